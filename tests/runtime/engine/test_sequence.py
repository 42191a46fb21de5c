"""What a request may ask, and where a sequence's tokens end."""

import pytest
from dflash_core.errors import ExitCode, UsageError

from runtime.engine import Completion, FinishReason, Request, StepKind, StepRecord
from runtime.engine.sequence import Sequence


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", 0, "at least 1"), ("max_tokens", -3, "at least 1"),
        ("temperature", -0.1, "a number of at least 0"), ("temperature", float("inf"), "a number of at least 0"),
        ("temperature", float("nan"), "a number of at least 0"), ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"), ("top_p", float("nan"), "above 0 and at most 1"),
        ("top_k", -1, "0 to 2**31 - 1"), ("top_k", 2**31, "0 to 2**31 - 1"), ("seed", -1, "0 to 2**64 - 1"),
        ("seed", 2**64, "0 to 2**64 - 1"), ("top_logprobs", -1, "0 to 20"), ("top_logprobs", 21, "0 to 20"),
    ],
)  # fmt: skip
def test_refuses_a_request_out_of_range(field, value, expected):
    with pytest.raises(UsageError) as refused:
        Request(**{"max_tokens": 1, field: value})

    error = refused.value
    assert (error.code, error.where, error.expected, error.got) == ("REQUEST", field, expected, str(value))
    assert error.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 1}, {"temperature": 0.0}, {"temperature": 2.5}, {"top_p": 1.0}, {"top_p": 1e-9}, {"top_k": 0},
     {"top_k": 2**31 - 1}, {"seed": 0}, {"seed": 2**64 - 1}, {"top_logprobs": 0}, {"top_logprobs": 20}],
    ids=str,
)  # fmt: skip
def test_accepts_the_ends_of_every_range(fields):
    Request(**{"max_tokens": 1, **fields})


@pytest.mark.parametrize(
    ("max_tokens", "stop", "steps", "tokens", "reason"),
    [
        pytest.param(5, (), [[1], [2, 3]], [1, 2, 3], None, id="not done"),
        pytest.param(3, (), [[1], [2, 3]], [1, 2, 3], FinishReason.LENGTH, id="exactly the limit"),
        pytest.param(1, (), [[7]], [7], FinishReason.LENGTH, id="one token"),
        pytest.param(5, (9,), [[9]], [9], FinishReason.STOP, id="stop token first"),
        pytest.param(5, (9,), [[1], [2, 9, 3, 4]], [1, 2, 9], FinishReason.STOP, id="stop token inside a block"),
        pytest.param(5, (9,), [[1], [2, 3, 4, 9]], [1, 2, 3, 4, 9], FinishReason.STOP, id="stop token at the limit"),
        pytest.param(9, (8, 9), [[1, 8, 9]], [1, 8], FinishReason.STOP, id="first of two stop tokens"),
    ],
)
def test_tokens_end_after_a_stop_token_or_at_the_limit(max_tokens, stop, steps, tokens, reason):
    sequence = Sequence((5, 6), Request(max_tokens, stop_token_ids=stop))

    for step in steps:
        sequence.commit(StepKind.VERIFY, 0, list(step))

    assert sequence.tokens == tokens
    assert sequence.finish_reason is reason


def test_record_holds_what_was_taken_and_what_was_proposed():
    sequence = Sequence((5,), Request(9, stop_token_ids=(3,)))

    record = sequence.commit(StepKind.VERIFY, 4, [1, 3, 2], proposals=(1, 3, 8), candidates=((1,), (3,), (8,)),
                             accepted=2)

    assert record == StepRecord(StepKind.VERIFY, 4, (1, 3, 8), ((1,), (3,), (8,)), 2, (1, 3))
    assert sequence.steps == [record]


def test_limit_counts_prompt_and_new_tokens():
    assert Sequence((5, 6, 7), Request(4)).limit == 7


def test_completion_averages_the_steps_after_the_prefill():
    def step(kind, *tokens):
        return StepRecord(kind, 0, (), (), 0, tokens)

    steps = (step(StepKind.PREFILL, 1), step(StepKind.VERIFY, 2, 3, 4), step(StepKind.DECODE, 5))

    assert Completion((1, 2, 3, 4, 5), FinishReason.LENGTH, steps).tokens_per_step == 2.0
    assert Completion((1,), FinishReason.STOP, steps[:1]).tokens_per_step == 0.0


def test_unfinished_sequence_has_no_completion():
    with pytest.raises(AssertionError):
        Sequence((5,), Request(4)).completion()


def test_finished_sequence_gives_its_tokens_reason_and_steps():
    sequence = Sequence((5,), Request(2))
    first = sequence.commit(StepKind.PREFILL, 5, [1])
    second = sequence.commit(StepKind.DECODE, 1, [2])

    assert sequence.completion() == Completion((1, 2), FinishReason.LENGTH, (first, second))
