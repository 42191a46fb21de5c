"""Random draws that anybody can recompute: a draw is a pure function of seed, position and purpose.

No state moves along, so a draw does not depend on the batch, on the block, or on how many tokens were rejected before,
and two purposes at one position never share a number.

    >>> draw(seed=7, position=41, purpose=Purpose.ACCEPT) == draw(seed=7, position=41, purpose=Purpose.ACCEPT)
    True
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a draw decides; the number is the second word of the counter."""

    TARGET = 0
    PROPOSAL = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds: four random 32-bit words for a counter and a key of 32-bit words.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11), and the vectors of Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def draw(seed: int, position: int, purpose: Purpose) -> np.float32:
    """A uniform number in [0, 1), a multiple of 2**-24, for the token at this absolute position.

    The key is (low, high) word of the seed, the counter (position, purpose, 0, 0); the draw is the upper 24 bits of
    the first output word.

    Args:
        seed: 0 <= seed < 2**64, of the request.
        position: 0 <= position < 2**32, of the token that the draw decides.
    """
    word = philox4x32((position, int(purpose), 0, 0), (seed & _MASK, seed >> 32))[0]
    return np.float32((word >> 8) * 2.0**-24)
