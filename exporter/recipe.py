"""Read a recipe, and explain what is wrong with it.

A recipe in manifests/recipes/ says which tensors a model family has, in which shapes, and which conversions are
declared for each; `exporter.recipe_match` holds a checkpoint against it.

    recipe = load_recipe("llama")
    recipe.conversions["online_mxfp8"]          # ("all",)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from pathlib import Path

from dflash_core.errors import RecipeError
from dflash_core.formats import Format
from dflash_core.v1 import recipe_pb2
from google.protobuf import text_format

from exporter.recipe_shape import symbols_of

SUFFIX = ".txtpb"
ONLINE_MXFP8, DRAFT_BODY, DRAFT_HEAD = "online_mxfp8", "draft_body", "draft_head"

ANY_LENGTH = "*"
SLOT_SYMBOLS = {"{layer}": "layers", "{expert}": "experts", "{block}": "blocks"}
"""Placeholder of a pattern -> symbol that counts it."""

_PLACEHOLDER = re.compile(r"\{[^}]*\}")
_BLOCK_FORMATS = (Format.MXFP8.value, Format.NVFP4.value)


class RecipeKind(Enum):
    """What a recipe describes."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class Row:
    """One family of tensors.

    Attributes:
        pattern: tensor name in which {layer}, {expert} and {block} stand for decimal numbers.
        shape: expressions in the recipe's symbols, outermost axis first; "*" is any length.
        role: what the tensors are; the part before the first "_" groups them in reports.
        optional: a checkpoint may lack them.
        groups: conversions that convert them: ("online_mxfp8", "all") or ("draft_body", "").
        keep_reason: why they always keep checkpoint precision, `groups` or not.
        layer_type: only layers of this type have them; empty: every layer.
        fused_group: stored as one matrix with the rows of the same group.
        ignored: claimed, and not stored.
        other_names: patterns under which some checkpoints spell them.
        passthrough: they may come in a block format, whose bytes are then kept.
    """

    pattern: str
    shape: tuple[str, ...]
    role: str
    optional: bool
    groups: tuple[tuple[str, str], ...]
    keep_reason: str
    layer_type: str
    fused_group: str
    ignored: bool
    other_names: tuple[str, ...] = ()
    passthrough: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model family, as a person wrote it down.

    Attributes:
        conversions: declared values by group: scopes of "online_mxfp8" (the first is its default), or formats.
        name_prefixes: prefixes that a published tensor name may carry or lack.
    """

    name: str
    kind: RecipeKind
    architectures: tuple[str, ...]
    forward_implemented: bool
    symbols: tuple[recipe_pb2.ConfigSymbol, ...]
    rows: tuple[Row, ...]
    conversions: Mapping[str, tuple[str, ...]]
    name_prefixes: tuple[str, ...]
    layer_types: tuple[recipe_pb2.LayerType, ...]

    def bare(self, name: str) -> str:
        """A tensor name without the first of the recipe's prefixes that it carries."""
        for prefix in self.name_prefixes:
            if name.startswith(prefix):
                return name[len(prefix):]
        return name


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read the recipe of that name from manifests/recipes, or the file at a path that ends in `.txtpb`.

    Raises:
        RecipeError: RECIPE_UNKNOWN when there is none; RECIPE_SYNTAX for text that is no recipe; RECIPE_RULE for one
            that contradicts itself; SHAPE_EXPRESSION.
    """
    text, where = _read(name_or_path)
    message = recipe_pb2.Recipe()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as cause:
        raise RecipeError("RECIPE_SYNTAX", f"recipe is malformed ({cause})", where=where,
                          expected="protobuf text of dflash.core.v1.Recipe",
                          hint="compare with the recipes in manifests/recipes") from cause
    recipe = _recipe(message, where)
    _check(recipe, where)
    return recipe


def find_recipe(architecture: str) -> Recipe | None:
    """The shipped target recipe that names this architecture; None when there is none."""
    recipes = (load_recipe(name) for name in known_recipes())
    return next((recipe for recipe in recipes
                 if recipe.kind is RecipeKind.TARGET and architecture in recipe.architectures), None)


def known_recipes() -> tuple[str, ...]:
    """The names of the shipped recipes, in order."""
    names = (file.name for file in (resources.files("manifests") / "recipes").iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)))


def _read(name_or_path: str | Path) -> tuple[str, str]:
    if str(name_or_path).endswith(SUFFIX):
        path = Path(name_or_path)
        try:
            return path.read_text("utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as cause:
            raise RecipeError("RECIPE_UNKNOWN", "recipe cannot be read", where=str(path),
                              hint="give a name of manifests/recipes or a readable .txtpb file") from cause
    known = known_recipes()
    if str(name_or_path) not in known:
        raise RecipeError("RECIPE_UNKNOWN", "there is no recipe of that name", where="--recipe",
                          expected=f"one of {', '.join(known)}", got=repr(str(name_or_path)),
                          hint=f"or give the path of a {SUFFIX} file")
    file = resources.files("manifests") / "recipes" / f"{name_or_path}{SUFFIX}"
    return file.read_text("utf-8"), f"manifests/recipes/{file.name}"


def _recipe(message: recipe_pb2.Recipe, where: str) -> Recipe:
    kinds = {kind.value: kind for kind in RecipeKind}
    if message.kind not in kinds:
        raise _broken(where, "kind of a recipe", expected=" or ".join(kinds), got=repr(message.kind))
    rows = tuple(
        Row(
            row.pattern, tuple(row.shape), row.role, row.optional,
            tuple((group, value) for group, _, value in (name.partition(":") for name in row.groups)),
            row.keep_reason, row.layer_type, row.fused_group, row.ignored, tuple(row.other_names), row.passthrough,
        )
        for row in message.tensors
    )
    conversions = {conversion.group: tuple(conversion.values) for conversion in message.conversions}
    if len(conversions) != len(message.conversions):
        raise _broken(where, "conversion group is declared twice")
    return Recipe(
        message.name, kinds[message.kind], tuple(message.architectures), message.forward_implemented,
        tuple(message.symbols), rows, conversions, tuple(message.name_prefixes), tuple(message.layer_types),
    )


def _check(recipe: Recipe, where: str) -> None:
    """What a recipe must hold to before it meets a checkpoint."""
    if not recipe.name or not recipe.architectures or not recipe.rows:
        raise _broken(where, "recipe lacks a name, an architecture or tensors")
    for group, values in recipe.conversions.items():
        if group not in (ONLINE_MXFP8, DRAFT_BODY, DRAFT_HEAD):
            raise _broken(where, "unknown conversion group", expected=f"{ONLINE_MXFP8}, {DRAFT_BODY} or {DRAFT_HEAD}",
                          got=group)
        wrong = [value for value in values if group != ONLINE_MXFP8 and value not in _BLOCK_FORMATS]
        if not values or wrong:
            raise _broken(where, f"conversion {group} declares no usable value",
                          expected="scopes" if group == ONLINE_MXFP8 else " or ".join(_BLOCK_FORMATS),
                          got=", ".join(wrong) or "none")
    known: set[str] = set()
    for symbol in recipe.symbols:
        _check_symbols(symbol.expression, known, f"symbol {symbol.name}", where)
        if not symbol.name or symbol.name in known or not (symbol.keys or symbol.HasField("expression")):
            raise _broken(where, "symbol lacks a name or a source, or is given twice", got=symbol.name or "no name")
        known.add(symbol.name)
    types: set[str] = set()
    for layer_type in recipe.layer_types:
        _check_layer_type(layer_type, types, known, where)
        types.add(layer_type.name)
    for row in recipe.rows:
        _check_row(recipe, row, known, where)
        if row.layer_type and row.layer_type not in types:
            raise _broken(where, f"row {row.pattern} names a layer type that the recipe does not describe",
                          expected=" or ".join(sorted(types)) or "a layer type", got=row.layer_type)
    twice = {(row.pattern, row.layer_type) for row in recipe.rows}
    if len(twice) != len(recipe.rows):
        raise _broken(where, "two rows have the same pattern and layer type")


def _check_row(recipe: Recipe, row: Row, known: set[str], where: str) -> None:
    place = f"row {row.pattern or '(no pattern)'}"
    if not row.pattern or not row.role:
        raise _broken(where, f"{place} lacks a pattern or a role")
    if row.ignored == bool(row.groups or row.keep_reason):
        raise _broken(where, f"{place} does not say what becomes of its tensors",
                      expected="groups, keep_reason or both; or ignored")
    if any(_slots(name) != _slots(row.pattern) for name in row.other_names):
        raise _broken(where, f"{place} has another name with other placeholders", expected=_slots(row.pattern))
    for name in (row.pattern, *row.other_names):
        if any("{" in part and _slots(part) != [part] for part in name.split(".")):
            raise _broken(where, f"{place} has a placeholder that is not a whole part of a name",
                          expected="placeholders between dots, as in layers.{layer}.norm.weight", got=name)
    for slot in _slots(row.pattern):
        if slot not in SLOT_SYMBOLS:
            raise _broken(where, f"{place} has an unknown placeholder", expected=" or ".join(SLOT_SYMBOLS), got=slot)
        if SLOT_SYMBOLS[slot] not in known:
            raise _broken(where, f"{place} uses {slot} without its count", expected=f"a symbol {SLOT_SYMBOLS[slot]}")
    for group, value in row.groups:
        declared = recipe.conversions.get(group)
        if declared is None or (group == ONLINE_MXFP8) != bool(value) or (value and value not in declared):
            raise _broken(where, f"{place} names a conversion that the recipe does not declare",
                          expected=f"one of {', '.join(_group_names(recipe))}",
                          got=f"{group}:{value}" if value else group)
    for axis in row.shape:
        if axis != ANY_LENGTH:
            _check_symbols(axis, known, place, where)


def _check_layer_type(layer_type: recipe_pb2.LayerType, types: set[str], known: set[str], where: str) -> None:
    place = f"layer type {layer_type.name or '(no name)'}"
    sources = [bool(layer_type.keys), bool(getattr(layer_type, "from")), bool(layer_type.other_than)]
    if not layer_type.name or layer_type.name in types or sources.count(True) != 1:
        raise _broken(where, f"{place} is given twice, or lacks a name or its one source",
                      expected="exactly one of keys, from and other_than")
    if layer_type.other_than and layer_type.other_than not in types:
        raise _broken(where, f"{place} is other than a type that is not given before it", got=layer_type.other_than)
    for expression in (getattr(layer_type, "from"), layer_type.every):
        _check_symbols(expression, known, place, where)


def _slots(pattern: str) -> list[str]:
    return _PLACEHOLDER.findall(pattern)


def _check_symbols(expression: str, known: set[str], place: str, where: str) -> None:
    unknown = sorted(symbols_of(expression) - known)
    if unknown:
        raise _broken(where, f"{place} uses a symbol that is not given before it",
                      expected=f"one of {', '.join(sorted(known))}", got=", ".join(unknown))


def _group_names(recipe: Recipe) -> Iterator[str]:
    for group, values in recipe.conversions.items():
        yield from (f"{group}:{value}" for value in values) if group == ONLINE_MXFP8 else (group,)


def _broken(where: str, what: str, expected: str | None = None, got: str | None = None) -> RecipeError:
    return RecipeError("RECIPE_RULE", what, where=where, expected=expected, got=got,
                       hint="mend the recipe; those in manifests/recipes show every rule kept")

