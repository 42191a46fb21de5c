"""The runtime's counter-based draws, in a kernel: bit for bit `runtime.ops.philox.draw`."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.ops.philox import Purpose

TARGET = tl.constexpr(int(Purpose.TARGET))
PROPOSAL = tl.constexpr(int(Purpose.PROPOSAL))
ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))


@triton.jit
def draw(seed, position, PURPOSE: tl.constexpr):
    """A uniform fp32 in [0, 1) for a seed (64 bits) and the position (i32, >= 0) of the token that it decides.

    Philox4x32 with ten rounds: key the two words of the seed, counter (position, purpose, 0, 0), upper 24 bits of the
    first word.
    """
    words = seed.to(tl.uint64)
    k0, k1 = (words & 0xFFFFFFFF).to(tl.uint32), (words >> 32).to(tl.uint32)
    c0 = position.to(tl.uint32)
    c2 = c0 ^ c0
    c1, c3 = c2 + PURPOSE, c2
    for _ in tl.static_range(10):
        high_first, low_first = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high_second, low_second = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high_second ^ c1 ^ k0, low_second, high_first ^ c3 ^ k1, low_first
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return (c0 >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
