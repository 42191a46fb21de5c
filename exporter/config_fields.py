"""Typed reading of config.json fields: a value of the wrong kind is an error that names the field.

    fields = Fields(checkpoint.config, "config.json")
    hidden_size = fields.count("hidden_size")
    eps = fields.number("rms_norm_eps", default=1e-6)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one config. `null` counts as absent.

    Attributes:
        values: field by name.
        where: the file, for messages.
        spellings: how a message names a field that may be written in more than one way.
    """

    values: Mapping[str, Any]
    where: str
    spellings: Mapping[str, str] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        """The raw value, or None when absent."""
        return self.values.get(key)

    def count(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        """An integer ≥ `minimum`; without a default the field must be there.

        Raises:
            CheckpointError: FIELD_MISSING or FIELD_VALUE.
        """
        value = self._value(key, default)
        if type(value) is not int or value < minimum:
            raise self.wrong(key, f"an integer ≥ {minimum}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A finite number, as a float. Raises as `count`."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def positive(self, key: str, *, default: float | None = None) -> float:
        """A finite number > 0. Raises as `count`."""
        value = self.number(key, default=default)
        if value <= 0:
            raise self.wrong(key, "a number > 0")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """A JSON boolean. Raises as `count`."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string. Raises as `count`."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def section(self, key: str) -> Fields:
        """A nested object, empty when absent. Raises FIELD_VALUE when it is of another kind."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value or {}, f"{self.where}: {key}", self.spellings)

    def name(self, key: str) -> str:
        """The field as messages write it, all its spellings included."""
        return self.spellings.get(key, key)

    def missing(self, key: str) -> CheckpointError:
        """The error for a field that must be there."""
        return CheckpointError("FIELD_MISSING", f"config has no {self.name(key)}", where=self.where,
                               hint="download the file again, or give it the value that the model was trained with")

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error for a field whose value is not `expected`."""
        return CheckpointError(
            "FIELD_VALUE", f"config field {self.name(key)} has a value of the wrong kind", where=self.where,
            expected=expected, got=short(self.values.get(key)),
            hint="download the file again, or give it the value that the model was trained with",
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        return value


def short(value: Any) -> str:
    """A JSON value as one short line of JSON."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "…"
