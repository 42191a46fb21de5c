"""A driver call returns a value or raises DriverError with CUDA's name, what failed, where, and what to do."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from dflash_core.errors import DriverError, ExitCode

import runtime.driver
from runtime.driver import Driver, open_driver
from tests.runtime.gpu.fake_driver import FakeDriver, Result


def refused_by(call: Any, *args: Any) -> DriverError:
    with pytest.raises(DriverError) as refused:
        call(*args)
    assert refused.value.exit_code is ExitCode.RESOURCES
    return refused.value


def opened(fake: FakeDriver) -> Driver:
    driver = open_driver()
    driver.use(driver.retain_context(driver.device(0)))
    return driver


def test_failed_call_says_code_what_where_and_hint(fake: FakeDriver) -> None:
    error = refused_by(opened(fake).allocate, 1 << 40)

    assert (error.code, error.what, error.where, error.hint) == (
        "CUDA_ERROR_OUT_OF_MEMORY", "out of memory", "cuMemAlloc 1099511627776 bytes",
        "free device memory, or use a smaller core")


def test_status_without_a_name_keeps_its_number(fake: FakeDriver) -> None:
    driver = opened(fake)
    fake.fail("cuStreamCreate", 912)

    error = refused_by(driver.create_stream)

    assert (error.code, error.what) == ("CUDA_ERROR_912", "a CUDA call failed")


def test_machine_without_a_driver_library_is_told_so(fake: FakeDriver) -> None:
    fake.missing_library = True

    error = refused_by(open_driver)

    assert (error.code, error.what) == ("DRIVER_MISSING",
                                        "the CUDA driver cannot be used: Failed to dlopen libcuda.so.1")
    assert error.hint == "install an NVIDIA driver of release 580 or later, or use `--device cpu`"


def test_machine_without_bindings_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without_cuda(name: str, *args: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError(name)
        return found(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_cuda)

    error = refused_by(runtime.driver.bindings)

    assert (error.code, error.hint) == ("DRIVER_BINDINGS", "pip install 'dflash-cores[gpu]'")


def test_old_driver_is_refused_before_anything_else_is_called(fake: FakeDriver) -> None:
    fake.driver_version = 12030

    error = refused_by(open_driver)

    assert (error.code, error.expected, error.got) == ("DRIVER_OLD", "at least 12040", "12030")
    assert fake.calls == ["cuDriverGetVersion"]


def test_machine_without_a_device_is_told_so(fake: FakeDriver) -> None:
    fake.devices = 0

    error = refused_by(open_driver)

    assert (error.code, error.hint) == ("CUDA_ERROR_NO_DEVICE", "check `nvidia-smi` and CUDA_VISIBLE_DEVICES")


def test_dead_handle_is_refused_by_name(fake: FakeDriver) -> None:
    driver = opened(fake)
    stream = driver.create_stream()
    driver.destroy_stream(stream)

    assert refused_by(driver.synchronize, stream).code == "CUDA_ERROR_INVALID_HANDLE"


def test_event_that_is_not_reached_is_no_error(fake: FakeDriver) -> None:
    driver = opened(fake)
    stream, event, memory = driver.create_stream(), driver.create_event(), driver.allocate(16)
    driver.fill(memory, 7, 16, stream)
    driver.record(event, stream)

    assert driver.reached(event) is False
    driver.wait(event)
    assert driver.reached(event) is True
    assert fake.read(memory, 16) == b"\x07" * 16


def test_event_query_that_fails_is_an_error(fake: FakeDriver) -> None:
    driver = opened(fake)
    event = driver.create_event()
    fake.fail("cuEventQuery", Result.CUDA_ERROR_LAUNCH_FAILED)

    error = refused_by(driver.reached, event)

    assert error.code == "CUDA_ERROR_LAUNCH_FAILED"
    assert error.hint.startswith("the GPU is lost to this process")


def test_ptx_text_is_ended_with_a_zero_and_a_cubin_is_left_alone(fake: FakeDriver) -> None:
    driver = opened(fake)

    text, binary = driver.load_library(b".version 8.8", "a"), driver.load_library(b"\x7fELFrest", "b")

    assert [found.image for found in (text, binary)] == [b".version 8.8\0", b"\x7fELFrest"]  # type: ignore[attr-defined]


def test_parameter_sizes_that_cannot_be_read_are_an_error(fake: FakeDriver) -> None:
    driver = opened(fake)
    function = driver.function(driver.load_library(b"\x7fELF", "m"), "toy_draft")
    assert driver.param_sizes(function) == (8, 8, 8, 8, 8, 4, 8, 8)
    fake.fail("cuFuncGetParamInfo", Result.CUDA_ERROR_LAUNCH_FAILED)

    error = refused_by(driver.param_sizes, function)

    assert (error.code, error.where) == ("CUDA_ERROR_LAUNCH_FAILED", "cuFuncGetParamInfo parameter 0")
