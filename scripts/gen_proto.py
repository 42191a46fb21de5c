#!/usr/bin/env python3
"""Generate proto/dflash_core/v1/*_pb2.py(i) from the .proto files beside them.

    python scripts/gen_proto.py            write the generated files
    python scripts/gen_proto.py --check    exit 1 when the committed files differ from what would be written
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"


def generate(out: Path) -> None:
    """Write the generated modules and their type stubs below `out`, in the folders of their package."""
    sources = sorted(str(p.relative_to(PROTO)) for p in PROTO.glob("dflash_core/v1/*.proto"))
    args = ["protoc", f"-I{PROTO}", f"--python_out={out}", f"--pyi_out={out}", *sources]
    if protoc.main(args) != 0:
        raise SystemExit("protoc failed")


def main() -> None:
    """Command line; exits with a message when protoc fails or the committed files are stale."""
    if sys.argv[1:] == []:
        generate(PROTO)
        return
    if sys.argv[1:] != ["--check"]:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as tmp:
        generate(Path(tmp))
        fresh = {p.relative_to(tmp): p.read_bytes() for p in Path(tmp).rglob("*_pb2.py*")}
    kept = {p.relative_to(PROTO): p.read_bytes() for p in PROTO.rglob("*_pb2.py*")}
    stale = sorted(str(p) for p in fresh.keys() | kept.keys() if fresh.get(p) != kept.get(p))
    if stale:
        raise SystemExit("generated code differs from the schema; run `make proto`: " + ", ".join(stale))


if __name__ == "__main__":
    main()
