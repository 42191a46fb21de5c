"""A kernel's random number is the runtime's, bit for bit: seen through which of 2**24 ids a uniform draw picks."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.ops.philox import Purpose, draw
from tests.exporter.kernels.test_sampling import sample_case, sampled, sampling_arrays


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**31 - 2])
def test_uniform_draw_picks_the_id_that_the_runtimes_number_names(interpreter, seed, position):
    ids = 4096
    case = sample_case(np.zeros((1, ids)), [position], [0], sampling_arrays(1, 1.0, seeds=[seed]))

    tokens, _ = sampled(interpreter, case)

    assert tokens == [int(float(draw(seed, position + 1, Purpose.TARGET)) * ids)]
