"""The bounds that every attack test holds: a typed error, soon, and without using much memory."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dflash_core.errors import DflashError

MAX_SECONDS = 5.0
MAX_WAIT_SECONDS = 30.0
"""On a machine that others load as well."""
MAX_BYTES = 256 << 20


@contextlib.contextmanager
def refused(code: str) -> Iterator[None]:
    """The block must raise a DflashError with this code, within five seconds of work and 256 MiB."""
    before = _peak_bytes(reset=True)
    start, work = time.perf_counter(), time.process_time()
    with pytest.raises(DflashError) as caught:
        yield
    seconds, worked = time.perf_counter() - start, time.process_time() - work
    assert caught.value.code == code, caught.value
    assert caught.value.where and caught.value.what and "\x1b" not in str(caught.value)
    assert worked < MAX_SECONDS and seconds < MAX_WAIT_SECONDS
    assert _peak_bytes() - before < MAX_BYTES


def _peak_bytes(*, reset: bool = False) -> int:
    if reset:
        with contextlib.suppress(OSError):  # where the kernel cannot forget the peak, growth beyond it still counts
            Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024
