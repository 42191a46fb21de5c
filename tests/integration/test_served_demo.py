"""The demo pair behind the server: its own words, through its own template, are those that `generate` gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai import OpenAI

from runtime import Engine, LoadedCore, Request
from runtime.text import CoreText
from tests.integration.conftest import KEPT
from tests.served_core import running

QUESTION = "Name the capital of France."


@pytest.fixture
def folder(demo_bf16: LoadedCore) -> Path:
    """The folder that holds the exported pair and its keys."""
    return max(KEPT.glob("bf16-*"), key=lambda path: path.stat().st_mtime)


def test_chat_and_stream_are_the_text_of_plain_greedy_decoding(demo_bf16: LoadedCore, folder: Path) -> None:
    text = CoreText(demo_bf16)
    messages = [{"role": "user", "content": QUESTION}]
    completion = Engine(demo_bf16).generate(
        text.encode_chat(messages), Request(24, stop_token_ids=text.stop_token_ids, speculation=False))

    with running(folder, canary=False) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="unused", _strict_response_validation=True, max_retries=0)
        model = client.models.list().data[0].id
        asked = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        streamed = "".join(chunk.choices[0].delta.content for chunk in client.chat.completions.create(
            **asked, stream=True))
        cut = client.chat.completions.create(**asked, stop=["Paris"])

    assert whole.choices[0].message.content == streamed == text.decode(completion.tokens)
    assert "Paris" in streamed
    assert cut.choices[0].message.content == streamed[:streamed.index("Paris")]
    assert cut.choices[0].finish_reason == "stop"
