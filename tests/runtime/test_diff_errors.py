"""`dflash-run diff` sets the conversion errors of two cores side by side, where both carry a report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runtime.cli import app
from runtime.diff_errors import Kept, SqnrDiff, compare_errors
from runtime.error_report import WeightErrors
from tests.edit_core import add_file
from tests.toy_core import make_toy_core, trust_document, write_trust

Weight = tuple[str, str, float | None]
QKV: Weight = ("target.layers.0.qkv", "mxfp8", 31.5)
HEAD: Weight = ("head.proposal", "nvfp4", 20.25)
HEAD_MXFP8: Weight = ("head.proposal", "mxfp8", 31.0)
EXACT: Weight = ("draft.fc", "mxfp8", None)


def entry(weight: Weight) -> dict[str, Any]:
    name, fmt, sqnr_db = weight
    return {"name": name, "format": fmt, "num_weights": 64, "sqnr_db": sqnr_db, "max_abs": 0.01, "max_rel": 1.0,
            "saturated": 0.0, "zero_blocks": 0}


def core(folder: Path, weights: Sequence[Weight] | None) -> Path:
    """A toy core with a report of these weights; None: without a report."""
    toy = make_toy_core(folder)
    if weights is not None:
        document = {"kind": "dflash-conversion-errors/1", "weights": [entry(weight) for weight in weights]}
        report = json.dumps(document, separators=(",", ":")).encode()
        name = f"config/{hashlib.sha256(report).hexdigest()}"
        toy.edit_manifest(lambda manifest: add_file(toy, manifest, "config", name, report))
    return toy.path


def diff(tmp_path: Path, left: Sequence[Weight] | None, right: Sequence[Weight] | None, *options: str) -> Result:
    paths = core(tmp_path / "a", left), core(tmp_path / "b", right)
    return CliRunner().invoke(app, ["diff", *map(str, paths), *options])


@pytest.mark.parametrize("verified", [True, False])
def test_json_lists_every_weight_of_both_sides_differences_first(tmp_path: Path, verified: bool) -> None:
    trust = write_trust(tmp_path / "trust.json", trust_document())
    options = ("--trust", str(trust)) if verified else ()

    result = diff(tmp_path, [QKV, HEAD, EXACT], [QKV, HEAD_MXFP8], "--json", *options)

    assert json.loads(result.stdout)["sqnr"] == [
        {"name": "head.proposal", "left": {"format": "nvfp4", "sqnr_db": 20.25},
         "right": {"format": "mxfp8", "sqnr_db": 31.0}},
        {"name": "draft.fc", "left": {"format": "mxfp8", "sqnr_db": None}, "right": None},
        {"name": "target.layers.0.qkv", "left": {"format": "mxfp8", "sqnr_db": 31.5},
         "right": {"format": "mxfp8", "sqnr_db": 31.5}},
    ]


def test_text_shows_what_differs_and_counts_what_does_not(tmp_path: Path) -> None:
    text = diff(tmp_path, [QKV, HEAD, EXACT], [QKV, HEAD_MXFP8]).stdout

    lines = [" ".join(line.split()) for line in text.splitlines()]
    start = lines.index("SQNR of converted weights")
    assert [line for line in lines[start + 1:start + 6] if "─" not in line] == [
        "weight left right", "head.proposal nvfp4 20.25 dB mxfp8 31.00 dB", "draft.fc mxfp8 exact not converted",
        "1 of 3 weights are equal on both sides"]
    assert max(map(len, text.splitlines()[start:start + 6])) <= 80


def test_text_lists_no_more_than_twenty_weights(tmp_path: Path) -> None:
    text = diff(tmp_path, [(f"w{i:02}", "mxfp8", 30.0) for i in range(23)],
                [(f"w{i:02}", "mxfp8", 31.0) for i in range(23)]).stdout

    assert "\nw19 " in text and "\nw20 " not in text
    assert "\nand 3 weights more; --json lists all\n0 of 23 weights are equal on both sides\n" in text


@pytest.mark.parametrize(("left", "right"), [
    pytest.param(None, [QKV], id="left-without"),
    pytest.param([QKV], None, id="right-without"),
    pytest.param(None, None, id="neither"),
])
def test_nothing_is_compared_unless_both_carry_a_report(
    tmp_path: Path, left: Sequence[Weight] | None, right: Sequence[Weight] | None,
) -> None:
    result = diff(tmp_path, left, right, "--json")
    text = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")]).stdout

    assert json.loads(result.stdout)["sqnr"] is None
    assert "SQNR of converted weights\nnot compared: both cores need an error report\n" in text


def test_other_errors_alone_are_no_difference_of_target_draft_or_graphs(tmp_path: Path) -> None:
    result = diff(tmp_path, [HEAD], [HEAD_MXFP8], "--json", "--fail-on", "target", "--fail-on", "draft")

    assert result.exit_code == 0


def test_lowest_ratio_comes_first_among_equals_and_among_differences() -> None:
    def errors(*weights: Weight) -> list[WeightErrors]:
        return [WeightErrors(**entry(weight)) for weight in weights]

    rows = compare_errors(errors(QKV, HEAD, EXACT, ("x", "mxfp8", 40.0), ("y", "mxfp8", 9.0)),
                          errors(QKV, HEAD, EXACT, ("x", "mxfp8", 8.0), ("y", "mxfp8", 10.0)))

    assert rows is not None
    assert [row.name for row in rows] == ["x", "y", "head.proposal", "target.layers.0.qkv", "draft.fc"]
    assert rows[0] == SqnrDiff("x", Kept("mxfp8", 40.0), Kept("mxfp8", 8.0))
