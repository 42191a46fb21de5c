"""A DFlash2 draft with latent attention: its block is that of a float64 port, and it changes no token of its target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash.model import DFlash2DraftModel, _attention_mask
from dflash_core.formats import Format
from transformers import DeepseekV3Config, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

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
from tests.oracles.mla_draft_numpy import MlaDraft, mla_json, write_draft
from tests.oracles.mla_draft_torch import MlaDraftModel
from tests.oracles.zlab_pair import HIDDEN, MASK_TOKEN, PairSpec, draft_json, init_draft

BLOCK = 4
SHAPES = [pytest.param(None, False, id="full"), pytest.param(12, False, id="window"),
          pytest.param(12, True, id="causal"), pytest.param(3, False, id="narrower-than-a-block")]


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


@pytest.mark.parametrize(("window", "causal"), SHAPES)
@pytest.mark.parametrize("context", [1, 11, 50])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-13)], ids=["f32", "f64"])
def test_draft_that_is_fitted_is_the_port(tmp_path: Path, window: int | None, causal: bool, context: int,
                                          dtype: torch.dtype, bound: float) -> None:
    config, weights = write_draft(tmp_path / "draft", TAPS, window=window, causal=causal, block_size=BLOCK)
    model = MlaDraftModel(config)
    model.load_state_dict({f"{n}.weight" if n.endswith("codebook") else n: v for n, v in weights.items()})
    features, embeddings = _random_inputs(context)

    port = MlaDraft(config, weights)
    expected = port.block(port.context(features.numpy()), embeddings.numpy())
    got = _forward(model.to(dtype), features.to(dtype), embeddings.to(dtype))
    assert np.abs(got - expected).max() <= bound * np.abs(expected).max()


class DeepseekAttention(DeepseekV3Attention):
    """DeepSeek's latent attention over a context and a block, as one sequence of which the block's rows are kept."""

    def __init__(self, config: DeepseekV3Config, spec: PairSpec) -> None:
        super().__init__(config, 0)
        self.rotary, self.spec = DeepseekV3RotaryEmbedding(config), spec

    def forward(self, hidden_states: torch.Tensor, target_hidden: torch.Tensor, **_: object) -> tuple[torch.Tensor]:
        rows = torch.cat([target_hidden, hidden_states], 1)
        seen = _attention_mask(rows, rows, is_causal=self.spec.causal, sliding_window=self.spec.window)
        angles = self.rotary(rows, torch.arange(rows.shape[1])[None])
        return (super().forward(rows, angles, seen)[0][:, target_hidden.shape[1]:],)


@pytest.mark.parametrize(("window", "causal"), SHAPES)
@pytest.mark.parametrize("context", [1, 11, 50])
def test_draft_that_is_fitted_is_zlabs_with_deepseeks_attention(window: int | None, causal: bool,
                                                                context: int) -> None:
    spec = PairSpec(window=window, causal=causal, block_size=BLOCK)
    config = mla_json(spec, target_layers=6, taps=TAPS)
    model = MlaDraftModel(config)
    init_draft(model)
    reference = DFlash2DraftModel(Qwen3Config(**draft_json(spec, target_layers=6, taps=TAPS)))
    for layer in reference.layers:
        layer.self_attn = DeepseekAttention(_deepseek(config), spec)
    reference.load_state_dict(model.state_dict())
    features, embeddings = (x.float() for x in _random_inputs(context))

    expected = _forward(reference, features, embeddings)
    assert np.abs(_forward(model, features, embeddings) - expected).max() <= 1e-5 * np.abs(expected).max()


def _deepseek(draft: dict[str, Any]) -> DeepseekV3Config:
    same = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
            "qk_rope_head_dim", "v_head_dim", "rope_parameters", "max_position_embeddings")
    return DeepseekV3Config(num_key_value_heads=draft["num_attention_heads"], rope_interleave=False,
                            attn_implementation="sdpa", **{name: draft[name] for name in same})


def _random_inputs(context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [context, taps * hidden] and embeddings [block, hidden]."""
    generator = torch.Generator().manual_seed(context)
    return (torch.randn(context, len(TAPS) * HIDDEN, generator=generator, dtype=torch.float64),
            torch.randn(BLOCK, HIDDEN, generator=generator, dtype=torch.float64))


@torch.no_grad()
def _forward(draft: torch.nn.Module, features: torch.Tensor, embeddings: torch.Tensor) -> np.ndarray:
    positions = torch.arange(len(features) + BLOCK)[None]
    hidden = draft(position_ids=positions, target_hidden=features[None], noise_embedding=embeddings[None])
    return hidden[0].double().numpy()


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
