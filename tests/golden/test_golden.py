"""Cores of every release, and older forms: today's code reads each, and what a missing field means never changes.

A failure here is a change of interface. The cores are never edited; `make goldens` adds that of the release in work.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from dflash_core.effective import effective_precision
from dflash_core.v1.manifest_pb2 import RebuildManifest
from typer.testing import CliRunner, Result

from exporter.cli import combine_app
from runtime import Engine, Request, load
from runtime.canary import carried_canaries
from runtime.cli import app
from runtime.error_report import errors_of, worst_first
from runtime.trust import TrustPolicy
from runtime.verify import verify
from scripts.update_goldens import FUTURE_FIELD, FUTURE_SPECULATION, GOLDENS

GOLDEN = Path(__file__).resolve().parent
TRUST = TrustPolicy.parse((GOLDEN / "trust.json").read_bytes(), "tests/golden/trust.json")

CORES = [
    pytest.param("0.1.0", "b2cbb2a6d5580a0807248b087e57784207d57dcd38cdb3f6a529a13f96ef4a77",
                 ["checkpoint", "mxfp8", "nvfp4", "checkpoint"], [None, "mxfp8", "nvfp4", None], id="0.1.0"),
    pytest.param("no-scope", "e503b4eaa9bf411514db004987fdd71e5ec22014ebcb9433f2e6cb5f6da8ab58",
                 ["mxfp8:all", "mxfp8", "checkpoint", "checkpoint"], ["mxfp8", None, None, None], id="no-scope"),
    pytest.param("no-field-14", "e56be9a0af66617372763c3c9f0f6524195bcc0917d732b070da9c5998afadd4",
                 ["mxfp8:all", "mxfp8", "checkpoint", "checkpoint"], ["mxfp8:all", None, None, None], id="no-field-14"),
    pytest.param("empty-scope", "24552006ecbea9e9f4356500b5be3d148ec8498eb937756f4d6d6647ae218b9a",
                 ["mxfp8:all", "mxfp8", "checkpoint", "checkpoint"], ["mxfp8", None, None, None], id="empty-scope"),
    pytest.param("unknown-body", "907226c3f1b9dade2cac68c3cbc6aee875fe0ae9df0db7111b4c507157f4bcba",
                 ["mxfp8:all", "mxfp6", "checkpoint", "checkpoint"], ["mxfp8:all", "mxfp6", None, None],
                 id="unknown-body"),
    pytest.param("dspark", "d5b63b8b2eb00158a527d1a9cf34fed361ec539fafbd4b37321ff4c1365c35e3",
                 ["mxfp8:all", "checkpoint", "checkpoint", "checkpoint"], ["mxfp8:all", None, None, None], id="dspark"),
    pytest.param("future-fields", "5d8e67049664c9cb65ba1530cb773aa92b22833e5b59c10718ceb3f81bb8aeb5",
                 ["mxfp8:all", "mxfp8", "checkpoint", "checkpoint"], ["mxfp8:all", None, None, None],
                 id="future-fields"),
]


@pytest.mark.parametrize(("name", "digest", "effective", "recorded"), CORES)
def test_a_golden_core_means_what_it_always_meant(
    name: str, digest: str, effective: list[str], recorded: list[str | None],
) -> None:
    with verify(GOLDEN / name, TRUST) as core:
        core.read_full()
        rows = effective_precision(core.manifest)

    assert core.core_digest == digest
    assert [row.text for row in rows] == effective
    assert [row.recorded for row in rows] == recorded


@pytest.mark.parametrize("name", [golden.name for golden in GOLDENS])
def test_a_golden_core_runs(name: str) -> None:
    """Speculation changes no token; the tokens themselves are left to the arithmetic of the machine."""
    with load(GOLDEN / name, trust=TRUST) as core:
        engine = Engine(core)
        drafted = engine.generate([1, 2, 3], Request(max_tokens=12))
        plain = engine.generate([1, 2, 3], Request(max_tokens=12, speculation=False))

    assert len(plain.tokens) == 12
    assert drafted.tokens == plain.tokens


def test_error_report_and_canary_of_0_1_0_are_read() -> None:
    with verify(GOLDEN / "0.1.0", TRUST) as core:
        errors = worst_first(errors_of(core))
        (canary,) = carried_canaries(core)

    assert [(entry.name, entry.format, round(entry.sqnr_db or 0, 1)) for entry in errors] == [
        ("head.proposal", "nvfp4", 20.6), ("draft.layers.0.qkv", "mxfp8", 31.3), ("draft.layers.0.o", "mxfp8", 31.7),
        ("draft.layers.0.gate_up", "mxfp8", 31.7), ("draft.fc", "mxfp8", 31.9), ("draft.layers.0.down", "mxfp8", 31.9),
    ]
    assert (canary.depth, len(canary.prompts), canary.prompts[0].prompt[:4]) == (3, 4, (7, 20, 59, 60))


def test_every_golden_core_is_read_by_a_test() -> None:
    kept = {path.name for path in GOLDEN.iterdir() if (path / "manifest.pb").exists()}

    assert kept == {str(row.values[0]) for row in CORES} == {golden.name for golden in GOLDENS}


@pytest.mark.parametrize("name", [golden.name for golden in GOLDENS])
def test_a_golden_core_is_small(name: str) -> None:
    assert sum(path.stat().st_size for path in (GOLDEN / name).rglob("*") if path.is_file()) < 300_000


def combine(folder: Path, *names: str) -> Result:
    """`dflash-combine` with the golden key; key and trust file get the modes that git does not keep."""
    for file, mode in (("key.pem", 0o600), ("trust.json", 0o644)):
        shutil.copyfile(GOLDEN / file, folder / file)
        (folder / file).chmod(mode)
    arguments = [*(str(GOLDEN / name) for name in names), "--out", str(folder / "out"), "--key",
                 str(folder / "key.pem"), "--trust", str(folder / "trust.json"), "--json"]
    return CliRunner().invoke(combine_app, arguments)


@pytest.mark.parametrize(("names", "code"), [
    pytest.param(("no-scope", "no-field-14", "empty-scope", "future-fields"), None, id="all-mean-mxfp8"),
    pytest.param(("no-field-14", "unknown-body"), "COMBINE_DRAFT_BODY", id="unknown-body"),
    pytest.param(("no-scope", "dspark"), "COMBINE_DRAFT_BODY", id="dspark-inherits-nothing"),
    pytest.param(("0.1.0", "no-scope"), "COMBINE_ONLINE_QUANTIZATION", id="target-formats"),
])
def test_golden_cores_combine_by_what_they_mean(tmp_path: Path, names: tuple[str, ...], code: str | None) -> None:
    result = combine(tmp_path, *names)

    assert result.exit_code == (0 if code is None else 5)
    assert json.loads(result.stdout).get("error", {}).get("code") == code


def test_fields_from_the_future_are_kept_through_combine(tmp_path: Path) -> None:
    combine(tmp_path, "future-fields", "no-scope")

    manifest = RebuildManifest.FromString((tmp_path / "out" / "manifest.pb").read_bytes())
    component = manifest.components[0]
    assert FUTURE_FIELD in manifest.SerializeToString()
    assert FUTURE_SPECULATION in manifest.speculation.SerializeToString()
    assert FUTURE_SPECULATION in component.recorded_speculation.SerializeToString()
    kept = tmp_path / "out" / "components" / f"{component.manifest.digest.hex()}.pb"
    assert kept.read_bytes() == (GOLDEN / "future-fields" / "manifest.pb").read_bytes()


def test_diff_shows_what_is_recorded_where_the_meaning_is_equal(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["diff", str(GOLDEN / "no-scope"), str(GOLDEN / "no-field-14"), "--json",
                                      "--fail-on", "target", "--fail-on", "draft", "--fail-on", "graphs"])

    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [row["same"] for row in document["precision"]] == [True, True, True, True]
    assert document["precision"][0]["left"]["recorded"] == "mxfp8"
    assert document["precision"][0]["right"]["recorded"] == "mxfp8:all"


@pytest.mark.parametrize("name", [golden.name for golden in GOLDENS])
def test_a_manifest_is_written_as_it_was_read(name: str) -> None:
    data = (GOLDEN / name / "manifest.pb").read_bytes()

    assert hashlib.sha256(RebuildManifest.FromString(data).SerializeToString(deterministic=True)).digest() == (
        hashlib.sha256(data).digest())
