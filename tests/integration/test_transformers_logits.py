"""Logits of every position equal transformers' in float32, for the shapes, ropes and files a target may have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime import Engine, LoadedCore, Request
from tests.integration.cores import Signer, make_core
from tests.integration.drive import Lane, Logits
from tests.oracles.hf_checkpoint import CheckpointSpec, Family, every_logit, make_checkpoint

LLAMA, QWEN3 = Family.LLAMA, Family.QWEN3
THETA = 10000.0
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 128}

CHECKPOINTS = [
    pytest.param(CheckpointSpec(LLAMA), id="llama-gqa"),
    pytest.param(CheckpointSpec(LLAMA, tied=True, sharded=True), id="llama-tied-sharded"),
    pytest.param(CheckpointSpec(LLAMA, kv_heads=4, layers=3, sharded=True), id="llama-mha-sharded"),
    pytest.param(CheckpointSpec(LLAMA, hidden=96, heads=6, kv_heads=1, vocab=131), id="llama-mqa-odd-vocab"),
    pytest.param(CheckpointSpec(LLAMA, heads=2, kv_heads=2, head_dim=64), id="llama-wide-heads"),
    pytest.param(CheckpointSpec(LLAMA, rope=LINEAR), id="llama-linear"),
    pytest.param(CheckpointSpec(LLAMA, rope=LLAMA3), id="llama-llama3"),
    pytest.param(CheckpointSpec(LLAMA, rope=YARN), id="llama-yarn"),
    pytest.param(CheckpointSpec(QWEN3), id="qwen3-gqa"),
    pytest.param(CheckpointSpec(QWEN3, head_dim=32, tied=True), id="qwen3-head-dim-tied"),
    pytest.param(CheckpointSpec(QWEN3, hidden=96, heads=3, kv_heads=1, head_dim=8, sharded=True), id="qwen3-narrow"),
    pytest.param(CheckpointSpec(QWEN3, kv_heads=4, rope=YARN, sharded=True), id="qwen3-yarn-mha-sharded"),
]
TOKENS = 70             # more than a prefill chunk and a page, of 64 each
RELATIVE_ERROR = 1e-4   # of the row's largest logit


@dataclass(frozen=True, slots=True)
class Exported:
    """A loaded core and the logits that transformers computes for `tokens`, [TOKENS, vocab]."""

    core: LoadedCore
    tokens: list[int]
    expected: npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def exported(request: pytest.FixtureRequest, signer: Signer, tmp_path_factory: pytest.TempPathFactory,
             ) -> Iterator[Exported]:
    folder = tmp_path_factory.mktemp("checkpoint")
    spec: CheckpointSpec = request.param
    model = make_checkpoint(folder / "target", spec)
    assert len(list((folder / "target").glob("*.safetensors"))) > 1 or not spec.sharded
    tokens = torch.randint(0, spec.vocab, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    with make_core(signer, folder / "core", folder / "target") as core:
        yield Exported(core, tokens, every_logit(model, tokens))


def test_prefill_of_every_prefix_ends_in_the_logits_of_transformers(exported: Exported) -> None:
    lane = Lane(exported.core, limit=TOKENS + 1)
    rows = []
    for length in range(1, TOKENS + 1):
        lane.reset()
        rows.append(lane.prefill(exported.tokens[:length]))
    assert _error(np.array(rows), exported.expected) <= RELATIVE_ERROR


@pytest.mark.parametrize("prompt", [1, 40, 64])
def test_decode_after_a_prompt_gives_the_logits_of_transformers(exported: Exported, prompt: int) -> None:
    lane = Lane(exported.core, limit=TOKENS + 2)
    rows = [lane.prefill(exported.tokens[:prompt])]
    rows += [lane.decode(token) for token in exported.tokens[prompt:]]
    assert _error(np.array(rows), exported.expected[prompt - 1:]) <= RELATIVE_ERROR


@pytest.fixture(scope="module")
def smollm2(demo_target: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(repo_root: Path) -> list[list[int]]:
    """The first three prompts of the reference trace, as ids."""
    reference = json.loads((repo_root / "examples" / "smollm2-135m-dflash2" / "reference.json").read_text())
    return [row["prompt_ids"] for row in reference["rows"][:3]]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_smollm2_continues_a_prompt_as_in_transformers(demo_f32: LoadedCore, smollm2: PreTrainedModel,
                                                       prompts: list[list[int]], index: int) -> None:
    prompt = prompts[index]
    logits = Lane(demo_f32, limit=len(prompt) + 8).prefill(prompt)
    completion = Engine(demo_f32).generate(prompt, Request(max_tokens=8, speculation=False))
    assert _error(logits[None], every_logit(smollm2, prompt)[-1:]) <= RELATIVE_ERROR
    assert list(completion.tokens) == _greedy(smollm2, prompt, 8)


def _greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(every_logit(model, ids)[-1].argmax()))
    return ids[len(prompt):]


def _error(got: Logits, expected: Logits) -> float:
    """The largest error of a logit, relative to the largest logit of its row."""
    assert got.shape == expected.shape
    return float((np.abs(got - expected).max(-1) / np.abs(expected).max(-1)).max())
