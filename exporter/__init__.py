"""Turn a model and its draft into a signed core.

    from exporter import ExportRequest, export

    export(ExportRequest(target=Path("SmolLM2-135M-Instruct"), draft=Path("draft"), out=Path("core")), key)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exporter.export import ExportRequest, SignedCore, export

__version__ = "0.1.0"
__all__ = ["ExportRequest", "SignedCore", "export"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import exporter.export

        return getattr(exporter.export, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
