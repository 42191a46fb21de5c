"""The engine admits, steps, ends and frees sequences: a tiny random pair, and that pair with a draft that is right."""

from dataclasses import replace

import numpy as np
import pytest
from dflash_core.errors import CompatibilityError, UsageError

from runtime import load
from runtime.engine import Engine, FinishReason, Request, StepKind
from runtime.trust import TrustPolicy
from tests.tiny_pair import CHUNK_TOKENS, CONTEXT, DEPTH, PAGE_TOKENS, VOCAB, TinyProgram, write_pair

PROMPT = (3, 1, 4, 1, 5)
LONG_PROMPT = tuple(range(2 * CHUNK_TOKENS + 3))


@pytest.fixture(scope="module")
def pair():
    return TinyProgram.record(batches=(1, 2, 4))


@pytest.fixture(scope="module")
def core(pair):
    return pair.load(seed=1)


@pytest.fixture(scope="module")
def plain_tokens(core):
    """Plain greedy continuations of some prompts, one sequence at a time."""
    known = {}

    def continuation(prompt, count):
        key = tuple(prompt)
        if len(known.get(key, ())) < count:
            known[key] = Engine(core).generate(prompt, Request(count, speculation=False)).tokens
        return known[key][:count]

    return continuation


class OracleDraft:
    """A core whose draft proposes the tokens that the target will choose, except at the positions in `wrong`."""

    def __init__(self, core, prompt, tokens, wrong=()):
        self._core, self._prompt, self._tokens, self._wrong = core, prompt, tokens, wrong

    def __getattr__(self, name):
        return getattr(self._core, name)

    def graph(self, role, batch):
        graph = self._core.graph(role, batch)
        return replace(graph, steps=(*graph.steps, self._propose)) if role == "draft" else graph

    def _propose(self):
        io = self._core.io
        done = int(io["length"][io["slots"][0]]) + 1 - len(self._prompt)
        for i in range(DEPTH):
            at = done + i
            token = self._tokens[at] if at < len(self._tokens) else 0
            io["proposals"][0, i] = (token + 1) % VOCAB if at in self._wrong else token


def finish(engine, *sequences):
    """Step until these are done; every step's outputs."""
    outputs = []
    for _ in range(500):
        if all(s.finish_reason is not None for s in sequences):
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine does not finish")


@pytest.mark.parametrize("prompt", [(7,), PROMPT, LONG_PROMPT], ids=["one token", "five tokens", "three chunks"])
def test_speculation_gives_the_tokens_of_plain_decoding(core, plain_tokens, prompt):
    completion = Engine(core).generate(prompt, Request(20))

    assert completion.tokens == plain_tokens(prompt, 20)
    assert completion.finish_reason is FinishReason.LENGTH
    assert {s.kind for s in completion.steps} == {StepKind.PREFILL, StepKind.VERIFY}


@pytest.mark.parametrize(
    ("max_tokens", "wrong", "tokens_by_step", "accepted", "proposed"),
    [
        pytest.param(1, (), [1], [0], [0], id="one token: the prefill's"),
        pytest.param(2, (), [1, 1], [0, 1], [0, 1], id="two tokens: one proposal can count"),
        pytest.param(5, (), [1, 4], [0, 3], [0, 3], id="a whole block"),
        pytest.param(6, (), [1, 4, 1], [0, 3, 1], [0, 3, 1], id="a block and one"),
        pytest.param(10, (), [1, 4, 4, 1], [0, 3, 3, 1], [0, 3, 3, 1], id="two blocks and one"),
        pytest.param(9, (1,), [1, 1, 4, 3], [0, 0, 3, 3], [0, 3, 3, 3], id="first proposal is wrong"),
        pytest.param(9, (3,), [1, 3, 4, 1], [0, 2, 3, 1], [0, 3, 3, 1], id="third proposal is wrong"),
    ],
)
def test_accepted_proposals_and_one_more_come_per_step(core, plain_tokens, max_tokens, wrong, tokens_by_step, accepted,
                                                       proposed):
    expected = plain_tokens(PROMPT, 40)
    engine = Engine(OracleDraft(core, PROMPT, expected, wrong))

    completion = engine.generate(PROMPT, Request(max_tokens))

    assert completion.tokens == expected[:max_tokens]
    assert [len(s.tokens) for s in completion.steps] == tokens_by_step
    assert [s.accepted for s in completion.steps] == accepted
    assert [len(s.proposals) for s in completion.steps] == proposed
    assert [len(s.candidates) for s in completion.steps] == proposed


class LogitsByPosition:
    """A core that notes the logits of every live row of decode and verify steps by the row's position."""

    def __init__(self, core):
        self._core, self._start, self.noted = core, 0, {}

    def __getattr__(self, name):
        return getattr(self._core, name)

    def graph(self, role, batch):
        graph = self._core.graph(role, batch)
        if role not in ("decode", "verify"):
            return graph
        return replace(graph, steps=(self._before, *graph.steps, self._after))

    def _before(self):
        self._start = int(self._core.io["length"][self._core.io["slots"][0]])

    def _after(self):
        for row in range(self._core.io["produced"][0]):
            self.noted[self._start + row] = self._core.io["logits"][row].tobytes()


def test_logits_of_a_position_are_equal_bytes_from_verify_and_from_decode(core, plain_tokens):
    expected = plain_tokens(PROMPT, 40)
    decoded, verified = LogitsByPosition(core), LogitsByPosition(OracleDraft(core, PROMPT, expected, wrong=(9, 20, 21)))

    Engine(decoded).generate(PROMPT, Request(30, speculation=False))
    Engine(verified).generate(PROMPT, Request(30))

    assert sorted(decoded.noted) == list(range(5, 34))
    assert verified.noted == decoded.noted


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("speculation", [True, False])
def test_stop_token_is_the_last_one_wherever_it_falls(core, plain_tokens, place, speculation):
    expected = plain_tokens(PROMPT, 40)
    stop = expected[place]
    last = expected.index(stop)
    engine = Engine(OracleDraft(core, PROMPT, expected))

    completion = engine.generate(PROMPT, Request(30, stop_token_ids=(stop,), speculation=speculation))

    assert completion.tokens == expected[: last + 1]
    assert completion.finish_reason is FinishReason.STOP
    assert engine.pages.available == core.symbols["kv_pages"]


def test_steps_are_told_as_they_are_committed_and_name_their_anchor(core):
    told = []

    completion = Engine(core).generate(PROMPT, Request(6), on_step=told.append)

    assert tuple(told) == completion.steps
    assert told[0].anchor == 5
    before = [PROMPT[-1], *completion.tokens]
    made = 0
    for step in told:
        assert step.anchor == before[made]
        made += len(step.tokens)


def test_prompt_longer_than_a_chunk_is_prefilled_in_chunks(core):
    engine = Engine(core)
    sequence = engine.add(LONG_PROMPT, Request(1))

    steps = [len(engine.step()) for _ in range(3)]

    assert steps == [0, 0, 1]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert [s.kind for s in sequence.steps] == [StepKind.PREFILL]


@pytest.mark.parametrize(("prompt", "max_tokens"), [(1, CONTEXT - 1), (CONTEXT - 1, 1), (CONTEXT - 3, 3)])
def test_context_may_be_filled_to_its_last_token(core, plain_tokens, prompt, max_tokens):
    tokens = tuple(i % VOCAB for i in range(prompt))

    completion = Engine(core).generate(tokens, Request(max_tokens))

    assert len(completion.tokens) == max_tokens
    assert completion.tokens == plain_tokens(tokens, max_tokens)


def test_refuses_more_than_the_context(core):
    with pytest.raises(CompatibilityError) as refused:
        Engine(core).add([1] * 60, Request(5))

    error = refused.value
    assert (error.code, error.expected, error.got) == ("CONTEXT_LENGTH", "at most 64", "60 + 5")


def test_refuses_an_empty_prompt(core):
    with pytest.raises(UsageError) as refused:
        Engine(core).add([], Request(5))

    assert refused.value.code == "PROMPT_EMPTY"


@pytest.mark.parametrize(
    ("prompt", "got"),
    [([1, VOCAB], "[128]"), ([-1, 5], "[-1]"), ([200, 1, 201, 202, 203, 204], "[200, 201, 202, 203]")],
)
def test_refuses_tokens_outside_the_vocabulary(core, prompt, got):
    engine = Engine(core)

    with pytest.raises(CompatibilityError) as refused:
        engine.add(prompt, Request(5))

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("TOKEN_RANGE", "0 to 127", got)
    assert engine.idle


def few_pages(core, count):
    """The core with a K/V cache of `count` pages."""
    class Small:
        symbols = {"kv_pages": count}  # noqa: RUF012

        def __getattr__(self, name):
            return getattr(core, name)

    return Small()


def test_refuses_a_sequence_that_the_cache_can_never_hold(core):
    with pytest.raises(CompatibilityError) as refused:
        Engine(few_pages(core, 2)).add(PROMPT, Request(12))

    error = refused.value
    assert (error.code, error.expected, error.got) == ("KV_PAGES", "at most 16 tokens", "17")


def test_sequence_waits_until_enough_pages_are_free(core, plain_tokens):
    engine = Engine(few_pages(core, 3))
    first, second, third = (engine.add(PROMPT, Request(n)) for n in (8, 19, 2))

    engine.step()
    waiting = (first.slot, second.slot, third.slot, engine.pages.available)
    finish(engine, first, second, third)

    assert waiting == (0, -1, -1, 1)
    assert [tuple(s.tokens) for s in (first, second, third)] == [plain_tokens(PROMPT, n) for n in (8, 19, 2)]
    assert engine.pages.available == 3


def test_sequences_beyond_the_slots_wait_in_order(core, plain_tokens):
    engine = Engine(core)
    sequences = [engine.add((i + 1,), Request(3)) for i in range(6)]

    engine.step()
    admitted = [s.slot for s in sequences]
    finish(engine, *sequences)

    assert admitted == [0, 1, 2, 3, -1, -1]
    assert [tuple(s.tokens) for s in sequences] == [plain_tokens((i + 1,), 3) for i in range(6)]
    assert engine.idle


def test_pages_of_a_sequence_are_those_its_limit_needs(core):
    engine = Engine(core)
    sequence = engine.add(PROMPT, Request(PAGE_TOKENS - len(PROMPT) + 1))

    engine.step()

    assert len(sequence.pages) == 2
    assert core.io["page_table"][sequence.slot, :2].tolist() == sequence.pages
    engine.abort(sequence)


def test_abort_frees_pages_and_slot_of_a_running_sequence(core, plain_tokens):
    engine = Engine(core)
    first, second = engine.add(PROMPT, Request(30)), engine.add(LONG_PROMPT, Request(6))
    for _ in range(3):
        engine.step()

    engine.abort(first)
    finish(engine, second)

    assert engine.pages.available == core.symbols["kv_pages"]
    assert engine.idle
    assert first.finish_reason is None
    assert tuple(second.tokens) == plain_tokens(LONG_PROMPT, 6)


def test_abort_forgets_a_waiting_sequence_and_may_be_repeated(core):
    engine = Engine(core)
    sequence = engine.add(PROMPT, Request(5))

    engine.abort(sequence)
    engine.abort(sequence)

    assert engine.idle
    assert engine.step() == []
    assert engine.pages.available == core.symbols["kv_pages"]


def test_abort_takes_the_sequence_it_is_given_among_equal_ones(core):
    engine = Engine(core)
    first, second = engine.add(PROMPT, Request(3)), engine.add(PROMPT, Request(3))

    engine.abort(second)
    finish(engine, first)

    assert (len(first.tokens), len(second.tokens)) == (3, 0)


def test_interrupted_generation_frees_what_it_held(core):
    engine = Engine(core)

    def interrupt(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, Request(20), on_step=interrupt)

    assert engine.idle
    assert engine.pages.available == core.symbols["kv_pages"]


def test_company_in_the_batch_changes_no_token(core, plain_tokens):
    """Sequences of all kinds at once: speculating or not, greedy or drawn, joining late, leaving early."""
    drawn = Request(12, temperature=0.9, seed=7)
    alone = Engine(core).generate((9, 8), drawn).tokens
    engine = Engine(core)
    mixed = [engine.add(PROMPT, Request(15)), engine.add(LONG_PROMPT, Request(9, speculation=False)),
             engine.add((9, 8), drawn)]
    for _ in range(4):
        engine.step()
    mixed += [engine.add((2,), Request(4)), engine.add((2,), Request(1))]

    finish(engine, *mixed)

    assert tuple(mixed[0].tokens) == plain_tokens(PROMPT, 15)
    assert tuple(mixed[1].tokens) == plain_tokens(LONG_PROMPT, 9)
    assert tuple(mixed[2].tokens) == alone
    assert tuple(mixed[3].tokens) == plain_tokens((2,), 4)
    assert tuple(mixed[4].tokens) == plain_tokens((2,), 1)
    assert {s.kind for s in mixed[1].steps} == {StepKind.PREFILL, StepKind.DECODE}


def test_slot_serves_the_next_sequence_as_if_it_were_new(core, plain_tokens):
    engine = Engine(core)
    engine.generate(LONG_PROMPT, Request(20, temperature=1.5, top_k=3, top_p=0.5, seed=3))

    assert engine.generate(PROMPT, Request(10)).tokens == plain_tokens(PROMPT, 10)


def test_seed_decides_what_is_drawn(core):
    def draw(seed):
        return Engine(core).generate(PROMPT, Request(12, temperature=1.0, seed=seed)).tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_core_without_a_draft_decodes_plainly():
    core = TinyProgram.record(drafted=False).load(seed=1)

    completion = Engine(core).generate(PROMPT, Request(6))

    assert [s.kind for s in completion.steps] == [StepKind.PREFILL] + [StepKind.DECODE] * 5
    assert completion.tokens_per_step == 1.0


def test_exported_pair_speculates_without_loss(tmp_path):
    """The whole way once: checkpoints, export, signature, load, generate."""
    from exporter.export import ExportRequest, export
    from runtime.keys import generate_key, load_private_key

    write_pair(tmp_path, seed=3)
    generate_key(tmp_path / "keys")
    export(ExportRequest(target=tmp_path / "target", draft=tmp_path / "draft", out=tmp_path / "core", batches=(1, 2)),
           load_private_key(tmp_path / "keys" / "key.pem"))

    with load(tmp_path / "core", trust=TrustPolicy.load(tmp_path / "keys" / "trust.json")) as core:
        plain = Engine(core).generate(PROMPT, Request(16, speculation=False))
        drafted = Engine(core).generate(PROMPT, Request(16))

    assert drafted.tokens == plain.tokens
    assert all(s.kind is StepKind.VERIFY for s in drafted.steps[1:])


def test_steps_say_how_many_proposals_took_part_without_reading_them(core):
    seen = Engine(core).generate(PROMPT, Request(9))
    unseen = Engine(core, record_candidates=False).generate(PROMPT, Request(9))

    assert [s.proposed for s in seen.steps] == [len(s.proposals) for s in seen.steps]
    assert [s.proposed for s in unseen.steps] == [s.proposed for s in seen.steps]
    assert seen.steps[1].proposed == DEPTH


@pytest.mark.parametrize("speculation", [True, False], ids=["verify", "decode"])
def test_logprobs_are_those_of_the_logits_that_chose_each_token(core, plain_tokens, speculation):
    expected = plain_tokens(PROMPT, 40)
    watched = LogitsByPosition(OracleDraft(core, PROMPT, expected, wrong=(4,)))

    completion = Engine(watched).generate(PROMPT, Request(12, speculation=speculation, top_logprobs=3))

    told = [entry for step in completion.steps for entry in step.logprobs]
    assert tuple(entry.token for entry in told) == completion.tokens
    for at, entry in list(enumerate(told))[1:]:
        row = np.frombuffer(watched.noted[len(PROMPT) + at - 1], np.float32).astype(np.float64)
        logprobs = row - np.log(np.exp(row).sum())
        assert entry.logprob == pytest.approx(logprobs[entry.token], abs=1e-9)
        assert [token for token, _ in entry.top] == np.argsort(-logprobs, kind="stable")[:3].tolist()
        assert entry.top[0] == (entry.token, entry.logprob)


def test_logprobs_of_each_lane_are_its_own(core):
    alone = [Engine(core).generate((i + 1,), Request(6, top_logprobs=2)) for i in range(3)]
    engine = Engine(core)
    together = [engine.add((i + 1,), Request(6, top_logprobs=2)) for i in range(3)]

    finish(engine, *together)

    assert [[e for s in sequence.steps for e in s.logprobs] for sequence in together] == [
        [e for s in completion.steps for e in s.logprobs] for completion in alone]


def test_step_times_name_the_parts_that_ran(core):
    engine = Engine(core)
    engine.add(PROMPT, Request(8))
    engine.step()
    first = engine.times

    engine.step()

    second = engine.times
    assert first.prefill_s > 0
    assert (first.draft_s, first.verify_s, first.decode_s) == (0, 0, 0)
    assert second.prefill_s == second.decode_s == 0
    assert second.draft_s > 0
    assert second.verify_s > 0
    assert second.total_s == pytest.approx(second.draft_s + second.verify_s + second.host_s)
