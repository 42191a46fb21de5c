"""The options that several commands of `dflash-run` share, each spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
TrustOption = Annotated[
    Path | None,
    typer.Option("--trust", metavar="TRUST", help="Trust file; without it ~/.config/dflash/trust.json."),
]
DeviceOption = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.")]
NoSpeculationOption = Annotated[bool, typer.Option("--no-speculation", help="Decode without the draft.")]

DraftOption = Annotated[
    Path | None, typer.Option("--draft", metavar="DRAFT", help="For a checkpoint: folder of its draft.")
]
ScopeOption = Annotated[str | None, typer.Option("--online-mxfp8-scope", help="For a checkpoint: as dflash-export.")]
DraftBodyOption = Annotated[
    str | None, typer.Option("--draft-body-quantization", help="For a checkpoint: as dflash-export.")
]
DraftHeadOption = Annotated[
    str | None, typer.Option("--draft-head-quantization", help="For a checkpoint: as dflash-export.")
]
