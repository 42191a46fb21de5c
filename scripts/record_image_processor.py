"""Record what transformers' Kimi K2.5 image processor makes of drawn pictures: the oracle of tests/runtime/vision.

    python scripts/record_image_processor.py

The processor needs torchvision, which our lock does not hold: run this in an environment that has the torchvision of
its torch, beside transformers, numpy and Pillow. Kimi K3's mean and deviation are set; the rest is K2.5's own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tests.oracles.drawn_images import drawn

OUT = Path(__file__).resolve().parent.parent / "tests" / "runtime" / "vision" / "data" / "kimi_k25_processor.npz"
# width, height, most patches: unscaled, padded on either side, scaled in both or one of the directions
CASES = ((28, 28, 64), (56, 28, 64), (1, 1, 64), (13, 45, 64), (70, 33, 64), (300, 14, 64), (128, 96, 24),
         (96, 128, 24), (250, 30, 16), (333, 517, 16), (256, 3, 64))
SIZES = 400


def main() -> None:
    from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor, navit_resize

    arrays: dict[str, np.ndarray] = {}
    for width, height, most in CASES:
        processor = Kimi_K25ImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3, max_patches=most)
        made = processor([Image.fromarray(drawn(width, height))], return_tensors="np")
        name = f"{width}x{height}/{most}"
        arrays[f"{name} values"] = made["pixel_values"].astype(np.float32)
        arrays[f"{name} grid"] = made["image_grid_thw"].reshape(3).astype(np.int32)
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(SIZES):
        width, height = (int(2 ** rng.uniform(0, 13)) for _ in range(2))
        most, side = int(2 ** rng.uniform(2, 16)), int(2 ** rng.uniform(2, 9)) // 2 * 2
        scaled, padded = navit_resize(height, width, 14, 2, most, side)
        rows.append((width, height, most, side, scaled[1], scaled[0], padded[1], padded[0]))
    arrays["sizes"] = np.array(rows, np.int32)
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main()
