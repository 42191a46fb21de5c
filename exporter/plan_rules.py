"""Which precision settings go together, and what a core records about them.

    recorded = resolve(PrecisionSettings(draft_body="mxfp8"), load_recipe("llama"), draft_config)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from dflash_core.effective import DFLASH2, Origin
from dflash_core.effective import ONLINE_MXFP8 as MXFP8
from dflash_core.errors import PlanError

from exporter.recipe import DRAFT_BODY, DRAFT_HEAD, ONLINE_MXFP8, Recipe

BODY_FLAG, HEAD_FLAG, SCOPE_FLAG, DEPTH_FLAG = (
    "--draft-body-quantization", "--draft-head-quantization", "--online-mxfp8-scope", "--depth",
)  # fmt: skip
DEFAULT_SCOPE = "kda-input"
SCOPE_ALIASES = {"kda-input=full": "kda-input"}
_METHOD_REFUSALS = {
    "dspark": ("BODY_DSPARK", "a DSpark draft has no body conversion"),
    "dflash": ("BODY_DFLASH1", "a DFlash draft of the first kind has no body conversion"),
}


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """What the user asked for; None is "not given".

    Attributes:
        online_mxfp8_scope: scope of the target's online MXFP8 conversion, as its recipe declares them; `kda-input=full`
            is another spelling of `kda-input`.
        draft_body: format of the DFlash2 body.
        draft_head: format of a separate proposal head.
        depth: proposals a step; 0 turns speculation off.
    """

    online_mxfp8_scope: str | None = None
    draft_body: str | None = None
    draft_head: str | None = None
    depth: int | None = None


class DraftFacts(Protocol):
    """What the rules need to know of a draft; `exporter.draft_config.DraftConfig` has it."""

    @property
    def method(self) -> Enum: ...
    @property
    def block_size(self) -> int: ...
    @property
    def has_own_quantization(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RecordedPrecision:
    """What the manifest records; None is left absent there.

    Attributes:
        online_quantization, online_mxfp8_scope: the target's online conversion, or both None.
        scope_origin: whether the scope was asked for or is the recipe's default.
        method: the draft's; None when speculation is off.
        depth: proposals a step; 0 when speculation is off.
        draft_body_quantization, draft_head_quantization: as asked for, never the effective value.
    """

    online_quantization: str | None
    online_mxfp8_scope: str | None
    scope_origin: Origin
    method: str | None
    depth: int
    draft_body_quantization: str | None
    draft_head_quantization: str | None


def resolve(settings: PrecisionSettings, target_recipe: Recipe, draft: DraftFacts | None) -> RecordedPrecision:
    """Check the settings against recipe and draft, and fill in the defaults that a manifest records.

    Raises:
        PlanError: SCOPE_UNDECLARED; DEPTH_NO_DRAFT, DEPTH_RANGE; BODY_NO_DRAFT, BODY_DEPTH_ZERO, BODY_DSPARK,
            BODY_DFLASH1, BODY_METHOD, BODY_UNDECLARED, BODY_FORMAT, BODY_OWN_QUANTIZATION; HEAD_NO_DRAFT,
            HEAD_DEPTH_ZERO, HEAD_UNDECLARED, HEAD_FORMAT.
    """
    scope, origin = _scope(settings, target_recipe)
    depth = _depth(settings, draft)
    method = draft.method.value if draft is not None and depth > 0 else None
    if settings.draft_body is not None:
        _check_body(settings.draft_body, target_recipe, draft, depth)
    if settings.draft_head is not None:
        _check_head(settings.draft_head, target_recipe, draft, depth)
    return RecordedPrecision(
        MXFP8 if scope else None, scope, origin, method, depth, settings.draft_body, settings.draft_head
    )


def undeclared_body(recipe: Recipe, asked: str) -> PlanError:
    """The refusal of a body conversion that a recipe does not declare."""
    return PlanError(
        "BODY_UNDECLARED", f"recipe {recipe.name} does not declare the conversion draft_body", where=asked,
        expected=_declared(recipe), hint=f"leave {BODY_FLAG} out, or declare the conversion in the recipe",
    )


def own_quantization(asked: str) -> PlanError:
    """The refusal to convert a draft that is quantized already."""
    return PlanError(
        "BODY_OWN_QUANTIZATION", "a tensor is never converted twice", where=asked,
        expected="a draft in checkpoint precision", got="a draft with a quantization_config of its own",
        hint="take the draft as it was first published",
    )


def _scope(settings: PrecisionSettings, recipe: Recipe) -> tuple[str | None, Origin]:
    """The scope and its origin. Dense families declare no default scope: for them, not given is off."""
    declared = recipe.conversions.get(ONLINE_MXFP8, ())
    given = settings.online_mxfp8_scope
    asked = SCOPE_ALIASES.get(given, given) if given is not None else None
    if asked is None:
        return (DEFAULT_SCOPE if DEFAULT_SCOPE in declared else None), Origin.DEFAULT
    if asked not in declared:
        raise PlanError(
            "SCOPE_UNDECLARED", f"recipe {recipe.name} does not declare this scope of online MXFP8", where=SCOPE_FLAG,
            expected=" or ".join(declared) or "none", got=repr(given), hint=f"leave {SCOPE_FLAG} out for the default",
        )
    return asked, Origin.FLAG


def _depth(settings: PrecisionSettings, draft: DraftFacts | None) -> int:
    asked = settings.depth
    if draft is None:
        if asked:
            raise PlanError("DEPTH_NO_DRAFT", "there is no draft to propose tokens", where=DEPTH_FLAG, got=asked,
                            hint="give a draft with --draft")
        return 0
    most = draft.block_size - 1
    if asked is None:
        return most
    if not 0 <= asked <= most:
        raise PlanError("DEPTH_RANGE", "draft cannot propose this many tokens", where=DEPTH_FLAG,
                        expected=f"0 to {most}, one less than its block", got=asked,
                        hint="leave the option out for the draft's own depth")
    return asked


def _check_body(asked: str, recipe: Recipe, draft: DraftFacts | None, depth: int) -> None:
    where = f"{BODY_FLAG} {asked}"
    if draft is None:
        raise PlanError("BODY_NO_DRAFT", "speculation is off: there is no draft body to convert", where=where,
                        hint="give a draft with --draft")
    if depth == 0:
        raise PlanError("BODY_DEPTH_ZERO", "depth 0 turns speculation off: there is no draft body to convert",
                        where=where, hint=f"give a {DEPTH_FLAG} of at least 1")
    method = str(draft.method.value)
    if method != DFLASH2:
        code, what = _METHOD_REFUSALS.get(method, ("BODY_METHOD", "this method has no body conversion"))
        raise PlanError(code, what, where=where, expected=f"method {DFLASH2}", got=f"method {method}",
                        hint=f"leave {BODY_FLAG} out")
    declared = recipe.conversions.get(DRAFT_BODY)
    if declared is None:
        raise undeclared_body(recipe, where)
    if asked not in declared:
        raise PlanError("BODY_FORMAT", "draft body cannot be stored in this format", where=BODY_FLAG,
                        expected=" or ".join(declared), got=repr(asked),
                        hint="give one of the formats named, or leave the option out")
    if draft.has_own_quantization:
        raise own_quantization(where)


def _check_head(asked: str, recipe: Recipe, draft: DraftFacts | None, depth: int) -> None:
    where = f"{HEAD_FLAG} {asked}"
    if draft is None:
        raise PlanError("HEAD_NO_DRAFT", "speculation is off: there is no proposal head", where=where,
                        hint="give a draft with --draft")
    if depth == 0:
        raise PlanError("HEAD_DEPTH_ZERO", "depth 0 turns speculation off: there is no proposal head", where=where,
                        hint=f"give a {DEPTH_FLAG} of at least 1")
    declared = recipe.conversions.get(DRAFT_HEAD)
    if declared is None:
        raise PlanError("HEAD_UNDECLARED", f"recipe {recipe.name} does not declare the conversion draft_head",
                        where=where, expected=_declared(recipe), hint=f"leave {HEAD_FLAG} out")
    if asked not in declared:
        raise PlanError("HEAD_FORMAT", "proposal head cannot be stored in this format", where=HEAD_FLAG,
                        expected=" or ".join(declared), got=repr(asked),
                        hint="give one of the formats named, or leave the option out")


def _declared(recipe: Recipe) -> str:
    return f"one of {', '.join(recipe.conversions)}" if recipe.conversions else "no conversion"
