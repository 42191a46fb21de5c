"""A report of `inspect` as text for a person: 80 columns, readable without colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from dflash_core.effective import Role
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .console import human_bytes, printable
from .inspect import CoreReport, Model
from .inspect_precision import Component
from .table_console import TableConsole

_NOT_AUTHENTICATED = "NOT AUTHENTICATED: no signature was checked; --trust TRUST verifies the core"
_LABEL_WIDTH = 10
_KEYID_DIGITS = 16
_SETTINGS = {
    Role.TARGET: ("online_quantization", "online_mxfp8_scope"), Role.DRAFT_BODY: ("draft_body_quantization",),
    Role.DRAFT_HEAD: ("draft_head_quantization",), Role.VERIFY_HEAD: ("verify_head_precision",),
}


def print_report(report: CoreReport) -> None:
    """Write the report to stdout. Its first line says whether signatures were checked."""
    out = TableConsole()
    for line in _lines(report):
        out.print(line, soft_wrap=True)
    for title, table in _tables(report):
        out.print()
        out.print(title)
        out.print(table)


def _lines(report: CoreReport) -> Iterable[str]:
    signers = ", ".join(printable(signer.owner) or signer.keyid[:_KEYID_DIGITS] for signer in report.signers)
    yield f"verified: signed by {signers}" if report.authenticated else _NOT_AUTHENTICATED
    yield ""
    yield _line("core", f"{report.core_name}   release {report.release}")
    yield _line("digest", report.core_digest)
    yield from _model_lines("target", report.target)
    if report.draft is not None and report.speculation is not None:
        yield from _model_lines("draft", report.draft)
        speculation = report.speculation
        yield _line("", f"{speculation.method}, {speculation.depth} proposals per step, block {speculation.block_size}")
    else:
        yield _line("draft", "none")
    if report.vision is not None:
        yield from _model_lines("vision", report.vision.encoder)
        if report.vision.max_image_tokens is not None:
            yield _line("", f"images of at most {report.vision.max_image_tokens} tokens")
    room = report.capacity
    yield _line("room for", f"{room}{f' of {human_bytes(room.state_nbytes)}' if room.snapshot_slots else ''}")
    graphs = "recorded without a device" if report.export_device is None else f"captured on {report.export_device}"
    yield _line("exported", f"by dflash {report.exporter_version or '(version not recorded)'}, graphs {graphs}")
    roles = Counter(item.role for item in report.files)
    yield _line("files", f"{human_bytes(sum(item.nbytes for item in report.files))} in "
                         f"{', '.join(f'{count} {role}' for role, count in roles.items())}")


def _model_lines(label: str, model: Model) -> Iterable[str]:
    yield _line(label, f"{model.repository or '(repository not recorded)'}   {model.architecture}")
    yield _line("", f"revision {model.revision or 'not recorded'}")
    if model.files:
        yield _line("", f"{model.files} checkpoint files   {human_bytes(model.nbytes)}")


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{printable(text)}"


def _tables(report: CoreReport) -> Iterable[tuple[str, Table]]:
    yield "effective precision", _table(
        {"role": "left", "format": "left", "origin": "left"},
        ((item.role, item.effective, item.origin) for item in report.precision),
    )
    for part in report.components:
        graphs = f"{len(part.graphs)} graph{'' if len(part.graphs) == 1 else 's'}"
        yield printable(f"component {part.component_id}, {part.core_name}: {graphs}"), _table(
            {"role": "left", "recorded": "left", "effective": "left", "origin": "left"},
            ((item.role, _recorded(part, item.role), item.effective, item.origin) for item in part.precision),
        )
    yield "graphs", _table(
        {"graph": "left", "role": "left", "batch": "right", "tokens": "right", "nodes": "right", "kernels": "left"},
        (
            (f"{item.target}:{item.name}", item.role, str(item.batch), str(item.query_tokens), str(item.nodes),
             ", ".join(f"{count}×{name}" for name, count in item.kernels.items()))
            for item in report.graphs
        ),
    )
    yield "memory by buffer class", _table(
        {"class": "left", "buffers": "right", "size": "right", "and for each": "left"},
        (
            (" ".join(filter(None, (item.buffer_class, item.target))), str(item.buffers), human_bytes(item.nbytes),
             ", ".join(f"{symbol} × {human_bytes(nbytes)}" for symbol, nbytes in item.per_symbol.items()))
            for item in report.memory
        ),
    )
    yield "weights", _table(
        {"owner": "left", "format": "left", "tensors": "right", "size": "right", "bits/weight": "right"},
        (
            (item.owner, item.format, str(item.tensors), human_bytes(item.nbytes), _bits(item.bits_per_weight))
            for item in report.weights
        ),
    )
    if report.authenticated:
        yield "signers", _table(
            {"key": "left", "owner": "left", "roles": "left"},
            ((f"{item.keyid[:_KEYID_DIGITS]}…", item.owner, ", ".join(item.roles)) for item in report.signers),
        )


def _recorded(part: Component, role: str) -> str:
    """The recorded values behind a role as they are: "-" where nothing is recorded, quotes round nothing."""
    values = [part.recorded[setting] for setting in _SETTINGS[Role(role)]]
    if not any(value is not None for value in values):
        return "-"
    return ", scope ".join("-" if value is None else value or '""' for value in values)


def _bits(bits_per_weight: float | None) -> str:
    return "shared" if bits_per_weight is None else f"{bits_per_weight:.2f}"


def _table(columns: Mapping[str, Literal["left", "right"]], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, justify in columns.items():
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(printable(cell) for cell in row))
    return table
