#!/usr/bin/env python3
"""Add what is missing in tests/golden: a small signed core of this release, and the older forms made by hand once.

    make goldens

A golden is never made again: what it holds is what its release wrote, and `tests/golden/test_golden.py` reads it for
good. The core of the release in work is the exception; it is replaced while its bytes still change, and the diff of
that commit is reviewed as a change of interface.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from dflash_core.v1.manifest_pb2 import RebuildManifest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT))

import exporter  # noqa: E402
from exporter.draft_config import read_draft_config  # noqa: E402
from exporter.draft_tensors import draft_tensor_shapes  # noqa: E402
from exporter.export import ExportRequest, export  # noqa: E402
from exporter.plan_rules import PrecisionSettings  # noqa: E402
from exporter.target_config import read_target_config, target_tensor_shapes  # noqa: E402
from runtime.keys import PrivateKey  # noqa: E402
from runtime.sign import sign_core  # noqa: E402
from tests.exporter.small_checkpoints import DRAFT, DRAFT_SHAPES, LLAMA, checkpoint_of, nest, shard_bytes  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16}
TARGET_CONFIG: dict[str, Any] = {**LLAMA, **SIZES, "num_hidden_layers": 2, "max_position_embeddings": 64}
DRAFT_CONFIG: dict[str, Any] = nest({**DRAFT, **SIZES, "num_hidden_layers": 1, "num_target_layers": 2}, block_size=4,
                                    target_layer_ids=[0, 1], mask_token_id=63)
ALL = PrecisionSettings(online_mxfp8_scope="all")
ASKED = PrecisionSettings(online_mxfp8_scope="all", draft_body="mxfp8")
EVERYTHING = PrecisionSettings(draft_body="mxfp8", draft_head="nvfp4")
FUTURE_FIELD = b"\xfa\x01\x06future"       # field 31 of RebuildManifest: free in this release
FUTURE_SPECULATION = b"\xa2\x01\x06future"  # field 20 of RebuildSpeculation: free in this release


@dataclass(frozen=True, slots=True)
class Golden:
    """One core: its folder, what it is exported as, and what is then done to its manifest by hand."""

    name: str
    settings: PrecisionSettings
    edit: Callable[[RebuildManifest], object]
    batches: tuple[int, ...] = (1,)
    canary: bool = False


def keep(manifest: RebuildManifest) -> None:
    """As the exporter wrote it."""


def no_scope(manifest: RebuildManifest) -> None:
    """From before the scope was recorded: it was always `all`."""
    manifest.ClearField("online_mxfp8_scope")


def no_field_14(manifest: RebuildManifest) -> None:
    """From before the draft body was recorded: it followed the scope."""
    manifest.speculation.ClearField("draft_body_quantization")


def empty_scope(manifest: RebuildManifest) -> None:
    manifest.online_mxfp8_scope = ""


def unknown_body(manifest: RebuildManifest) -> None:
    manifest.speculation.draft_body_quantization = "mxfp6"


def dspark(manifest: RebuildManifest) -> None:
    manifest.speculation.method = "dspark"


def future(manifest: RebuildManifest) -> None:
    """Fields that only a later release knows, where a reader may ignore them."""
    manifest.speculation.MergeFromString(FUTURE_SPECULATION)
    manifest.MergeFromString(FUTURE_FIELD)


GOLDENS = (
    Golden(exporter.__version__, EVERYTHING, keep, batches=(1, 2), canary=True),
    Golden("no-scope", ALL, no_scope),
    Golden("no-field-14", ASKED, no_field_14),
    Golden("empty-scope", ALL, empty_scope),
    Golden("unknown-body", ALL, unknown_body),
    Golden("dspark", ALL, dspark),
    Golden("future-fields", ALL, future),
)


def write_pair(folder: Path) -> None:
    """Both checkpoints, with the same random weights every time."""
    target = read_target_config(checkpoint_of(TARGET_CONFIG))
    rng = np.random.default_rng(14)
    written: dict[str, dict[str, tuple[int, ...]]] = {"target": target_tensor_shapes(target)}
    draft = read_draft_config(checkpoint_of(DRAFT_CONFIG, {**DRAFT_SHAPES, "fc.weight": (32, 64)}), target)
    written["draft"] = draft_tensor_shapes(draft)
    for name, config in (("target", TARGET_CONFIG), ("draft", DRAFT_CONFIG)):
        tensors = {}
        for key, shape in written[name].items():
            centre = 1.0 if key.endswith("norm.weight") else 0.0
            values = (rng.normal(size=shape) * 0.2 + centre).astype(ml_dtypes.bfloat16)
            tensors[key] = ("BF16", shape, values.tobytes())
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes(shard_bytes(tensors))


def make(golden: Golden, pair: Path, out: Path, key: PrivateKey) -> None:
    """Export, edit by hand, sign again."""
    export(ExportRequest(target=pair / "target", draft=pair / "draft", out=out, settings=golden.settings,
                         batches=golden.batches, core_name="golden", canary=golden.canary), key)
    manifest = RebuildManifest.FromString((out / "manifest.pb").read_bytes())
    golden.edit(manifest)
    (out / "manifest.pb").write_bytes(manifest.SerializeToString(deterministic=True))
    sign_core(out, key)


def unsigned(core: Path) -> dict[str, bytes]:
    """Every file but the signatures, by its name in the core."""
    return {path.relative_to(core).as_posix(): path.read_bytes() for path in core.rglob("*")
            if path.is_file() and path.parent.name != "signatures"}


def main() -> None:
    key = serialization.load_pem_private_key((GOLDEN / "key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    with tempfile.TemporaryDirectory() as made:
        write_pair(Path(made))
        for golden in GOLDENS:
            kept, new = GOLDEN / golden.name, Path(made) / f"core-{golden.name}"
            if kept.exists() and golden.name != exporter.__version__:
                continue
            make(golden, Path(made), new, key)
            if kept.exists() and unsigned(kept) == unsigned(new):
                continue
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(new, kept)
            print(f"{kept.relative_to(ROOT)}   {sum(map(len, unsigned(kept).values()))} bytes")


if __name__ == "__main__":
    main()
