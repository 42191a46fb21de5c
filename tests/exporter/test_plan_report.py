"""`dflash-export --plan` as a person and a script read it, also for families that cannot be exported yet."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from exporter.cli import export_app
from exporter.target_config import read_target_config, target_tensor_shapes
from runtime.console import human_bytes
from runtime.keys import generate_key
from tests.exporter.small_checkpoints import LLAMA, checkpoint_of
from tests.exporter.test_family_recipes import kimi_model, muse_model
from tests.tiny_pair import write_pair


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    kimi_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family whose forward pass is not there."""
    folder = tmp_path_factory.mktemp("muse")
    muse_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder, 3)
    return folder / "target", folder / "draft"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(export_app, [str(argument) for argument in arguments], env={"COLUMNS": "80"})


def lines(result: Result) -> list[str]:
    return [re.sub(r"\s+", " ", line).strip() for line in result.stdout.splitlines() if line.strip(" ─")]


def test_plan_lists_groups_under_their_part_with_effective_value_and_origin(pair: tuple[Path, Path]) -> None:
    shown = run(pair[0], "--draft", pair[1], "--plan", "--draft-body-quantization", "mxfp8")

    assert shown.exit_code == 0
    assert lines(shown)[1] == "part count before after bits format effective, from"
    assert [line.split()[0] for line in lines(shown)[2:] if line in ("target", "draft")] == ["target", "draft"]
    body = next(line for line in lines(shown) if line.startswith("body "))
    assert body.endswith("mxfp8 mxfp8, flag")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "\n\nprecision" in re.sub(" +\n", "\n", shown.stdout), "a blank line between two tables"


def test_plan_sums_up_all_groups(pair: tuple[Path, Path]) -> None:
    arguments = (pair[0], "--draft", pair[1], "--plan", "--draft-body-quantization", "mxfp8")
    shown, groups = run(*arguments), json.loads(run(*arguments, "--json").stdout)["groups"]

    keys = ("num_tensors", "nbytes_before", "nbytes_after")
    count, before, after = (sum(group[key] for group in groups) for key in keys)
    assert f"total {count} {human_bytes(before)} {human_bytes(after)}" in lines(shown)


def test_group_that_a_scope_covers_and_leaves_is_not_shown_as_converted(kimi: Path) -> None:
    shown = run(kimi, "--plan", "--online-mxfp8-scope", "all")
    groups = json.loads(run(kimi, "--plan", "--online-mxfp8-scope", "all", "--json").stdout)["groups"]

    router, shared = (next(line for line in lines(shown) if line.startswith(name)) for name in ("router ", "shared "))
    assert router.endswith(" f32 kept, see below") and shared.endswith(" mxfp8 mxfp8:all, flag")
    found = {group["group"]: (group["num_tensors"], group["num_converted"], group["num_skipped"]) for group in groups}
    assert (found["router"], found["shared"], found["normalization"]) == ((8, 0, 4), (12, 12, 0), (16, 0, 0))


def test_group_of_which_a_scope_leaves_a_part_says_how_many(tmp_path: Path) -> None:
    config = {**LLAMA, "intermediate_size": 80}  # the rows of down_proj are no multiple of 32
    shapes = target_tensor_shapes(read_target_config(checkpoint_of(config)))
    save_file({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))

    shown = run(tmp_path, "--plan", "--online-mxfp8-scope", "all")

    layers = config["num_hidden_layers"]
    mlp = next(line for line in lines(shown) if line.startswith("mlp "))
    assert mlp.endswith(f"mxfp8:all, flag; {layers} kept")
    assert (f"kept: {layers} x model.layers.*.mlp.down_proj.weight [64, 80]: last dimension 80 is not divisible by 32"
            in lines(shown))
    assert all(len(line) <= 80 for line in shown.stdout.splitlines() if not line.startswith("kept: "))


def test_plan_of_a_family_without_forward_pass_says_so(unbuilt: Path) -> None:
    shown = run(unbuilt, "--plan")

    assert shown.exit_code == 0
    assert lines(shown)[-1] == (
        "no graphs: the forward pass of muse-glimmer is not implemented, so it cannot be exported yet")
    assert not any(line.startswith("graphs") for line in lines(shown))


def test_plan_of_a_kimi_model_shows_its_default_scope_and_its_graphs(kimi: Path) -> None:
    shown = run(kimi, "--plan")

    assert shown.exit_code == 0
    group = next(line for line in lines(shown) if line.startswith("kda-input "))
    assert group.endswith("mxfp8:kda-input, default")
    assert any(line.startswith("prefill.c64") for line in lines(shown))


def test_plan_lists_what_a_scope_covers_and_leaves_once_for_tensors_alike(kimi: Path) -> None:
    shown = run(kimi, "--plan", "--online-mxfp8-scope", "all")

    assert sorted(line for line in lines(shown) if line.startswith("kept: ")) == [
        "kept: 4 x model.layers.*.block_sparse_moe.gate.weight [8, 64]: router",
        "kept: 4 x model.layers.*.self_attn.f_b_proj.weight [128, 32]: low-rank up projection of decay and gate",
        "kept: 4 x model.layers.*.self_attn.g_b_proj.weight [128, 32]: low-rank up projection of decay and gate",
        "kept: model.layers.3.self_attn.kv_b_proj.weight [128, 32]: absorbed key/value",
    ]


def test_verbose_plan_has_a_line_for_every_tensor(kimi: Path) -> None:
    shown = run(kimi, "--plan", "--verbose")

    tensors = [line for line in lines(shown) if line.startswith("target: ")]
    assert len(tensors) == 197
    assert ("target: model.layers.0.self_attn.q_proj.weight [128, 64] f32 → mxfp8 32.8 kB → 8.4 kB default: online "
            "MXFP8, scope kda-input") in tensors
    assert ("target: model.norm.weight [64] f32 → f32 256 B → 256 B checkpoint: normalization") in tensors


@pytest.mark.parametrize(("more", "count"), [((), None), (("--verbose",), 92)], ids=["plain", "verbose"])
def test_json_plan_has_every_tensor_when_asked(unbuilt: Path, more: tuple[str, ...], count: int | None) -> None:
    document: dict[str, Any] = json.loads(run(unbuilt, "--plan", "--json", *more).stdout)

    assert document["can_be_exported"] is False
    assert (document["graphs"], document["kv_bytes_per_token"], document["max_context"]) == ([], None, None)
    assert (len(document["tensors"]) if count else document.get("tensors")) == count
    if count:
        assert document["tensors"][0] == {
            "part": "target", "tensor": "lm_head.weight", "role": "head", "shape": [97, 64], "source_dtype": "F32",
            "format": "f32", "origin": "checkpoint", "reason": "target-head storage", "skipped": False,
            "nbytes_before": 24832, "nbytes_after": 24832}


def test_export_of_a_family_without_forward_pass_is_refused_by_name(unbuilt: Path, tmp_path: Path) -> None:
    shown = run(unbuilt, "--out", tmp_path / "core", "--key", key_in(tmp_path), "--json")

    assert shown.exit_code == 3
    error = json.loads(shown.stdout)["error"]
    assert error["code"] == "FORWARD_NOT_IMPLEMENTED"
    assert error["what"] == "the forward pass of muse-glimmer is not implemented: it can be planned only"
    assert error["where"].startswith("MuseGlimmerForConditionalGeneration in ")
    assert not (tmp_path / "core").exists()


def test_draft_of_a_family_without_forward_pass_is_not_planned(unbuilt: Path, pair: tuple[Path, Path]) -> None:
    shown = run(unbuilt, "--draft", pair[1], "--plan", "--json")

    assert (shown.exit_code, json.loads(shown.stdout)["error"]["code"]) == (3, "PLAN_DRAFT")


def without_gate(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.2.block_sparse_moe.gate.weight"]


def another(tensors: dict[str, Any]) -> None:
    tensors["model.layers.9.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].clone()


CHANGED = [("missing", without_gate, "missing: layers.2.block_sparse_moe.gate.weight"),
           ("unknown", another, "matches no row: model.layers.9.self_attn.q_proj.weight")]


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in CHANGED], ids=[row[0] for row in CHANGED])
def test_checkpoint_that_the_recipe_does_not_describe_is_refused(
    kimi: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    tensors = load_file(kimi / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((kimi / "config.json").read_bytes())

    error = json.loads(run(tmp_path, "--plan", "--json").stdout)["error"]

    assert (error["code"], error["got"]) == ("TENSORS_UNMATCHED", message)


def key_in(folder: Path) -> Path:
    generate_key(folder)
    return folder / "key.pem"
