"""Synthetic checkpoints have a model's names and shapes, and convert in memory that their size does not touch."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.checkpoint import open_checkpoint
from exporter.recipe import load_recipe
from exporter.recipe_match import match_tensors
from scripts.synth_checkpoint import config_of, write_checkpoint

CONVERT = """
import json, sys
from pathlib import Path
from dflash_core.formats import Format
from exporter.checkpoint import open_checkpoint
from exporter.convert.stream import convert_weights
from exporter.weights import WeightSpec, layout_weights

checkpoint = open_checkpoint(Path(sys.argv[1]))


def peak():
    # of this program alone: ru_maxrss starts at what the process that started it had
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


before = peak()
formats = [Format.MXFP8, Format.NVFP4]
specs = [WeightSpec(name, "target", "target", "target", (name,), "copy/1", formats[i % 2], entry.shape)
         for i, (name, entry) in enumerate(checkpoint.tensors.items()) if len(entry.shape) == 2]
convert_weights(layout_weights(specs), {"target": checkpoint}, Path(sys.argv[2]), lambda nbytes: None)
after = peak()
largest = max(entry.nbytes for entry in checkpoint.tensors.values())
print(json.dumps({"before": before, "after": after, "largest": largest}))
"""


@pytest.mark.parametrize("model", ["llama-8b", "kimi-k3-slice"])
def test_names_and_shapes_are_those_of_the_family(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import scripts.synth_checkpoint as synth

    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(synth, "LLAMA_8B", {**synth.LLAMA_8B, **small})
    monkeypatch.setattr(synth, "KIMI_K3", {
        **synth.KIMI_K3, **small, "q_lora_rank": 32, "kv_lora_rank": 32, "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32})
    monkeypatch.setattr(synth, "KIMI_K3_VISION", {**synth.KIMI_K3_VISION, "vt_hidden_size": 32,
                                                  "qkv_hidden_size": 48, "vt_intermediate_size": 64})
    recipe, config = config_of(model, 4, 2, 256)

    total = write_checkpoint(tmp_path / "model", recipe, config, shard_nbytes=3_000_000)

    checkpoint = open_checkpoint(tmp_path / "model")
    assert len(match_tensors(load_recipe(recipe), checkpoint.tensors, checkpoint.config)) == len(checkpoint.tensors)
    assert sum(entry.nbytes for entry in checkpoint.tensors.values()) == total
    assert (len(checkpoint.shards) > 1) == (model == "kimi-k3-slice")


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    digests = []
    for name in ("first", "second"):
        write_checkpoint(tmp_path / name, "llama", {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 128})
        digests.append([hashlib.sha256(path.read_bytes()).digest() for path in sorted((tmp_path / name).iterdir())])

    assert digests[0] == digests[1] and len(digests[0]) == 3


def test_memory_of_a_conversion_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    recipe, config = config_of("llama-8b", 1, None, 1024)
    total = write_checkpoint(tmp_path / "model", recipe, config)

    done = subprocess.run([sys.executable, "-c", CONVERT, str(tmp_path / "model"), str(tmp_path / "core")],
                          capture_output=True, check=True)

    used = json.loads(done.stdout)
    assert (total, used["largest"]) == (444_620_800, 117_440_512)
    assert used["after"] <= 1_000_000_000 + 3 * used["largest"]
    assert used["after"] - used["before"] <= 3 * used["largest"], "less than the checkpoint's 445 MB"
