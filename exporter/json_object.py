"""Strict JSON for files that we did not write: one object, UTF-8, no key twice, no NaN.

    config = parse_json_object(path.read_bytes(), "config.json")
"""

from __future__ import annotations

import json
from typing import Any

from dflash_core.errors import CheckpointError


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse `data` as one JSON object.

    Args:
        data: the file's bytes.
        where: the file's name, for messages.
    Returns:
        The object; nested objects are plain dicts.
    Raises:
        CheckpointError: JSON_INVALID when the bytes are not strict JSON or repeat a key; JSON_NOT_OBJECT when the
            value is of another kind.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as cause:
        raise CheckpointError(
            "JSON_INVALID", f"file is not valid JSON ({cause or type(cause).__name__})", where=where,
            hint="the file is damaged or was cut short: fetch it again",
        ) from cause
    if not isinstance(value, dict):
        raise CheckpointError(
            "JSON_NOT_OBJECT", "JSON file does not hold an object", where=where, expected="{…}",
            got=type(value).__name__,
            hint="download the file again",
        )
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} appears twice")
    return members


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
