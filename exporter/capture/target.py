"""What recording for a GPU gives; importing it needs no triton."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_core.v1 import graph_pb2 as pb


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What a GPU adds to a core.

    Attributes:
        name: device target and module architecture, such as "sm_90a".
        modules: cubins by module id.
        kernels: with one variant each.
        graphs: one per recorded CPU graph, of the same name.
        features: what the device must be capable of, in the manifest's words.
        shared_bytes: dynamic shared memory of the kernel that takes most.
        captured_on: name and driver version of the device whose captures agreed with the recording; None: no witness.
    """

    name: str
    modules: tuple[tuple[pb.KernelModule, bytes], ...]
    kernels: tuple[pb.Kernel, ...]
    graphs: tuple[pb.Graph, ...]
    features: tuple[str, ...]
    shared_bytes: int
    captured_on: tuple[str, int] | None = None
