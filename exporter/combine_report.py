"""What `dflash-combine --explain` prints: every rule with both values and where they come from, and how to mend it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from exporter.combine_rules import RECORDED, Rule, Side, Verdict
from runtime.console import printable


def rules_document(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """The rules for `--json`: fields of `Rule` and `Side`, the verdict as its word."""
    return [{**asdict(rule), "verdict": rule.verdict.value} for rule in rules]


def print_rules(rules: Sequence[Rule]) -> None:
    """Print the rules on stdout, what fails last and in full; readable without colour."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    out = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("rule", "verdict", "first", "other"):
        table.add_column(name, overflow="fold")
    for rule in rules:
        table.add_row(*(printable(text) for text in (
            rule.name, rule.verdict.value, _side(rule.left), _side(rule.right))))
    out.print(table)
    for rule in rules:
        if rule.verdict is Verdict.FAILS:
            out.print()
            for label, text in (("fails", f"{rule.name} ({rule.code})"), ("at", rule.where), ("change", rule.change)):
                if text:
                    out.print(f"{label:<8}{printable(text)}", soft_wrap=True)
    failed = sum(rule.verdict is Verdict.FAILS for rule in rules)
    out.print()
    out.print(f"these cores do not combine: {failed} of {len(rules)} rules fail" if failed else "these cores combine")


def _side(side: Side | None) -> str:
    """`core: value`, and what decided the value unless it is simply what was recorded."""
    if side is None:
        return "-"
    core = f"{side.core}: " if side.core else ""
    if side.recorded == side.effective:
        return f"{core}{side.effective}" + ("" if side.origin == RECORDED else f" ({side.origin})")
    return f"{core}{side.effective} ({side.origin}, recorded: {side.recorded})"
