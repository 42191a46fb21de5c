"""A canary is recorded, stored, read back and replayed; each difference has its own refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from dflash_core.errors import CheckpointError, FormatError, QualityError, VerificationError
from typer.testing import CliRunner

from exporter.cli import export_app
from exporter.export import ExportRequest, export
from runtime import TrustPolicy, canary, load
from runtime.canary import Canary, CanaryPrompt
from runtime.keys import generate_key, load_private_key
from tests.tiny_pair import TinyProgram, write_pair

TOP = ((5, -0.1), (6, -0.15), (7, -3.0))


def prompt(tokens=(5, 5), accepted=(2, 0), proposed=(3, 3)) -> CanaryPrompt:
    return CanaryPrompt((1, 2), tokens, tuple((9,) * count for count in proposed), accepted, (TOP,) * len(tokens))


@pytest.fixture(scope="module")
def core():
    return TinyProgram.record().load(seed=1)


@pytest.fixture(scope="module")
def recorded(core) -> Canary:
    return canary.record(core, [[3, 1, 4], [1, 5]], 12)


def test_recording_keeps_prompt_tokens_and_eight_alternatives(core, recorded):
    first = recorded.prompts[0]

    assert first.prompt == (3, 1, 4)
    assert len(first.tokens) == len(first.top) == 12
    assert [len(place) for place in first.top] == [8] * 12
    assert [place[0][0] for place in first.top] == list(first.tokens)
    assert len(first.accepted) == len(first.proposals) > 0


def test_stored_canary_reads_back_equal(recorded):
    assert canary.parse(recorded.to_bytes(), "golden/x.json") == recorded


def test_replay_on_the_same_core_holds(core, recorded):
    result = canary.replay(core, recorded)

    assert result.prompts == 2
    assert result.agreement == 1.0
    assert result.accepted_per_step == canary.mean_accepted(recorded.prompts)


@pytest.mark.parametrize(
    ("accepted", "proposed", "mean", "rates"),
    [
        ((), (), 0.0, (0.0, 0.0, 0.0)),
        ((3, 0), (3, 3), 1.5, (0.5, 0.5, 0.5)),
        ((2, 1, 0), (3, 3, 3), 1.0, (0.6667, 0.3333, 0.0)),
        ((1, 1), (3, 1), 1.0, (1.0, 0.0, 0.0)),
    ],
    ids=["no draft", "all or nothing", "one less each", "cut by the limit"],
)
def test_acceptance_counts_the_steps_where_a_position_took_part(accepted, proposed, mean, rates):
    prompts = [prompt(accepted=accepted, proposed=proposed)]

    assert canary.mean_accepted(prompts) == mean
    assert canary.acceptance_by_position(prompts, 3) == rates


@pytest.mark.parametrize(
    ("token", "refused"), [(5, False), (6, False), (7, True), (99, True)],
    ids=["the recorded one", "a tie", "no tie", "not among the eight"],
)
def test_differing_token_is_refused_unless_the_recording_saw_a_tie(monkeypatch, core, token, refused):
    old, new = prompt(), prompt(tokens=(5, token))
    monkeypatch.setattr(canary, "_play", lambda engine, tokens, count: new)

    def run():
        return canary.replay(core, Canary(3, (old,)))

    if not refused:
        assert run().prompts == 1
        return
    with pytest.raises(QualityError) as error:
        run()
    assert (error.value.code, error.value.where, error.value.expected, error.value.got) == (
        "CANARY_TOKENS", "canary prompt 0, token 1", "5", str(token))
    assert error.value.exit_code == 7


@pytest.mark.parametrize(
    ("blocks", "share"),
    [
        (((9, 9, 9), (9, 9, 9)), None), (((9, 9, 8), (9, 9, 9)), None), (((8, 9, 9), (8, 9, 9)), "0.67"),
        (((8, 8, 8), (8, 8, 8)), "0.00"),
    ],
    ids=["all", "five of six", "four of six", "none"],
)
def test_other_proposals_than_recorded_are_refused(monkeypatch, core, blocks, share):
    old = prompt(tokens=(5,) * 6, accepted=(2, 0))
    monkeypatch.setattr(canary, "_play", lambda engine, tokens, count: replace(old, proposals=blocks))

    if share is None:
        assert canary.replay(core, Canary(3, (old,))).prompts == 1
        return
    with pytest.raises(QualityError) as error:
        canary.replay(core, Canary(3, (old,)))
    assert (error.value.code, error.value.expected, error.value.got) == (
        "CANARY_PROPOSALS", "at least 0.70 of them equal", share)


def test_proposals_are_compared_where_both_continue_the_same_tokens(monkeypatch, core):
    """The replay's second step starts two tokens later than the recording's, so only the first can be compared."""
    old = replace(prompt(tokens=(5,) * 8, accepted=(0, 2)), proposals=((9, 9, 9), (9, 9, 9)))
    new = replace(old, accepted=(2, 0), proposals=((9, 9, 9), (1, 1, 1)))
    monkeypatch.setattr(canary, "_play", lambda engine, tokens, count: new)

    assert canary.replay(core, Canary(3, (old,))).agreement == 1.0


@pytest.mark.parametrize(("kept", "refused"), [(8, False), (7, True)], ids=["at the bound", "below it"])
def test_acceptance_under_four_fifths_of_the_recording_is_refused(monkeypatch, core, kept, refused):
    old = prompt(accepted=(1,) * 10, proposed=(3,) * 10)
    new = replace(old, accepted=(1,) * kept + (0,) * (10 - kept))
    monkeypatch.setattr(canary, "_play", lambda engine, tokens, count: new)

    if not refused:
        assert canary.replay(core, Canary(3, (old,))).accepted_per_step == 0.8
        return
    with pytest.raises(QualityError) as error:
        canary.replay(core, Canary(3, (old,)))
    assert (error.value.code, error.value.expected, error.value.got) == (
        "CANARY_ACCEPTANCE", "at least 0.800 a step", "0.700")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b'{"format":"other/1"}', b'{"format":"dflash-canary/1","depth":1,"prompts":[]}',
     b'{"format":"dflash-canary/1","depth":1,"prompts":[{"prompt":[1],"tokens":[2],"proposals":[],"accepted":[],"top":[]}]}'],
    ids=["empty", "a list", "no fields", "another format", "no prompts", "lists of other lengths"],
)  # fmt: skip
def test_refuses_a_malformed_canary(data):
    with pytest.raises(FormatError) as refused:
        canary.parse(data, "golden/x.json")

    assert (refused.value.code, refused.value.where) == ("CANARY", "golden/x.json")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """Keys, checkpoints and a core with its canary."""
    folder = tmp_path_factory.mktemp("canary")
    write_pair(folder, seed=3)
    generate_key(folder / "keys")
    export(ExportRequest(target=folder / "target", draft=folder / "draft", out=folder / "core", canary=True),
           load_private_key(folder / "keys" / "key.pem"))
    return folder


def test_exported_core_carries_its_canary_and_replays_it(exported):
    trust = TrustPolicy.load(exported / "keys" / "trust.json")

    with load(exported / "core", trust=trust) as core:
        (found,) = canary.read_canaries(exported / "core", trust, core.core_digest)
        result = canary.replay(core, found)

    assert [entry.role for entry in core.manifest.files if entry.path.startswith("golden/")] == ["golden"]
    assert [len(p.tokens) for p in found.prompts] == [32] * 4
    assert result.prompts == 4


def test_core_that_was_replaced_since_it_was_loaded_is_refused(exported):
    trust = TrustPolicy.load(exported / "keys" / "trust.json")

    with pytest.raises(VerificationError) as refused:
        canary.read_canaries(exported / "core", trust, "0" * 64)

    assert refused.value.code == "CORE_CHANGED"


def _export(folder: Path, out: str, *options: str):
    return CliRunner().invoke(export_app, [
        str(folder / "target"), "--draft", str(folder / "draft"), "--out", str(folder / out),
        "--key", str(folder / "keys" / "key.pem"), *options])


def _with_other_token(stored: bytes) -> bytes:
    document = json.loads(stored)
    document["prompts"][0]["tokens"][3] ^= 1
    return json.dumps(document).encode()


def test_export_that_does_not_reproduce_a_reference_writes_nothing(exported):
    (stored,) = (exported / "core" / "golden").iterdir()
    (exported / "wrong.json").write_bytes(_with_other_token(stored.read_bytes()))

    wrong = _export(exported, "refused", "--canary-reference", str(exported / "wrong.json"))
    right = _export(exported, "kept", "--canary-reference", str(stored))

    assert (wrong.exit_code, right.exit_code) == (7, 0)
    assert not (exported / "refused").exists()
    assert (exported / "kept" / "golden" / stored.name).read_bytes() == stored.read_bytes()


def test_export_records_a_canary_unless_told_not_to(exported):
    plain = _export(exported, "plain", "--no-canary")

    assert plain.exit_code == 0
    assert not (exported / "plain" / "golden").exists()


def test_refuses_a_reference_without_a_canary(exported):
    assert _export(exported, "x", "--no-canary", "--canary-reference", "f.json").exit_code == 2


def test_refuses_a_reference_that_is_not_there(exported):
    request = ExportRequest(target=exported / "target", draft=exported / "draft", out=exported / "none", canary=True,
                            canary_reference=exported / "absent.json")

    with pytest.raises(CheckpointError) as refused:
        export(request, load_private_key(exported / "keys" / "key.pem"))

    assert refused.value.code == "CANARY_REFERENCE"
    assert not (exported / "none").exists()
