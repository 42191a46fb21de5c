"""One interpreting process for all kernel tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exporter.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()
