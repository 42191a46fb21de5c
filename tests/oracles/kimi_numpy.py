"""The text side of Kimi-Linear and Kimi K3 in float64, written from their description; imports nothing of ours.

Every quantity is computed in the plainest form: keys and values of a head are formed, states are run row by row,
experts are looped over. `chunk_scan` is the blocked form of the recurrence, for comparing the two.

    model = Kimi(config, weights)             # weights by bare name, "layers.0.self_attn.q_proj.weight"
    run = model.forward([5, 8, 13])
    run.logits                                # [3, vocab]
    run.reads[1]                              # what layer 1 reads, before its norm; the last entry: what the head reads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))


def rms(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def unit(x: F64) -> F64:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def causal_conv(x: F64, weight: F64, before: F64 | None = None) -> F64:
    """Depthwise: x [T, C], weight [C, W], before [W - 1, C] the rows that precede x (None: zeros). SiLU follows."""
    taps = weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])) if before is None else before, x])
    y = sum(weight[:, j] * padded[j:j + len(x)] for j in range(taps))
    return y * sigmoid(y)


def log_decay(raw: F64, a_log: F64, dt_bias: F64, lower_bound: float | None) -> F64:
    """raw [T, H, D]; a_log [H]; dt_bias [H * D]."""
    u = raw + dt_bias.reshape(raw.shape[1:])
    rate = np.exp(a_log)[:, None]
    if lower_bound is None:
        return -rate * np.log1p(np.exp(u))
    return lower_bound * sigmoid(rate * u)


def scan(q: F64, k: F64, v: F64, g: F64, beta: F64, state: F64) -> tuple[F64, list[F64]]:
    """q, k, v, g [T, H, D]; beta [T, H]; state [H, D, D] -> outputs, and the state after every row."""
    outputs, states = [], []
    for t in range(len(q)):
        state = np.exp(g[t])[:, :, None] * state
        change = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state = state + np.einsum("hk,hv->hkv", k[t], change)
        outputs.append(np.einsum("hk,hkv->hv", q[t], state))
        states.append(state)
    return np.array(outputs), states


def chunk_scan(q: F64, k: F64, v: F64, g: F64, beta: F64, state: F64, chunk: int) -> tuple[F64, F64]:
    """The same by chunks: within one, a triangular system in place of the recurrence."""
    outputs = np.empty_like(v)
    for first in range(0, len(q), chunk):
        rows = slice(first, min(first + chunk, len(q)))
        for h in range(q.shape[1]):
            qh, kh, vh, bh, total = q[rows, h], k[rows, h], v[rows, h], beta[rows, h], g[rows, h].cumsum(0)
            between = np.exp(np.minimum(total[:, None] - total[None], 0))
            by_keys = np.tril(np.einsum("tk,sk,tsk->ts", kh, kh, between), -1)
            by_queries = np.tril(np.einsum("tk,sk,tsk->ts", qh, kh, between))
            inverse = np.linalg.inv(np.eye(len(qh)) + bh[:, None] * by_keys)
            change = inverse @ (bh[:, None] * vh) - inverse @ (bh[:, None] * kh * np.exp(total)) @ state[h]
            outputs[rows, h] = (qh * np.exp(total)) @ state[h] + by_queries @ change
            state = state.copy()
            state[h] = np.exp(total[-1])[:, None] * state[h] + (kh * np.exp(total[-1] - total)).T @ change
    return outputs, state


def route(x: F64, gate: F64, bias: F64, text: Mapping[str, Any]) -> list[dict[int, float]]:
    """The chosen experts of each row and their weights."""
    scores = sigmoid(x @ gate.T)
    groups, kept = text.get("num_expert_group") or 1, text.get("topk_group") or 1
    chosen = []
    for row in scores:
        choice = row + bias
        if groups > kept:
            size = len(row) // groups
            value = [sum(sorted(choice[i * size:(i + 1) * size])[-2:]) for i in range(groups)]
            best = sorted(range(groups), key=lambda i: -value[i])[:kept]
            choice = np.array([c if e // size in best else -np.inf for e, c in enumerate(choice)])
        ids = sorted(range(len(row)), key=lambda e: (-choice[e], e))[:text["num_experts_per_token"]]
        share = sum(row[e] for e in ids) + 1e-20 if text.get("moe_renormalize", True) else 1.0
        chosen.append({e: row[e] / share * text.get("routed_scaling_factor", 1.0) for e in ids})
    return chosen


def mix(parts: Sequence[F64], norm: F64, score: F64, eps: float) -> F64:
    """Softmax over the parts, by the score of each one's normalized row; the rows themselves are mixed."""
    logits = np.array([(rms(part, norm, eps) * score.reshape(-1)).sum(-1) for part in parts])
    shares = np.exp(logits - logits.max(0))
    shares /= shares.sum(0)
    return sum(share[:, None] * part for share, part in zip(shares, parts, strict=True))


@dataclass(frozen=True)
class Run:
    """Logits [T, vocab]; `reads[i]` [T, hidden]: what layer i reads, and after the layers what the final norm reads;
    `states[i]`: of a KDA layer, the state after every row."""

    logits: F64
    reads: list[F64]
    states: dict[int, list[F64]]


class Kimi:
    """A model from its config (nested or flat) and its weights by bare name."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, npt.ArrayLike]) -> None:
        self.text = config.get("text_config", config)
        self.linear = self.text["linear_attn_config"]
        self.weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.eps = self.text.get("rms_norm_eps", 1e-6)

    def w(self, name: str) -> F64:
        return self.weights[name]

    def has(self, name: str) -> bool:
        return name in self.weights

    def act(self, gate: F64, up: F64) -> F64:
        if self.text.get("hidden_act", "silu") == "silu":
            return gate * sigmoid(gate) * up
        beta, bound = self.text.get("activation_situ_beta") or 1.0, self.text.get("activation_situ_linear_beta")
        return beta * np.tanh(gate / beta) * sigmoid(gate) * (bound * np.tanh(up / bound) if bound else up)

    def kda(self, x: F64, at: str) -> tuple[F64, list[F64]]:
        heads, dim = self.linear["num_heads"], self.linear["head_dim"]
        q, k, v = (causal_conv(x @ self.w(f"{at}.{n}_proj.weight").T,
                               self.w(f"{at}.{n}_conv1d.weight").reshape(heads * dim, -1)).reshape(-1, heads, dim)
                   for n in "qkv")
        raw = (x @ self.w(f"{at}.f_a_proj.weight").T @ self.w(f"{at}.f_b_proj.weight").T).reshape(-1, heads, dim)
        g = log_decay(raw, self.w(f"{at}.A_log").reshape(-1)[:heads], self.w(f"{at}.dt_bias"),
                      self.linear.get("gate_lower_bound"))
        beta = sigmoid(x @ self.w(f"{at}.b_proj.weight").T)
        o, states = scan(unit(q) * dim ** -0.5, unit(k), v, g, beta, np.zeros((heads, dim, dim)))
        if self.has(f"{at}.g_proj.weight"):
            z = x @ self.w(f"{at}.g_proj.weight").T
        else:
            z = x @ self.w(f"{at}.g_a_proj.weight").T @ self.w(f"{at}.g_b_proj.weight").T
        o = rms(o, self.w(f"{at}.o_norm.weight"), self.eps) * sigmoid(z.reshape(-1, heads, dim))
        return o.reshape(-1, heads * dim) @ self.w(f"{at}.o_proj.weight").T, states

    def mla(self, x: F64, at: str) -> F64:
        heads, nope, rope, v_dim, rank = (self.text[k] for k in (
            "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        if self.has(f"{at}.q_proj.weight"):
            q = x @ self.w(f"{at}.q_proj.weight").T
        else:
            q = rms(x @ self.w(f"{at}.q_a_proj.weight").T, self.w(f"{at}.q_a_layernorm.weight"), 1e-6)
            q = q @ self.w(f"{at}.q_b_proj.weight").T
        kv_a = x @ self.w(f"{at}.kv_a_proj_with_mqa.weight").T
        kv = rms(kv_a[:, :rank], self.w(f"{at}.kv_a_layernorm.weight"), 1e-6) @ self.w(f"{at}.kv_b_proj.weight").T
        q, kv = q.reshape(-1, heads, nope + rope), kv.reshape(-1, heads, nope + v_dim)
        out = []
        for h in range(heads):
            k = np.concatenate([kv[:, h, :nope], kv_a[:, rank:]], -1)
            scores = q[:, h] @ k.T * (nope + rope) ** -0.5 + np.triu(np.full((len(x), len(x)), -np.inf), 1)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(p / p.sum(-1, keepdims=True) @ kv[:, h, nope:])
        o = np.concatenate(out, -1)
        if self.text.get("mla_use_output_gate"):
            o = o * sigmoid(x @ self.w(f"{at}.g_proj.weight").T)
        return o @ self.w(f"{at}.o_proj.weight").T

    def mlp(self, x: F64, at: str) -> F64:
        gate, up = (x @ self.w(f"{at}.{n}_proj.weight").T for n in ("gate", "up"))
        return self.act(gate, up) @ self.w(f"{at}.down_proj.weight").T

    def moe(self, x: F64, at: str) -> F64:
        z = x @ self.w(f"{at}.routed_expert_down_proj.weight").T if self.has(
            f"{at}.routed_expert_down_proj.weight") else x
        chosen = route(x, self.w(f"{at}.gate.weight"), self.w(f"{at}.gate.e_score_correction_bias"), self.text)
        routed = np.zeros_like(z)
        for row, experts in enumerate(chosen):
            for e, weight in experts.items():
                w1, w2, w3 = (self.w(f"{at}.experts.{e}.w{i}.weight") for i in (1, 2, 3))
                routed[row] += weight * (w2 @ self.act(w1 @ z[row], w3 @ z[row]))
        if self.text.get("latent_moe_use_norm"):
            routed = rms(routed, self.w(f"{at}.routed_expert_norm.weight"), self.eps)
        if self.has(f"{at}.routed_expert_up_proj.weight"):
            routed = routed @ self.w(f"{at}.routed_expert_up_proj.weight").T
        return routed + self.mlp(x, f"{at}.shared_experts")

    def mixer(self, x: F64, layer: int, states: dict[int, list[F64]]) -> F64:
        if layer + 1 not in self.linear["kda_layers"]:
            return self.mla(x, f"layers.{layer}.self_attn")
        y, states[layer] = self.kda(x, f"layers.{layer}.self_attn")
        return y

    def ffn(self, x: F64, layer: int) -> F64:
        first, every = self.text.get("first_k_dense_replace", 0), self.text.get("moe_layer_freq", 1)
        if layer >= first and layer % every == 0:
            return self.moe(x, f"layers.{layer}.block_sparse_moe")
        plain = f"layers.{layer}.mlp"
        return self.mlp(x, plain if self.has(f"{plain}.gate_proj.weight") else f"layers.{layer}.block_sparse_moe")

    def forward(self, ids: Sequence[int]) -> Run:
        block = self.text.get("attn_res_block_size")
        running: F64 | None = self.w("embed_tokens.weight")[list(ids)]
        before: list[F64] = []
        reads, states = [], {}
        for i in range(self.text["num_hidden_layers"]):
            at = f"layers.{i}"
            assert running is not None
            h = self._mix(before, running, f"{at}.self_attention_res") if before else running
            reads.append(h)
            if block and i % block == 0:
                before.append(running)
                running = None
            y = self.mixer(rms(h, self.w(f"{at}.input_layernorm.weight"), self.eps), i, states)
            running = y if running is None else running + y
            h = self._mix(before, running, f"{at}.mlp_res") if before else running
            running = running + self.ffn(rms(h, self.w(f"{at}.post_attention_layernorm.weight"), self.eps), i)
        h = self._mix(before, running, "output_attn_res") if before else running
        reads.append(h)
        return Run(rms(h, self.w("norm.weight"), self.eps) @ self.w("lm_head.weight").T, reads, states)

    def _mix(self, before: Sequence[F64], running: F64, name: str) -> F64:
        return mix([*before, running], self.w(f"{name}_norm.weight"), self.w(f"{name}_proj.weight"), self.eps)
