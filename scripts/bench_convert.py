#!/usr/bin/env python3
"""How fast weights are converted, as one JSON document on stdout, in GB of bf16 input a second.

    python scripts/bench_convert.py [--layers 1] [--runs 3]

`codec` is quantizing alone, of a matrix in memory: ours on two threads, torchao 0.18 on its own. `stream` is the whole
way from a checkpoint to a core's weight file: read, convert, measure the errors, hash three ways, write and sync.
`copy` reads the same checkpoint and writes it as it is, and syncs: the most that `stream` could reach. Every speed is
the best of the runs, which take turns; `cores` is the CPU time of that run over its wall time, and `cpu_ns_per_weight`
the least CPU time of all runs, which a machine with other work to do changes less than the speed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dflash_core.formats import Format

from exporter.checkpoint import open_checkpoint
from exporter.convert.mxfp8 import quantize_mxfp8
from exporter.convert.nvfp4 import quantize_nvfp4
from exporter.convert.quantized import row_chunks
from exporter.convert.stream import THREADS, convert_weights
from exporter.weights import WeightSpec, layout_weights
from scripts.synth_checkpoint import config_of, write_checkpoint

CODEC_SHAPE = (4096, 4096)
COPY_NBYTES = 8 << 20


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Conversion speed as JSON.")
    parser.add_argument("--layers", type=int, default=1, help="layers of the 8B shapes in the checkpoint: 436 MB each")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; absent: the system's temporary folder")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        document = {"threads": THREADS, "runs": given.runs, "codec": codec(given.runs),
                    "stream": stream(Path(folder), given.layers, given.runs)}
    print(json.dumps(document, indent=1))
    return 0


def codec(runs: int) -> dict[str, Any]:
    """GB/s of both formats, ours and torchao's, on one matrix."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    weight = (torch.randn(CODEC_SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)

    def torchao_nvfp4() -> object:
        return nvfp4_quantize(weight, 16, per_tensor_amax_to_scale(weight.abs().max().float()))

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "mxfp8": (lambda: _on_threads(weight, quantize_mxfp8),
                  lambda: to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)),
        "nvfp4": (lambda: _on_threads(weight, _nvfp4_of(weight)), torchao_nvfp4),
    }
    found = {}
    for name, (ours, theirs) in pairs.items():
        ours_gbs, theirs_gbs = (weight.nbytes / 1e9 / took.wall_s for took in _measure(runs, ours, theirs))
        found[name] = {"ours_gbs": round(ours_gbs, 3), "torchao_gbs": round(theirs_gbs, 3),
                       "ratio": round(ours_gbs / theirs_gbs, 1)}
    return found


def stream(folder: Path, layers: int, runs: int) -> dict[str, Any]:
    """GB/s from checkpoint to file, beside those of a copy."""
    recipe, config = config_of("llama-8b", layers, None, 1024)
    total = write_checkpoint(folder / "model", recipe, config)
    checkpoint = open_checkpoint(folder / "model")
    matrices = {name: entry for name, entry in checkpoint.tensors.items() if len(entry.shape) == 2}

    def convert(fmt: Format) -> None:
        specs = [WeightSpec(name, "target", "target", "target", (name,), "copy/1", fmt, entry.shape)
                 for name, entry in matrices.items()]
        convert_weights(layout_weights(specs), {"target": checkpoint}, folder / "core", lambda nbytes: None)
        shutil.rmtree(folder / "core")

    def copy() -> None:
        with (folder / "copy").open("wb", buffering=0) as out:
            for shard in checkpoint.shards:
                with (checkpoint.path / shard.name).open("rb", buffering=0) as file:
                    while piece := file.read(COPY_NBYTES):
                        out.write(piece)
            os.fsync(out.fileno())
        (folder / "copy").unlink()

    found = _measure(runs, copy, lambda: convert(Format.MXFP8), lambda: convert(Format.NVFP4))
    document: dict[str, Any] = {"input_gb": round(total / 1e9, 3)}
    for name, took in zip(("copy", "mxfp8", "nvfp4"), found, strict=True):
        document[name] = {
            "gbs": round(total / 1e9 / took.wall_s, 3), "of_copy": round(found[0].wall_s / took.wall_s, 2),
            "cores": round(took.cores, 2), "cpu_ns_per_weight": round(took.least_cpu_s / (total / 2) * 1e9, 2),
        }
    return document


def _nvfp4_of(weight: torch.Tensor) -> Callable[[torch.Tensor], object]:
    from exporter.convert.nvfp4 import global_scale_of
    from exporter.convert.quantized import block_amax

    scale = global_scale_of(max(_on_threads(weight, lambda rows: block_amax(rows, 16).max())))
    return lambda rows: quantize_nvfp4(rows, scale)


def _on_threads(weight: torch.Tensor, work: Callable[[torch.Tensor], Any]) -> list[Any]:
    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, [weight[part] for part in row_chunks(*weight.shape)]))


@dataclass(slots=True)
class _Took:
    wall_s: float = float("inf")
    cores: float = 0.0
    least_cpu_s: float = float("inf")


def _measure(runs: int, *works: Callable[[], object]) -> list[_Took]:
    """The best run of each; they take turns, so that a slow moment of the machine meets all."""
    found = [_Took() for _ in works]
    for _ in range(runs):
        for took, work in zip(found, works, strict=True):
            started, cpu = time.perf_counter(), time.process_time()
            work()
            wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
            took.least_cpu_s = min(took.least_cpu_s, cpu_s)
            if wall_s < took.wall_s:
                took.wall_s, took.cores = wall_s, cpu_s / wall_s
    return found


if __name__ == "__main__":
    sys.exit(main())
