"""Which experts each row goes to: one block per row sorts integer keys, equal choices by ascending id."""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.order import LOWEST, key_id, key_of, key_order, ordered, value_of
from exporter.kernels.rows import power_of_two
from exporter.program.builder import Program

NAN_ORDER = tl.constexpr(-(1 << 31))  # below the order of -inf; keys with it are still above LOWEST


@triton.jit
def _sigmoid(x):
    """fp32; the exponential is computed in fp64 and rounded once, so that choices seldom tie apart."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x.to(tl.float64)).to(tl.float32))


@triton.jit
def _nan_last(value):
    return tl.where(value != value, NAN_ORDER, ordered(value))


@triton.jit
def route_rows(logits_ptr, bias_ptr, ids_ptr, weights_ptr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
               GROUPS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
               K_PAD: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.route. Grid: rows."""
    begin(CHAINED)
    row = tl.program_id(0)
    size: tl.constexpr = EXPERTS // GROUPS
    group, j, k = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD), tl.arange(0, K_PAD)
    expert = group[:, None] * size + j[None, :]
    held = (group < GROUPS)[:, None] & (j < size)[None, :]
    logits_ptr += row.to(tl.int64) * EXPERTS
    choice = _sigmoid(tl.load(logits_ptr + expert, mask=held, other=0.0))
    choice += tl.load(bias_ptr + expert, mask=held, other=0.0).to(tl.float32)
    if TOP_GROUPS < GROUPS:
        keys = tl.where(held, key_of(ordered(choice), expert), LOWEST)
        first = tl.max(keys, axis=1)
        second = tl.max(tl.where(keys == first[:, None], LOWEST, keys), axis=1)
        total = value_of(key_order(first)) + value_of(key_order(second))
        by_group = tl.where(group < GROUPS, key_of(_nan_last(total), group), LOWEST)
        better = tl.sum((by_group[None, :] > by_group[:, None]).to(tl.int32), axis=1)
        choice = tl.where((better < TOP_GROUPS)[:, None], choice, float("-inf"))
    keys = tl.where(held, key_of(_nan_last(choice), expert), LOWEST)
    ids = key_id(tl.topk(tl.reshape(keys, (GROUPS_PAD * SIZE_PAD,)), K_PAD))
    weight = _sigmoid(tl.load(logits_ptr + ids, mask=k < TOP_K, other=0.0))
    if RENORMALIZE:
        weight = tl.div_rn(weight, tl.sum(tl.where(k < TOP_K, weight, 0.0), axis=0) + 1e-20)
    tl.store(ids_ptr + row * TOP_K + k, ids, mask=k < TOP_K)
    tl.store(weights_ptr + row * TOP_K + k, weight * SCALE, mask=k < TOP_K)


def lower_route(call: OpCall, program: Program) -> list[Launch]:
    """Ids are the CPU op's except between choices that an ulp of a sigmoid tells apart; weights within 1e-6 relative.
    """
    o, experts, groups, top_k = call.operands, call.number("experts"), call.number("groups"), call.number("top_k")
    groups_pad, k_pad = power_of_two(groups), max(2, power_of_two(top_k))
    size_pad = max(2, power_of_two(experts // groups))
    kernel = Kernel(route_rows, (call.op,),
                    {"EXPERTS": experts, "GROUPS": groups, "GROUPS_PAD": groups_pad, "SIZE_PAD": size_pad,
                     "TOP_GROUPS": call.number("top_groups"), "TOP_K": top_k, "K_PAD": k_pad,
                     "RENORMALIZE": bool(call.number("renormalize")), "SCALE": call.real("scale")},
                    num_warps=min(8, max(1, groups_pad * size_pad // 256)))
    return [Launch(kernel, {"logits_ptr": o["logits"], "bias_ptr": o["bias"], "ids_ptr": o["ids"],
                            "weights_ptr": o["weights"]}, (call.number("rows"), 1, 1), (o["logits"], o["bias"]),
                   (o["ids"], o["weights"]), (call.node_id,), call.label)]
