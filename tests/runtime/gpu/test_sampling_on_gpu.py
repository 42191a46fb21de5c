"""Above temperature 0 on a real GPU: draws are the CPU op's on the device's own logits, as are accepted proposals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from exporter.export import ExportRequest, export
from runtime.engine import Engine, Request
from runtime.keys import generate_key, load_private_key
from runtime.ops.registry import call
from runtime.replay import replay
from runtime.trust import TrustPolicy
from tests.tiny_pair import write_pair

pytestmark = pytest.mark.gpu
REQUEST = Request(max_tokens=24, temperature=0.9, top_p=0.95, top_k=40, seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sampling")
    write_pair(made, seed=3, draft_head_dim=32)
    generate_key(made / "keys")
    export(ExportRequest(target=made / "target", draft=made / "draft", out=made / "core", core_name="tiny",
                         capability=90), load_private_key(made / "keys" / "key.pem"))
    return made


def opened(folder: Path, device: str) -> Any:
    return runtime.load(folder / "core", trust=TrustPolicy.load(folder / "keys" / "trust.json"), device=device)


def test_each_drawn_token_is_the_one_that_the_cpu_op_draws(folder: Path) -> None:
    with opened(folder, "cuda") as core:
        engine, vocab = Engine(core), core.manifest.contract.vocab_size
        sequence = engine.add([3, 1, 4, 1, 5], Request(**{**_fields(), "speculation": False}))
        drawn = []
        while sequence.finish_reason is None:
            stored = len(sequence.prompt) + len(sequence.tokens)
            (output,) = engine.step() or [None]
            if output is None or not sequence.tokens:
                continue
            arrays: dict[str, Any] = {
                "logits": np.array([core.get("logits", 0, vocab)], np.float32),
                "positions": np.array([max(stored - 1, 0)], np.int32), "slots": np.zeros(1, np.int32),
                "temperature": np.array([REQUEST.temperature], np.float32),
                "top_p": np.array([REQUEST.top_p], np.float32), "top_k": np.array([REQUEST.top_k], np.int32),
                "seed": np.array([REQUEST.seed], np.uint64), "emitted": np.zeros((1, 1), np.int32),
                "produced": np.zeros(1, np.int32)}
            call("dflash.sample/1", arrays, groups=1, vocab=vocab, live_vocab=vocab, max_slots=1)
            drawn.append(int(arrays["emitted"][0, 0]))

        assert len(drawn) == REQUEST.max_tokens
        assert tuple(drawn) == tuple(sequence.tokens)
        assert len(set(drawn)) > 4


@pytest.mark.parametrize("steps", [1, 4])
def test_acceptance_above_temperature_0_is_the_cpu_ops(folder: Path, steps: int) -> None:
    with opened(folder, "cpu") as cpu, opened(folder, "cuda") as gpu:
        engine = Engine(cpu)
        sequence = engine.add([3, 1, 4, 1, 5], REQUEST)
        for _ in range(steps):
            engine.step()
        engine._launch("draft", [sequence])

        reports = replay(gpu, cpu, "verify.b1")

    assert all(report.within for report in reports), [r for r in reports if not r.within]


def test_a_seed_gives_the_same_text_again_and_another_seed_another(folder: Path) -> None:
    with opened(folder, "cuda") as core:
        engine = Engine(core)
        texts = [engine.generate([3, 1, 4, 1, 5], Request(**{**_fields(), "seed": seed})).tokens
                 for seed in (11, 11, 12)]

    assert texts[0] == texts[1] != texts[2]


def _fields() -> dict[str, Any]:
    return {"max_tokens": REQUEST.max_tokens, "temperature": REQUEST.temperature, "top_p": REQUEST.top_p,
            "top_k": REQUEST.top_k, "seed": REQUEST.seed}
