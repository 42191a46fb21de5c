"""What `dflash-combine --explain` prints: every rule with both values and where they come from, and how to mend it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    from rich.table import Table

    from runtime.table_console import TableConsole

    out = TableConsole()
    cores = dict.fromkeys(side.core for rule in rules for side in (rule.left, rule.right) if side and side.core)
    numbers = {core: str(number) for number, core in enumerate(cores, 1)}
    for core, number in numbers.items():
        out.print(f"core {number:<3}{printable(core)}", soft_wrap=True)
    out.print()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("rule", "verdict", "first", "other"):
        table.add_column(name, overflow="fold")
    for rule in rules:
        table.add_row(*(printable(text) for text in (
            rule.name, rule.verdict.value, _side(rule.left, numbers), _side(rule.right, numbers))))
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


def _side(side: Side | None, numbers: Mapping[str, str]) -> str:
    """`number: value`, and what decided the value unless it is simply what was recorded."""
    if side is None:
        return "-"
    core = f"{numbers[side.core]}: " if side.core else ""
    if side.recorded == side.effective:
        return f"{core}{side.effective}" + ("" if side.origin == RECORDED else f" ({side.origin})")
    return f"{core}{side.effective} ({side.origin}, recorded: {side.recorded})"
