"""The official client, with strict validation, on a real port: each call gives what the engine alone gives."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from runtime import Engine, LoadedCore, Request, TrustPolicy, load
from runtime.engine import StepKind
from tests.served_core import Server

PROMPT, IDS = "t3 t1 t4", (3, 1, 4)
CHAT_IDS = (1, 2, 9, 1, 4)


@pytest.fixture(scope="module")
def core(tiny: Path) -> LoadedCore:
    with load(tiny / "core", trust=TrustPolicy.load(tiny / "keys" / "trust.json")) as core:
        yield core


def spelled(tokens) -> str:
    return "".join(f" t{token}" for token in tokens)


def greedy(core: LoadedCore, prompt, count: int):
    return Engine(core).generate(prompt, Request(count))


def test_models_name_the_core(server: Server) -> None:
    client = server.client()

    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "dflash"


def test_completion_is_the_engines_text(server: Server, core: LoadedCore) -> None:
    expected = greedy(core, IDS, 12)

    answer = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)

    assert answer.choices[0].text == spelled(expected.tokens)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 12, 15)
    assert answer.system_fingerprint == f"dflash-{core.core_digest[:12]}"


def test_completion_takes_token_ids(server: Server) -> None:
    client = server.client()

    by_text, by_ids = (client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0)
                       for prompt in (PROMPT, list(IDS)))

    assert by_ids.choices[0].text == by_text.choices[0].text


def test_chat_goes_through_the_template(server: Server, core: LoadedCore) -> None:
    answer = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "t9"}], max_tokens=8, temperature=0)

    assert answer.choices[0].message.content == spelled(greedy(core, CHAT_IDS, 8).tokens)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == 5


def test_chat_takes_content_in_parts(server: Server) -> None:
    client = server.client()
    parts = [{"type": "text", "text": "t9"}, {"type": "text", "text": " t8"}]

    whole, split = (client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}],
                                                   max_completion_tokens=4, temperature=0)
                    for content in ("t9 t8", parts))

    assert split.choices[0].message.content == whole.choices[0].message.content


def test_an_answers_message_can_be_sent_back_as_it_came(server: Server, core: LoadedCore) -> None:
    client, messages = server.client(), [{"role": "user", "content": "t9"}]
    first = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, temperature=0)
    said = greedy(core, CHAT_IDS, 3).tokens

    second = client.chat.completions.create(
        model="tiny", messages=[*messages, first.choices[0].message, {"role": "user", "content": "t8"}], max_tokens=8,
        temperature=0)

    assert second.choices[0].message.content == spelled(
        greedy(core, (1, 2, 9, 1, 4, *said, 1, 2, 8, 1, 4), 8).tokens)


def test_chat_goes_on_where_the_assistant_stopped(server: Server, core: LoadedCore) -> None:
    answer = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "t9"}], max_tokens=8, temperature=0,
        extra_body={"add_generation_prompt": False})

    assert answer.choices[0].message.content == spelled(greedy(core, (1, 2, 9), 8).tokens)


def test_chat_template_is_given_tool_calls_and_their_answers(server: Server, monkeypatch) -> None:
    given = []
    monkeypatch.setattr(server.state.served.text, "encode_chat",
                        lambda messages, **settings: given.append(messages) or [1, 2])
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}

    server.client().chat.completions.create(model="tiny", max_tokens=1, messages=[
        {"role": "user", "content": "t9", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "t5"}]}])

    assert given == [[
        {"role": "user", "content": "t9", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [
            {**call, "function": {"name": "weather", "arguments": {"city": "Bern"}}}]},
        {"role": "tool", "content": "t5", "tool_call_id": "c1"}]]


def test_chat_without_a_limit_fills_the_context(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": " ".join(["t9"] * 240)}], temperature=0)

    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (256, "length")


def test_stream_says_the_same_text_in_pieces_and_its_usage(server: Server, core: LoadedCore) -> None:
    chunks = list(server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "t9"}], max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True}))

    assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == spelled(greedy(core, CHAT_IDS, 8).tokens)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 8)
    assert len({c.id for c in chunks}) == 1


def test_stream_without_usage_ends_with_the_last_choice(server: Server) -> None:
    chunks = list(server.client(strict=False).completions.create(
        model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, stream=True))

    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_acceptance_of_a_request_is_in_its_answer(server: Server, core: LoadedCore) -> None:
    steps = [s for s in greedy(core, IDS, 20).steps if s.kind is StepKind.VERIFY]

    answer = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)

    told = answer.model_extra["metrics"]["speculative_decoding"]
    kept = [min(s.accepted, len(s.proposals)) for s in steps]
    assert told == {
        "mean_acceptance_length": 1 + sum(kept) / len(kept),
        "draft_acceptance_rate": sum(kept) / sum(len(s.proposals) for s in steps),
        "acceptance_histogram": [kept.count(n) for n in range(4)], "num_spec_steps": len(kept),
        "num_accepted_draft_tokens": sum(kept), "num_draft_tokens": sum(len(s.proposals) for s in steps),
        "num_spec_tokens": 3}


def test_without_speculation_nothing_was_drafted(server: Server) -> None:
    answer = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0,
                                                extra_body={"speculation": False})

    assert answer.model_extra["metrics"] == {"speculative_decoding": None}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_before_itself(server: Server, core: LoadedCore, stream: bool) -> None:
    tokens = greedy(core, IDS, 30).tokens
    first = next(i for i in range(4, 30) if tokens[i] not in tokens[:i])

    answer = server.client(strict=not stream).completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, stream=stream,
        stop=["never", f" t{tokens[first]}"])

    pieces = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    text = "".join(piece.text for piece in pieces)
    assert spelled(tokens).startswith(text)
    assert text == spelled(tokens[:first])
    assert pieces[-1].finish_reason == "stop"


def test_seed_decides_what_is_drawn(server: Server) -> None:
    def draw(seed: int) -> str:
        return server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=16, temperature=1.5,
                                                  seed=seed).choices[0].text

    assert draw(-5) == draw(-5)
    assert draw(-5) != draw(7)


def test_top_k_one_is_greedy(server: Server, core: LoadedCore) -> None:
    answer = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=1,
                                                extra_body={"top_k": 1})

    assert answer.choices[0].text == spelled(greedy(core, IDS, 8).tokens)


def test_chat_logprobs_are_those_of_the_verify_logits(server: Server, core: LoadedCore) -> None:
    completion = Engine(core).generate(CHAT_IDS, Request(8, top_logprobs=3))
    expected = [entry for step in completion.steps for entry in step.logprobs]

    answer = server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "t9"}], max_tokens=8, temperature=0, logprobs=True,
        top_logprobs=3)

    told = answer.choices[0].logprobs.content
    assert [(e.token, e.logprob) for e in told] == [(f" t{e.token}", e.logprob) for e in expected]
    assert [[(t.token, t.logprob) for t in e.top_logprobs] for e in told] == [
        [(f" t{token}", value) for token, value in e.top] for e in expected]
    assert told[0].bytes == list(told[0].token.encode())


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_name_tokens_and_where_they_start(server: Server, stream: bool) -> None:
    answer = server.client(strict=not stream).completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2, stream=stream)

    choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
    tokens = [token for c in choices for token in c.logprobs.tokens]
    offsets = [offset for c in choices for offset in c.logprobs.text_offset]
    assert "".join(tokens) == "".join(c.text for c in choices)
    assert offsets == [len("".join(tokens[:i])) for i in range(6)]
    assert all(len(top) == 2 for c in choices for top in c.logprobs.top_logprobs)


def test_steps_say_how_each_token_came(server: Server, core: LoadedCore) -> None:
    steps = greedy(core, CHAT_IDS, 12).steps

    chunks = list(server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "t9"}], max_tokens=12, temperature=0, stream=True,
        stream_options={"include_steps": True}))

    told = [chunk.model_extra["dflash"] for chunk in chunks if "dflash" in chunk.model_extra]
    assert [[t["id"] for t in step["tokens"]] for step in told] == [list(step.tokens) for step in steps]
    assert [t["from"] for t in told[0]["tokens"]] == ["plain"]
    for step, document in zip(steps[1:], told[1:], strict=True):
        positions = [t["position"] for t in document["tokens"]]
        assert positions == [i + 1 if i < step.accepted else 0 for i in range(len(step.tokens))]
        assert document["ms"]["verify"] > 0


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"n": 2}, 400, "n"), ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"), ({"extra_body": {"beams": 4}}, 400, "beams"),
        ({"max_tokens": 0}, 400, "max_tokens"), ({"max_tokens": 254}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"), ({"temperature": 3}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"), ({"prompt": []}, 400, "prompt"), ({"prompt": [128]}, 400, "prompt"),
        ({"logprobs": 21}, 400, "logprobs"), ({"stop": [""]}, 400, "stop"), ({"seed": 2**63}, 400, "seed"),
        ({"model": "other"}, 404, "model"), ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"best_of": 3}, 400, "best_of"), ({"echo": True}, 400, "echo"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_refusals_of_a_completion_name_their_parameter(server: Server, change, status, param) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        server.client().completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **change})

    assert (refused.value.status_code, refused.value.param) == (status, param)
    assert refused.value.type == "invalid_request_error"


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"), ({"messages": [{"role": "user", "content": IMAGE}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "t1"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "t1", "refusal": "no"}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"tool_choice": "required"},
                                                                                  "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "t9 " * 300}]}, "max_tokens"),
    ],
    ids=["no messages", "an image", "a role", "no content", "arguments", "a refusal", "tools", "forced tool",
         "response format", "top_logprobs alone", "longer than the context"],
)
def test_refusals_of_a_chat_name_their_parameter(server: Server, change, param) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().chat.completions.create(
            **{"model": "tiny", "messages": [{"role": "user", "content": "t9"}], "max_tokens": 4, **change})

    assert refused.value.param == param


def test_a_request_beyond_the_context_is_told_the_limit(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=300)

    assert refused.value.code == "context_length_exceeded"
    assert "at most 256" in refused.value.message


@pytest.mark.parametrize("value", [{"n": 1}, {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"logit_bias": {}},
                                   {"user": "someone"}, {"echo": False}, {"suffix": None}], ids=str)
def test_parameters_that_change_nothing_pass(server: Server, value) -> None:
    answer = server.client().completions.create(model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, **value)

    assert answer.usage.completion_tokens == 1
