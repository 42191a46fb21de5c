"""The target's distribution of one row of logits, inside one block: which ids stay, and a draw from them.

Ids are cut from the bottom of one order (logit descending, id ascending), by top_k and by top_p alike, so what stays
is a `Cut`: an order value, and how far among the ids that have exactly this value. Both cuts are found by reading the
row again and again, two bits of the order at a time; nothing is sorted or stored.

Against `runtime.ops.distribution`: the same set of ids, but for sums within fp64 rounding of top_p; exponentials and
quotients differ in the last bits of fp32; sums run in fp64 in another order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.order import ordered

ALL_IDS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _order(x):
    """`ordered`, moved to u32."""
    return ordered(x).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _weight(x, top, temperature):
    """exp((x - top) / temperature), fp32."""
    return tl.exp(tl.div_rn(x - top, temperature))


@triton.jit
def _reach(logits_ptr, goal, top, temperature, WEIGHED: tl.constexpr, LIVE: tl.constexpr, BLOCK: tl.constexpr):
    """The largest order value at or above which the ids (their weights, if WEIGHED) still sum to `goal`, fp64."""
    reach, step = tl.full((), 0, tl.uint32), tl.full((), 0x40000000, tl.uint32)
    for _ in range(16):
        one, two, three = reach + step, reach + step * 2, reach + step * 3
        above_one, above_two, above_three = (tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64),
                                             tl.zeros((BLOCK,), tl.float64))
        for start in range(0, LIVE, BLOCK):
            idx = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + idx, mask=idx < LIVE, other=float("-inf"))
            order = tl.where(idx < LIVE, _order(x), 0)
            if WEIGHED:
                amount = _weight(x, top, temperature).to(tl.float64)
            else:
                amount = tl.full((BLOCK,), 1.0, tl.float64)
            above_one += tl.where(order >= one, amount, 0.0)
            above_two += tl.where(order >= two, amount, 0.0)
            above_three += tl.where(order >= three, amount, 0.0)
        steps = ((tl.sum(above_one, axis=0) >= goal).to(tl.uint32) + (tl.sum(above_two, axis=0) >= goal).to(tl.uint32)
                 + (tl.sum(above_three, axis=0) >= goal).to(tl.uint32))
        reach += steps * step
        step = step >> 2
    return reach


@triton.jit
def _beyond(logits_ptr, at, top, temperature, LIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Of the ids above the order value `at`: how many, and their weight; and how many ids have exactly it."""
    count, equal = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    weight = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, LIVE, BLOCK):
        idx = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + idx, mask=idx < LIVE, other=float("-inf"))
        order, live = _order(x), idx < LIVE
        count += (live & (order > at)).to(tl.int32)
        equal += (live & (order == at)).to(tl.int32)
        weight += tl.where(live & (order > at), _weight(x, top, temperature).to(tl.float64), 0.0)
    return tl.sum(count, axis=0), tl.sum(weight, axis=0), tl.sum(equal, axis=0)


@triton.jit
def _last_equal(logits_ptr, at, count, LIVE: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the `count`-th id, ascending, that has exactly the order value `at`."""
    seen, last = 0, 0
    for start in range(0, LIVE, BLOCK):
        idx = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + idx, mask=idx < LIVE, other=float("-inf"))
        equal = ((idx < LIVE) & (_order(x) == at)).to(tl.int32)
        here = tl.sum(equal, axis=0)
        if (seen < count) & (seen + here >= count):
            rank = seen + tl.cumsum(equal, axis=0)
            last = tl.max(tl.where((equal > 0) & (rank == count), idx, 0), axis=0)
        seen += here
    return last


@triton.jit
def find_cut(logits_ptr, top, temperature, top_k, top_p, LIVE: tl.constexpr, BLOCK: tl.constexpr):
    """(order value, last id, total): ids stay that are above the value, or have it and an id up to the last one;
    their weights sum to total, fp64.

    Args:
        top: the highest logit, finite. temperature > 0. top_k: 0, or LIVE and more, keeps all. top_p: 1 keeps all.
    """
    at = tl.full((), 0, tl.uint32)  # every logit is above order 0
    limited = (top_k > 0) & (top_k < LIVE)
    if limited:
        at = _reach(logits_ptr, top_k.to(tl.float64), top, temperature, False, LIVE, BLOCK)
    count, weight, equal = _beyond(logits_ptr, at, top, temperature, LIVE, BLOCK)
    kept = tl.where(limited, tl.minimum(top_k - count, equal), equal)
    total = weight + kept * _edge_weight(at, top, temperature)
    if top_p < 1:
        goal = total * top_p.to(tl.float64)
        highest = _order(top)
        nucleus = tl.minimum(_reach(logits_ptr, goal, top, temperature, True, LIVE, BLOCK), highest)
        count, weight, equal = _beyond(logits_ptr, nucleus, top, temperature, LIVE, BLOCK)
        each = _edge_weight(nucleus, top, temperature)
        wanted = tl.minimum(tl.maximum(tl.ceil((goal - weight) / each), 1.0), 2147483647.0).to(tl.int32)
        at, kept = nucleus, tl.minimum(wanted, equal)
        total = weight + kept * each
    last = tl.full((), ALL_IDS, tl.int32)
    if kept < equal:
        last = _last_equal(logits_ptr, at, kept, LIVE, BLOCK)
    return at, last, total


@triton.jit
def _edge_weight(at, top, temperature):
    """The fp64 weight of an id with the order value `at`; 0 for the value below every logit."""
    order = (at ^ 0x80000000).to(tl.int32, bitcast=True)
    x = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(at == 0, 0.0, _weight(x, top, temperature).to(tl.float64))


@triton.jit
def probability(x, idx, top, temperature, at, last, total):
    """fp32 probability of ids with logits x; exactly 0 for what was cut."""
    order = _order(x)
    stays = (order > at) | ((order == at) & (idx <= last))
    return tl.where(stays, tl.div_rn(_weight(x, top, temperature), total.to(tl.float32)), 0.0)


@triton.jit
def _mass(logits_ptr, idx, top, temperature, at, last, total, ids_ptr, probs_ptr, subtracted,
          CANDIDATES: tl.constexpr, LIVE: tl.constexpr):
    """What a draw of ids weighs: max(p - q, 0) for the first `subtracted` candidates, p elsewhere."""
    x = tl.load(logits_ptr + idx, mask=idx < LIVE, other=float("-inf"))
    mass = tl.where(idx < LIVE, probability(x, idx, top, temperature, at, last, total), 0.0)
    if CANDIDATES > 0:
        k = 0
        while k < subtracted:
            proposed, q = tl.load(ids_ptr + k), tl.load(probs_ptr + k)
            mass = tl.where(idx == proposed, tl.maximum(mass - q, 0.0), mass)
            k += 1
    return mass


@triton.jit
def _block_sums(logits_ptr, top, temperature, at, last, total, ids_ptr, probs_ptr, subtracted,
                CANDIDATES: tl.constexpr, LIVE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr):
    """The fp64 mass of each block of ids, [BLOCKS_PAD]."""
    b = tl.arange(0, BLOCKS_PAD)
    sums = tl.zeros((BLOCKS_PAD,), tl.float64)
    for start in range(0, LIVE, BLOCK):
        mass = _mass(logits_ptr, start + tl.arange(0, BLOCK), top, temperature, at, last, total, ids_ptr, probs_ptr,
                     subtracted, CANDIDATES, LIVE)
        sums = tl.where(b == start // BLOCK, tl.sum(mass.to(tl.float64), axis=0), sums)
    return sums


@triton.jit
def _first_beyond(running, goal, mass, idx):
    """The first idx with mass at which the running sum exceeds the goal; a scan may round below the sum that the goal
    was taken from, and then it is the last idx with mass."""
    first = tl.min(tl.where((running > goal) & (mass > 0), idx, ALL_IDS), axis=0)
    return tl.minimum(first, tl.max(tl.where(mass > 0, idx, 0), axis=0))


@triton.jit
def draw_id(logits_ptr, u, top, temperature, at, last, total, ids_ptr, probs_ptr, subtracted,
            CANDIDATES: tl.constexpr, LIVE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr):
    """The first id, ascending, at which the running sum exceeds u times the sum: of p, less the probability q of each
    of the `subtracted` candidates, but not below 0; of p itself where nothing is left. Sums are fp64."""
    sums = _block_sums(logits_ptr, top, temperature, at, last, total, ids_ptr, probs_ptr, subtracted, CANDIDATES, LIVE,
                       BLOCK, BLOCKS_PAD)
    if tl.max(sums, axis=0) == 0:
        subtracted = subtracted * 0
        sums = _block_sums(logits_ptr, top, temperature, at, last, total, ids_ptr, probs_ptr, subtracted, CANDIDATES,
                           LIVE, BLOCK, BLOCKS_PAD)
    b, running = tl.arange(0, BLOCKS_PAD), tl.cumsum(sums, axis=0)
    goal = u.to(tl.float64) * tl.max(running, axis=0)
    block = _first_beyond(running, goal, sums, b)
    before = tl.max(tl.where(b < block, running, 0.0), axis=0)
    idx = block * BLOCK + tl.arange(0, BLOCK)
    mass = _mass(logits_ptr, idx, top, temperature, at, last, total, ids_ptr, probs_ptr, subtracted, CANDIDATES, LIVE)
    return _first_beyond(before + tl.cumsum(mass.to(tl.float64), axis=0), goal, mass, idx)
