"""A DFlash2 draft with latent attention: its block is that of a float64 port, and it changes no token of its target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from dflash_core.formats import Format

from exporter.checkpoint import open_checkpoint
from exporter.draft_config import read_draft_config
from exporter.kimi_config import read_kimi_config
from exporter.plan import PrecisionSettings, plan_precision
from exporter.recipe import load_recipe
from runtime import LoadedCore, Request
from runtime.ops import DType
from tests.integration.cores import Signer, make_core
from tests.integration.drive import Lane
from tests.integration.watch import random_tokens, watch
from tests.oracles.kimi_pair import K3, TAPS, write_target
from tests.oracles.mla_draft_numpy import MlaDraft, write_draft
from tests.oracles.zlab_pair import HIDDEN, MASK_TOKEN

BLOCK = 4
SHAPES = [pytest.param(None, False, id="full"), pytest.param(12, False, id="window"),
          pytest.param(12, True, id="causal")]


@pytest.mark.parametrize(("window", "causal"), SHAPES)
@pytest.mark.parametrize("context", [1, 11, 50])
def test_block_is_that_of_a_float64_port(signer: Signer, tmp_path: Path, window: int | None, causal: bool,
                                         context: int) -> None:
    target = write_target(tmp_path / "target", K3)
    config, weights = write_draft(tmp_path / "draft", TAPS, window=window, causal=causal, block_size=BLOCK)
    anchor = 7
    with make_core(signer, tmp_path / "core", tmp_path / "target", tmp_path / "draft") as core:
        lane = Lane(core, limit=context + 20)
        lane.prefill(random_tokens(context, seed=1))
        features = _buffer(core, "features", len(TAPS) * HIDDEN)[:context].astype(np.float64)
        lane.propose(anchor)
        hidden = _buffer(core, "draft_hidden", HIDDEN)[:BLOCK]

    draft = MlaDraft(config, weights)
    embeddings = target["embed_tokens.weight"].double().numpy()[[anchor, *[MASK_TOKEN] * (BLOCK - 1)]]
    expected = draft.block(draft.context(features), embeddings)
    assert np.abs(hidden - expected).max() <= 1e-5 * np.abs(expected).max()


def _buffer(core: LoadedCore, name: str, cols: int) -> np.ndarray:
    buffer = next(b for b in core.manifest.buffers if b.name == name)
    return core.memory[buffer.buffer_id].view(np.float32).reshape(-1, cols).copy()


@pytest.fixture(scope="module", params=[DType.F32, DType.BF16], ids=["f32", "bf16"])
def core(request: pytest.FixtureRequest, signer: Signer, tmp_path_factory: pytest.TempPathFactory,
         ) -> Iterator[LoadedCore]:
    folder, dtype = tmp_path_factory.mktemp("mla"), torch.bfloat16 if request.param is DType.BF16 else torch.float32
    write_target(folder / "target", K3, dtype=dtype)
    write_draft(folder / "draft", TAPS, window=12, block_size=BLOCK, dtype=dtype)
    with make_core(signer, folder / "core", folder / "target", folder / "draft", act=request.param, batches=(1, 2),
                   settings=PrecisionSettings(draft_body="mxfp8", draft_head="nvfp4"), max_context=256) as loaded:
        yield loaded


@pytest.mark.parametrize("length", [1, 70])
def test_text_and_logits_are_the_same_with_and_without_speculation(core: LoadedCore, length: int) -> None:
    prompt = random_tokens(length, seed=length)
    plain = watch(core, prompt, Request(max_tokens=24, speculation=False))
    fast = watch(core, prompt, Request(max_tokens=24), before=[(random_tokens(5, seed=3), Request(max_tokens=9))])
    assert fast.completion.tokens == plain.completion.tokens
    assert fast.logits == plain.logits


def test_body_conversion_leaves_what_is_absorbed(tmp_path: Path) -> None:
    write_target(tmp_path / "target", K3)
    write_draft(tmp_path / "draft", TAPS)
    target, draft = open_checkpoint(tmp_path / "target"), open_checkpoint(tmp_path / "draft")
    config = read_draft_config(draft, read_kimi_config(target))

    plan = plan_precision(target, load_recipe("kimi-k3"), draft, config, PrecisionSettings(draft_body="mxfp8"))

    attention = {t.name.split("self_attn.")[1]: t.format for t in plan.draft if "layers.1.self_attn" in t.name}
    assert {name for name, fmt in attention.items() if fmt is Format.MXFP8} == {
        "q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight"}
    assert next(t.reason for t in plan.draft if t.name.endswith("kv_b_proj.weight")) == "absorbed key/value"
