"""What `inspect` shows of a combined core: its components, each with what it recorded and what that means."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dflash_core.v1.manifest_pb2 import RebuildManifest
from typer.testing import CliRunner, Result

from runtime.cli import app
from tests.edit_core import add_file
from tests.exporter.combining import Bench, precision
from tests.toy_core import ToyCore


def inspect(core: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["inspect", str(core), *options])


def _add_config(toy: ToyCore, name: str, data: bytes, manifest: RebuildManifest) -> None:
    add_file(toy, manifest, "config", name, data)


def test_inspect_shows_what_each_component_recorded_and_what_it_means(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    inherits = bench.toy("inherits", precision(online="mxfp8", scope="all"))
    bench.toy("asks", precision(online="mxfp8", body="mxfp8"))
    bench.combine("inherits", "asks")

    digest = hashlib.sha256((inherits.path / "manifest.pb").read_bytes()).hexdigest()
    first, second = json.loads(inspect(tmp_path / "out", "--json").stdout)["components"]

    target = {"role": "target inputs", "effective": "mxfp8:all"}
    kept = [{"role": role, "recorded": None, "effective": "checkpoint", "origin": "checkpoint"}
            for role in ("proposal head", "verification head")]
    assert first == {
        "component_id": 1, "core_name": "inherits", "manifest": digest, "graphs": ["decode_1"],
        "recorded": {"online_quantization": "mxfp8", "online_mxfp8_scope": "all", "draft_body_quantization": None,
                     "draft_head_quantization": None, "verify_head_precision": None},
        "precision": [
            {**target, "recorded": "mxfp8:all", "origin": "flag"},
            {"role": "draft body", "recorded": None, "effective": "mxfp8", "origin": "implied by scope"}, *kept],
    }
    assert (second["component_id"], second["core_name"], second["graphs"]) == (2, "asks", ["decode_1"])
    assert second["recorded"] == {
        "online_quantization": "mxfp8", "online_mxfp8_scope": None, "draft_body_quantization": "mxfp8",
        "draft_head_quantization": None, "verify_head_precision": None}
    assert second["precision"] == [
        {**target, "recorded": "mxfp8", "origin": "default"},
        {"role": "draft body", "recorded": "mxfp8", "effective": "mxfp8", "origin": "flag"}, *kept]


def test_the_text_sets_recorded_beside_effective(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.toy("inherits", precision(online="mxfp8", scope="all"))
    bench.toy("asks", precision(online="mxfp8", scope="", body="mxfp8"))
    bench.combine("inherits", "asks")

    text = inspect(tmp_path / "out").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]

    start = lines.index("component 1, inherits: 1 graph")
    assert [line for line in lines[start:lines.index("graphs")] if line and "─" not in line] == [
        "component 1, inherits: 1 graph", "role recorded effective origin",
        "target inputs mxfp8, scope all mxfp8:all flag", "draft body - mxfp8 implied by scope",
        "proposal head - checkpoint checkpoint", "verification head - checkpoint checkpoint",
        "component 2, asks: 1 graph", "role recorded effective origin",
        'target inputs mxfp8, scope "" mxfp8:all default', "draft body mxfp8 mxfp8 flag",
        "proposal head - checkpoint checkpoint", "verification head - checkpoint checkpoint",
    ]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("settings", "recorded", "effective"), [
    pytest.param({"scope": "all"}, {"online_mxfp8_scope": "all"}, ["checkpoint", "checkpoint"], id="inert-scope"),
    pytest.param({"online": "mxfp8", "scope": ""}, {"online_quantization": "mxfp8", "online_mxfp8_scope": ""},
                 ["mxfp8:all", "mxfp8"], id="empty-scope"),
    pytest.param({"method": None, "online": "mxfp8"}, {"online_quantization": "mxfp8"}, ["mxfp8:all", "no draft"],
                 id="no-draft"),
    pytest.param({"body": "mxfp6"}, {"draft_body_quantization": "mxfp6"}, ["checkpoint", "mxfp6"],
                 id="unknown-body"),
    pytest.param({"online": "mxfp8", "body": ""}, {"online_quantization": "mxfp8", "draft_body_quantization": ""},
                 ["mxfp8:all", "mxfp8"], id="empty-body"),
])
def test_a_component_shows_recorded_values_verbatim(
    tmp_path: Path, settings: dict[str, Any], recorded: dict[str, str], effective: list[str],
) -> None:
    bench = Bench(tmp_path)
    bench.toy("a", precision(**settings))
    bench.toy("b", precision(**settings))
    bench.combine("a", "b")

    component = json.loads(inspect(tmp_path / "out", "--json").stdout)["components"][0]

    assert {name: value for name, value in component["recorded"].items() if value is not None} == recorded
    assert [row["effective"] for row in component["precision"][:2]] == effective


def test_components_of_a_combined_input_are_listed_flat(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for name in ("a", "b", "c"):
        bench.toy(name, precision())
    bench.combine("a", "b", out="ab")
    bench.combine("ab", "c", out="abc")

    components = json.loads(inspect(tmp_path / "abc", "--json").stdout)["components"]

    assert [(part["component_id"], part["core_name"]) for part in components] == [(1, "a"), (2, "b"), (3, "c")]


def test_an_exported_core_has_no_components(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    core = bench.toy("a", precision()).path

    assert json.loads(inspect(core, "--json").stdout)["components"] == []
    assert "component" not in inspect(core).stdout


def test_a_weight_that_components_share_has_one_line_among_the_errors(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    shared = {"name": "target.qkv", "format": "mxfp8", "num_weights": 64, "sqnr_db": 31.5, "max_abs": 0.01,
              "max_rel": 1.0, "saturated": 0.0, "zero_blocks": 2}
    for name, weights in (("a", [shared]), ("b", [{**shared, "name": "draft.fc", "sqnr_db": 30.0}, shared])):
        toy = bench.toy(name)
        report = json.dumps({"kind": "dflash-conversion-errors/1", "weights": weights}, separators=(",", ":")).encode()
        entry = f"config/{hashlib.sha256(report).hexdigest()}"
        toy.edit_manifest(partial(_add_config, toy, entry, report))
    bench.combine("a", "b")

    shown = json.loads(inspect(tmp_path / "out", "--errors", "--json").stdout)["weights"]

    assert [row["name"] for row in shown] == ["draft.fc", "target.qkv"]


def test_a_component_cannot_steer_the_terminal(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def named(manifest: RebuildManifest) -> None:
        manifest.speculation.draft_body_quantization = "\x1b[2J"
    bench.toy("a", precision(), named)
    bench.toy("b", precision(), named)
    bench.combine("a", "b")

    text = inspect(tmp_path / "out").stdout

    assert "\\x1b[2J" in text
    assert "\x1b" not in text
