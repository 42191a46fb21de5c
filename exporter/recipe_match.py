"""Match a checkpoint's tensors with the rows of a recipe.

Every tensor must match exactly one row and every row must be there, so that nothing is converted, kept or overlooked by
accident.

    matched = match_tensors(load_recipe("llama"), checkpoint.tensors, checkpoint.config)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

from dflash_core.errors import RecipeError

from exporter.recipe import ANY_LENGTH, SLOT_SYMBOLS, Recipe, Row
from exporter.recipe_layers import layers_by_type, lookup
from exporter.recipe_shape import evaluate
from exporter.safetensors_header import TensorEntry

MAX_NUMBERED = 100_000  # layers, experts: more is a damaged config
MAX_LISTED = 12

_SLOT = re.compile(r"\{[a-z]+\}")
_NUMBER = re.compile(r"(?<![^.])([0-9]+)(?![^.])")
_NUMBER_OR_SLOT = re.compile(r"(?<![^.])([0-9]+|\{[a-z]+\})(?![^.])")


class MatchedTensor(NamedTuple):
    """A checkpoint tensor under the name that rows describe, its one row, and its layer (None: of no layer)."""

    name: str
    entry: TensorEntry
    row: Row
    layer: int | None


def config_symbols(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, int]:
    """The recipe's symbols with the values that a config gives them; a list counts its elements.

    Raises:
        RecipeError: SYMBOL_VALUE when a key holds no count, SYMBOL_MISSING when neither key nor expression is there,
            SHAPE_EXPRESSION when the expression has no value.
    """
    symbols: dict[str, int] = {}
    for symbol in recipe.symbols:
        found = [(key, value) for key in symbol.keys if (value := lookup(config, key)) is not None]
        if found:
            symbols[symbol.name] = _count(*found[0])
        elif symbol.HasField("expression"):
            symbols[symbol.name] = evaluate(symbol.expression, symbols)
        else:
            raise RecipeError(
                "SYMBOL_MISSING", "config lacks a number that the recipe needs",
                where=f"symbol {symbol.name} of recipe {recipe.name}",
                expected=f"{' or '.join(symbol.keys)} in config.json",
                hint="download config.json again, or pass the recipe of this model's family",
            )
    return symbols


def match_tensors(
    recipe: Recipe, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> tuple[MatchedTensor, ...]:
    """Match every tensor with its row.

    Args:
        recipe: the family.
        tensors: entry by the name that rows describe, which may differ from the entry's own.
        config: config.json; gives the symbols, and each layer's types.
    Returns:
        One entry a tensor, in the order of `tensors`.
    Raises:
        RecipeError: TENSORS_UNMATCHED, one error that lists every tensor that matches no row or two, every tensor that
            a row promises and the checkpoint lacks, every tensor under two names, and every shape that is not its
            row's. Also as `config_symbols` and `exporter.recipe_layers.layers_by_type`.
    """
    families = _Families.of(recipe, config)
    matched: list[MatchedTensor] = []
    unknown, ambiguous, twice, misshapen = [], [], [], []
    for name, entry in tensors.items():
        found = families.fitting(name)
        if not found:
            unknown.append(name)
        elif len(found) > 1:
            ambiguous.append(f"{name} ({' and '.join(family.row.pattern for family, _ in found)})")
        else:
            family, numbers = found[0]
            if not family.has_shape(entry.shape):
                misshapen.append(f"{name}: expected {family.shape_text}, got {list(entry.shape)}")
            if numbers in family.seen:
                twice.append(name)
            family.seen.add(numbers)
            layer = numbers[family.layer_at] if family.layer_at is not None else None
            matched.append(MatchedTensor(name, entry, family.row, layer))
    missing = [name for family in families.members for name in islice(family.missing(), MAX_LISTED + 1)]
    kinds = {"matches no row": unknown, "matches two rows": ambiguous, "given twice": twice, "missing": missing,
             "wrong shape": misshapen}
    if any(kinds.values()):
        raise RecipeError(
            "TENSORS_UNMATCHED", f"recipe {recipe.name} does not describe this checkpoint",
            expected="every tensor to match one row, and every row a tensor",
            got="; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names),
            hint="use another recipe, or the model is a variant that is not supported",
        )
    return tuple(matched)


def find_rows(recipe: Recipe, names: Iterable[str], config: Mapping[str, Any]) -> dict[str, Row | None]:
    """The one row of each name, or None; unlike `match_tensors` it asks for nothing to be complete."""
    families = _Families.of(recipe, config)
    fitting = {name: families.fitting(name) for name in names}
    return {name: found[0][0].row if len(found) == 1 else None for name, found in fitting.items()}


def promised_tensors(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint with this config must hold; an axis of any length is 1 here."""
    return {name: tuple(axis or 1 for axis in family.shape)
            for family in _Families.of(recipe, config).members for name in family.missing()}


@dataclass(frozen=True, slots=True)
class _Family:
    """A row against one config: the tensors it promises, and those that were seen.

    Attributes:
        shape: the row's, evaluated; None is an axis of any length.
        slots: the placeholders of the row's pattern, in order.
        allowed: the numbers that each of `slots` may take, by their decimal text.
        layer_at: position of {layer} in `slots`; None when it is not there.
        seen: numbers of the tensors that were matched.
    """

    row: Row
    shape: tuple[int | None, ...]
    slots: tuple[str, ...]
    allowed: tuple[Mapping[str, int], ...]
    layer_at: int | None
    seen: set[tuple[int | None, ...]] = field(default_factory=set)

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this family may have that shape; an ignored one may have any."""
        if shape == self.shape or self.row.ignored:
            return True
        return len(shape) == len(self.shape) and all(
            want is None or want == have for want, have in zip(self.shape, shape, strict=True)
        )

    @property
    def shape_text(self) -> str:
        return f"[{', '.join(ANY_LENGTH if axis is None else str(axis) for axis in self.shape)}]"

    def missing(self) -> Iterator[str]:
        """Names that the row promises and no tensor has; an optional row promises none."""
        if self.row.optional or len(self.seen) == prod(map(len, self.allowed)):
            return
        for numbers in product(*(allowed.values() for allowed in self.allowed)):
            if numbers not in self.seen:
                texts = map(str, numbers)
                yield _SLOT.sub(lambda _: next(texts), self.row.pattern)  # noqa: B023


@dataclass(frozen=True, slots=True)
class _Spelling:
    """One way to write a family's names.

    Attributes:
        allowed: what each whole-number part of a name may be; None for the only text that a literal may be.
        has_literal: whether one of them is a literal.
    """

    family: _Family
    allowed: tuple[Mapping[str, int | None], ...]
    has_literal: bool

    def fit(self, digits: Sequence[str]) -> tuple[int | None, ...] | None:
        """The numbers that a name puts in the placeholders; None when it is not one of this spelling's names."""
        try:
            numbers = tuple([allowed[text] for allowed, text in zip(self.allowed, digits, strict=True)])
        except KeyError:
            return None
        return tuple([number for number in numbers if number is not None]) if self.has_literal else numbers


@dataclass(frozen=True, slots=True)
class _Families:
    """A recipe against one config; `by_skeleton` finds spellings by a name's parts between its whole-number parts."""

    members: tuple[_Family, ...]
    by_skeleton: Mapping[tuple[str, ...], Sequence[_Spelling]]

    @classmethod
    def of(cls, recipe: Recipe, config: Mapping[str, Any]) -> _Families:
        symbols = config_symbols(recipe, config)
        layers = layers_by_type(recipe, config, symbols)
        numbers = {layer_type: _texts(layers[layer_type]) for layer_type in layers}
        members = tuple(_family(row, symbols, numbers) for row in recipe.rows)
        by_skeleton: dict[tuple[str, ...], list[_Spelling]] = {}
        for family in members:
            for pattern, prefix in product((family.row.pattern, *family.row.other_names), ("", *recipe.name_prefixes)):
                parts = _NUMBER_OR_SLOT.split(prefix + recipe.bare(pattern))
                by_skeleton.setdefault(tuple(parts[::2]), []).append(_spelling(family, parts[1::2]))
        return cls(members, by_skeleton)

    def fitting(self, name: str) -> list[tuple[_Family, tuple[int | None, ...]]]:
        """The families that a name belongs to, with the numbers it puts in their placeholders."""
        parts = _NUMBER.split(name)
        found = []
        for spelling in self.by_skeleton.get(tuple(parts[::2]), ()):
            numbers = spelling.fit(parts[1::2])
            if numbers is not None:
                found.append((spelling.family, numbers))
        return found


def _family(row: Row, symbols: Mapping[str, int], numbers: Mapping[str, Mapping[str, int]]) -> _Family:
    slots = tuple(_SLOT.findall(row.pattern))
    allowed: list[Mapping[str, int]] = []
    for slot in slots:
        _check_numbered(SLOT_SYMBOLS[slot], symbols)
        allowed.append(numbers[row.layer_type] if slot == "{layer}" and row.layer_type
                       else _texts(range(symbols[SLOT_SYMBOLS[slot]])))
    shape = tuple(None if axis == ANY_LENGTH else evaluate(axis, symbols) for axis in row.shape)
    return _Family(row, shape, slots, tuple(allowed), slots.index("{layer}") if "{layer}" in slots else None)


def _spelling(family: _Family, parts: Sequence[str]) -> _Spelling:
    """The spelling whose numbers and placeholders are `parts`, in order."""
    of_slots = iter(family.allowed)
    allowed = tuple({part: None} if part.isdecimal() else next(of_slots) for part in parts)
    return _Spelling(family, allowed, has_literal=len(allowed) > len(family.allowed))


def _texts(numbers: Iterable[int]) -> dict[str, int]:
    return {str(number): number for number in sorted(numbers)}


def _check_numbered(symbol: str, symbols: Mapping[str, int]) -> None:
    if symbols[symbol] > MAX_NUMBERED:
        raise RecipeError("SYMBOL_VALUE", f"config asks for too many {symbol}", where="config.json",
                          expected=f"at most {MAX_NUMBERED}", got=symbols[symbol],
                          hint="download config.json again: no published model has so many")


def _count(key: str, value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RecipeError("SYMBOL_VALUE", "config value is no count", where=f"{key} in config.json",
                          expected="a whole number or a list", got=repr(value),
                          hint="download config.json again, or give it the value that the model was trained with")
    return value


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED])
    return shown if len(names) <= MAX_LISTED else f"{shown} and {len(names) - MAX_LISTED} more"
