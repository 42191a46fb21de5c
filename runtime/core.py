"""What the engine and its users see of a loaded core, whatever memory and device are behind it.

    core.put("slots", 0, [0])
    core.graph("decode", 1).run()
    token = core.get("sampled", 0, 1)[0]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.verify import VerifiedCore


class Graph(Protocol):
    """A launchable graph."""

    def run(self) -> None:
        """Launch; `Core.get` waits for it where it must."""


class Core(Protocol):
    """A core in the memory of a device. Close it, or use it as a context manager.

    Attributes:
        manifest: parsed from verified bytes.
        core_digest: SHA-256 of manifest.pb in hex.
        symbols: name -> value at load.
    """

    manifest: RebuildManifest
    core_digest: str

    @property
    def symbols(self) -> Mapping[str, int]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None: ...

    def close(self) -> None: ...

    def put(self, name: str, offset: int, values: Sequence[int] | Sequence[float]) -> None:
        """Write consecutive elements of a binding, counted from its first; the next launch sees them."""

    def get(self, name: str, offset: int, count: int) -> list[Any]:
        """Read consecutive elements of a binding, as the launches so far left them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a binding; KeyError when the core has none of that name."""

    def file(self, path: str) -> bytes | None:
        """The bytes of a model file that the core carries as published ("tokenizer.json"), or None."""

    def graph(self, role: str, batch: int) -> Graph:
        """The smallest graph of this role that serves a batch. Raises CompatibilityError NO_GRAPH."""


def carried_file(verified: VerifiedCore, path: str) -> bytes | None:
    """The bytes of a target's file that a core carries as published, or None."""
    for source in verified.manifest.target.files:
        if source.path == path:
            entry = f"config/{source.sha256.hex()}"
            for listed in verified.manifest.files:
                if listed.path == entry:
                    return verified.small_file(listed.ref)
    return None
