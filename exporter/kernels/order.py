"""One total order of logits, as integers: value descending, then id ascending. Its highest keys are the best ids.

A float's bits, with the sign moved out of the way, compare as the float does; the id fills the low word, reversed, so
that one integer maximum is an argmax whose ties go to the lowest id.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(1 << 63))  # below the key of every logit, -inf included
NAN_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(value):
    """i32 that compares as the fp32 value does; the two zeros are equal, every NaN is above infinity."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value != value, NAN_BITS, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The fp32 value that `ordered` made this of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_of(order, idx):
    """i64: the order in the high word, the id in the low one."""
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - idx).to(tl.int64)


@triton.jit
def key_id(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def key_order(key):
    return (key >> 32).to(tl.int32)


@triton.jit
def is_finite(value):
    return tl.abs(value) < float("inf")
