"""The plan as a person reads it: what each part becomes and why, which graphs follow, and what it all weighs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from exporter.plan import PlannedTensor, PlanRow, PrecisionPlan, plan_table
from exporter.program.graphs import RecordedProgram
from exporter.program.serving import ServingShape
from exporter.weights import WeightLayout
from runtime.console import human_bytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One graph that will be in the core."""

    name: str
    role: str
    num_nodes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything `--plan` says."""

    plan: PrecisionPlan
    rows: tuple[PlanRow, ...]
    graphs: tuple[GraphRow, ...]
    weight_nbytes: int
    kv_bytes_per_token: int
    max_context: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "groups": [{**asdict(row), "origin": row.origin.value} for row in self.rows],
            "effective": [{"role": e.role.value, "value": _word(e.value), "origin": e.origin.value}
                          for e in self.plan.effective],
            "skipped": [{"tensor": t.source, "shape": list(t.shape), "reason": t.reason} for t in self.plan.skipped],
            "graphs": [asdict(graph) for graph in self.graphs], "weight_nbytes": self.weight_nbytes,
            "kv_bytes_per_token": self.kv_bytes_per_token, "max_context": self.max_context,
            "tuning_identity": self.plan.tuning_identity.hex(),
        }


def report(plan: PrecisionPlan, layout: WeightLayout, recorded: RecordedProgram, shape: ServingShape) -> PlanReport:
    graphs = tuple(GraphRow(g.name, g.role, len(g.nodes), g.ByteSize()) for g in recorded.graphs)
    return PlanReport(plan, plan_table(plan), graphs, layout.size_bytes,
                      recorded.kv_bytes_per_page // shape.page_tokens, shape.max_context)


def print_plan(found: PlanReport) -> None:
    """Print the report on stdout; readable without colour and at 80 columns."""
    from rich.console import Console

    console = Console(highlight=False)
    table = _table("weights", "part", "tensors", "before", "after", "bits", "format", "origin", right=(1, 2, 3, 4))
    for row in found.rows:
        part = row.part if row.part.endswith(row.group) else f"{row.part} {row.group}"
        before = human_bytes(row.nbytes_before) if row.nbytes_before else "copy"
        table.add_row(part, str(row.num_tensors), before, human_bytes(row.nbytes_after), f"{row.bits_per_weight:.2f}",
                      "+".join(row.formats) or "not stored", row.origin.value)
    console.print(table)
    effective = _table("precision", "role", "effective", "origin")
    for entry in found.plan.effective:
        effective.add_row(entry.role.value, _word(entry.value), entry.origin.value)
    console.print(effective)
    graphs = _table("graphs", "graph", "role", "nodes", "bytes", right=(2, 3))
    for graph in found.graphs:
        graphs.add_row(graph.name, graph.role, str(graph.num_nodes), human_bytes(graph.nbytes))
    console.print(graphs)
    for tensor in found.plan.skipped:
        console.print(f"kept: {_named(tensor)}: {tensor.reason}")
    console.print(f"weights {human_bytes(found.weight_nbytes)}   "
                  f"K/V {human_bytes(found.kv_bytes_per_token)} per token   context {found.max_context} tokens")


def _table(title: str, *columns: str, right: tuple[int, ...] = ()) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*columns, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left",
                  title_style="bold")
    for index in right:
        table.columns[index].justify = "right"
    return table


def _named(tensor: PlannedTensor) -> str:
    return f"{tensor.source} {list(tensor.shape)}"


def _word(value: object) -> str:
    """An effective value as a word: the two non-string markers carry theirs."""
    return value if isinstance(value, str) else str(getattr(value, "value", value))
