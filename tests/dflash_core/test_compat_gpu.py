"""Which GPU runs which core: the architecture rule, and each requirement as a row with both sides of the comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dflash_core.compat import Device, memory_bytes, requirements, runs_on, select_target, unmet
from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2 as pb
from dflash_core.v1.manifest_pb2 import Parallelism, RebuildManifest

H200 = Device("sm_90", 13000, 1 << 37, (9, 0), 132, 232_448, frozenset({"tma", "cluster", "pdl", "vmm"}))


def device(major: int, minor: int) -> Device:
    return replace(H200, name=f"sm_{major}{minor}", compute_capability=(major, minor))


@pytest.mark.parametrize(
    ("target", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 3), False),
        ("sm_100a", (9, 0), False),
        ("sm_100f", (10, 0), True),
        ("sm_100f", (10, 3), True),
        ("sm_103f", (10, 0), False),
        ("sm_100f", (12, 0), False),
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_89", (8, 6), False),
        ("sm_80", (9, 0), False),
        ("sm_80+ptx", (9, 0), True),
        ("sm_80+ptx", (12, 1), True),
        ("sm_80+ptx", (7, 5), False),
        ("sm_90a+ptx", (10, 0), False),
        ("sm_90x", (9, 0), False),
        ("sm_9", (9, 0), False),
        ("cpu", (9, 0), False),
        ("", (9, 0), False),
    ],
)
def test_target_runs_on_capability(target: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(target, device(*capability)) is runs


def test_cpu_runs_only_the_target_of_its_name() -> None:
    cpu = Device("cpu", None, 0)

    assert [runs_on(name, cpu) for name in ("cpu", "sm_90a", "sm_80+ptx")] == [True, False, False]


def gpu_manifest(**target: Any) -> RebuildManifest:
    """A core for the CPU and for sm_90a: 1,000 bytes for both, 24 for the GPU, and 10 for each of 2 pages or more."""
    return RebuildManifest(
        core_name="pair",
        symbols=[pb.Symbol(symbol_id=0, name="kv_pages", width=4, minimum=2, maximum=9, default_value=8)],
        buffers=[
            pb.Buffer(buffer_id=0, name="state", buffer_class=pb.STATE, fixed_bytes=1000),
            pb.Buffer(buffer_id=1, name="gpu", buffer_class=pb.SCRATCH, fixed_bytes=24, device_target=1),
            pb.Buffer(buffer_id=2, name="cpu", buffer_class=pb.SCRATCH, fixed_bytes=7777, device_target=0),
            pb.Buffer(buffer_id=3, name="kv", buffer_class=pb.KV_ARENA,
                      size_terms=[pb.SizeTerm(symbol_id=0, bytes=10)]),
        ],
        modules=[
            pb.KernelModule(module_id=0, kind=pb.CPU_REGISTRY, target="cpu"),
            pb.KernelModule(module_id=1, kind=pb.CUBIN, target="sm_90a", min_driver=12080),
            pb.KernelModule(module_id=2, kind=pb.CUBIN, target="sm_90a", min_driver=12000),
            pb.KernelModule(module_id=3, kind=pb.CUBIN, target="sm_100a", min_driver=99000),
        ],
        device_targets=[pb.DeviceTarget(target_id=0, name="cpu", module_ids=[0]),
                        pb.DeviceTarget(target_id=1, name="sm_90a", module_ids=[1, 2], **target)])


def test_first_fitting_target_is_taken() -> None:
    assert select_target(gpu_manifest(), H200).target_id == 1


def test_refuses_a_gpu_of_another_architecture_and_says_what_to_export() -> None:
    with pytest.raises(CompatibilityError) as refused:
        select_target(gpu_manifest(), device(10, 0))

    error = refused.value
    assert (error.code, error.expected, error.got, error.hint) == (
        "DEVICE_TARGET", "cpu, sm_90a", "sm_100", "export it with `--device cuda:sm_100`")


def test_memory_counts_the_buffers_of_the_target_alone() -> None:
    manifest = gpu_manifest()

    assert memory_bytes(manifest, {0: 2}, 1) == {"STATE": 1000, "SCRATCH": 24, "KV_ARENA": 20}
    assert memory_bytes(manifest, {0: 2}, 0) == {"STATE": 1000, "SCRATCH": 7777, "KV_ARENA": 20}
    assert memory_bytes(manifest, {0: 2}) == {"STATE": 1000, "SCRATCH": 7801, "KV_ARENA": 20}


def test_requirements_come_in_the_order_of_the_loader() -> None:
    manifest = gpu_manifest(exact_sm_count=132, min_sm_count=100, min_shared_optin_bytes=166_912,
                            device_features=["tma", "vmm"])
    manifest.modules[2].ptx_version = 88

    found = requirements(manifest, H200)

    assert [(r.name, r.expected, r.found, r.met) for r in found] == [
        ("ranks", "1", "1", True),
        ("driver", "at least 12080", "13000", True),
        ("ptx_version", "a driver for PTX 8.8, 12090", "13000", True),
        ("sm_count", "exactly 132", "132", True),
        ("sm_count", "at least 100", "132", True),
        ("shared_memory", "at least 166912 bytes a block", "232448 bytes", True),
        ("device_feature", "tma", "cluster, pdl, tma, vmm", True),
        ("device_feature", "vmm", "cluster, pdl, tma, vmm", True),
        ("memory", "at least 1044 bytes free", "137438953472 bytes", True),
    ]


UNMET = [
    pytest.param({}, replace(H200, driver=12079), [("driver", "at least 12080", "12079")], id="driver"),
    pytest.param({}, replace(H200, driver=12080), [], id="driver just new enough"),
    pytest.param({"exact_sm_count": 132}, replace(H200, sm_count=131), [("sm_count", "exactly 132", "131")],
                 id="fewer SMs than the grid was sized to"),
    pytest.param({"exact_sm_count": 132}, replace(H200, sm_count=144), [("sm_count", "exactly 132", "144")],
                 id="more SMs than the grid was sized to"),
    pytest.param({"min_sm_count": 100}, replace(H200, sm_count=60, partition=True),
                 [("sm_count", "at least 100", "60 of a MIG partition")], id="MIG partition too small"),
    pytest.param({"min_shared_optin_bytes": 232_449}, H200,
                 [("shared_memory", "at least 232449 bytes a block", "232448 bytes")], id="shared memory"),
    pytest.param({"device_features": ["tma", "conditional"]}, H200,
                 [("device_feature", "conditional", "cluster, pdl, tma, vmm")], id="feature"),
    pytest.param({"device_features": ["telepathy"]}, replace(H200, features=frozenset()),
                 [("device_feature", "telepathy", "none")], id="unknown feature"),
    pytest.param({}, replace(H200, free_bytes=1043), [("memory", "at least 1044 bytes free", "1043 bytes")],
                 id="one byte too little memory"),
    pytest.param({}, replace(H200, free_bytes=1044), [], id="memory to the byte"),
]


@pytest.mark.parametrize(("target", "machine", "expected"), UNMET)
def test_unmet_requirement_names_both_sides(
    target: dict[str, Any], machine: Device, expected: list[tuple[str, str, str]]
) -> None:
    found = unmet(requirements(gpu_manifest(**target), machine))

    assert [(r.name, r.expected, r.found) for r in found] == expected


@pytest.mark.parametrize(
    ("version", "driver", "met"), [(88, 12080, False), (88, 12090, True), (90, 12090, False), (99, 99999, False)]
)
def test_ptx_needs_a_driver_that_knows_its_version(version: int, driver: int, met: bool) -> None:
    manifest = gpu_manifest()
    manifest.modules[1].ptx_version = version

    found = requirements(manifest, replace(H200, driver=driver))

    assert [r.met for r in found if r.name == "ptx_version"] == [met]


def test_core_of_two_ranks_does_not_run_on_one_gpu() -> None:
    manifest = gpu_manifest()
    manifest.parallelism.CopyFrom(Parallelism(world_size=2))

    assert [(r.name, r.expected, r.found) for r in unmet(requirements(manifest, H200))] == [("ranks", "1", "2")]


def test_module_of_another_target_asks_nothing() -> None:
    manifest = gpu_manifest()
    manifest.modules[3].ptx_version = 99

    assert unmet(requirements(manifest, H200)) == ()
