"""The plan as a person reads it: what each part becomes and why, which graphs follow, and what it all weighs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from exporter.plan import PlannedTensor, PlanRow, PrecisionPlan, plan_table
from exporter.program.graphs import RecordedProgram
from exporter.program.serving import ServingShape
from exporter.weights import WeightLayout
from runtime.console import human_bytes

if TYPE_CHECKING:
    from rich.table import Table

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One graph that will be in the core."""

    name: str
    role: str
    num_nodes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything `--plan` says.

    Attributes:
        kv_bytes_per_token, max_context: None for a family without a program.
        planned_only: name of the family that can be planned and not exported; empty when it can.
    """

    plan: PrecisionPlan
    rows: tuple[PlanRow, ...]
    graphs: tuple[GraphRow, ...]
    weight_nbytes: int
    kv_bytes_per_token: int | None
    max_context: int | None
    planned_only: str = ""

    def as_dict(self, *, verbose: bool = False) -> dict[str, Any]:
        """The report as JSON; `verbose` adds every tensor."""
        tensors = {"tensors": [_tensor(part, t) for part, t in _parts(self.plan)]} if verbose else {}
        return {
            "groups": [{**asdict(row), "origin": row.origin.value} for row in self.rows],
            "effective": [{"role": e.role.value, "value": _word(e.value), "origin": e.origin.value}
                          for e in self.plan.effective],
            "skipped": [{"tensor": t.source, "shape": list(t.shape), "reason": t.reason} for t in self.plan.skipped],
            "graphs": [asdict(graph) for graph in self.graphs], "weight_nbytes": self.weight_nbytes,
            "kv_bytes_per_token": self.kv_bytes_per_token, "max_context": self.max_context,
            "tuning_identity": self.plan.tuning_identity.hex(), "can_be_exported": not self.planned_only, **tensors,
        }


def report(plan: PrecisionPlan, layout: WeightLayout, recorded: RecordedProgram, shape: ServingShape) -> PlanReport:
    graphs = tuple(GraphRow(g.name, g.role, len(g.nodes), g.ByteSize()) for g in recorded.graphs)
    return PlanReport(plan, plan_table(plan), graphs, layout.size_bytes,
                      recorded.kv_bytes_per_page // shape.page_tokens, shape.max_context)


def print_plan(found: PlanReport, *, verbose: bool = False) -> None:
    """Print the report on stdout; readable without colour and at 80 columns. `verbose` adds a line for every tensor."""
    from runtime.table_console import TableConsole

    console = TableConsole()
    console.print(_weights_table(found.rows), "")
    effective = _table("precision", "role", "effective", "origin")
    for entry in found.plan.effective:
        effective.add_row(entry.role.value, _word(entry.value), entry.origin.value)
    console.print(effective, "")
    if found.graphs:
        graphs = _table("graphs", "graph", "role", "nodes", "bytes", right=(2, 3))
        for graph in found.graphs:
            graphs.add_row(graph.name, graph.role, str(graph.num_nodes), human_bytes(graph.nbytes))
        console.print(graphs, "")
    for line in _skipped_lines(found.plan):
        console.print(line, soft_wrap=True)
    if verbose:
        for part, tensor in _parts(found.plan):
            console.print(_tensor_line(part, tensor), soft_wrap=True)
    rest = [f"weights {human_bytes(found.weight_nbytes)}{', rope tables included' if found.graphs else ''}"]
    if found.kv_bytes_per_token is not None:
        rest += [f"K/V {human_bytes(found.kv_bytes_per_token)} per token", f"context {found.max_context} tokens"]
    console.print("   ".join(rest))
    if found.planned_only:
        console.print(f"no graphs: the forward pass of {found.planned_only} is not implemented, so it cannot be "
                      "exported yet", soft_wrap=True)


def _weights_table(rows: Sequence[PlanRow]) -> Table:
    """Groups under the part that they belong to, each with the value that applies to it and where that came from."""
    table = _table("weights", "part", "count", "before", "after", "bits", "format", "effective, from",
                   right=(1, 2, 3, 4))
    table.padding = (0, 0, 0, 0)  # or the longest scope does not fit 80 columns
    part = ""
    for row in rows:
        if row.part != part:
            part = row.part
            table.add_row(part)
        before = human_bytes(row.nbytes_before) if row.nbytes_before else "copy"
        table.add_row(f"  {row.group}", str(row.num_tensors), before, human_bytes(row.nbytes_after),
                      f"{row.bits_per_weight:.2f}", "+".join(row.formats) or "not stored", _applies(row))
    before, after = sum(row.nbytes_before for row in rows), sum(row.nbytes_after for row in rows)
    table.add_row("total", str(sum(row.num_tensors for row in rows)), human_bytes(before), human_bytes(after))
    return table


def _applies(row: PlanRow) -> str:
    """The value that applies to a group and where that came from; or that the group is kept all the same."""
    if row.num_skipped and not row.num_converted:
        return "kept, see below"
    effective = row.effective if row.effective == row.origin.value else f"{row.effective}, {row.origin.value}"
    return f"{effective}; {row.num_skipped} kept" if row.num_skipped else effective


def _skipped_lines(plan: PrecisionPlan) -> Iterator[str]:
    """What a setting covers and leaves as it was: tensors that differ in their numbers alone share a line."""
    alike: dict[tuple[str, tuple[int, ...], str], list[PlannedTensor]] = {}
    for tensor in plan.skipped:
        alike.setdefault((_NUMBER.sub("*", tensor.source), tensor.shape, tensor.reason), []).append(tensor)
    for (name, shape, reason), tensors in alike.items():
        shown = tensors[0].source if len(tensors) == 1 else f"{len(tensors)} x {name}"
        yield f"kept: {shown} {list(shape)}: {reason}"


def _parts(plan: PrecisionPlan) -> Iterator[tuple[str, PlannedTensor]]:
    head = () if plan.proposal_head is None else (plan.proposal_head,)
    for part, tensors in (("target", plan.target), ("draft", plan.draft), ("proposal head", head)):
        yield from ((part, tensor) for tensor in tensors)


def _tensor_line(part: str, tensor: PlannedTensor) -> str:
    stored = tensor.format.value if tensor.format else "not stored"
    return (f"{part}: {tensor.source} {list(tensor.shape)} {tensor.source_dtype.lower()} → {stored}   "
            f"{human_bytes(tensor.nbytes_before)} → {human_bytes(tensor.nbytes_after)}   "
            f"{tensor.origin.value}: {tensor.reason}")


def _tensor(part: str, tensor: PlannedTensor) -> dict[str, Any]:
    return {
        "part": part, "tensor": tensor.source, "role": tensor.role, "shape": list(tensor.shape),
        "source_dtype": tensor.source_dtype, "format": tensor.format.value if tensor.format else None,
        "origin": tensor.origin.value, "reason": tensor.reason, "skipped": tensor.skipped,
        "nbytes_before": tensor.nbytes_before, "nbytes_after": tensor.nbytes_after,
    }


def _table(title: str, *columns: str, right: tuple[int, ...] = ()) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, title=title,
                  title_justify="left", title_style="bold")
    for index in right:
        table.columns[index].justify = "right"
    return table


def _word(value: object) -> str:
    """An effective value as a word: the two non-string markers carry theirs."""
    return value if isinstance(value, str) else str(getattr(value, "value", value))
