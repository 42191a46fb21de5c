"""Philox4x32-10 against the known answers that ship with Random123, and the key and counter of a draw."""

import numpy as np
import pytest

from runtime.ops.philox import Purpose, draw, philox4x32

F = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        pytest.param((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
        pytest.param((F, F, F, F), (F, F), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"),
        pytest.param((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
                     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1), id="digits of pi"),
    ],
)
def test_known_answers(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_draw_is_the_upper_24_bits_of_the_first_word():
    assert draw(0, 0, Purpose.TARGET) == np.float32(0x6627E8 / 2**24)
    assert draw(0, 0, Purpose.TARGET).dtype == np.float32


@pytest.mark.parametrize(
    ("seed", "position", "purpose", "counter", "key"),
    [
        pytest.param(0x1122334455667788, 9, Purpose.TARGET, (9, 0, 0, 0), (0x55667788, 0x11223344), id="target"),
        pytest.param(0x1122334455667788, 9, Purpose.PROPOSAL, (9, 1, 0, 0), (0x55667788, 0x11223344), id="proposal"),
        pytest.param(0x1122334455667788, 9, Purpose.ACCEPT, (9, 2, 0, 0), (0x55667788, 0x11223344), id="accept"),
        pytest.param(2**64 - 1, 70000, Purpose.RESIDUAL, (70000, 3, 0, 0), (F, F), id="residual, largest seed"),
    ],
)
def test_seed_is_the_key_and_position_and_purpose_are_the_counter(seed, position, purpose, counter, key):
    assert draw(seed, position, purpose) == np.float32((philox4x32(counter, key)[0] >> 8) / 2**24)


def test_draws_of_all_purposes_and_positions_differ():
    draws = {float(draw(7, position, purpose)) for position in range(200) for purpose in Purpose}

    assert len(draws) == 800


def test_draws_fill_the_unit_interval_evenly():
    draws = np.array([draw(1, position, Purpose.TARGET) for position in range(4000)])

    assert 0 <= draws.min() < draws.max() < 1
    assert np.histogram(draws, bins=4, range=(0, 1))[0].tolist() == pytest.approx([1000] * 4, abs=110)
