"""Kimi delta attention: a recurrent state per head that decays by channel, corrected by a delta rule at every row.

The state of a sequence is S [head_dim (keys), head_dim (values)] per head, fp32, in its slot. The recurrence runs row
by row in every graph, so a state, and all that follows from it, does not depend on how the rows were cut into chunks or
blocks. No step that may be undone writes a state: `kda_scan` reads it and records, for each row, its key and its
change; `kda_commit` replays the kept rows with the same operations on the same numbers, hence to the same bits.
"""

from __future__ import annotations

import numpy as np
from dflash_core.errors import FormatError

from runtime.ops.activation import sigmoid
from runtime.ops.registry import (
    ACT,
    F32,
    U32,
    Args,
    Array,
    DType,
    DTypeOf,
    F32Array,
    Scalar,
    Step,
    op,
    reads,
    to_f32,
    updates,
    writes,
)
from runtime.ops.short_conv import live_rows

I32, FP32 = DType.I32, DType.F32
L2_EPS = np.float32(1e-6)

HEADS = (Scalar("heads", U32), Scalar("head_dim", U32))
GROUPS = (Scalar("groups", U32), Scalar("block_rows", U32), *HEADS, Scalar("max_slots", U32))
ROW_HEADS = ("groups*block_rows", "heads*head_dim")
STATE = ("max_slots", "heads", "head_dim", "head_dim")


def softplus(x: F32Array) -> F32Array:
    """log(1 + exp(x)) in fp32, as max(x, 0) + log1p(exp(-|x|)), which never overflows."""
    positive: F32Array = np.maximum(x, np.float32(0))
    return positive + np.log1p(np.exp(-np.abs(x)))


def unit_rows(x: F32Array) -> F32Array:
    """Each row divided by sqrt(its sum of squares + 1e-6): the epsilon lies inside the root."""
    square = np.multiply(x, x)
    length = np.sqrt(np.add.reduce(square, axis=-1, keepdims=True) + L2_EPS)
    result: F32Array = np.divide(x, length, dtype=np.float32)
    return result


@op("dflash.kda_gates/1",
    Scalar("rows", U32), *HEADS, Scalar("lower_bound", F32), Scalar("act", U32), Scalar("a_w", U32),
    Scalar("bias_w", U32),
    reads("decay", ACT, "rows", "heads*head_dim"), reads("beta", ACT, "rows", "heads"),
    reads("a_log", DTypeOf("a_w"), "heads"), reads("dt_bias", DTypeOf("bias_w"), "heads*head_dim"),
    writes("log_decay", FP32, "rows", "heads*head_dim"), writes("strength", FP32, "rows", "heads"))
def kda_gates(a: Args) -> Step:
    """log_decay and strength of every row, both fp32, from their projections `decay` and `beta`.

    With u = decay + dt_bias and A = exp(a_log): log_decay = -A * softplus(u), or, where `lower_bound` is not 0,
    lower_bound * sigmoid(A * u), which is another function and no clamp of the first. strength = sigmoid(beta).

    Rounding: fp32 throughout; nothing is rounded to the activation's type, in which a slow decay would become none.
    Raises:
        FormatError: OP_SCALAR; a lower bound above 0 or not finite.
    """
    head_dim, bound = a.int("head_dim"), np.float32(a.real("lower_bound"))
    if not (np.isfinite(bound) and bound <= 0):
        raise FormatError("OP_SCALAR", "decay with an impossible lower bound", where=a.op_name,
                          expected="0 for none, or a number below 0", got=float(bound))
    decay, beta, log_decay, strength = (a.array(n) for n in ("decay", "beta", "log_decay", "strength"))
    rate = np.repeat(np.exp(to_f32(a.array("a_log"))), head_dim)
    bias = to_f32(a.array("dt_bias"))

    def run() -> None:
        raw = to_f32(decay) + bias
        log_decay[...] = bound * sigmoid(rate * raw) if bound else -rate * softplus(raw)
        strength[...] = sigmoid(to_f32(beta))

    return run


@op("dflash.kda_scan/1", *GROUPS, Scalar("act", U32),
    reads("qkv", ACT, "groups*block_rows", "3*heads*head_dim"), reads("log_decay", FP32, *ROW_HEADS),
    reads("strength", FP32, "groups*block_rows", "heads"), reads("positions", I32, "groups*block_rows"),
    reads("slots", I32, "groups"), reads("state", FP32, *STATE),
    writes("out", FP32, *ROW_HEADS), writes("keys", FP32, *ROW_HEADS), writes("changes", FP32, *ROW_HEADS))
def kda_scan(a: Args) -> Step:
    """Run the recurrence over each group's live rows from its slot's state, which stays as it is.

    Per head and row, with k and q scaled to unit length (`unit_rows`) and q times head_dim ** -0.5:
    S = exp(log_decay) * S by key channel; change = strength * (v - S.T k); S = S + k change.T; out = S.T q.
    A group that starts at position 0 starts from zeros, whatever its slot holds. Dead rows give zeros.

    Args:
        keys, changes: k and change of every row: what `kda_commit` replays.
    Rounding: fp32 throughout, sums over key channels in ascending order, no fused multiply-add.
    Source: the recurrent form of Kimi delta attention in flash-linear-attention.
    """
    groups, block_rows, heads, head_dim = (a.int(n) for n in ("groups", "block_rows", "heads", "head_dim"))
    rows = (groups, block_rows, heads, head_dim)
    qkv = a.array("qkv").reshape(groups, block_rows, 3, heads, head_dim)
    log_decay, out, keys, changes = (a.array(n).reshape(rows) for n in ("log_decay", "out", "keys", "changes"))
    strength = a.array("strength").reshape(groups, block_rows, heads, 1)
    positions, slots, states = a.array("positions").reshape(groups, block_rows), a.array("slots"), a.array("state")
    scale = np.float32(head_dim ** -0.5)
    state = np.empty((heads, head_dim, head_dim), np.float32)
    product = np.empty_like(state)

    def run() -> None:
        for group, slot in enumerate(slots.tolist()):
            count = live_rows(positions[group])
            if count:
                state[...] = states[slot] if positions[group, 0] > 0 else 0
            for row in range(count):
                q, k, v = to_f32(qkv[group, row])
                q, k = unit_rows(q) * scale, unit_rows(k)
                _decay(state, log_decay[group, row])
                change = strength[group, row] * (v - _read(state, k, product))
                _add(state, k, change, product)
                out[group, row] = _read(state, q, product)
                keys[group, row], changes[group, row] = k, change
            for result in (out, keys, changes):
                result[group, count:] = 0

    return run


@op("dflash.kda_commit/1", *GROUPS,
    reads("keys", FP32, *ROW_HEADS), reads("changes", FP32, *ROW_HEADS), reads("log_decay", FP32, *ROW_HEADS),
    reads("positions", I32, "groups*block_rows"), reads("slots", I32, "groups"), updates("state", FP32, *STATE))
def kda_commit(a: Args) -> Step:
    """Move each slot's state on by the group's kept rows: those at positions >= 0, which come first.

    S = exp(log_decay) * S; S = S + k change.T, row by row: the bits that `kda_scan` had after the last kept row. A
    group that starts at position 0 starts from zeros; one that keeps nothing leaves its slot as it is.

    Rounding: fp32, as `kda_scan`.
    """
    groups, block_rows, heads, head_dim = (a.int(n) for n in ("groups", "block_rows", "heads", "head_dim"))
    rows = (groups, block_rows, heads, head_dim)
    keys, changes, log_decay = (a.array(n).reshape(rows) for n in ("keys", "changes", "log_decay"))
    positions, slots, states = a.array("positions").reshape(groups, block_rows), a.array("slots"), a.array("state")
    product = np.empty((heads, head_dim, head_dim), np.float32)

    def run() -> None:
        for group, slot in enumerate(slots.tolist()):
            count = live_rows(positions[group])
            if count and positions[group, 0] == 0:
                states[slot] = 0
            for row in range(count):
                _decay(states[slot], log_decay[group, row])
                _add(states[slot], keys[group, row], changes[group, row], product)

    return run


def _decay(state: Array, log_decay: Array) -> None:
    np.multiply(state, np.exp(log_decay)[:, :, None], out=state)


def _add(state: Array, k: Array, change: Array, product: Array) -> None:
    np.multiply(k[:, :, None], change[:, None, :], out=product)
    np.add(state, product, out=state)


def _read(state: Array, by: Array, product: Array) -> F32Array:
    """S.T by, per head: [heads, head_dim]."""
    np.multiply(state, by[:, :, None], out=product)
    result: F32Array = np.add.reduce(product, axis=1)
    return result


@op("dflash.gated_norm/1",
    Scalar("rows", U32), *HEADS, Scalar("eps", F32), Scalar("act", U32), Scalar("w", U32),
    reads("x", FP32, "rows", "heads*head_dim"), reads("gate", ACT, "rows", "heads*head_dim"),
    reads("weight", DTypeOf("w"), "head_dim"), writes("out", ACT, "rows", "heads*head_dim"))
def gated_norm(a: Args) -> Step:
    """out = r(x / rms(x) * weight * sigmoid(gate)), the norm over each head's channels.

    The gate is a sigmoid, not SiLU. Rounding: fp32 throughout, rounded once.
    """
    heads, head_dim, eps = a.int("heads"), a.int("head_dim"), np.float32(a.real("eps"))
    x, gate, out = (a.array(n).reshape(-1, heads, head_dim) for n in ("x", "gate", "out"))
    weight = to_f32(a.array("weight"))

    def run() -> None:
        mean = np.add.reduce(np.multiply(x, x), axis=-1, keepdims=True) / np.float32(head_dim)
        out[...] = x * (np.float32(1) / np.sqrt(mean + eps)) * weight * sigmoid(to_f32(gate))

    return run
