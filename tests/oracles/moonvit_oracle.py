"""Kimi K3's image path restated slowly in fp64 from its description, sharing nothing with the code under test.

A config is the published `vision_config`; weights are the checkpoint's, by name, as arrays. Where a step is the image
library's own (bicubic resizing), that library is called: what is restated is what comes before and after it.

Source: the fields, formulas and tensor names of the published Kimi K3 vision tower and image processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

GREY, WHITE, SQUARE, PATCH = 180, 255, 8, 14


def patches(picture: Image.Image, max_patches: int, max_side: int, *, fill_first: bool = False) -> Any:
    """Levels u8 [rows * cols, 588] and the grid (rows, cols)."""
    width, height = picture.size
    scale = min(1.0, math.sqrt(max_patches / (max(1.0, width // PATCH) * max(1.0, height // PATCH))),
                max_side * PATCH / width, max_side * PATCH / height)
    new_width = min(max(1, math.floor(width * scale)), max_side * PATCH)
    new_height = min(max(1, math.floor(height * scale)), max_side * PATCH)
    if fill_first:
        picture = on_chessboard(picture)
    picture = on_chessboard(picture.resize((new_width, new_height), Image.Resampling.BICUBIC))
    rows, cols = math.ceil(new_height / 28) * 2, math.ceil(new_width / 28) * 2
    out = np.zeros((rows * cols, 3, PATCH, PATCH), np.uint8)
    for y in range(new_height):
        for x in range(new_width):
            out[y // PATCH * cols + x // PATCH, :, y % PATCH, x % PATCH] = picture.getpixel((x, y))
    return out.reshape(rows * cols, 588), (rows, cols)


def on_chessboard(picture: Image.Image) -> Image.Image:
    if picture.mode == "RGB":
        return picture
    out = Image.new("RGB", picture.size)
    for y in range(picture.height):
        for x in range(picture.width):
            *colours, alpha = picture.getpixel((x, y))
            behind = GREY if (y // SQUARE + x // SQUARE) % 2 == 1 else WHITE
            share = np.float32(alpha) / np.float32(255)
            out.putpixel((x, y), tuple(int(share * np.float32(c) + (1 - share) * np.float32(behind)) for c in colours))
    return out


def embeddings(config: Mapping[str, Any], weights: Mapping[str, np.ndarray], levels: np.ndarray, rows: int,
               cols: int) -> np.ndarray:
    """Embeddings f64 [rows * cols / 4, text_hidden_size] of patches u8 [rows * cols, 588]."""
    def w(name: str) -> np.ndarray:
        return np.asarray(weights[name], np.float64)

    hidden, heads = config["vt_hidden_size"], config["vt_num_attention_heads"]
    head_dim, eps = config["qkv_hidden_size"] // heads, float(np.finfo(np.float32).eps)
    pixels = (levels.astype(np.float64) / 255 - 0.5) / 0.5
    x = pixels @ w("vision_tower.patch_embed.proj.weight").reshape(hidden, 588).T
    x = x + position_embedding(w("vision_tower.patch_embed.pos_emb.weight"), rows, cols)
    for block in range(config["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{block}."
        qkv = rms_norm(x, w(at + "norm0.weight"), eps) @ w(at + "wqkv.weight").T
        q, k, v = qkv.reshape(len(x), 3, heads, head_dim).transpose(1, 2, 0, 3)
        q, k = rotate(q, rows, cols), rotate(k, rows, cols)
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(head_dim)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + (shares @ v).transpose(1, 0, 2).reshape(len(x), heads * head_dim) @ w(at + "wo.weight").T
        inner = rms_norm(x, w(at + "norm1.weight"), eps) @ w(at + "mlp.fc0.weight").T
        gelu = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + gelu @ w(at + "mlp.fc1.weight").T
    x = rms_norm(x, w("vision_tower.encoder.final_layernorm.weight"), eps)
    groups = np.array([[(2 * r + dr) * cols + 2 * c + dc for dr in (0, 1) for dc in (0, 1)]
                       for r in range(rows // 2) for c in range(cols // 2)])
    inner = x[groups].reshape(len(groups), 4 * hidden) @ w("mm_projector.proj.0.weight").T
    erf = np.vectorize(math.erf)
    out = 0.5 * inner * (1 + erf(inner / math.sqrt(2))) @ w("mm_projector.proj.2.weight").T
    return rms_norm(out, w("mm_projector.post_norm.weight"), config.get("projector_ln_eps", 1e-5))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def position_embedding(table: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """The table [height, width, hidden], read at the middle of each patch, bilinear between its own middles."""
    def at(index: int, count: int, size: int) -> tuple[int, int, float]:
        place = min(max((index + 0.5) * size / count - 0.5, 0.0), size - 1.0)
        low = math.floor(place)
        return low, min(low + 1, size - 1), place - low

    out = []
    for r in range(rows):
        top, bottom, down = at(r, rows, table.shape[0])
        for c in range(cols):
            left, right, across = at(c, cols, table.shape[1])
            above = table[top, left] * (1 - across) + table[top, right] * across
            below = table[bottom, left] * (1 - across) + table[bottom, right] * across
            out.append(above * (1 - down) + below * down)
    return np.array(out)


def rotate(x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """x [heads, rows * cols, head_dim]: dims (2m, 2m + 1) as a complex number; even m turn by column, odd by row."""
    head_dim = x.shape[-1]
    turned = x[..., 0::2] + 1j * x[..., 1::2]
    for patch in range(rows * cols):
        row, col = divmod(patch, cols)
        for j in range(head_dim // 4):
            theta = 10000.0 ** (-4 * j / head_dim)
            turned[:, patch, 2 * j] *= np.exp(1j * col * theta)
            turned[:, patch, 2 * j + 1] *= np.exp(1j * row * theta)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)
