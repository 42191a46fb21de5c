"""Load signed cores and run them; no torch.

    from pathlib import Path
    import runtime

    trust = runtime.TrustPolicy.load(Path("trust.json"))
    with runtime.load(Path("core"), trust=trust) as core:
        engine = runtime.Engine(core)
        result = engine.generate([1, 2, 3], runtime.Request(max_tokens=32))

Importing this package is cheap: numpy is imported when a core is loaded, and never on the way to a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.trust import TrustPolicy
from runtime.verify import VerifiedCore, verify

if TYPE_CHECKING:
    from runtime.core import Core
    from runtime.engine import Engine, Request
    from runtime.run import LoadedCore

__all__ = ["Engine", "LoadedCore", "Request", "TrustPolicy", "VerifiedCore", "load", "verify"]


def load(path: Path, *, trust: TrustPolicy, device: str = "cpu", threads: int | None = None,
         on_bytes: Callable[[int], None] | None = None) -> Core:
    """Load a core: verify it, check it against the device, fill its memory, bind its graphs.

    Args:
        path: the core's directory.
        trust: whose signatures are accepted.
        device: "cpu"; "cuda" for the first visible GPU, "cuda:1" for the second.
        threads: threads that read and hash the weights; None: 2 for a CPU, one per processor for a GPU, at most 16.
        on_bytes: told the size of each verified chunk of weights.
    Returns:
        The core, ready to run. Nothing has run yet.
    Raises:
        PolicyError, VerificationError: it is not what trusted signers have signed.
        FormatError, CompatibilityError: it breaks a rule, or does not fit this runtime or device.
        ResourceError: it does not fit in memory.
        DriverError: the GPU's driver is missing or refuses a call; `code` is CUDA's name for it.
    """
    if device.startswith("cuda"):
        from runtime.gpu.loader import load_on_gpu

        return load_on_gpu(path, trust, device, threads=threads, on_bytes=on_bytes)
    from runtime.check import check, query_device
    from runtime.instantiate import instantiate
    from runtime.mapping import map_sections

    verified = verify(path, trust)
    try:
        checked = check(verified, query_device(device))
        return instantiate(map_sections(checked, threads=threads or 2, on_bytes=on_bytes))
    except BaseException:
        verified.close()
        raise


def __getattr__(name: str) -> Any:
    if name in ("Engine", "Request"):
        import runtime.engine

        return getattr(runtime.engine, name)
    if name == "LoadedCore":
        from runtime.run import LoadedCore

        return LoadedCore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
