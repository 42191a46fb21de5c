"""A DFlash2 draft with latent attention in float64, written from its description; imports nothing of ours.

    config, weights = write_draft(tmp_path / "draft", window=12)
    draft = MlaDraft(config, weights)
    hidden = draft.block(draft.context(features), embeddings)      # [block, hidden], as its head reads them
    blocks = speculate(draft, target, text, prompt_tokens)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from tests.oracles.kimi_numpy import Kimi, rms, sigmoid
from tests.oracles.zlab_pair import HIDDEN, MASK_TOKEN, VOCAB, Block, PairSpec, draft_json

F64 = npt.NDArray[np.float64]
Q_RANK, RANK, NOPE, ROPE, V_DIM, HEADS, INNER, LAYERS = 32, 32, 16, 8, 16, 4, 96, 2


def write_draft(folder: Path, taps: tuple[int, ...], *, window: int | None = None, causal: bool = False,
                block_size: int = 4, target_layers: int = 6, dtype: torch.dtype = torch.float32,
                ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Write a random draft in the published form; returns its config and weights by canonical name."""
    config = mla_json(PairSpec(block_size=block_size, window=window, causal=causal), target_layers=target_layers,
                      taps=taps)
    generator = torch.Generator().manual_seed(1)
    weights = {name: _values(name, shape, generator).to(dtype) for name, shape in _shapes(len(taps)).items()}
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return config, weights


def mla_json(spec: PairSpec, *, target_layers: int, taps: Sequence[int]) -> dict[str, Any]:
    """The draft's config.json."""
    assert not spec.scalars, "no published draft of this kind has them"
    config = draft_json(spec, target_layers=target_layers, taps=taps)
    for name in ("head_dim", "num_key_value_heads"):
        del config[name]
    config["dflash_config"] |= {"attention_mode": "mla"}
    return config | {"q_lora_rank": Q_RANK, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
                     "v_head_dim": V_DIM}


def _shapes(taps: int) -> dict[str, tuple[int, ...]]:
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_a_proj.weight": (Q_RANK, HIDDEN), "self_attn.q_a_layernorm.weight": (Q_RANK,),
        "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        "self_attn.kv_a_proj_with_mqa.weight": (RANK + ROPE, HIDDEN), "self_attn.kv_a_layernorm.weight": (RANK,),
        "self_attn.kv_b_proj.weight": (HEADS * (NOPE + V_DIM), RANK),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * V_DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER)}
    for conv in ("attention_conv", "mlp_conv"):
        layer |= {f"{conv}.base_kernel": (2, 2, HIDDEN),
                  f"{conv}.kernel_projection.weight": (2 * 2 * HIDDEN // 16, HIDDEN)}
    return {"fc.weight": (HIDDEN, taps * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,),
            **{f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()},
            "candidate_selector.predecessor_codebook": (VOCAB, 8), "candidate_selector.successor_codebook": (VOCAB, 8),
            "candidate_selector.hidden_projection.weight": (8, HIDDEN)}


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 1 + 0.2 * noise
    return noise * (0.4 if "base_kernel" in name else 1.2 * shape[-1] ** -0.5)


class MlaDraft:
    """Context rows of every layer, a block over them, and what the selector proposes for it."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = {name: value.double().numpy() for name, value in weights.items()}
        self.eps = config["rms_norm_eps"]

    def context(self, features: F64) -> F64:
        """The feature that all layers share, [T, hidden], from taps [T, taps * hidden]."""
        return rms(features @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"], self.eps)

    def block(self, shared: F64, embeddings: F64) -> F64:
        """Rows of a block that follows `shared`'s positions, normalized, [block, hidden]."""
        h = embeddings
        for i in range(LAYERS):
            at = f"layers.{i}"
            x = rms(h, self.weights[f"{at}.input_layernorm.weight"], self.eps)
            delta = self._delta(x, f"{at}.attention_conv")
            y = self._attention(self._conv(x, delta, f"{at}.attention_conv", 0), shared, f"{at}.self_attn")
            h = h + self._conv(y, delta, f"{at}.attention_conv", 1)
            x = rms(h, self.weights[f"{at}.post_attention_layernorm.weight"], self.eps)
            delta = self._delta(x, f"{at}.mlp_conv")
            z = self._conv(x, delta, f"{at}.mlp_conv", 0)
            gate, up, down = (self.weights[f"{at}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            g = z @ gate.T
            h = h + self._conv((g * sigmoid(g) * (z @ up.T)) @ down.T, delta, f"{at}.mlp_conv", 1)
        return rms(h, self.weights["norm.weight"], self.eps)

    def propose(self, hidden: F64, anchor: int, head: F64) -> tuple[tuple[int, ...], tuple[frozenset[int], ...]]:
        """The tokens chosen for a block's rows after the anchor's, and the ids each was chosen among.

        Args:
            hidden: the block's rows, [block, hidden].
            head: the target's, [vocab, hidden].
        """
        predecessor, successor, projection = (self.weights[f"candidate_selector.{name}"] for name in (
            "predecessor_codebook", "successor_codebook", "hidden_projection.weight"))
        path, candidates = [anchor], []
        for row in hidden[1:]:
            logits = head @ row
            ids = np.argsort(-logits, kind="stable")[:self.config["dflash_config"]["selector_top_k"]]
            scores = logits[ids] + successor[ids] @ (predecessor[path[-1]] * (projection @ row))
            path.append(int(ids[scores.argmax()]))
            candidates.append(frozenset(ids.tolist()))
        return tuple(path[1:]), tuple(candidates)

    def _delta(self, x: F64, name: str) -> F64:
        """Coefficients [rows, side, tap, channel]: a group of 16 channels shares one."""
        return (x @ self.weights[f"{name}.kernel_projection.weight"].T).reshape(len(x), 2, 2, -1).repeat(16, axis=-1)

    def _conv(self, x: F64, delta: F64, name: str, side: int) -> F64:
        kernel = self.weights[f"{name}.base_kernel"][side] + delta[:, side]
        before = np.concatenate([np.zeros((1, x.shape[1])), x[:-1]])
        return kernel[:, 0] * x + kernel[:, 1] * before

    def _attention(self, x: F64, shared: F64, at: str) -> F64:
        w = {n.removeprefix(f"{at}.").removesuffix(".weight"): v for n, v in self.weights.items() if n.startswith(at)}
        start, rows = len(shared), len(x)
        positions = np.arange(start + rows)
        q = rms(x @ w["q_a_proj"].T, w["q_a_layernorm"], self.eps) @ w["q_b_proj"].T
        q = q.reshape(rows, HEADS, NOPE + ROPE)
        kv_a = np.concatenate([shared, x]) @ w["kv_a_proj_with_mqa"].T
        kv = (rms(kv_a[:, :RANK], w["kv_a_layernorm"], self.eps) @ w["kv_b_proj"].T).reshape(-1, HEADS, NOPE + V_DIM)
        k_rope = self._rotate(kv_a[:, RANK:], positions)
        distance = positions[start:, None] - positions[None]
        seen = np.ones(distance.shape, bool)
        if self.config["is_causal"]:
            seen &= distance >= 0
        if self.config["sliding_window"] is not None:
            seen &= np.abs(distance) < self.config["sliding_window"]
        out = []
        for h in range(HEADS):
            k = np.concatenate([kv[:, h, :NOPE], k_rope], -1)
            query = np.concatenate([q[:, h, :NOPE], self._rotate(q[:, h, NOPE:], positions[start:])], -1)
            scores = np.where(seen, query @ k.T * (NOPE + ROPE) ** -0.5, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(p / p.sum(-1, keepdims=True) @ kv[:, h, NOPE:])
        return np.concatenate(out, -1) @ w["o_proj"].T

    def _rotate(self, x: F64, positions: npt.NDArray[np.int64]) -> F64:
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = positions[:, None] * theta ** (-np.arange(0, ROPE, 2) / ROPE)
        first, second = x[:, :ROPE // 2], x[:, ROPE // 2:]
        return np.concatenate([first * np.cos(angle) - second * np.sin(angle),
                               second * np.cos(angle) + first * np.sin(angle)], -1)


def speculate(draft: MlaDraft, target: Kimi, text: Sequence[int], prompt_tokens: int) -> tuple[Block, ...]:
    """The blocks that lead from a prompt to `text`, which continues it as the target does.

    A tap is what the layer after it reads, before its norm.
    """
    nested, embedding, head = draft.config["dflash_config"], target.w("embed_tokens.weight"), target.w("lm_head.weight")
    reads = target.forward(text).reads
    shared = draft.context(np.concatenate([reads[tap + 1] for tap in nested["target_layer_ids"]], -1))
    blocks, start = [], prompt_tokens
    while start + 1 < len(text):
        wanted = text[start + 1:start + nested["block_size"]]
        hidden = draft.block(shared[:start], embedding[[text[start], *[MASK_TOKEN] * len(wanted)]])
        path, candidates = draft.propose(hidden, text[start], head)
        right = [chosen == token for chosen, token in zip(path, wanted, strict=True)]
        produced = min([*right, False].index(False) + 1, len(text) - start - 1)
        blocks.append(Block(text[start], path, candidates, produced))
        start += produced
    return tuple(blocks)
