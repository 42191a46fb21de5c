"""Match a checkpoint's tensors with the rows of a recipe.

Every tensor must match exactly one row and every row must be there, so that nothing is converted, kept or overlooked by
accident.

    matched = match_tensors(load_recipe("llama"), checkpoint.tensors, checkpoint.config)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

from dflash_core.errors import RecipeError

from exporter.recipe import SLOT_SYMBOLS, Recipe, Row
from exporter.recipe_shape import evaluate
from exporter.safetensors_header import TensorEntry

MAX_NUMBERED = 100_000  # layers, experts: more is a damaged config
MAX_LISTED = 12

_SLOT = re.compile(r"\{[a-z]+\}|(?<![^.])\d+(?![^.])")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class MatchedTensor:
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
        found = [(key, value) for key in symbol.keys if (value := _lookup(config, key)) is not None]
        if found:
            symbols[symbol.name] = _count(*found[0])
        elif symbol.HasField("expression"):
            symbols[symbol.name] = evaluate(symbol.expression, symbols)
        else:
            raise RecipeError(
                "SYMBOL_MISSING", "config lacks a number that the recipe needs",
                where=f"symbol {symbol.name} of recipe {recipe.name}",
                expected=f"{' or '.join(symbol.keys)} in config.json",
            )
    return symbols


def match_tensors(
    recipe: Recipe, tensors: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> tuple[MatchedTensor, ...]:
    """Match every tensor with its row.

    Args:
        recipe: the family.
        tensors: entry by the name that rows describe, which may differ from the entry's own.
        config: config.json; gives the symbols, and each layer's type by `layer_types`.
    Returns:
        One entry a tensor, in the order of `tensors`.
    Raises:
        RecipeError: TENSORS_UNMATCHED, one error that lists every tensor that matches no row or two, every tensor that
            a row promises and the checkpoint lacks, and every shape that is not its row's. Also as `config_symbols`.
    """
    families = _Families.of(recipe, config)
    matched: list[MatchedTensor] = []
    unknown, ambiguous, misshapen = [], [], []
    for name, entry in tensors.items():
        found = families.fitting(recipe.bare(name))
        if not found:
            unknown.append(name)
        elif len(found) > 1:
            ambiguous.append(f"{name} ({' and '.join(family.row.pattern for family, _ in found)})")
        else:
            family, numbers = found[0]
            if entry.shape != family.shape and not family.row.ignored:
                misshapen.append(f"{name}: expected {list(family.shape)}, got {list(entry.shape)}")
            family.seen.add(numbers)
            matched.append(MatchedTensor(name, entry, family.row, family.layer_of(numbers)))
    missing = [name for family in families.members for name in islice(family.missing(), MAX_LISTED + 1)]
    kinds = {"matches no row": unknown, "matches two rows": ambiguous, "missing": missing, "wrong shape": misshapen}
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
    fitting = {name: families.fitting(recipe.bare(name)) for name in names}
    return {name: found[0][0].row if len(found) == 1 else None for name, found in fitting.items()}


@dataclass(frozen=True, slots=True)
class _Family:
    """A row against one config: the tensors it promises, and those that were seen.

    Attributes:
        shape: the row's, evaluated.
        slots: of the pattern's numbers in order: a placeholder, or a number that stands for itself.
        allowed: the numbers that each placeholder of `slots` may take.
        seen: numbers of the tensors that were matched.
    """

    row: Row
    shape: tuple[int, ...]
    slots: tuple[str, ...]
    allowed: tuple[Collection[int], ...]
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def fit(self, digits: Sequence[str]) -> tuple[int, ...] | None:
        """The numbers that a name puts in the placeholders; None when it is not one of this family's names."""
        numbers = []
        allowed = iter(self.allowed)
        for slot, text in zip(self.slots, digits, strict=True):
            if slot in SLOT_SYMBOLS:
                number = int(text)
                if str(number) != text or number not in next(allowed):
                    return None
                numbers.append(number)
            elif slot != text:
                return None
        return tuple(numbers)

    def layer_of(self, numbers: Sequence[int]) -> int | None:
        placeholders = [slot for slot in self.slots if slot in SLOT_SYMBOLS]
        return dict(zip(placeholders, numbers, strict=True)).get("{layer}")

    def missing(self) -> Iterator[str]:
        """Names that the row promises and no tensor has; an optional row promises none."""
        for numbers in () if self.row.optional else product(*self.allowed):
            if numbers not in self.seen:
                texts = iter(numbers)
                yield _SLOT.sub(lambda slot: str(next(texts)) if slot[0] in SLOT_SYMBOLS else slot[0],  # noqa: B023
                                self.row.pattern)


@dataclass(frozen=True, slots=True)
class _Families:
    """A recipe against one config; `by_skeleton` finds families by pattern, numbers and placeholders cut out."""

    members: tuple[_Family, ...]
    by_skeleton: Mapping[str, Sequence[_Family]]

    @classmethod
    def of(cls, recipe: Recipe, config: Mapping[str, Any]) -> _Families:
        symbols = config_symbols(recipe, config)
        layer_types = _lookup(config, "layer_types") or ()
        members = tuple(_family(recipe, row, symbols, layer_types) for row in recipe.rows)
        by_skeleton: dict[str, list[_Family]] = {}
        for family in members:
            by_skeleton.setdefault(_SLOT.sub("#", recipe.bare(family.row.pattern)), []).append(family)
        return cls(members, by_skeleton)

    def fitting(self, bare: str) -> list[tuple[_Family, tuple[int, ...]]]:
        """The families that a name without prefix belongs to, with the numbers it puts in their placeholders."""
        digits = _NUMBER.findall(bare)
        candidates = self.by_skeleton.get(_NUMBER.sub("#", bare), ())
        return [(family, numbers) for family in candidates if (numbers := family.fit(digits)) is not None]


def _family(recipe: Recipe, row: Row, symbols: Mapping[str, int], layer_types: Sequence[str]) -> _Family:
    slots = tuple(_SLOT.findall(recipe.bare(row.pattern)))
    allowed: list[Collection[int]] = []
    for slot in slots:
        if slot == "{layer}" and row.layer_type:
            allowed.append([layer for layer, kind in enumerate(layer_types) if kind == row.layer_type])
        elif slot in SLOT_SYMBOLS:
            _check_numbered(SLOT_SYMBOLS[slot], symbols)
            allowed.append(range(symbols[SLOT_SYMBOLS[slot]]))
    return _Family(row, tuple(evaluate(axis, symbols) for axis in row.shape), slots, tuple(allowed))


def _check_numbered(symbol: str, symbols: Mapping[str, int]) -> None:
    if symbols[symbol] > MAX_NUMBERED:
        raise RecipeError("SYMBOL_VALUE", f"config asks for too many {symbol}", where="config.json",
                          expected=f"at most {MAX_NUMBERED}", got=symbols[symbol])


def _count(key: str, value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RecipeError("SYMBOL_VALUE", "config value is no count", where=f"{key} in config.json",
                          expected="a whole number or a list", got=repr(value))
    return value


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED])
    return shown if len(names) <= MAX_LISTED else f"{shown} and {len(names) - MAX_LISTED} more"
