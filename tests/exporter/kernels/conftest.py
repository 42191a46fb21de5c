"""Where kernel tests run: in one interpreting process for all tests of a session, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import has_gpu
from tests.exporter.kernels.interpreter import Interpreter
from tests.exporter.kernels.on_gpu import OnGpu

PLACES = {"interpreter": Interpreter, "gpu": OnGpu}


@pytest.fixture(scope="session",
                params=["interpreter", *([pytest.param("gpu", marks=pytest.mark.gpu)] if has_gpu() else [])])
def interpreter(request: pytest.FixtureRequest) -> Iterator[Interpreter | OnGpu]:
    place = PLACES[request.param]()
    yield place
    place.close()
