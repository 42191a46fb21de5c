"""What a recorded precision means: the one rule that combine, weight reuse and inspect share.

A manifest records what was asked for, and a missing field keeps the meaning it had before the field existed. Two cores
can therefore record different things and run the same draft body. Comparisons go through here; recorded values are
never rewritten.

    >>> effective_draft_body(manifest)          # nothing recorded, but online MXFP8 covers scope "all"
    'mxfp8'
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from dflash_core.v1.manifest_pb2 import RebuildManifest

CHECKPOINT: Final = "checkpoint"
"""The tensors are stored as the checkpoint has them."""

ONLINE_MXFP8: Final = "mxfp8"
DFLASH2: Final = "dflash2"
SCOPE_ALL: Final = "all"


class NoDraft(Enum):
    """Its one member says that a core has no draft. It is no string, so no recorded value can equal it."""

    NO_DRAFT = "no draft"


class NoConversion(Enum):
    """Its one member says that no online conversion took place. It is no string either."""

    NO_CONVERSION = "no online conversion"


NO_DRAFT: Final = NoDraft.NO_DRAFT
NO_CONVERSION: Final = NoConversion.NO_CONVERSION


class Origin(Enum):
    """Where an effective value comes from. The value is the word that reports print."""

    FLAG = "flag"
    SCOPE = "implied by scope"
    CHECKPOINT = "checkpoint"
    DEFAULT = "default"


class Role(Enum):
    """The parts of a core whose precision is chosen on its own. The value is the word that reports print."""

    TARGET = "target inputs"
    DRAFT_BODY = "draft body"
    DRAFT_HEAD = "proposal head"
    VERIFY_HEAD = "verification head"


@dataclass(frozen=True, slots=True)
class Effective:
    """One role's precision.

    Attributes:
        role: the part of the core.
        recorded: what the manifest says, verbatim; None when it says nothing (or holds an empty string).
        value: what that means: a format, a scope, `CHECKPOINT`, `NO_DRAFT` or `NO_CONVERSION`.
        origin: what decided it.
    """

    role: Role
    recorded: str | None
    value: str | NoDraft | NoConversion
    origin: Origin

    @property
    def text(self) -> str:
        """The value as reports print it."""
        return self.value if isinstance(self.value, str) else str(self.value.value)


def effective_precision(manifest: RebuildManifest) -> tuple[Effective, ...]:
    """Every role's recorded and effective precision with its origin, in the order that reports show them."""
    return (
        _target(manifest),
        _draft_body(manifest),
        _draft_head(manifest),
        _verify_head(manifest),
    )


def effective_scope(manifest: RebuildManifest) -> str | NoConversion:
    """The scope of the target's online conversion; a scope that was never recorded means "all".

    A recorded scope that this release does not know is returned as it is. Without online conversion the scope is inert.
    """
    if not manifest.online_quantization:
        return NO_CONVERSION
    return manifest.online_mxfp8_scope or SCOPE_ALL


def effective_draft_body(manifest: RebuildManifest) -> str | NoDraft:
    """The format that a core's draft body runs in: the recorded one, known or not, else "mxfp8" or "checkpoint"."""
    value = _draft_body(manifest).value
    assert not isinstance(value, NoConversion)
    return value


def effective_draft_head(manifest: RebuildManifest) -> str | NoDraft:
    """The format of the head that proposes tokens; "checkpoint" when it is the target's own storage."""
    value = _draft_head(manifest).value
    assert not isinstance(value, NoConversion)
    return value


def effective_verify_head(manifest: RebuildManifest) -> str:
    """The format of the head that verifies tokens; "checkpoint" unless one is recorded."""
    return manifest.speculation.verify_head_precision or CHECKPOINT


def same_draft_body(left: RebuildManifest, right: RebuildManifest) -> bool:
    """Whether two cores, or a weight cache and a requested export, agree on the draft body.

    A side without a draft takes no part: it reads no draft weights, so it agrees with everything.
    """
    bodies = effective_draft_body(left), effective_draft_body(right)
    return NO_DRAFT in bodies or bodies[0] == bodies[1]


def has_draft(manifest: RebuildManifest) -> bool:
    """Whether the core speculates: it names a method, and a depth of at least one."""
    speculation = manifest.speculation
    return speculation.method not in ("", "none") and speculation.draft_depth > 0


def _target(manifest: RebuildManifest) -> Effective:
    scope = effective_scope(manifest)
    if isinstance(scope, NoConversion):
        return Effective(Role.TARGET, None, CHECKPOINT, Origin.CHECKPOINT)
    fmt = manifest.online_quantization
    if not manifest.online_mxfp8_scope:
        return Effective(Role.TARGET, fmt, f"{fmt}:{scope}", Origin.DEFAULT)
    return Effective(Role.TARGET, f"{fmt}:{scope}", f"{fmt}:{scope}", Origin.FLAG)


def _draft_body(manifest: RebuildManifest) -> Effective:
    recorded = manifest.speculation.draft_body_quantization or None
    if not has_draft(manifest):
        return Effective(Role.DRAFT_BODY, recorded, NO_DRAFT, Origin.DEFAULT)
    if recorded is not None:
        return Effective(Role.DRAFT_BODY, recorded, recorded, Origin.FLAG)
    inherits = manifest.speculation.method == DFLASH2 and manifest.online_quantization == ONLINE_MXFP8
    if inherits and effective_scope(manifest) == SCOPE_ALL:
        return Effective(Role.DRAFT_BODY, None, ONLINE_MXFP8, Origin.SCOPE)
    return Effective(Role.DRAFT_BODY, None, CHECKPOINT, Origin.CHECKPOINT)


def _draft_head(manifest: RebuildManifest) -> Effective:
    recorded = manifest.speculation.draft_head_quantization or None
    if not has_draft(manifest):
        return Effective(Role.DRAFT_HEAD, recorded, NO_DRAFT, Origin.DEFAULT)
    if recorded is not None:
        return Effective(Role.DRAFT_HEAD, recorded, recorded, Origin.FLAG)
    return Effective(Role.DRAFT_HEAD, None, CHECKPOINT, Origin.CHECKPOINT)


def _verify_head(manifest: RebuildManifest) -> Effective:
    recorded = manifest.speculation.verify_head_precision or None
    origin = Origin.CHECKPOINT if recorded is None else Origin.FLAG
    return Effective(Role.VERIFY_HEAD, recorded, effective_verify_head(manifest), origin)
