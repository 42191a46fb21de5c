"""What conversion cost each weight of a core, as its exporter measured it: `dflash-run inspect CORE --errors`.

    for entry in worst_first(read_errors(Path("demo/core"), TrustPolicy.load(path))):
        print(entry.name, entry.sqnr_db)

The report is a JSON file among the core's configs, signed like everything else there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dflash_core.errors import FormatError

from .archive import open_core
from .console import printable
from .structure import check_manifest_structure
from .trust import TrustPolicy
from .verify import VerifiedCore, check_contents, check_version, file_sizes, parse_manifest, read_manifest, verify

REPORT_KIND = "dflash-conversion-errors/1"
_MARK = f'{{"kind":"{REPORT_KIND}",'.encode()
_TYPES = {"name": (str,), "format": (str,), "num_weights": (int,), "zero_blocks": (int,),
          "sqnr_db": (int, float, type(None)), "max_abs": (int, float), "max_rel": (int, float),
          "saturated": (int, float)}


@dataclass(frozen=True, slots=True)
class WeightErrors:
    """The errors of one converted weight.

    Attributes:
        name, format: of the stored weight.
        num_weights: how many values it has.
        sqnr_db: signal to quantization noise, 10 · log10(Σw² / Σ(w − q)²); None when nothing was lost.
        max_abs: the largest |w − q|.
        max_rel: the largest |w − q| / |w| over weights other than zero.
        saturated: fraction of weights that the format's largest code holds although they are larger.
        zero_blocks: blocks of which every code is zero.
    """

    name: str
    format: str
    num_weights: int
    sqnr_db: float | None
    max_abs: float
    max_rel: float
    saturated: float
    zero_blocks: int


def read_errors(path: Path, trust: TrustPolicy | None) -> tuple[WeightErrors, ...]:
    """The error reports of a core in storage order; empty when it carries none.

    Args:
        path: the core's directory, or an archive of it.
        trust: whose signatures are accepted; None reads the core without asking who made it.
    Raises:
        VerificationError, PolicyError, FormatError, CompatibilityError: as `verify`.
        FormatError: ERROR_REPORT, a report that is not of the form above.
    """
    if trust is not None:
        with verify(path, trust) as core:
            return errors_of(core)
    with open_core(path) as files:
        manifest = parse_manifest(read_manifest(files))
        check_version(manifest)
        check_manifest_structure(manifest, file_sizes(files))
        return reported_in(check_contents(files, manifest).files)


def errors_of(core: VerifiedCore) -> tuple[WeightErrors, ...]:
    """The error reports of a core that is open; errors as of `read_errors`."""
    return reported_in({entry.path: core.small_file(entry.ref) for entry in core.manifest.files
                        if entry.role == "config"})


def reported_in(files: Mapping[str, bytes]) -> tuple[WeightErrors, ...]:
    """The error reports among a core's small files, by their names in it; errors as of `read_errors`.

    A combined core has the reports of all its components; a weight that they share is listed once.
    """
    reports = (files[name] for name in sorted(files) if files[name].startswith(_MARK))
    return tuple(dict.fromkeys(entry for report in reports for entry in _parse(report)))


def worst_first(errors: Iterable[WeightErrors]) -> list[WeightErrors]:
    """In the order in which a person should look at them: the lowest ratio first, then by name."""
    return sorted(errors, key=lambda entry: (math.inf if entry.sqnr_db is None else entry.sqnr_db, entry.name))


def print_errors(errors: Iterable[WeightErrors], *, authenticated: bool) -> None:
    """Write the table to stdout, worst first; 80 columns hold it unless a name is long."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from .table_console import TableConsole

    out = TableConsole()
    if not authenticated:
        out.print("NOT AUTHENTICATED: no signature was checked; --trust TRUST verifies the core", soft_wrap=True)
    table = Table("weight", "format", "SQNR dB", "max abs", "max rel", "saturated", "zero", box=SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    table.columns[0].overflow = "fold"
    for column in table.columns:
        column.no_wrap = column is not table.columns[0]
    for entry in worst_first(errors):
        ratio = "exact" if entry.sqnr_db is None else f"{entry.sqnr_db:.2f}"
        table.add_row(printable(entry.name), printable(entry.format), ratio, f"{entry.max_abs:.3g}",
                      f"{entry.max_rel:.3g}", f"{entry.saturated:.2%}", str(entry.zero_blocks))
    if table.row_count:
        out.print(table)
    else:
        out.print("no converted weights, or a core that carries no error report")


def _parse(report: bytes) -> list[WeightErrors]:
    try:
        document = json.loads(report, parse_constant=_refuse)
        weights = document["weights"] if isinstance(document, dict) else None
    except (ValueError, KeyError, RecursionError) as cause:
        raise _malformed(f"not JSON with weights ({type(cause).__name__})") from cause
    if not isinstance(weights, list):
        raise _malformed("no list of weights")
    return [_entry(value) for value in weights]


def _entry(value: Any) -> WeightErrors:
    names = [field.name for field in fields(WeightErrors)]
    if not isinstance(value, dict) or any(type(value.get(name)) not in _TYPES[name] for name in names):
        raise _malformed(json.dumps(value)[:100])
    return WeightErrors(**{name: value[name] for name in names})


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _malformed(got: str) -> FormatError:
    return FormatError("ERROR_REPORT", "error report is malformed", where="config/", got=printable(got),
                       expected="name, format and figures of every weight",
                       hint="it was made by another release: use the one that exported the core")
