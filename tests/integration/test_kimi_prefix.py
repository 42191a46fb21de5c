"""A prompt that begins like an earlier one starts from a snapshot; text and logits are those of a cold start."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from dflash_core.compat import fit_symbols
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime import Engine, LoadedCore, Request, load
from runtime.engine import Sequence as Running
from runtime.engine import StepKind
from runtime.inspect import inspect_core
from runtime.inspect_table import print_report
from tests.integration.cores import Signer, make_core
from tests.integration.watch import random_tokens
from tests.oracles.kimi_pair import K3, KIMI_LINEAR, make_pair
from tests.oracles.zlab_pair import PairSpec

PAGE = 64
SYSTEM = random_tokens(2 * PAGE, seed=1)
A, B, C = (SYSTEM + random_tokens(n, seed=n) for n in (20, 90, 1))
OTHER = random_tokens(150, seed=9)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One core, loaded twice: one that remembers, and one that is asked each prompt cold."""

    path: Path
    core: LoadedCore
    reference: LoadedCore


@pytest.fixture(scope="module", params=[KIMI_LINEAR, K3], ids=["linear", "k3"])
def kimi(request: pytest.FixtureRequest, signer: Signer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("kimi")
    pair = make_pair(folder, request.param, PairSpec(block_size=4, fit_steps=0), lambda target, prompt: [])
    out = folder / "core"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.check.fit_symbols", few_snapshots)
        with (make_core(signer, out, pair.target_path, pair.draft_path, batches=(1, 2), max_context=320) as core,
              load(out, trust=signer.trust) as reference):
            yield Loaded(out, core, reference)


def few_snapshots(manifest: RebuildManifest, target_id: int, free_bytes: int) -> dict[int, int]:
    """Four, as in little memory, so that some must go."""
    return fit_symbols(manifest, target_id, free_bytes) | {
        s.symbol_id: 4 for s in manifest.symbols if s.name == "snapshots"}


class Watched:
    """What came of a prompt: its tokens, the logits row of each, and how many prompt tokens were run for it."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
        running = [engine.add(prompt, Request(max_tokens=12)) for prompt in prompts]
        self.logits: dict[Running, list[bytes]] = {sequence: [] for sequence in running}
        while not engine.idle:
            stepped = [o for o in engine.step() if o.record.kind is not StepKind.PREFILL]
            for lane, output in enumerate(stepped):
                rows = engine.core.shape("emitted")[1] if output.record.kind is StepKind.VERIFY else 1
                for i in range(len(output.record.tokens)):
                    row = engine.core.io["logits"][lane * rows + i]  # type: ignore[attr-defined]
                    self.logits[output.sequence].append(row.tobytes())
        self.taken_over = [sequence.taken_over for sequence in running]
        self.rows = [self.logits[sequence] for sequence in running]
        self.tokens = [tuple(sequence.tokens) for sequence in running]


def cold(kimi: Loaded, prompt: Sequence[int]) -> Watched:
    """A prompt on an engine of its own, which has seen nothing."""
    found = Watched(Engine(kimi.reference), [prompt])
    assert found.taken_over == [0]
    return found


def assert_like_cold(kimi: Loaded, found: Watched, prompts: Sequence[Sequence[int]]) -> None:
    for tokens, rows, prompt in zip(found.tokens, found.rows, prompts, strict=True):
        alone = cold(kimi, prompt)
        assert (tokens, rows) == (alone.tokens[0], alone.rows[0])


def test_a_b_a_takes_over_the_common_part_and_changes_no_bit(kimi: Loaded) -> None:
    engine = Engine(kimi.core)
    depths = []
    for prompt in (A, B, A, B, OTHER, C, B):
        found = Watched(engine, [prompt])
        depths += found.taken_over
        assert_like_cold(kimi, found, [prompt])

    # There are four snapshots: the two of OTHER take the place of B's own, which was used least recently.
    assert depths == [0, 128, 128, 192, 0, 128, 128]


def test_cold_prefills_that_run_between_each_other_stay_apart(kimi: Loaded) -> None:
    """Two prompts of one beginning in the same batch, then both again: each page and snapshot is of one of them."""
    engine = Engine(kimi.core)
    prompts = (B, OTHER, A)

    assert_like_cold(kimi, Watched(engine, prompts), prompts)
    again = Watched(engine, prompts)

    assert again.taken_over == [192, 128, 128]
    assert_like_cold(kimi, again, prompts)


def test_one_token_off_would_show(kimi: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: a state saved one token before the depth it is filed under gives other logits."""
    engine = Engine(kimi.core)
    original = Engine._prefill

    def short(self: Engine, sequence: Running) -> object:
        monkeypatch.setattr(self, "_chunk_tokens", PAGE - 1 if not sequence.prefilled else 1)
        if sequence.prefilled == PAGE - 1:
            sequence.prefilled = PAGE
            self._remember(sequence)
            sequence.prefilled = PAGE - 1
        return original(self, sequence)

    monkeypatch.setattr(Engine, "_prefill", short)
    Watched(engine, [SYSTEM[:PAGE + 1]])
    monkeypatch.undo()

    found = Watched(engine, [A])
    assert found.taken_over == [PAGE]
    assert found.rows[0] != cold(kimi, A).rows[0]


def test_memory_runs_out_gracefully(kimi: Loaded) -> None:
    """Many prompts of one beginning and of none, more than pages and snapshots can hold, two at a time."""
    engine = Engine(kimi.core)
    pages = engine.pages.available
    prompts = [SYSTEM[:n] + random_tokens(70, seed=n) for n in (0, 64, 100, 128, 10, 70)]
    for first, second in itertools.pairwise(prompts):
        found = Watched(engine, [first, second])
        assert_like_cold(kimi, found, [first, second])

    assert engine.prefix is not None
    assert engine.pages.available + engine.prefix.evictable() == pages


def test_inspect_says_how_many_tokens_and_snapshots_there_is_room_for(kimi: Loaded, signer: Signer,
                                                                      capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect_core(kimi.path, signer.trust)
    print_report(report)

    state = kimi.core.manifest.contract.state_bytes_per_slot
    assert (report.capacity.kv_tokens, report.capacity.snapshot_slots) == (2 * 320, 10)
    assert report.capacity.state_nbytes == state == 4 * (4 * 32 * 32 * 4 + 3 * 3 * 128 * 4)
    assert "room for" in capsys.readouterr().out.split("640 KV tokens, 10 snapshot slots of ")[0]


def test_prompt_that_was_given_up_halfway_leaves_only_what_it_ran(kimi: Loaded) -> None:
    engine = Engine(kimi.core)
    pages = engine.pages.available
    given_up = engine.add(B, Request(max_tokens=12))
    engine.step()
    engine.abort(given_up)
    assert engine.prefix is not None
    assert (engine.pages.available, engine.prefix.evictable()) == (pages - 1, 1)

    found = Watched(engine, [B])

    assert found.taken_over == [PAGE]
    assert_like_cold(kimi, found, [B])


def test_a_chunk_longer_than_a_prompt_ends_at_its_last_page_border(signer: Signer, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """As chunks of a GPU core are: without that no snapshot of a short prompt would ever be filed."""
    monkeypatch.setattr("exporter.export.CHUNK_TOKENS", 4 * PAGE)
    pair = make_pair(tmp_path, KIMI_LINEAR, PairSpec(block_size=4, fit_steps=0), lambda target, prompt: [])
    out = tmp_path / "core"
    with (make_core(signer, out, pair.target_path, pair.draft_path, batches=(1, 2), max_context=320) as core,
          load(out, trust=signer.trust) as reference):
        kimi, engine, depths = Loaded(out, core, reference), Engine(core), []
        for prompt in (A, B, A, OTHER):
            found = Watched(engine, [prompt])
            depths += found.taken_over
            assert_like_cold(kimi, found, [prompt])

    assert depths == [0, 128, 128, 0]
