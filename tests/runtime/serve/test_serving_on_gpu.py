"""A core on a real GPU behind the server: canary, plain and streamed answers, and many clients at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime import Engine, Request, TrustPolicy, load
from tests.served_core import make_tiny, running

pytestmark = pytest.mark.gpu
CAPABILITY = 90
PROMPTS = tuple([(3 * i) % 90, (5 * i + 1) % 90, (7 * i + 2) % 90, i] for i in range(12))
TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("serve-gpu"), CAPABILITY)


def test_every_client_gets_the_text_that_plain_decoding_gives_alone(folder: Path) -> None:
    with load(folder / "core", trust=TrustPolicy.load(folder / "keys" / "trust.json"), device="cuda") as core:
        engine = Engine(core)
        expected = ["".join(f" t{t}" for t in engine.generate(prompt, Request(TOKENS, speculation=False)).tokens)
                    for prompt in PROMPTS]

    with running(folder, device="cuda") as server:
        client = server.client()

        def asked(prompt: list[int]) -> str:
            return client.completions.create(model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0,
                                             extra_body={"ignore_eos": True}).choices[0].text

        def streamed(prompt: list[int]) -> str:
            chunks = server.client(strict=False).completions.create(
                model="tiny", prompt=prompt, max_tokens=TOKENS, temperature=0, stream=True,
                extra_body={"ignore_eos": True})
            return "".join(chunk.choices[0].text for chunk in chunks)

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(asked, PROMPTS))
            in_parts = list(pool.map(streamed, PROMPTS))
        accepted = server.http().get("/metrics").text.partition("\nvllm:spec_decode_num_accepted_tokens_total{")[2]

    assert together == in_parts == expected
    assert len(set(expected)) > 1
    assert float(accepted.partition("} ")[2].split("\n")[0]) > 0
