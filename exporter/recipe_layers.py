"""Which layers of a model are of which kind, by the keys that its family uses.

    layers_by_type(load_recipe("kimi-k3"), config, symbols)["mla"]      # {3, 7, 11, ..., 91, 92}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflash_core.errors import RecipeError
from dflash_core.v1.recipe_pb2 import LayerType

from exporter.recipe import Recipe
from exporter.recipe_shape import evaluate


def layers_by_type(
    recipe: Recipe, config: Mapping[str, Any], symbols: Mapping[str, int]
) -> dict[str, Collection[int]]:
    """The layers of every type that the recipe describes, numbered from 0.

    Args:
        symbols: what `config_symbols` gave; `layers` counts the layers.
    Raises:
        RecipeError: LAYER_TYPES when a list is missing, holds anything but numbers or names, names a layer that is not
            there or twice, or names the types of more or fewer layers than there are.
    """
    found: dict[str, Collection[int]] = {}
    for layer_type in recipe.layer_types:
        num_layers = symbols["layers"]
        if layer_type.other_than:
            others = found[layer_type.other_than]
            found[layer_type.name] = frozenset(layer for layer in range(num_layers) if layer not in others)
        elif layer_type.keys:
            found[layer_type.name] = _listed(layer_type, config, num_layers)
        else:
            first = evaluate(getattr(layer_type, "from"), symbols)
            every = evaluate(layer_type.every, symbols) if layer_type.every else 1
            found[layer_type.name] = frozenset(layer for layer in range(first, num_layers) if layer % every == 0)
    return found


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value at a "/"-separated path of a config; None when it is not there."""
    value: Any = config
    for part in key.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _listed(layer_type: LayerType, config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    key, values = next(((key, value) for key in layer_type.keys if (value := lookup(config, key)) is not None),
                       (" or ".join(layer_type.keys), None))
    where = f"{key} in config.json"
    if not isinstance(values, list):
        raise _bad(layer_type, where, "a list", repr(values))
    if values and all(isinstance(value, str) for value in values):
        if len(values) != num_layers:
            raise _bad(layer_type, where, f"the types of {num_layers} layers", len(values))
        wanted = layer_type.value or layer_type.name
        return frozenset(layer for layer, value in enumerate(values) if value == wanted)
    return _numbered(layer_type, where, values, num_layers)


def _numbered(layer_type: LayerType, where: str, values: Sequence[Any], num_layers: int) -> frozenset[int]:
    first = layer_type.first_number
    wrong = [value for value in values if type(value) is not int or not first <= value < first + num_layers]
    if wrong or len(set(values)) != len(values):
        raise _bad(layer_type, where, f"different layers of {first} to {first + num_layers - 1}",
                   repr(wrong[0]) if wrong else "one twice")
    return frozenset(value - first for value in values)


def _bad(layer_type: LayerType, where: str, expected: str, got: object) -> RecipeError:
    return RecipeError("LAYER_TYPES", f"config does not say which layers are of type {layer_type.name}", where=where,
                       expected=expected, got=got,
                       hint="download config.json again, or mend the layer type in the recipe")
