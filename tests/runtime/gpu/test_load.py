"""Loading onto a GPU: what is checked before anything is reserved, what is refused, and that nothing stays behind."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import (
    CompatibilityError,
    DflashError,
    DriverError,
    FormatError,
    ResourceError,
    VerificationError,
)
from dflash_core.v1 import graph_pb2 as g

import runtime
from runtime.engine import Engine, Request
from runtime.gpu.device import Releases
from runtime.gpu.graphs import load_order
from tests.runtime.gpu.fake_driver import FakeDriver, FakeKernel, Result
from tests.runtime.gpu.toy import IDS, PARAMS, STEP, fake_kernels, make_gpu_core, next_tokens
from tests.runtime.test_kernel_image import cubin
from tests.toy_core import CHUNK

ROOT = Path(__file__).resolve().parents[3]


def first(calls: list[str], *names: str) -> list[int]:
    return [calls.index(name) for name in names]


def test_checks_come_before_memory_and_memory_before_graphs(load: Any, fake: FakeDriver) -> None:
    load()

    order = first(fake.calls, "cuDriverGetVersion", "cuInit", "cuDevicePrimaryCtxRetain", "cuMemGetInfo",
                  "cuLibraryLoadData", "cuFuncGetParamInfo", "cuMemAlloc", "cuGraphCreate", "cuGraphInstantiate",
                  "cuGraphUpload")
    assert order == sorted(order)
    assert "cuGraphLaunch" not in fake.calls
    assert fake.calls.count("cuMemAlloc") == 1


def test_every_buffer_starts_as_recorded(load: Any, fake: FakeDriver) -> None:
    core = load()
    at = {name: core._memory.buffers[IDS[name]] for name in IDS}

    assert fake.read(at["weights"], 8) == struct.pack("<2i", STEP, 0)
    assert fake.read(at["weights"] + 2 * CHUNK, 1024) == bytes(1024)
    assert fake.read(at["length"], 8) == bytes(8)
    assert fake.read(at["anchor"], 8) == struct.pack("<2i", 0, 7)
    assert fake.read(at["table"], 16) == struct.pack("<2Q", 0, at["kv"] + 512)
    assert [fake.read(at[n], 4) for n in ("slots", "sampled", "pages_seen")] == [bytes(4)] * 3
    assert all(address % 256 == 0 for address in at.values())


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_staging_buffer_is_filled_again_only_after_its_copy(load: Any, fake: FakeDriver, threads: int) -> None:
    """The fake copies when it is waited for, so a buffer that is overwritten early sends the wrong bytes."""
    told: list[int] = []
    core = load(threads=threads, on_bytes=told.append)

    weights = fake.read(core._memory.buffers[IDS["weights"]], 2 * CHUNK + 1024)
    assert weights == struct.pack("<i", STEP) + bytes(2 * CHUNK + 1020)
    assert sorted(told) == [1024, CHUNK, CHUNK]


def test_more_chunks_than_staging_buffers_arrive_in_place(tmp_path: Path, load: Any, fake: FakeDriver) -> None:
    """Ten chunks, each full of its own number, through six buffers."""
    weights = b"".join(bytes([index]) * CHUNK for index in range(10))
    core = make_gpu_core(tmp_path / "large", weights=weights)

    loaded = load(path=core.path, threads=2)

    assert fake.read(loaded._memory.buffers[IDS["weights"]], 10 * CHUNK) == weights


def test_graphs_of_every_role_are_built_first_and_the_rest_later() -> None:
    graphs = [g.Graph(name=n, role=n.split(".")[0], load_priority=p) for n, p in
              (("decode.b2", 4), ("prefill", 0), ("decode.b1", 3), ("verify", 2))] + [g.Graph(name="late", role="late")]

    now, later = load_order(graphs)

    assert [[graph.name for graph in part] for part in (now, later)] == [
        ["prefill", "verify", "decode.b1", "late"], ["decode.b2"]]


def test_graph_that_is_still_being_built_is_waited_for(load: Any, fake: FakeDriver) -> None:
    core = load()

    assert core.graph("decode", 2).name == "decode.b2"
    assert core.graph("decode", 1).name == "decode.b1"


def test_graph_that_could_not_be_built_is_refused_when_it_is_asked_for(load: Any, fake: FakeDriver) -> None:
    fake.fail("cuGraphInstantiate", Result.CUDA_ERROR_OUT_OF_MEMORY, at=4)
    core = load()

    with pytest.raises(DriverError) as refused:
        core.graph("decode", 2)

    assert (refused.value.code, refused.value.where) == (
        "CUDA_ERROR_OUT_OF_MEMORY", "cuGraphInstantiate graph decode.b2")
    assert Engine(core).generate([1], Request(max_tokens=3)).tokens == tuple(next_tokens(1, 3))


def test_driver_that_drops_an_edge_is_noticed(load: Any, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.driver.Driver.add_edges", lambda *_: None)

    with pytest.raises(DriverError) as refused:
        load()

    assert (refused.value.code, refused.value.expected, refused.value.got) == (
        "GRAPH_READBACK", "2 nodes, 1 edges", "2 nodes, 0 edges")


# Refusals: (arrange, error, code, expected, got). Nothing of the core is reserved, and nothing stays taken.

Arrange = Callable[[FakeDriver], object]


def device(**fields: Any) -> Arrange:
    def arrange(fake: FakeDriver) -> None:
        for name, value in fields.items():
            if name in fake.attributes:
                fake.attributes[name] = value
            else:
                setattr(fake, name, value)
    return arrange


def kernels(**changed: FakeKernel) -> Arrange:
    return lambda fake: setattr(fake, "kernels", fake_kernels(**changed))


def failing(call: str, result: Result) -> Arrange:
    return lambda fake: fake.fail(call, result)


DECODE = tuple(4 if name == "vocab" else 8 for name in (*PARAMS["toy_decode"], "scratch", "scratch"))
REFUSED = [
    pytest.param(device(missing_library=True), DriverError, "DRIVER_MISSING", None, None, id="no driver library"),
    pytest.param(device(devices=0), DriverError, "CUDA_ERROR_NO_DEVICE", None, None, id="no device"),
    pytest.param(device(driver_version=12000), DriverError, "DRIVER_OLD", "at least 12040", "12000",
                 id="driver too old for the runtime"),
    pytest.param(device(COMPUTE_CAPABILITY_MAJOR=10), CompatibilityError, "DEVICE_TARGET", "sm_90a", "sm_100",
                 id="compute capability"),
    pytest.param(device(COMPUTE_MODE=2), CompatibilityError, "COMPUTE_MODE", "default", "prohibited",
                 id="compute mode prohibited"),
    pytest.param(device(total_bytes=8_000_000), ResourceError, "MEMORY", "at least 8391184 bytes free",
                 "8000000 bytes", id="too little memory"),
    pytest.param(failing("cuDevicePrimaryCtxRetain", Result.CUDA_ERROR_OUT_OF_MEMORY), DriverError,
                 "CUDA_ERROR_OUT_OF_MEMORY", None, None, id="no context"),
    pytest.param(failing("cuLibraryLoadData", Result.CUDA_ERROR_NO_BINARY_FOR_GPU), DriverError,
                 "CUDA_ERROR_NO_BINARY_FOR_GPU", None, None, id="driver refuses the cubin"),
    pytest.param(lambda fake: setattr(fake, "kernels", fake_kernels()[:-1]), FormatError, "KERNEL_SYMBOL", None, None,
                 id="symbol missing"),
    pytest.param(kernels(toy_decode=FakeKernel("toy_decode", DECODE[:-1])), FormatError, "KERNEL_PARAMS",
                 "9 of 8, 8, 8, 8, 8, 8, 4, 8, 8 bytes", "8 of 8, 8, 8, 8, 8, 8, 4, 8 bytes", id="a parameter less"),
    pytest.param(kernels(toy_decode=FakeKernel("toy_decode", (*DECODE[:6], 8, 8, 8))), FormatError, "KERNEL_PARAMS",
                 "9 of 8, 8, 8, 8, 8, 8, 4, 8, 8 bytes", "9 of 8, 8, 8, 8, 8, 8, 8, 8, 8 bytes",
                 id="parameter of another size"),
    pytest.param(kernels(toy_decode=FakeKernel("toy_decode", DECODE, max_threads=16)), CompatibilityError,
                 "KERNEL_LIMIT", "at most 16", "32", id="too many threads"),
    pytest.param(kernels(toy_decode=FakeKernel("toy_decode", DECODE, static_shared=232_449)), CompatibilityError,
                 "KERNEL_LIMIT", "at most 232448 bytes", "232449 + 0", id="too much shared memory"),
]


@pytest.mark.parametrize(("arrange", "error", "code", "expected", "got"), REFUSED)
def test_refuses_before_anything_is_reserved(
    load: Any, fake: FakeDriver, arrange: Arrange, error: type[DflashError], code: str, expected: str | None,
    got: str | None
) -> None:
    arrange(fake)

    with pytest.raises(DflashError) as refused:
        load()

    found = refused.value
    assert (type(found), found.code, found.expected, found.got) == (error, code, expected, got)
    assert not {"cuMemAlloc", "cuMemHostAlloc", "cuGraphCreate", "cuGraphLaunch"} & set(fake.calls)
    assert fake.held == {}


def in_manifest(edit: Callable[[Any], object]) -> Callable[[Any, Any], object]:
    return lambda manifest, graphs: edit(manifest)


def in_decode(edit: Callable[[g.GraphNode], object]) -> Callable[[Any, Any], object]:
    return lambda manifest, graphs: edit(next(x for x in graphs.graphs if x.name == "decode.b1").nodes[1])


def decode_kernel(manifest: Any) -> Any:
    return manifest.kernels[list(PARAMS).index("toy_decode")].variants[0]


RECORDS = [
    pytest.param(in_manifest(lambda m: setattr(m.modules[0], "min_driver", 13010)), "DRIVER", "at least 13010", "13000",
                 id="driver too old for a module"),
    pytest.param(in_manifest(lambda m: setattr(m.device_targets[0], "exact_sm_count", 114)), "SM_COUNT", "exactly 114",
                 "132", id="SM count"),
    pytest.param(in_manifest(lambda m: setattr(m.device_targets[0], "min_shared_optin_bytes", 300_000)),
                 "SHARED_MEMORY", "at least 300000 bytes a block", "232448 bytes", id="opt-in shared memory"),
    pytest.param(in_manifest(lambda m: m.device_targets[0].device_features.append("peer")), "DEVICE_FEATURE", "peer",
                 "cluster, conditional, pdl, tma, vmm", id="device feature"),
    pytest.param(in_manifest(lambda m: setattr(decode_kernel(m), "local_bytes", 64)), "KERNEL_RECORD", "64", "0",
                 id="local memory"),
    pytest.param(in_manifest(lambda m: setattr(decode_kernel(m), "static_shared_bytes", 8)), "KERNEL_RECORD", "8", "0",
                 id="static shared memory"),
    pytest.param(in_manifest(lambda m: decode_kernel(m).required_cluster.CopyFrom(g.Dim3(x=2, y=1, z=1))),
                 "FEATURE_UNSUPPORTED", None, None, id="kernel with a cluster"),
    pytest.param(in_decode(lambda n: n.cluster.CopyFrom(g.Dim3(x=2, y=1, z=1))), "FEATURE_UNSUPPORTED", None, None,
                 id="node with a cluster"),
    pytest.param(in_decode(lambda n: n.attributes.add(id=4, value=1)), "FEATURE_UNSUPPORTED", None, None,
                 id="launch attribute"),
    pytest.param(in_decode(lambda n: setattr(n, "dynamic_shared_bytes", 240_000)), "KERNEL_LIMIT",
                 "at most 232448 bytes", "0 + 240000", id="dynamic shared memory"),
]


@pytest.mark.parametrize(("edit", "code", "expected", "got"), RECORDS)
def test_refuses_a_core_whose_record_does_not_fit_this_device(
    tmp_path: Path, load: Any, fake: FakeDriver, edit: Any, code: str, expected: str | None, got: str | None
) -> None:
    core = make_gpu_core(tmp_path / "other", edit=edit)

    with pytest.raises(DflashError) as refused:
        load(path=core.path)

    assert (refused.value.code, refused.value.expected, refused.value.got) == (code, expected, got)
    assert "cuMemAlloc" not in fake.calls
    assert fake.held == {}


def test_refuses_a_cubin_of_another_architecture_before_the_driver_is_opened(
    tmp_path: Path, load: Any, fake: FakeDriver
) -> None:
    other = cubin(flags=0x640D64, names=tuple(PARAMS))
    core = make_gpu_core(tmp_path / "other", modules=dict.fromkeys(PARAMS, other))

    with pytest.raises(FormatError) as refused:
        load(path=core.path)

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("KERNEL_IMAGE", "sm_90a", "sm_100a")
    assert fake.calls == []


def test_mig_slice_is_named_when_it_is_too_small(tmp_path: Path, load: Any, fake: FakeDriver) -> None:
    core = make_gpu_core(tmp_path / "other",
                         edit=in_manifest(lambda m: setattr(m.device_targets[0], "exact_sm_count", 132)))
    fake.name, fake.attributes["MULTIPROCESSOR_COUNT"] = "NVIDIA H200 MIG 1g.18gb", 16

    with pytest.raises(CompatibilityError) as refused:
        load(path=core.path)

    assert (refused.value.code, refused.value.expected, refused.value.got) == (
        "SM_COUNT", "exactly 132", "16 of a MIG partition")


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", "cuda:0 to cuda:0"), ("cuda:x", "cuda or cuda:N"),
                                                ("cudagpu", "cuda or cuda:N")])
def test_refuses_a_device_that_is_not_there(load: Any, fake: FakeDriver, name: str, expected: str) -> None:
    with pytest.raises(CompatibilityError) as refused:
        load(name)

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("DEVICE_UNKNOWN", expected, name)
    assert fake.held == {}


CALLS = ("cuCtxSetCurrent", "cuMemGetInfo", "cuStreamCreate", "cuMemAlloc", "cuMemHostAlloc",
         "cuMemHostGetDevicePointer", "cuEventCreate", "cuMemsetD8Async", "cuMemcpyHtoDAsync", "cuEventRecord",
         "cuEventSynchronize", "cuGraphCreate", "cuGraphAddMemsetNode", "cuGraphAddKernelNode",
         "cuGraphAddDependencies", "cuGraphGetNodes", "cuGraphInstantiate", "cuGraphUpload", "cuStreamSynchronize",
         "cuKernelGetFunction", "cuFuncGetAttribute", "cuDeviceGetAttribute")


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_any_call_may_fail_and_nothing_stays_behind(
    toy: Any, trust: Any, fake: FakeDriver, call: str, at: int
) -> None:
    """Freeing goes on after the failure: only the named call fails, from then on."""
    fake.fail(call, Result.CUDA_ERROR_OUT_OF_MEMORY, at)
    before = threading.active_count()

    try:
        runtime.load(toy.path, trust=trust, device="cuda").close()
    except DriverError as err:
        assert err.code == "CUDA_ERROR_OUT_OF_MEMORY"

    assert fake.held == {}
    assert threading.active_count() == before


def test_weights_that_were_not_signed_are_never_followed_by_a_launch(toy: Any, trust: Any, fake: FakeDriver) -> None:
    path = toy.path / toy.big
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with pytest.raises(VerificationError) as refused:
        runtime.load(toy.path, trust=trust, device="cuda")

    assert refused.value.code == "CHUNK_MISMATCH"
    assert "cuGraphLaunch" not in fake.calls
    assert fake.held == {}


def test_device_memory_is_equal_after_fifty_cycles(toy: Any, trust: Any, fake: FakeDriver) -> None:
    for _ in range(50):
        with runtime.load(toy.path, trust=trust, device="cuda", threads=1) as core:
            assert fake.held["contexts"] == 1
            core.graph("decode", 2)
        assert fake.held == {}


def test_several_cores_share_a_process(load: Any, fake: FakeDriver) -> None:
    one, two = load(), load()

    assert fake.held["contexts"] == 2
    assert Engine(one).generate([1], Request(max_tokens=3)).tokens == tuple(next_tokens(1, 3))
    one.close()
    assert Engine(two).generate([2], Request(max_tokens=3)).tokens == tuple(next_tokens(2, 3))


@pytest.mark.parametrize("base", [0x7F00_0000_0000, 0x0000_0001_0000, 0x7FFF_F000_0000])
def test_core_runs_at_any_address(load: Any, fake: FakeDriver, base: int) -> None:
    fake._next = base

    assert Engine(load()).generate([3, 5], Request(max_tokens=7)).tokens == tuple(next_tokens(5, 7))


def test_phases_add_up_to_the_total(load: Any) -> None:
    phases = load().phases

    assert list(phases) == ["import", "verify", "context", "modules", "memory", "graphs", "upload", "total"]
    assert sum(phases.values()) == pytest.approx(2 * phases["total"])
    assert min(phases.values()) >= 0


def test_releases_go_on_after_one_that_fails_last_taken_first() -> None:
    done: list[str] = []
    releases = Releases()

    def refuse() -> None:
        raise DriverError("CUDA_ERROR_INVALID_VALUE", "no")

    for release in (lambda: done.append("first"), refuse, lambda: done.append("last")):
        releases.add(release)

    assert [err.code for err in releases.close()] == ["CUDA_ERROR_INVALID_VALUE"]  # type: ignore[attr-defined]
    assert done == ["last", "first"]
    assert releases.close() == ()


FRESH = """
import json, sys
from pathlib import Path
import runtime, runtime.driver
from runtime.engine import Engine, Request
from tests.runtime.gpu.fake_driver import FakeDriver
import types
core, trust, symbols = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
before = set(sys.modules)
from tests.runtime.gpu.fake_driver import FakeKernel
fake = FakeDriver(kernels=[FakeKernel(name, tuple(sizes)) for name, sizes in symbols.items()])
runtime.driver.bindings = lambda: fake
import runtime.gpu.loader
runtime.gpu.loader.bindings = lambda: fake
with runtime.load(core, trust=runtime.TrustPolicy.load(trust), device="cuda") as loaded:
    Engine(loaded)
    loaded.graph("decode", 1).run()
    loaded.get("sampled", 0, 1)
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules} | {n for n in sys.modules if n == "cuda.core"})))
"""


def test_load_path_imports_neither_numpy_nor_rich_nor_torch(toy: Any, tmp_path: Path, trust: Any) -> None:
    sizes = {kernel.symbol: kernel.params for kernel in fake_kernels()}
    arguments = [str(toy.path), str(tmp_path / "trust.json"), json.dumps(sizes)]

    done = subprocess.run([sys.executable, "-c", FRESH, *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=False)

    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "runtime" in loaded
    assert loaded & {"numpy", "ml_dtypes", "rich", "torch", "triton", "cuda.core", "exporter", "typer"} == set()


def test_cubins_of_triton_are_loaded_with_the_parameters_they_were_compiled_with(
    tmp_path: Path, load: Any, fake: FakeDriver
) -> None:
    """Compiled here for sm_90a, without a GPU: the image rules accept them, and each holds its own kernel."""
    from tests.runtime.gpu.toy_kernels import compile_kernel

    compiled = {name: compile_kernel(name) for name in PARAMS}
    core = make_gpu_core(tmp_path / "real", modules={name: kernel.asm["cubin"] for name, kernel in compiled.items()})

    loaded = load(path=core.path)

    assert Engine(loaded).generate([1], Request(max_tokens=4)).tokens == tuple(next_tokens(1, 4))
    assert {kernel.metadata.num_warps for kernel in compiled.values()} == {1}
    assert fake.calls.count("cuLibraryLoadData") == 4


def test_core_that_is_closed_while_graphs_are_built_ends_the_building(
    tmp_path: Path, trust: Any, fake: FakeDriver
) -> None:
    def many(manifest: Any, graphs: Any) -> None:
        for index in range(400):
            graph = graphs.graphs.add()
            graph.CopyFrom(graphs.graphs[0])
            graph.name = f"decode.more{index}"

    core = make_gpu_core(tmp_path / "many", edit=many)
    before = threading.active_count()

    runtime.load(core.path, trust=trust, device="cuda").close()

    assert threading.active_count() == before
    assert fake.held == {}
    assert fake.calls.count("cuGraphInstantiate") < 404


def test_upload_stops_when_the_load_has_failed(tmp_path: Path, trust: Any, fake: FakeDriver) -> None:
    core = make_gpu_core(tmp_path / "large", weights=bytes(20 * CHUNK))
    fake.fail("cuGraphCreate", Result.CUDA_ERROR_OUT_OF_MEMORY)

    with pytest.raises(DriverError):
        runtime.load(core.path, trust=trust, device="cuda", threads=1)

    assert fake.calls.count("cuMemcpyHtoDAsync") < 20
    assert fake.held == {}
