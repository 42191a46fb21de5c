"""A GPU that this process has opened: its driver, its primary context, and what it offers a core."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dflash_core.compat import Device
from dflash_core.errors import CompatibilityError, DflashError, DriverError

from runtime.driver import (
    COMPUTE_MODE_PROHIBITED,
    Context,
    DeviceAttribute,
    DeviceHandle,
    Driver,
    open_driver,
)

_NAME = re.compile(r"cuda(?::(?P<ordinal>[0-9]{1,3}))?")
_CONDITIONAL_DRIVER = 12030


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A device with a retained context; `close` it once."""

    driver: Driver
    handle: DeviceHandle
    context: Context
    facts: Device

    def use(self) -> None:
        """Make the context current in this thread."""
        self.driver.use(self.context)

    def close(self) -> None:
        self.driver.release_context(self.handle)


class Releases:
    """What was taken and must be given back, last taken first."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, release: Callable[[], None]) -> None:
        self._calls.append(release)

    def close(self) -> tuple[DflashError, ...]:
        """Give everything back; what the driver refused is returned, and does not keep the rest."""
        errors = []
        while self._calls:
            try:
                self._calls.pop()()
            except DriverError as err:
                errors.append(err)
        return tuple(errors)


def is_gpu(name: str) -> bool:
    """Whether a device name means a GPU: "cuda", or "cuda:" and a number."""
    return _NAME.fullmatch(name) is not None


def open_device(name: str) -> GpuDevice:
    """Open a GPU and make its context current in this thread.

    Args:
        name: "cuda" for the first device that is visible, "cuda:1" for the second.
    Raises:
        CompatibilityError: DEVICE_UNKNOWN, there is no such device; COMPUTE_MODE, its owner lets no program use it.
        DriverError: there is no usable driver, or what the driver says.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise CompatibilityError("DEVICE_UNKNOWN", "not the name of a GPU", where="--device", expected="cuda or cuda:N",
                                 got=name, hint="name a GPU as `nvidia-smi -L` counts them, or cpu")
    driver, ordinal = open_driver(), int(match["ordinal"] or 0)
    count = driver.device_count()
    if count == 0:
        raise DriverError("CUDA_ERROR_NO_DEVICE", "the driver reports no device", where="cuDeviceGetCount",
                          hint="check `nvidia-smi` and CUDA_VISIBLE_DEVICES; a MIG GPU needs an instance")
    if ordinal >= count:
        raise CompatibilityError("DEVICE_UNKNOWN", "this machine has no such GPU", where="--device",
                                 expected=f"cuda:0 to cuda:{count - 1}", got=name,
                                 hint="name one of those, or make more visible in CUDA_VISIBLE_DEVICES")
    handle = driver.device(ordinal)
    if driver.device_attribute(handle, DeviceAttribute.COMPUTE_MODE) == COMPUTE_MODE_PROHIBITED:
        raise CompatibilityError("COMPUTE_MODE", "the GPU's compute mode lets no program use it", where=name,
                                 expected="default", got="prohibited", hint="nvidia-smi --compute-mode=DEFAULT")
    context = driver.retain_context(handle)
    try:
        driver.use(context)
        return GpuDevice(driver, handle, context, _facts(driver, handle))
    except BaseException:
        driver.release_context(handle)
        raise


def _facts(driver: Driver, handle: DeviceHandle) -> Device:
    major, minor = (driver.device_attribute(handle, a) for a in (DeviceAttribute.MAJOR, DeviceAttribute.MINOR))
    version = driver.version()
    features = set()
    if (major, minor) >= (9, 0):
        features |= {"tma", "cluster", "pdl"}
    if version >= _CONDITIONAL_DRIVER:
        features.add("conditional")
    if driver.device_attribute(handle, DeviceAttribute.VIRTUAL_MEMORY):
        features.add("vmm")
    free_bytes, _ = driver.memory_info()
    return Device(
        name=f"sm_{major}{minor}", driver=version, free_bytes=free_bytes, compute_capability=(major, minor),
        sm_count=driver.device_attribute(handle, DeviceAttribute.SM_COUNT),
        shared_optin_bytes=driver.device_attribute(handle, DeviceAttribute.SHARED_OPTIN), features=frozenset(features),
        partition=" MIG " in driver.device_name(handle))
