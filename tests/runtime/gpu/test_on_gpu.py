"""The toy core on a real GPU: Triton's cubins, loaded and launched without torch, compared with what it must say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.driver import address_of, pointer_array
from runtime.engine import Engine, Request
from runtime.gpu.device import open_device
from runtime.trust import TrustPolicy
from tests.runtime.gpu.toy import PAGES, PARAMS, make_gpu_core, next_tokens

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def cubins() -> dict[str, bytes]:
    from tests.runtime.gpu.toy_kernels import KERNELS, compile_kernel

    return {name: compile_kernel(name).asm["cubin"] for name in KERNELS}


@pytest.fixture
def core_path(tmp_path: Path, cubins: dict[str, bytes]) -> Path:
    return make_gpu_core(tmp_path / "core", modules={name: cubins[name] for name in PARAMS}).path


def free_bytes() -> int:
    device = open_device("cuda")
    free = device.driver.memory_info()[0]
    device.close()
    return free


@pytest.mark.parametrize("speculation", [True, False])
def test_toy_continues_a_prompt(core_path: Path, trust: TrustPolicy, speculation: bool) -> None:
    with runtime.load(core_path, trust=trust, device="cuda") as core:
        request = Request(max_tokens=20, speculation=speculation)
        completions = [Engine(core).generate([1, 2, 3, 4, 9], request).tokens for _ in range(3)]

        assert completions == [tuple(next_tokens(9, 20))] * 3
        assert core.get("pages_seen", 0, 1) == [PAGES if speculation else completions[0][-1]]


def test_two_cores_run_side_by_side(core_path: Path, trust: TrustPolicy) -> None:
    with (runtime.load(core_path, trust=trust, device="cuda") as one,
          runtime.load(core_path, trust=trust, device="cuda:0") as two):
        first, second = Engine(one), Engine(two)

        assert first.generate([7], Request(max_tokens=5)).tokens == tuple(next_tokens(7, 5))
        assert second.generate([8], Request(max_tokens=5)).tokens == tuple(next_tokens(8, 5))


def test_device_memory_is_equal_after_fifty_cycles(core_path: Path, trust: TrustPolicy) -> None:
    holder = open_device("cuda")  # keeps the context, whose own memory is not the core's
    try:
        runtime.load(core_path, trust=trust, device="cuda").close()
        before = free_bytes()
        for _ in range(50):
            runtime.load(core_path, trust=trust, device="cuda").close()

        assert free_bytes() == before
    finally:
        holder.close()


FAULT = """
import pathlib, sys
import runtime
from dflash_core.errors import DflashError
from runtime.engine import Engine, Request

trust = runtime.TrustPolicy.load(pathlib.Path(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        with runtime.load(pathlib.Path(path), trust=trust, device="cuda") as core:
            Engine(core).generate([1], Request(max_tokens=4, speculation=False))
    except DflashError as err:
        print(type(err).__name__, err.code, err.hint)
"""


def test_faulting_kernel_is_a_typed_error_twice_and_the_next_process_is_sound(
    tmp_path: Path, core_path: Path, trust: TrustPolicy, cubins: dict[str, bytes]
) -> None:
    """The poisoned core's decode kernel writes far outside everything. The driver gives that process no new context,
    so a core that is loaded after it in the same process is refused, and told why."""
    def poison(manifest: Any, graphs: Any) -> None:
        manifest.kernels[list(PARAMS).index("toy_decode")].variants[0].symbol = "toy_fault"

    modules = {name: cubins["toy_fault" if name == "toy_decode" else name] for name in PARAMS}
    poisoned = make_gpu_core(tmp_path / "poisoned", modules=modules, edit=poison)

    arguments = [str(tmp_path / "trust.json"), str(poisoned.path), str(core_path)]
    done = subprocess.run([sys.executable, "-c", FAULT, *arguments], capture_output=True, text=True, timeout=120,
                          check=False)

    hint = "the GPU is lost to this process: start it again, and report the core whose kernel faulted"
    assert done.stdout.splitlines() == [f"DriverError CUDA_ERROR_ILLEGAL_ADDRESS {hint}"] * 2, done.stderr
    with runtime.load(core_path, trust=trust, device="cuda") as core:
        assert Engine(core).generate([1], Request(max_tokens=4)).tokens == tuple(next_tokens(1, 4))


def test_driver_graph_is_the_recorded_one(core_path: Path, trust: TrustPolicy) -> None:
    with runtime.load(core_path, trust=trust, device="cuda") as core:
        core.graph("decode", 2)
        recorded = next(g for g in core._recorded if g.name == "decode.b1")
        built = core._pool.builder.build(recorded)
        try:
            read = core._driver.read_graph(built)
            kernel = core._driver.read_kernel(read.nodes[1][0])
        finally:
            core._driver.destroy_graph(built)

    assert [kind for _, kind in read.nodes] == ["MEMSET", "KERNEL", "MEMCPY", "EMPTY"]
    assert len(read.edges) == 3
    assert (kernel.grid, kernel.block, kernel.shared_bytes) == ((1, 1, 1), (32, 1, 1), 0)


def test_copies_fills_and_events_do_what_they_say() -> None:
    device = open_device("cuda")
    driver = device.driver
    stream, start, end = driver.create_stream(), driver.create_event(timing=True), driver.create_event(timing=True)
    memory = driver.allocate(1024)
    found = pointer_array([0] * 64)
    try:
        driver.record(start, stream)
        driver.fill(memory, 0xAB, 512, stream)
        driver.copy(memory + 512, memory, 512, stream)
        driver.copy_out(address_of(found), memory + 512, 512, stream)
        driver.record(end, stream)
        driver.wait(end)

        assert driver.reached(end)
        assert found.tolist() == [0xABABABABABABABAB] * 64
        assert driver.elapsed_ms(start, end) > 0
    finally:
        driver.free(memory)
        driver.destroy_event(start)
        driver.destroy_event(end)
        driver.destroy_stream(stream)
        device.close()
