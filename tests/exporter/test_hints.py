"""Every error of the exporter that its user can meet says what to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dflash_core.errors as errors
from dflash_core.errors import CaptureError, DflashError

import exporter

EXPORTER = Path(exporter.__file__).parent
TYPED = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, DflashError)}
MET = TYPED - {CaptureError.__name__}  # that one says what model code or a kernel did wrong: ours to mend


def raised_without_hint(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in MET:
            continue
        if all(keyword.arg != "hint" for keyword in node.keywords):
            yield f"{path.relative_to(EXPORTER)}:{node.lineno} {ast.unparse(node)[:60]}"


def test_every_error_that_a_user_can_meet_has_a_hint() -> None:
    files = sorted(EXPORTER.rglob("*.py"))

    assert len(files) > 40 and {"CheckpointError", "PlanError", "RecipeError", "ConvertError"} <= TYPED
    assert [found for path in files for found in raised_without_hint(path)] == []
