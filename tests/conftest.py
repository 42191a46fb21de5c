"""Fixtures that every test may use, and the one reason to skip: a `gpu` test on a machine without a GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from filelock import FileLock

from scripts.fetch_demo_target import fetch

ROOT = Path(__file__).resolve().parent.parent


def has_gpu() -> bool:
    """Whether the CUDA driver is installed and reports a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The demo's target model as a Hugging Face folder, every tensor checked; fetched once for all workers.

    `build/demo/target` is used when it is there, `build/cache-tests/target` otherwise.
    """
    demo = ROOT / "build" / "demo" / "target"
    kept = ROOT / "build" / "cache-tests"
    kept.mkdir(parents=True, exist_ok=True)
    with FileLock(kept / "target.lock"):
        target = demo if demo.exists() else kept / "target"
        fetch(target)
    return target
