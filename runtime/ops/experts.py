"""A mixture of experts: which experts a row goes to, and what they make of it.

Expert weights are stored one expert after the other: `gate_up` [experts * 2 * inner, width], an expert's gate rows
before its up rows, and `down` [experts * width, inner]. Only the experts that some row chose are decoded, each time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from dflash_core.errors import FormatError

from runtime.ops.activation import gated, sigmoid
from runtime.ops.decode import E2M1_PAIRS, E4M3_VALUES, E8M0_VALUES, decode_plain
from runtime.ops.linear import RowProduct
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
    round_to,
    to_f32,
    writes,
)

Decode = Callable[[int], F32Array]
Product = Callable[[int, Array], F32Array]
I32, FP32 = DType.I32, DType.F32
TILE_ROWS = 8

SHAPE = (Scalar("rows", U32), Scalar("width", U32), Scalar("inner", U32), Scalar("experts", U32), Scalar("top_k", U32),
         Scalar("situ_beta", F32), Scalar("situ_linear_beta", F32), Scalar("act", U32))
ROWS = (reads("x", ACT, "rows", "width"), reads("positions", I32, "rows"), reads("ids", I32, "rows", "top_k"),
        reads("weights", FP32, "rows", "top_k"))
OUT = writes("out", ACT, "rows", "width")


@op("dflash.route/1",
    Scalar("rows", U32), Scalar("experts", U32), Scalar("top_k", U32), Scalar("groups", U32), Scalar("top_groups", U32),
    Scalar("renormalize", U32), Scalar("scale", F32), Scalar("w", U32),
    reads("logits", FP32, "rows", "experts"), reads("bias", DTypeOf("w"), "experts"),
    writes("ids", I32, "rows", "top_k"), writes("weights", FP32, "rows", "top_k"))
def route(a: Args) -> Step:
    """The top_k experts of each row by sigmoid(logit) + bias, best first, ties by ascending id; and their weights.

    With more groups than top_groups, experts outside the top_groups best groups are out of the choice; a group scores
    the sum of its two best. A weight is sigmoid(logit), without the bias; `renormalize` divides it by the row's sum
    + 1e-20; `scale` then multiplies it.

    Rounding: fp32 throughout.
    Raises:
        FormatError: OP_SCALAR; counts that do not go together.
    """
    rows, experts, top_k, groups, kept = (a.int(n) for n in ("rows", "experts", "top_k", "groups", "top_groups"))
    size = experts // groups if groups else 0
    if not (groups and groups * size == experts and 1 <= kept <= groups and 1 <= top_k <= kept * size
            and (kept == groups or size > 1)):
        raise FormatError("OP_SCALAR", "a choice among experts that cannot be made", where=a.op_name,
                          expected="groups that divide the experts, and top_k experts within top_groups of them",
                          got=f"{experts} experts, top {top_k}, {groups} groups, top {kept}")
    renormalize, scale = a.int("renormalize") != 0, np.float32(a.real("scale"))
    logits, ids, weights = a.array("logits"), a.array("ids"), a.array("weights")
    bias = to_f32(a.array("bias"))

    def run() -> None:
        scores = sigmoid(logits)
        choice = scores + bias
        if kept < groups:
            by_group = choice.reshape(rows, groups, size)
            best = np.sort(by_group, axis=-1)[..., -2:].sum(axis=-1)
            chosen = np.argsort(-best, axis=-1, kind="stable")[:, kept:]
            by_group[np.arange(rows)[:, None], chosen] = -np.inf
        ids[...] = np.argsort(-choice, axis=-1, kind="stable")[:, :top_k]
        taken = np.take_along_axis(scores, ids, axis=-1)
        if renormalize:
            taken /= np.add.reduce(taken, axis=-1, keepdims=True) + np.float32(1e-20)
        weights[...] = taken * scale

    return run


@op("dflash.experts/1", *SHAPE, Scalar("w", U32), *ROWS,
    reads("gate_up", DTypeOf("w"), "experts*2*inner", "width"), reads("down", DTypeOf("w"), "experts*width", "inner"),
    OUT)
def experts(a: Args) -> Step:
    """out = r(sum over chosen e of weight_e * down_e(r(act(gate_e x, up_e x)))), experts in bf16 or fp32.

    Dead rows give zeros. The activation is `runtime.ops.activation.gated`.

    Rounding: products and sums in fp32 at fixed shapes, the hidden row rounded once, the weighted sum of experts (by
    ascending id) in fp32 and rounded once.
    """
    return _bind(a, _product(_plain(a, "gate_up")), _product(_plain(a, "down")))


@op("dflash.experts_mxfp4/1", *SHAPE, *ROWS,
    reads("gate_up", DType.U8, "experts*2*inner", "width/2"),
    reads("gate_up_scale", DType.U8, "experts*2*inner", "width/32"),
    reads("down", DType.U8, "experts*width", "inner/2"), reads("down_scale", DType.U8, "experts*width", "inner/32"),
    OUT)
def experts_mxfp4(a: Args) -> Step:
    """As `experts`, with weights in MXFP4 as published: E2M1 codes, two a byte, low nibble first, times one E8M0 scale
    per 32 in-features. A decoded weight is exact in fp32."""
    return _bind(a, *(_product(_fp4(a, name, 32, E8M0_VALUES)) for name in ("gate_up", "down")))


@op("dflash.experts_nvfp4/1", *SHAPE, *ROWS,
    reads("gate_up", DType.U8, "experts*2*inner", "width/2"),
    reads("gate_up_scale", DType.E4M3, "experts*2*inner", "width/16"), reads("gate_up_global", FP32, "experts", 2),
    reads("down", DType.U8, "experts*width", "inner/2"), reads("down_scale", DType.E4M3, "experts*width", "inner/16"),
    reads("down_global", FP32, "experts"), OUT)
def experts_nvfp4(a: Args) -> Step:
    """As `experts`, with weights in NVFP4 as published: E2M1 codes, two a byte, low nibble first, times one E4M3 scale
    per 16 in-features, times one global scale per tensor: an expert's gate, its up and its down have one each.

    Rounding: a code times its block scale is exact in fp32. The global scale multiplies the fp32 sum, once, as in
    `linear_nvfp4`: gate's and up's before the activation, down's before the expert's weight.
    """
    return _bind(a, *(_scaled(_product(_fp4(a, name, 16, E4M3_VALUES)), a.array(f"{name}_global"))
                      for name in ("gate_up", "down")))


def _plain(a: Args, name: str) -> Decode:
    by_expert = a.array(name).reshape(a.int("experts"), -1, a.array(name).shape[-1])
    return lambda expert: decode_plain(by_expert[expert])


def _fp4(a: Args, name: str, block: int, scale_values: F32Array) -> Decode:
    """E2M1 codes times the values of one-byte scales, one per `block` in-features."""
    count = a.int("experts")
    codes = a.array(name).reshape(count, -1, a.array(name).shape[-1])
    scales = a.array(f"{name}_scale").reshape(count, codes.shape[1], -1)

    def decode(expert: int) -> F32Array:
        values: F32Array = E2M1_PAIRS[codes[expert]].reshape(codes.shape[1], -1, block)
        values *= scale_values[scales[expert]][..., None]
        return values.reshape(codes.shape[1], -1)

    return decode


def _product(decode: Decode) -> Product:
    """Rows times an expert's weight, in fp32."""
    return lambda expert, x: RowProduct(decode(expert), len(x), TILE_ROWS)(x)


def _scaled(product: Product, factors: Array) -> Product:
    """A product whose columns, in as many equal parts as an expert has factors, are multiplied by them."""
    by_expert = factors.reshape(len(factors), -1)

    def scaled(expert: int, x: Array) -> F32Array:
        y = product(expert, x).reshape(len(x), by_expert.shape[1], -1)
        y *= by_expert[expert][:, None]
        return y.reshape(len(x), -1)

    return scaled


def _bind(a: Args, gate_up: Product, down: Product) -> Step:
    x, positions, ids, weights, out = (a.array(n) for n in ("x", "positions", "ids", "weights", "out"))
    inner, activate = a.int("inner"), gated(a, out.dtype)
    total = np.empty(out.shape, np.float32)

    def run() -> None:
        live = positions >= 0
        total[...] = 0
        for expert in np.unique(ids[live]).tolist():
            rows, ranks = np.nonzero((ids == expert) & live[:, None])
            hidden = gate_up(expert, x[rows])
            hidden = round_to(activate(hidden[:, :inner], hidden[:, inner:]), out.dtype)
            total[rows] += weights[rows, ranks][:, None] * down(expert, hidden)
        out[...] = total

    return run
