"""Kimi delta attention in step graphs: what its rows are, the recurrence over a sequence's rows, its commit, its norm.

A recurrent layer's ops become three launches: `kda_rows` (convolution, gates, unit keys and queries), `kda_scan`, and
`gated_norm`. The columns of a state are independent of each other, so a block of the scan holds a few columns of one
head and walks the rows by itself, in the order of the rows; a state is read once, and written once where the rows are
committed at once. What a row is does not depend on the rows after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin


@triton.jit
def sigmoid(x):
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + tl.exp(-x))


@triton.jit
def log1p_of(e):
    """log(1 + e) for e in [0, 1], as the series of the inverse hyperbolic tangent: exact where e is tiny."""
    s = tl.div_rn(e, 2.0 + e)
    t = s * s
    series = 1.0 / 17 + t * (1.0 / 19)
    series = 1.0 / 15 + t * series
    series = 1.0 / 13 + t * series
    series = 1.0 / 11 + t * series
    series = 1.0 / 9 + t * series
    series = 1.0 / 7 + t * series
    series = 1.0 / 5 + t * series
    series = 1.0 / 3 + t * series
    return 2.0 * s * (1.0 + t * series)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which never overflows."""
    return tl.maximum(x, 0.0) + log1p_of(tl.exp(-tl.abs(x)))


@triton.jit
def _convolved(x_ptr, window_ptr, weight_ptr, row, i, slot, c, inside, live, started, CHANNELS: tl.constexpr,
               HISTORY: tl.constexpr):
    """dflash.short_conv at channels c of row i of a group, fp32 that is a bf16; zeros where the row is dead."""
    total = tl.zeros(c.shape, tl.float32)
    for j in tl.static_range(HISTORY + 1):
        at = i - HISTORY + j  # below 0: a row of the window
        earlier = tl.load(window_ptr + (slot.to(tl.int64) * HISTORY + (at + HISTORY)) * CHANNELS + c,
                          mask=inside & live & started & (at < 0), other=0.0)
        own = tl.load(x_ptr + (row + (j - HISTORY)).to(tl.int64) * CHANNELS + c, mask=inside & live & (at >= 0),
                      other=0.0)
        tap = tl.load(weight_ptr + c * (HISTORY + 1) + j, mask=inside, other=0.0).to(tl.float32)
        product = tap * tl.where(at < 0, earlier, own).to(tl.float32)
        if j == 0:
            total = product
        else:
            total = total + product
    return tl.div_rn(total, 1.0 + tl.exp(-total)).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _unit(x, EPS: tl.constexpr):
    """Rows [heads, channels] of unit length."""
    return tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, axis=1) + EPS)[:, None] + tl.zeros(x.shape, tl.float32))


@triton.jit
def kda_rows(x_ptr, window_ptr, conv_ptr, decay_ptr, beta_ptr, a_log_ptr, dt_bias_ptr, positions_ptr, slots_ptr,
             qkv_ptr, queries_ptr, keys_ptr, log_decay_ptr, strength_ptr, scale, BLOCK_ROWS: tl.constexpr,
             HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, D: tl.constexpr,
             HISTORY: tl.constexpr, LOWER_BOUND: tl.constexpr, L2_EPS: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.short_conv, dflash.kda_gates, and of dflash.kda_scan the unit queries (times scale) and keys.

    Grid: rows, tiles of HEAD_TILE heads. LOWER_BOUND is 0 for a decay without one; D is HEAD_DIM's power of two.
    """
    begin(CHAINED)
    row = tl.program_id(0)
    group, i = row // BLOCK_ROWS, row % BLOCK_ROWS
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    d = tl.arange(0, D)
    inside = (head < HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    c = head[:, None] * HEAD_DIM + d[None, :]
    live = tl.load(positions_ptr + row) >= 0
    started = tl.load(positions_ptr + group * BLOCK_ROWS) > 0
    slot = tl.maximum(tl.load(slots_ptr + group), 0)
    width: tl.constexpr = HEADS * HEAD_DIM
    at = row.to(tl.int64) * width + c
    qkv_at = row.to(tl.int64) * (3 * width) + c
    q = _convolved(x_ptr, window_ptr, conv_ptr, row, i, slot, c, inside, live, started, 3 * width, HISTORY)
    tl.store(qkv_ptr + qkv_at, q.to(tl.bfloat16), mask=inside)
    tl.store(queries_ptr + at, _unit(q, L2_EPS) * scale, mask=inside)
    k = _convolved(x_ptr, window_ptr, conv_ptr, row, i, slot, width + c, inside, live, started, 3 * width, HISTORY)
    tl.store(qkv_ptr + qkv_at + width, k.to(tl.bfloat16), mask=inside)
    tl.store(keys_ptr + at, _unit(k, L2_EPS), mask=inside)
    v = _convolved(x_ptr, window_ptr, conv_ptr, row, i, slot, 2 * width + c, inside, live, started, 3 * width, HISTORY)
    tl.store(qkv_ptr + qkv_at + 2 * width, v.to(tl.bfloat16), mask=inside)
    raw = tl.load(decay_ptr + at, mask=inside, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32))[:, None]
    if LOWER_BOUND != 0.0:
        log_decay = LOWER_BOUND * sigmoid(rate * raw)
    else:
        log_decay = -rate * softplus(raw)
    tl.store(log_decay_ptr + at, log_decay, mask=inside)
    beta = tl.load(beta_ptr + row * HEADS + head, mask=head < HEADS, other=0.0).to(tl.float32)
    tl.store(strength_ptr + row * HEADS + head, sigmoid(beta), mask=head < HEADS)


@triton.jit
def live_count(positions_ptr, group, BLOCK_ROWS: tl.constexpr):
    """How many rows of a group are live: they come first."""
    i = tl.arange(0, triton.next_power_of_2(BLOCK_ROWS))
    position = tl.load(positions_ptr + group * BLOCK_ROWS + i, mask=i < BLOCK_ROWS, other=-1)
    return tl.sum((position >= 0).to(tl.int32), axis=0)


@triton.jit
def kda_scan(queries_ptr, keys_ptr, qkv_ptr, log_decay_ptr, strength_ptr, positions_ptr, slots_ptr, state_ptr, out_ptr,
             changes_ptr, BLOCK_ROWS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, K: tl.constexpr,
             V: tl.constexpr, COMMIT: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.kda_scan from unit queries and keys; with COMMIT also dflash.kda_commit of all live rows, without it the
    rows' changes are recorded. Grid: tiles of V columns, HEADS, groups. K is HEAD_DIM's power of two."""
    begin(CHAINED)
    head, group = tl.program_id(1), tl.program_id(2)
    count = live_count(positions_ptr, group, BLOCK_ROWS)
    started = tl.load(positions_ptr + group * BLOCK_ROWS) > 0
    slot = tl.maximum(tl.load(slots_ptr + group), 0)
    k, v = tl.arange(0, K), tl.program_id(0) * V + tl.arange(0, V)
    k_inside, v_inside = k < HEAD_DIM, v < HEAD_DIM
    width: tl.constexpr = HEADS * HEAD_DIM
    held = state_ptr + ((slot * HEADS + head).to(tl.int64) * HEAD_DIM + k[:, None]) * HEAD_DIM + v[None, :]
    inside = k_inside[:, None] & v_inside[None, :]
    state = tl.load(held, mask=inside & started & (count > 0), other=0.0)
    first = group * BLOCK_ROWS
    for n in tl.range(0, count, num_stages=STAGES):
        row = first + n
        at = row.to(tl.int64) * width + head * HEAD_DIM
        decay = tl.exp(tl.load(log_decay_ptr + at + k, mask=k_inside, other=0.0))
        key = tl.load(keys_ptr + at + k, mask=k_inside, other=0.0)
        query = tl.load(queries_ptr + at + k, mask=k_inside, other=0.0)
        value = tl.load(qkv_ptr + at + row.to(tl.int64) * (2 * width) + 2 * width + v, mask=v_inside, other=0.0)
        strength = tl.load(strength_ptr + row * HEADS + head)
        state = state * decay[:, None]
        change = strength * (value.to(tl.float32) - tl.sum(state * key[:, None], axis=0))
        state = state + key[:, None] * change[None, :]
        tl.store(out_ptr + at + v, tl.sum(state * query[:, None], axis=0), mask=v_inside)
        if changes_ptr is not None:
            tl.store(changes_ptr + at + v, change, mask=v_inside)
    for n in range(count, BLOCK_ROWS):
        row = first + n
        at = row.to(tl.int64) * width + head * HEAD_DIM
        tl.store(out_ptr + at + v, tl.zeros([V], tl.float32), mask=v_inside)
        if changes_ptr is not None:
            tl.store(changes_ptr + at + v, tl.zeros([V], tl.float32), mask=v_inside)
    if COMMIT:
        tl.store(held, state, mask=inside & (count > 0))


@triton.jit
def kda_commit(keys_ptr, changes_ptr, log_decay_ptr, positions_ptr, slots_ptr, state_ptr, BLOCK_ROWS: tl.constexpr,
               HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, K: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr,
               CHAINED: tl.constexpr):
    """dflash.kda_commit: the operations of `kda_scan` on the state, for the kept rows. Grid: as there."""
    begin(CHAINED)
    head, group = tl.program_id(1), tl.program_id(2)
    count = live_count(positions_ptr, group, BLOCK_ROWS)
    started = tl.load(positions_ptr + group * BLOCK_ROWS) > 0
    slot = tl.maximum(tl.load(slots_ptr + group), 0)
    k, v = tl.arange(0, K), tl.program_id(0) * V + tl.arange(0, V)
    k_inside, v_inside = k < HEAD_DIM, v < HEAD_DIM
    held = state_ptr + ((slot * HEADS + head).to(tl.int64) * HEAD_DIM + k[:, None]) * HEAD_DIM + v[None, :]
    inside = k_inside[:, None] & v_inside[None, :]
    state = tl.load(held, mask=inside & started & (count > 0), other=0.0)
    for n in tl.range(0, count, num_stages=STAGES):
        row = group * BLOCK_ROWS + n
        at = row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
        decay = tl.exp(tl.load(log_decay_ptr + at + k, mask=k_inside, other=0.0))
        key = tl.load(keys_ptr + at + k, mask=k_inside, other=0.0)
        change = tl.load(changes_ptr + at + v, mask=v_inside, other=0.0)
        state = state * decay[:, None] + key[:, None] * change[None, :]
    tl.store(held, state, mask=inside & (count > 0))


@triton.jit
def gated_norm(x_ptr, gate_ptr, weight_ptr, out_ptr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
               HEAD_TILE: tl.constexpr, D: tl.constexpr, EPS: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.gated_norm. Grid: rows, tiles of HEAD_TILE heads."""
    begin(CHAINED)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    d = tl.arange(0, D)
    inside = (head < HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    at = tl.program_id(0).to(tl.int64) * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + d[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, axis=1) / HEAD_DIM
    inverse = tl.div_rn(tl.full([HEAD_TILE], 1.0, tl.float32), tl.sqrt_rn(mean + EPS))
    y = x * inverse[:, None] * weight[None, :] * sigmoid(gate)
    tl.store(out_ptr + at, y.to(tl.bfloat16), mask=inside)


@triton.jit
def conv_window(x_ptr, positions_ptr, slots_ptr, window_ptr, BLOCK_ROWS: tl.constexpr, CHANNELS: tl.constexpr,
                HISTORY: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """dflash.conv_window. Grid: groups, channel tiles. H is HISTORY's power of two."""
    begin(CHAINED)
    group = tl.program_id(0)
    count = live_count(positions_ptr, group, BLOCK_ROWS)
    started = tl.load(positions_ptr + group * BLOCK_ROWS) > 0
    slot = tl.maximum(tl.load(slots_ptr + group), 0)
    j = tl.arange(0, H)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (j < HISTORY)[:, None] & (c < CHANNELS)[None, :] & (count > 0)
    source = count - HISTORY + j  # below 0: a row of the old window, which ends with row -1
    held = window_ptr + slot.to(tl.int64) * (HISTORY * CHANNELS)
    old = tl.load(held + (source + HISTORY)[:, None] * CHANNELS + c[None, :],
                  mask=inside & started & (source < 0)[:, None], other=0.0)
    fresh = tl.load(x_ptr + (group * BLOCK_ROWS + source).to(tl.int64)[:, None] * CHANNELS + c[None, :],
                    mask=inside & (source >= 0)[:, None], other=0.0)
    tl.debug_barrier()  # a row of the old window is read by one thread and written by another
    tl.store(held + j[:, None] * CHANNELS + c[None, :], tl.where((source < 0)[:, None], old, fresh), mask=inside)
