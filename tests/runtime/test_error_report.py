"""The error report of a core is shown worst first, and a malformed one is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import FormatError, VerificationError
from typer.testing import CliRunner, Result

from runtime.cli import app
from runtime.error_report import WeightErrors, read_errors, worst_first
from runtime.trust import TrustPolicy
from tests.edit_core import add_file
from tests.toy_core import ToyCore, make_toy_core, trust_document, write_trust

ENTRY: dict[str, Any] = {"name": "target.layers.0.qkv", "format": "mxfp8", "num_weights": 64, "sqnr_db": 31.5,
                         "max_abs": 0.01, "max_rel": 1.0, "saturated": 0.0, "zero_blocks": 2}
WORST = {**ENTRY, "name": "head.proposal", "format": "nvfp4", "sqnr_db": 18.25, "saturated": 0.015625}
EXACT = {**ENTRY, "name": "draft.fc", "sqnr_db": None, "max_abs": 0, "max_rel": 0}


def toy_with(tmp_path: Path, report: bytes) -> ToyCore:
    toy = make_toy_core(tmp_path / "core")
    name = f"config/{hashlib.sha256(report).hexdigest()}"
    toy.edit_manifest(lambda manifest: add_file(toy, manifest, "config", name, report))
    return toy


def report_of(weights: Any, kind: str = "dflash-conversion-errors/1") -> bytes:
    return json.dumps({"kind": kind, "weights": weights}, separators=(",", ":")).encode()


def policy(tmp_path: Path) -> TrustPolicy:
    return TrustPolicy.load(write_trust(tmp_path / "trust.json", trust_document()))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("verified", [True, False])
def test_report_is_read_from_the_core(tmp_path: Path, verified: bool) -> None:
    toy = toy_with(tmp_path, report_of([ENTRY, WORST, EXACT]))

    found = read_errors(toy.path, policy(tmp_path) if verified else None)

    assert found == (WeightErrors(**ENTRY), WeightErrors(**WORST), WeightErrors(**EXACT))
    assert [entry.name for entry in worst_first(found)] == ["head.proposal", "target.layers.0.qkv", "draft.fc"]


def test_core_without_a_report_has_no_errors(tmp_path: Path) -> None:
    assert read_errors(make_toy_core(tmp_path / "core").path, policy(tmp_path)) == ()


def test_changed_report_does_not_verify(tmp_path: Path) -> None:
    report = report_of([ENTRY])
    toy = toy_with(tmp_path, report)
    (toy.path / "config" / hashlib.sha256(report).hexdigest()).write_bytes(report.replace(b"31.5", b"91.5"))

    for trust in (policy(tmp_path), None):
        with pytest.raises(VerificationError):
            read_errors(toy.path, trust)


MALFORMED = [
    ("cut-short", report_of([ENTRY])[:-5]),
    ("no-list", report_of({"a": 1})),
    ("no-object", report_of([3])),
    ("missing-field", report_of([{key: value for key, value in ENTRY.items() if key != "max_abs"}])),
    ("text-for-number", report_of([{**ENTRY, "sqnr_db": "31"}])),
    ("boolean-for-number", report_of([{**ENTRY, "max_abs": True}])),
    ("no-json-number", report_of([ENTRY]).replace(b"31.5", b"NaN")),
    ("no-weights", b'{"kind":"dflash-conversion-errors/1","other":[]}'),
]


@pytest.mark.parametrize("report", [row[1] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_malformed_report_is_refused(tmp_path: Path, report: bytes) -> None:
    toy = toy_with(tmp_path, report)

    with pytest.raises(FormatError) as caught:
        read_errors(toy.path, policy(tmp_path))

    assert caught.value.code == "ERROR_REPORT"


def test_inspect_shows_the_worst_weight_first(tmp_path: Path) -> None:
    toy = toy_with(tmp_path, report_of([ENTRY, EXACT, WORST]))

    shown = run("inspect", toy.path, "--errors", "--trust", write_trust(tmp_path / "trust.json", trust_document()))

    assert shown.exit_code == 0
    rows = [line.split() for line in shown.stdout.splitlines() if line.strip()][2:]
    assert rows == [
        ["head.proposal", "nvfp4", "18.25", "0.01", "1", "1.56%", "2"],
        ["target.layers.0.qkv", "mxfp8", "31.50", "0.01", "1", "0.00%", "2"],
        ["draft.fc", "mxfp8", "exact", "0", "0", "0.00%", "2"],
    ]


def test_inspect_gives_errors_as_json_worst_first(tmp_path: Path) -> None:
    toy = toy_with(tmp_path, report_of([ENTRY, WORST]))

    shown = run("inspect", toy.path, "--errors", "--json")

    assert json.loads(shown.stdout) == {"authenticated": False, "weights": [WORST, ENTRY]}


def test_inspect_says_that_nothing_was_authenticated(tmp_path: Path) -> None:
    shown = run("inspect", make_toy_core(tmp_path / "core").path, "--errors")

    assert shown.stdout.splitlines() == [
        "NOT AUTHENTICATED: no signature was checked; --trust TRUST verifies the core",
        "no converted weights, or a core that carries no error report",
    ]
