"""What cores of different recorded precision do when they meet: the tables of the effective draft body, by command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dflash_core.v1.manifest_pb2 import RebuildManifest
from typer.testing import CliRunner

from runtime.cli import app
from tests.exporter.combining import Bench, precision

Settings = dict[str, Any]
ON = "mxfp8"


def dflash2(online: str | None = None, scope: str | None = None, body: str | None = None) -> Settings:
    return {"online": online, "scope": scope, "body": body}


def dspark(**settings: Any) -> Settings:
    return {"method": "dspark", **settings}


PAIRS = [
    pytest.param(dflash2(ON, "all"), dflash2(ON, "all", "mxfp8"), None, "holds", id="inherited-and-asked-for"),
    pytest.param(dflash2(ON), dflash2(ON, "kda-input", "mxfp8"), "COMBINE_TARGET_SCOPE", "holds",
                 id="body-equal-target-not"),
    pytest.param(dflash2(ON, "kda-input"), dflash2(ON, "kda-input", "mxfp8"), "COMBINE_DRAFT_BODY", "fails",
                 id="kept-and-converted"),
    pytest.param(dflash2(), dflash2(body="mxfp8"), "COMBINE_DRAFT_BODY", "fails", id="off-and-converted"),
    pytest.param(dflash2(scope="all"), dflash2(), None, "holds", id="scope-is-inert-when-off"),
    pytest.param(dflash2(ON, "all", "mxfp6"), dflash2(ON, "all"), "COMBINE_DRAFT_BODY", "fails",
                 id="unknown-and-mxfp8"),
    pytest.param(dflash2(ON, "all", "mxfp6"), dflash2(ON, "all", "mxfp6"), None, "holds", id="unknown-twice"),
    pytest.param(dspark(online=ON, scope="all"), dspark(online=ON, scope="kda-input"), "COMBINE_TARGET_SCOPE", "holds",
                 id="dspark-inherits-nothing"),
    pytest.param(dflash2(ON), dflash2(ON, "all"), None, "holds", id="scope-absent-and-all"),
    pytest.param(dflash2(ON, ""), dflash2(ON, "all", "mxfp8"), None, "holds", id="scope-empty-and-all"),
    pytest.param(dflash2(ON, "router"), dflash2(ON, "router"), None, "holds", id="unknown-scope-twice"),
    pytest.param(dflash2(ON, "router"), dflash2(ON, "all"), "COMBINE_TARGET_SCOPE", "fails",
                 id="unknown-scope-and-all"),
    pytest.param(dflash2("mxfp5"), dflash2(ON), "COMBINE_ONLINE_QUANTIZATION", "fails", id="unknown-format-and-mxfp8"),
    pytest.param({"method": None}, dflash2(body="mxfp8"), None, "not compared", id="one-side-without-drafts"),
    pytest.param({"depth": 0}, dflash2(body="mxfp8"), None, "not compared", id="one-side-of-depth-0"),
]


@pytest.mark.parametrize(("left", "right", "code", "body"), PAIRS)
def test_pairs_combine_by_what_they_mean(
    tmp_path: Path, left: Settings, right: Settings, code: str | None, body: str,
) -> None:
    bench = Bench(tmp_path)
    bench.toy("a", precision(**left))
    bench.toy("b", precision(**right))

    result = bench.run("a", "b", options=("--json",))

    assert result.exit_code == (0 if code is None else 5)
    assert json.loads(result.stdout).get("error", {}).get("code") == code
    assert bench.explained("a", "b")["draft body"]["verdict"] == body
    assert bench.left_over == (["a", "b", "out"] if code is None else ["a", "b"])


TRUTH = [
    pytest.param({"online": ON, "scope": "all"}, "mxfp8", id="on-all"),
    pytest.param({"online": ON}, "mxfp8", id="on-scope-absent"),
    pytest.param({"online": ON, "scope": ""}, "mxfp8", id="on-scope-empty"),
    pytest.param({"online": ON, "scope": "kda-input"}, "checkpoint", id="on-kda-input"),
    pytest.param({"online": ON, "scope": "router"}, "checkpoint", id="on-unknown-scope"),
    pytest.param({"online": ON, "scope": "kda-input", "body": "mxfp8"}, "mxfp8", id="on-kda-input-asked-for"),
    pytest.param({}, "checkpoint", id="off"),
    pytest.param({"scope": "all"}, "checkpoint", id="off-all"),
    pytest.param({"body": "mxfp8"}, "mxfp8", id="off-asked-for"),
    pytest.param({"online": "mxfp4", "scope": "all"}, "checkpoint", id="another-online-format"),
    pytest.param({"online": ON, "scope": "all", "body": "mxfp6"}, "mxfp6", id="unknown-override"),
    pytest.param({"online": ON, "scope": "all", "body": ""}, "mxfp8", id="empty-override"),
    pytest.param({"method": "dspark", "online": ON, "scope": "all"}, "checkpoint", id="dspark"),
    pytest.param({"method": "dflash", "online": ON, "scope": "all"}, "checkpoint", id="dflash1"),
    pytest.param({"method": "dspark", "body": "mxfp8"}, "mxfp8", id="dspark-with-override"),
    pytest.param({"method": "eagle9", "online": ON, "scope": "all"}, "checkpoint", id="unknown-method"),
    pytest.param({"depth": 0, "online": ON, "scope": "all", "body": "mxfp8"}, "no draft", id="depth-0"),
    pytest.param({"method": "none", "online": ON, "scope": "all"}, "no draft", id="method-none"),
    pytest.param({"method": None, "online": ON, "scope": "all"}, "no draft", id="no-speculation"),
]


@pytest.mark.parametrize(("settings", "effective"), TRUTH)
def test_every_command_reads_a_recorded_body_alike(tmp_path: Path, settings: Settings, effective: str) -> None:
    """`inspect`, `diff` and `combine` say the same. The partner has the target's settings and a body of its own, which
    the core under test must equal exactly where its effective body is that one."""
    bench = Bench(tmp_path)
    core = bench.toy("core", precision(**settings)).path
    target = {name: settings[name] for name in ("online", "scope") if name in settings}
    partners = {"mxfp8": {"body": "mxfp8"}, "mxfp6": {"body": "mxfp6"}, "checkpoint": {"method": "dspark"}}
    for name, body in partners.items():
        bench.toy(name, precision(**target, **body))

    inspected = json.loads(CliRunner().invoke(app, ["inspect", str(core), "--json"]).stdout)
    compared = json.loads(CliRunner().invoke(app, ["diff", str(core), str(tmp_path / "mxfp8"), "--json"]).stdout)
    verdicts = {name: bench.explained("core", name)["draft body"]["verdict"] for name in partners}

    assert next(row["effective"] for row in inspected["precision"] if row["role"] == "draft body") == effective
    assert next(row["left"]["effective"] for row in compared["precision"] if row["role"] == "draft body") == effective
    expected = dict.fromkeys(partners, "not compared" if effective == "no draft" else "fails")
    assert verdicts == {**expected, **({} if effective == "no draft" else {effective: "holds"})}


def test_recorded_values_are_kept_as_they_were(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.toy("inherits", precision(online=ON, scope="all"))
    bench.toy("asks", precision(online=ON, body="mxfp8"))

    manifest = bench.combine("inherits", "asks").manifest

    first, second = manifest.components
    assert (first.core_name, second.core_name) == ("inherits", "asks")
    assert not first.recorded_speculation.HasField("draft_body_quantization")
    assert second.recorded_speculation.draft_body_quantization == "mxfp8"
    assert (first.recorded_online_quantization, first.recorded_online_mxfp8_scope) == ("mxfp8", "all")
    assert second.recorded_online_quantization == "mxfp8"
    assert not second.HasField("recorded_online_mxfp8_scope")
    assert not manifest.speculation.HasField("draft_body_quantization")


def test_the_result_speculates_as_the_first_core_with_drafts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.toy("plain", precision(method=None))
    bench.toy("drafted", precision(depth=3, body="mxfp8"))

    manifest = bench.combine("plain", "drafted").manifest

    assert (manifest.speculation.draft_depth, manifest.speculation.draft_body_quantization) == (3, "mxfp8")
    assert [c.HasField("recorded_speculation") for c in manifest.components] == [False, True]


def test_components_of_a_combined_core_still_compare_by_their_own_manifests(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.toy("plain", precision(method=None))
    bench.toy("kept", precision())
    bench.combine("plain", "kept", out="both")
    bench.toy("converted", precision(body="mxfp8"))

    result = bench.run("both", "converted", options=("--json",))

    error = json.loads(result.stdout)["error"]
    assert error["code"] == "COMBINE_DRAFT_BODY"
    assert "component 2, kept" in error["where"]


@pytest.mark.parametrize(("left", "right", "change"), [
    pytest.param({}, {"body": "mxfp8"},
                 "export {a} with --draft-body-quantization mxfp8, or {b} without --draft-body-quantization",
                 id="asked-for"),
    pytest.param({"online": ON, "scope": "all"}, {"online": ON, "scope": "all", "method": "dspark"},
                 "export {b} with --draft-body-quantization mxfp8", id="inherited"),
    pytest.param({"body": "mxfp6"}, {"body": "mxfp8"},
                 "export both with the same --draft-body-quantization; {b} with mxfp6", id="two-formats"),
])
def test_names_the_smallest_change_that_would_make_bodies_agree(
    tmp_path: Path, left: Settings, right: Settings, change: str,
) -> None:
    bench = Bench(tmp_path)
    bench.toy("a", precision(**left))
    bench.toy("b", precision(**right))

    rule = bench.explained("a", "b")["draft body"]

    assert rule["change"] == change.format(a=tmp_path / "a", b=tmp_path / "b")


def test_a_refusal_shows_recorded_and_effective_values_of_both(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.toy("a", precision(online=ON))
    bench.toy("b", precision(online=ON, body="mxfp6"))

    result = bench.run("a", "b")

    assert result.exit_code == 5
    assert result.stderr.splitlines()[0] == (
        "error: the cores do not combine: draft body differs: "
        "expected mxfp8 (recorded -; implied by scope), got mxfp6")


def test_fields_from_the_future_are_kept(tmp_path: Path) -> None:
    """Field 31 of the manifest and field 20 of its speculation are free in this release."""
    bench = Bench(tmp_path)
    unknown = {"manifest": b"\xfa\x01\x03new", "speculation": b"\xa2\x01\x03new"}

    def add_unknown(manifest: RebuildManifest) -> None:
        manifest.speculation.MergeFromString(unknown["speculation"])
        manifest.MergeFromString(unknown["manifest"])
    bench.toy("future", precision(), add_unknown)
    bench.toy("now", precision())

    combined = bench.combine("future", "now").manifest

    assert combined.SerializeToString().count(unknown["manifest"]) == 1
    assert combined.speculation.SerializeToString().endswith(unknown["speculation"])
    assert combined.components[0].recorded_speculation.SerializeToString().endswith(unknown["speculation"])
    assert unknown["speculation"] not in combined.components[1].recorded_speculation.SerializeToString()
