"""What the engine and its users see of a loaded core, whatever memory and device are behind it.

    core.put("slots", 0, [0])
    core.graph("decode", 1).run()
    token = core.get("sampled", 0, 1)[0]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from dflash_core.errors import CompatibilityError
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

    def graph(self, role: str, batch: int, query_tokens: int = 1) -> Graph:
        """The smallest graph of this role that serves a batch of so many rows each. Raises CompatibilityError NO_GRAPH.

        Args:
            query_tokens: tokens of a prefill chunk or of a block; patches of an image. Matters where a role has graphs
                that differ in nothing else.
        """


class Bucket(Protocol):
    """What a graph serves."""

    @property
    def batch(self) -> int: ...

    @property
    def query_tokens(self) -> int: ...


B = TypeVar("B", bound=Bucket)


def smallest_bucket(buckets: Iterable[B], role: str, batch: int, query_tokens: int, core_name: str) -> B:
    """The smallest of a role's buckets that holds `batch` times `query_tokens` rows: fewest sequences first.

    Raises:
        CompatibilityError: NO_GRAPH; none does.
    """
    known = list(buckets)
    wide = [b for b in known if b.batch >= batch]
    if not wide:
        raise CompatibilityError("NO_GRAPH", f"the core has no {role} graph for this batch", where=core_name,
                                 expected=f"at most {max((b.batch for b in known), default=0)}", got=batch,
                                 hint="export it with larger batch buckets")
    fitting = [b for b in wide if b.query_tokens >= query_tokens]
    if not fitting:
        raise CompatibilityError("NO_GRAPH", f"the core has no {role} graph for this many rows", where=core_name,
                                 expected=f"at most {max(b.query_tokens for b in wide)}", got=query_tokens,
                                 hint="export it with larger buckets")
    return min(fitting, key=lambda b: (b.batch, b.query_tokens))


def carried_file(verified: VerifiedCore, path: str) -> bytes | None:
    """The bytes of a target's file that a core carries as published, or None."""
    for source in verified.manifest.target.files:
        if source.path == path:
            entry = f"config/{source.sha256.hex()}"
            for listed in verified.manifest.files:
                if listed.path == entry:
                    return verified.small_file(listed.ref)
    return None
