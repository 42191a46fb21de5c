"""A DFlash2 draft with latent attention that can be fitted, written from its description; imports nothing of ours.

Parameters have the published names, except that a codebook is an embedding and so ends in ".weight". It is called as
the `dflash` package's drafts are, hence whatever fits or saves one of those does the same for this one.

    draft = MlaDraftModel(config)
    hidden = draft(position_ids=positions, target_hidden=features, noise_embedding=block)   # [1, rows, hidden]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Config = Mapping[str, Any]


class MlaDraftModel(nn.Module):
    """Features of the context, the layers of a block over them, and the selector's tables."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps, draft = config["hidden_size"], config["rms_norm_eps"], config["dflash_config"]
        self.fc = nn.Linear(len(draft["target_layer_ids"]) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(_Layer(config, kind) for kind in config["layer_types"])
        self.norm = nn.RMSNorm(hidden, eps)
        self.candidate_selector = _Selector(config["vocab_size"], draft["selector_rank"], hidden)

    def forward(self, position_ids: Tensor, target_hidden: Tensor, noise_embedding: Tensor) -> Tensor:
        """A block's rows, normalized as the head reads them, [1, rows, hidden].

        Args:
            position_ids: of the context and then the block, [1, context + rows].
            target_hidden: the target's taps for the context, [1, context, taps * hidden].
            noise_embedding: the block's, [1, rows, hidden].
        """
        context, h = self.hidden_norm(self.fc(target_hidden)), noise_embedding
        for layer in self.layers:
            h = layer(h, context, position_ids[0])
        return self.norm(h)

    def compute_logits(self, hidden: Tensor, head: nn.Module) -> Tensor:
        logits: Tensor = head(hidden)
        return logits


class _Layer(nn.Module):
    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        hidden, inner, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.attention_conv = _GroupedConv(config)
        self.self_attn = _LatentAttention(config, config["sliding_window"] if kind == "sliding_attention" else None)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp_conv = _GroupedConv(config)
        self.mlp = _GatedMlp(hidden, inner)

    def forward(self, h: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        x = self.input_layernorm(h)
        before, after = self.attention_conv(x)
        h = h + _convolve(self.self_attn(_convolve(x, before), context, positions), after)
        x = self.post_attention_layernorm(h)
        before, after = self.mlp_conv(x)
        return h + _convolve(self.mlp(_convolve(x, before)), after)


class _LatentAttention(nn.Module):
    """Queries of a low rank; keys and values from one latent row and one rotated key part that all heads share."""

    def __init__(self, config: Config, window: int | None) -> None:
        super().__init__()
        hidden, self.heads, self.window = config["hidden_size"], config["num_attention_heads"], window
        self.rank, self.nope, self.rope, self.v_dim = (
            config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        self.causal, self.theta = config["is_causal"], config["rope_parameters"]["rope_theta"]
        q_rank, eps = config["q_lora_rank"], config["rms_norm_eps"]
        self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(q_rank, eps)
        self.q_b_proj = nn.Linear(q_rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_dim, hidden, bias=False)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        own = positions[context.shape[1]:]
        q = self._by_head(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        q = torch.cat([q[..., :self.nope], self._rotate(q[..., self.nope:], own)], -1)
        latent, shared = self.kv_a_proj_with_mqa(torch.cat([context, x], 1)).split([self.rank, self.rope], -1)
        k, v = self._by_head(self.kv_b_proj(self.kv_a_layernorm(latent))).split([self.nope, self.v_dim], -1)
        shared = self._rotate(shared, positions)[:, None].expand(-1, self.heads, -1, -1)
        out = functional.scaled_dot_product_attention(q, torch.cat([k, shared], -1), v, self._seen(own, positions))
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn each pair of a row, whose parts are half a row apart, as one complex number."""
        turns = self.theta ** -torch.arange(0, 1, 2 / self.rope, dtype=torch.float64)
        angles = (positions[:, None] * turns).to(x.dtype)
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def _seen(self, own: Tensor, positions: Tensor) -> Tensor:
        back = own[:, None] - positions
        seen = torch.ones_like(back, dtype=torch.bool)
        if self.causal:
            seen &= back >= 0
        if self.window is not None:
            seen &= back.abs() < self.window
        return seen


class _GroupedConv(nn.Module):
    """Coefficients per row: a kernel of its own per channel, and what a group of channels adds to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, draft = config["hidden_size"], config["dflash_config"]
        self.taps, self.group_size = draft["conv_kernel_size"], draft["conv_group_size"]
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * self.taps * hidden // self.group_size, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows [1, rows, hidden]: the kernels before and after the sublayer, each [1, rows, taps, hidden]."""
        added = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group_size, -1)
        before, after = (self.base_kernel + added).unbind(2)
        return before, after


def _convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Row i: the sum over t of kernel[i, t] * row i - t; there is nothing before the block's first row."""
    shifted = [functional.pad(x, (0, 0, t, -t)) for t in range(kernel.shape[2])]
    return (kernel * torch.stack(shifted, 2)).sum(2)


class _GatedMlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Selector(nn.Module):
    def __init__(self, vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocab, rank)
        self.successor_codebook = nn.Embedding(vocab, rank)
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
