"""A report of `diff` as text for a person: 80 columns, readable without colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .console import human_bytes, printable
from .diff import Change, CoreDiff, CoreSide, Part, Value
from .diff_errors import Kept
from .table_console import TableConsole

_MOST_TENSORS = 20


def print_diff(report: CoreDiff) -> None:
    """Write the report to stdout: the two cores, then one block per thing that differs."""
    out = TableConsole()
    if not report.authenticated:
        out.print("NOT AUTHENTICATED: no signature was checked; --trust TRUST verifies the cores", soft_wrap=True)
    for label, side in (("left", report.left), ("right", report.right)):
        out.print(f"{label:<8}{_core(side)}", soft_wrap=True)
    out.print()
    out.print("effective precision")
    out.print(_table(("role", "left", "right", ""), (
        (row.role, _value(row.left), _value(row.right), "" if row.same else "differs") for row in report.precision)))
    out.print()
    out.print("weights")
    out.print(_table(("owner", "format", "left", "right"), (
        (row.owner, row.format, _amount(row.left_tensors, row.left_nbytes),
         _amount(row.right_tensors, row.right_nbytes)) for row in report.formats)))
    out.print()
    out.print("SQNR of converted weights")
    for part in _sqnr(report):
        out.print(part, soft_wrap=isinstance(part, str))
    for line in _changes(report):
        out.print(printable(line), soft_wrap=True)
    out.print()
    parts = [part.value for part in Part if report.differs(part)]
    out.print(f"differs: {', '.join(parts)}" if parts else "no difference in target, draft or graphs")


def _changes(report: CoreDiff) -> Iterable[str]:
    for field in report.identity:
        yield f"{field.part.value} {field.field}: {field.left or 'absent'} → {field.right or 'absent'}"
    for tensor in report.tensors[:_MOST_TENSORS]:
        fields = ", ".join(f"{name} {_short(left)} → {_short(right)}" for name, (left, right) in tensor.fields.items())
        yield f"tensor {tensor.name}: {fields or tensor.change.value}"
    if len(report.tensors) > _MOST_TENSORS:
        yield f"and {len(report.tensors) - _MOST_TENSORS} tensors more; --json lists all"
    for graph in report.graphs:
        detail = f"{graph.where}: {graph.left} → {graph.right}" if graph.change is Change.CHANGED else ""
        yield f"graph {graph.target}:{graph.name}: {graph.change.value} {detail}".rstrip()


def _sqnr(report: CoreDiff) -> Iterable[str | Table]:
    if report.sqnr is None:
        yield "not compared: both cores need an error report"
        return
    differ = [row for row in report.sqnr if row.left != row.right]
    if differ:
        yield _table(("weight", "left", "right"), (
            (row.name, _kept(row.left), _kept(row.right)) for row in differ[:_MOST_TENSORS]))
    if len(differ) > _MOST_TENSORS:
        yield f"and {len(differ) - _MOST_TENSORS} weights more; --json lists all"
    yield f"{len(report.sqnr) - len(differ)} of {len(report.sqnr)} weights are equal on both sides"


def _kept(side: Kept | None) -> str:
    if side is None:
        return "not converted"
    return f"{side.format} " + ("exact" if side.sqnr_db is None else f"{side.sqnr_db:.2f} dB")


def _core(side: CoreSide) -> str:
    return printable(f"{side.path}   {side.core_name} release {side.release}   {side.core_digest[:16]}…")


def _value(value: Value) -> str:
    """What applies; what is recorded is added where it says less."""
    recorded = "nothing recorded" if value.recorded is None else f"recorded {value.recorded}"
    return f"{value.effective} ({value.origin}, {recorded})"


def _amount(tensors: int, nbytes: int) -> str:
    return f"{tensors} tensors, {human_bytes(nbytes)}" if tensors else "none"


def _short(text: str) -> str:
    return (text or "absent") if len(text) < 32 else f"{text[:16]}…"


def _table(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    return table
