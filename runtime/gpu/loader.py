"""From a signed core to graphs that launch on a GPU, on one screen.

    with load_on_gpu(Path("core"), trust, "cuda") as core:
        core.graph("decode", 1).run()

Verify, open the device, check what the core needs of it, load modules and check kernels; only then reserve memory,
upload verified weights while the first graphs are built, and wait for both. Nothing is launched before that.
The rest of the graphs is built in the background.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from runtime.check import CheckedCore, check
from runtime.driver import Stream, bindings
from runtime.gpu.core import GpuCore, release_all
from runtime.gpu.device import GpuDevice, Releases, open_device
from runtime.gpu.graphs import GraphBuilder, GraphPool, load_order
from runtime.gpu.kernels import load_kernels
from runtime.gpu.layout import lay_out
from runtime.gpu.memory import CoreMemory, Staging, allocate, default_threads, fill, staging_buffers
from runtime.gpu.nodes import Addresses
from runtime.gpu.phases import PhaseClock
from runtime.trust import TrustPolicy
from runtime.verify import verify


def load_on_gpu(path: Path, trust: TrustPolicy, device_name: str, *, threads: int | None = None,
                on_bytes: Callable[[int], None] | None = None) -> GpuCore:
    """Load a core onto a GPU.

    Args:
        device_name: "cuda", or "cuda:N".
        threads: threads that read and hash weights; None: one per processor, at most 16.
        on_bytes: told the size of each verified chunk of weights.
    Raises:
        PolicyError, VerificationError: it is not what trusted signers have signed.
        FormatError, CompatibilityError: it breaks a rule, or does not fit this runtime or device.
        ResourceError, DriverError: memory or the driver is lacking.
    """
    clock = PhaseClock()
    bindings()
    clock.mark("import")
    verified = verify(path, trust)
    try:
        clock.mark("verify")
        device = open_device(device_name)
        clock.mark("context")
        releases = Releases()
        try:
            return _instantiate(check(verified, device.facts), device, releases, clock, threads or default_threads(),
                                on_bytes)
        except BaseException:
            release_all(device, releases)
            raise
    except BaseException:
        verified.close()
        raise


def _instantiate(checked: CheckedCore, device: GpuDevice, releases: Releases, clock: PhaseClock, threads: int,
                 on_bytes: Callable[[int], None] | None) -> GpuCore:
    driver = device.driver
    kernels = load_kernels(checked, device, releases)
    clock.mark("modules")
    stream = driver.create_stream()
    releases.add(lambda: driver.destroy_stream(stream))
    layout = lay_out(checked.verified.manifest, checked.target.target_id, checked.symbols)
    memory = allocate(device, layout, releases)
    clock.mark("memory")
    builder = GraphBuilder(device, checked, kernels, Addresses(memory.buffers, checked.symbols))
    pool = GraphPool(builder, stream, releases)
    first, later = load_order(checked.graphs)
    with _Upload(checked, memory, device, threads, on_bytes) as upload:
        clock.mark("memory")
        pool.build(first)
        clock.mark("graphs")
        upload.finish()
    driver.synchronize(stream)
    clock.mark("upload")
    core = GpuCore(checked, device, memory, pool, stream, releases, clock.seconds())
    pool.build_later(later)
    return core


class _Upload:
    """Fills a core's memory in a thread of its own. Left early, it stops; when it is left, its buffers are freed."""

    def __init__(self, checked: CheckedCore, memory: CoreMemory, device: GpuDevice, threads: int,
                 on_bytes: Callable[[int], None] | None) -> None:
        self._releases, self._device = Releases(), device
        driver = device.driver
        self._stream: Stream = driver.create_stream()
        self._releases.add(lambda: driver.destroy_stream(self._stream))
        self._error: BaseException | None = None
        try:
            staging = Staging(device, self._stream, staging_buffers(checked, threads), self._releases)
        except BaseException:
            self._releases.close()
            raise
        self._staging = staging

        def work() -> None:
            try:
                fill(checked, memory, staging, device, self._stream, threads=threads, on_bytes=on_bytes)
            except BaseException as err:
                self._error = err

        self._thread = threading.Thread(target=work, name="dflash-upload", daemon=True)

    def __enter__(self) -> _Upload:
        self._thread.start()
        return self

    def finish(self) -> None:
        """Wait until every byte has verified and arrived; raises what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._device.driver.synchronize(self._stream)

    def __exit__(self, *_: object) -> None:
        self._staging.cancel()
        self._thread.join()
        self._releases.add(lambda: self._device.driver.synchronize(self._stream))
        self._releases.close()
