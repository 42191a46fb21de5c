#!/usr/bin/env python3
"""Time to make a picture into patches, and patches into embeddings, on this CPU. One JSON document on stdout.

    make bench-vision
    python scripts/bench_vision.py --repeats 3 --side 1024 --patches 64

Preprocessing is of a square JPEG, from its bytes to patches, at Kimi K3's published limits. The tower has K3's sizes
and random weights, with two of its 27 blocks; what one block takes is the difference to a tower with one.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from dflash_core.compat import CPU
from dflash_core.formats import Format
from dflash_core.v1 import graph_pb2
from PIL import Image

from exporter.models import moonvit
from exporter.models.context import StoredWeight
from exporter.models.moonvit import VisionConfig
from exporter.program.builder import Program, Tensor
from exporter.program.vision import Vision, record_vision, vision_buffers
from runtime.ops import Args, DType, Prepared, find_op
from runtime.vision.decode import decode_image
from runtime.vision.preprocess import image_patches
from runtime.vision.settings import ImageSettings


def median(repeats: int, run: Callable[[], Any]) -> float:
    run()
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def photograph(side: int) -> bytes:
    """A JPEG with slopes and texture, as a camera's: about 0.3 bytes a pixel."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (side // 16, side // 16, 3), np.uint8))
    smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = np.clip(smooth + rng.integers(-8, 8, smooth.shape), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noisy).save(out, "JPEG", quality=90)
    return out.getvalue()


def measure_preprocessing(side: int, repeats: int) -> dict[str, Any]:
    data = photograph(side)
    picture, settings = decode_image(data), ImageSettings()
    image = image_patches(picture, settings, 1 << 20)
    return {"side": side, "jpeg_mb": len(data) / 1e6, "tokens": image.tokens,
            "decode_s": median(repeats, lambda: decode_image(data)),
            "patches_s": median(repeats, lambda: image_patches(picture, settings, 1 << 20))}


def tower_seconds(layers: int, patches: int, repeats: int) -> float:
    """One image of `patches` patches, in bf16, on the reference ops."""
    config = VisionConfig(14, 1024, 4096, layers, 12, 128, 64, 64, 7168, 1e-5)
    formats = dict.fromkeys(moonvit.vision_tensor_shapes(config), Format.BF16)
    program, weights, memory = Program(), {}, {}
    rng = np.random.default_rng(0)
    for spec in moonvit.weight_specs(config, formats, ImageSettings()):
        dtype = DType.F32 if spec.format is Format.F32 else DType.BF16
        buffer_id = program.weights(spec.name, 0, prod(spec.shape) * dtype.bits // 8)
        weights[spec.name] = StoredWeight(Format(spec.format), Tensor(buffer_id, 0, dtype, spec.shape, spec.name))
        values = rng.normal(size=spec.shape) * 0.02 if spec.data is None else spec.data.numpy()
        memory[buffer_id] = np.ascontiguousarray(values.astype(dtype.numpy)).reshape(-1).view(np.uint8)
    vision = Vision(config, (patches,))
    buffers = vision_buffers(program, vision, 16, DType.BF16)
    recorded = record_vision(program, vision, weights, buffers, DType.BF16)
    for buffer in program.buffers:
        if buffer.buffer_class != graph_pb2.WEIGHTS:
            memory[buffer.buffer_id] = np.zeros(buffer.fixed_bytes, np.uint8)
    side = int(patches**0.5) // 2 * 2
    memory[buffers.image_grid.buffer_id].view(np.int32)[:] = side, side
    steps, prepared = [], Prepared()
    for call in recorded.calls[0]:
        op = find_op(call.op)
        arrays = {p.name: np.ndarray(p.shape(call.scalars), p.element(call.scalars).numpy,
                                     memory[call.operands[p.name].buffer_id].data, call.operands[p.name].offset)
                  for p in op.operands}
        steps.append(op.bind(Args(call.op, dict(call.scalars), arrays, prepared)))
    return median(repeats, lambda: [step() for step in steps])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--patches", type=int, default=1024)
    args = parser.parse_args()
    one, two = (tower_seconds(layers, args.patches, args.repeats) for layers in (1, 2))
    print(json.dumps({
        "preprocessing": measure_preprocessing(args.side, args.repeats),
        "tower": {"device": CPU, "patches": args.patches, "block_s": two - one, "around_blocks_s": 2 * one - two},
        "machine": {"processors": len(os.sched_getaffinity(0))},
    }, indent=1))


if __name__ == "__main__":
    main()
