"""Precision as `inspect` shows it: what a core and each of its components recorded, beside what that means.

    for component in components_of(manifest):
        component.recorded["draft_body_quantization"], component.precision[1].effective

A core that inherited MXFP8 and one that asked for it combine, since both run the same draft. Their components still
tell them apart: recorded values are shown as they are, an empty one as empty and an absent one as None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_core.effective import effective_precision
from dflash_core.v1.manifest_pb2 import CoreComponent, RebuildManifest

_SPECULATION_SETTINGS = ("draft_body_quantization", "draft_head_quantization", "verify_head_precision")


@dataclass(frozen=True, slots=True)
class Precision:
    """What a role runs in, what is recorded about it (None: nothing), and what decided it."""

    role: str
    recorded: str | None
    effective: str
    origin: str


@dataclass(frozen=True, slots=True)
class Component:
    """One export that a combined core was made from.

    Attributes:
        component_id, core_name: how the combined core calls it.
        manifest: SHA-256 of its own manifest, in hex.
        graphs: names of the graphs that it brought.
        recorded: setting -> its recorded value, verbatim; None where the field is absent.
        precision: every role's effective value, and what decided it.
    """

    component_id: int
    core_name: str
    manifest: str
    graphs: Sequence[str]
    recorded: Mapping[str, str | None]
    precision: Sequence[Precision]


def precision_of(manifest: RebuildManifest) -> tuple[Precision, ...]:
    """Every role of a core, in the order that reports show them."""
    return tuple(
        Precision(item.role.value, item.recorded, item.text, item.origin.value)
        for item in effective_precision(manifest)
    )


def components_of(manifest: RebuildManifest) -> tuple[Component, ...]:
    """The components of a combined core; empty for a core that was exported."""
    return tuple(
        Component(part.component_id, part.core_name, part.manifest.digest.hex(), tuple(part.graph_names),
                  _recorded(part), precision_of(_as_manifest(part)))
        for part in manifest.components
    )


def _recorded(part: CoreComponent) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "online_quantization": part.recorded_online_quantization if part.HasField("recorded_online_quantization")
        else None,
        "online_mxfp8_scope": part.recorded_online_mxfp8_scope if part.HasField("recorded_online_mxfp8_scope")
        else None,
    }
    speculation = part.recorded_speculation
    for name in _SPECULATION_SETTINGS:
        found[name] = getattr(speculation, name) if speculation.HasField(name) else None
    return found


def _as_manifest(part: CoreComponent) -> RebuildManifest:
    """The recorded values where a manifest has them, so that one rule reads both."""
    manifest = RebuildManifest()
    if part.HasField("recorded_online_quantization"):
        manifest.online_quantization = part.recorded_online_quantization
    if part.HasField("recorded_online_mxfp8_scope"):
        manifest.online_mxfp8_scope = part.recorded_online_mxfp8_scope
    if part.HasField("recorded_speculation"):
        manifest.speculation.CopyFrom(part.recorded_speculation)
    return manifest
