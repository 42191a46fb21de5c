"""MoonViT, Kimi K3's image tower, and the projector behind it, for one image.

Patches are embedded, placed on a grid (a learned table, interpolated, and 2-D rope), attend to each other without a
mask, and leave as one row per 2 x 2 group, projected to the language model's width. Nothing of it is ever converted:
logical weight names are "vision.<...>", in a blob of their own. Source: docs/decisions/0010.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from dflash_core.errors import CheckpointError, PlanError
from dflash_core.formats import Format

from exporter.config_fields import Fields, short
from exporter.models.context import TILE_ROWS, Forward, ImageRows
from exporter.program.builder import Tensor
from exporter.rope import RopeParameters, RopeType, rope_table
from exporter.weights import WeightSpec
from runtime.vision.settings import PREPROCESSOR_CONFIG, ImageSettings

TOWER, PROJECTOR = "vision_tower", "mm_projector"
ROPE_THETA = 10000.0
MAX_SIDE_PATCHES = 512
MERGE = 2  # patches along a side of the group that becomes one row
NORM_EPS = float(np.finfo(np.float32).eps)  # what torch's norm adds where the model names none, also in bf16
# What a config may say in one way only: with another value, it is another tower.
FIXED: Mapping[str, object] = {
    "pos_emb_interpolation_mode": "bilinear", "pos_emb_type": "divided_fixed", "norm_type": "rmsnorm",
    "activation_func": "gelu_pytorch_tanh", "mlp_type": "mlp2", "merge_type": "sd2_tpool",
    "merge_kernel_size": [MERGE, MERGE], "mm_projector_type": "patchmergerv2", "projector_hidden_act": "gelu",
    "attn_bias": False, "linear_bias": False, "patch_embed_proj_bias": False, "rope_theta": ROPE_THETA,
    "max_pos_emb_height": MAX_SIDE_PATCHES, "max_pos_emb_width": MAX_SIDE_PATCHES,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The tower's and the projector's sizes.

    Attributes:
        patch_size: pixels along a side of a patch.
        num_heads, head_dim: of the attention; their product need not be hidden_size.
        grid_height, grid_width: cells of the learned position table.
        text_hidden_size: width of the embeddings that come out.
        projector_eps: of the norm behind the projector.
    """

    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    grid_height: int
    grid_width: int
    text_hidden_size: int
    projector_eps: float

    @property
    def patch_values(self) -> int:
        return 3 * self.patch_size**2


def read_vision_config(fields: Fields, text_hidden_size: int) -> VisionConfig:
    """The tower that a config's `vision_config` describes; absent fields mean what Kimi K3's published code takes.

    Args:
        fields: the nested object.
        text_hidden_size: of the language model that the embeddings are for.
    Raises:
        CheckpointError: VISION_UNSUPPORTED, with the field; FIELD_MISSING or FIELD_VALUE.
    """
    for name, only in FIXED.items():
        if fields.has(name) and fields.get(name) != only:
            raise CheckpointError("VISION_UNSUPPORTED", f"an image tower with this {name} is not built",
                                  where=fields.where, expected=short(only), got=short(fields.get(name)),
                                  hint="export the text model alone, or a checkpoint with Kimi K3's tower")
    hidden, heads = fields.count("vt_hidden_size"), fields.count("vt_num_attention_heads")
    wide = fields.count("qkv_hidden_size", default=hidden)
    if wide % (4 * heads):
        raise fields.wrong("qkv_hidden_size", f"a multiple of 4 · {heads} heads: rope turns pairs by row and column")
    if fields.count("mm_hidden_size", default=hidden) != hidden:
        raise fields.wrong("mm_hidden_size", f"the tower's hidden size, {hidden}")
    if fields.count("text_hidden_size", default=text_hidden_size) != text_hidden_size:
        raise fields.wrong("text_hidden_size", f"the language model's hidden size, {text_hidden_size}")
    return VisionConfig(
        patch_size=fields.count("patch_size", default=14), hidden_size=hidden,
        intermediate_size=fields.count("vt_intermediate_size"), num_layers=fields.count("vt_num_hidden_layers"),
        num_heads=heads, head_dim=wide // heads, grid_height=fields.count("init_pos_emb_height", default=64),
        grid_width=fields.count("init_pos_emb_width", default=64), text_hidden_size=text_hidden_size,
        projector_eps=fields.positive("projector_ln_eps", default=1e-5))


def _tensors(config: VisionConfig) -> list[tuple[str, str, tuple[int, ...]]]:
    """Logical name, checkpoint name and shape of every tensor of tower and projector, in storage order."""
    hidden, wide, inner = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    rows: list[tuple[str, str, tuple[int, ...]]] = [
        ("patch_embed", f"{TOWER}.patch_embed.proj", (hidden, 3, config.patch_size, config.patch_size)),
        ("pos_emb", f"{TOWER}.patch_embed.pos_emb", (config.grid_height, config.grid_width, hidden)),
    ]
    for block in range(config.num_layers):
        here, at = f"blocks.{block}", f"{TOWER}.encoder.blocks.{block}"
        rows += [
            (f"{here}.norm0", f"{at}.norm0", (hidden,)), (f"{here}.wqkv", f"{at}.wqkv", (3 * wide, hidden)),
            (f"{here}.wo", f"{at}.wo", (hidden, wide)), (f"{here}.norm1", f"{at}.norm1", (hidden,)),
            (f"{here}.fc0", f"{at}.mlp.fc0", (inner, hidden)), (f"{here}.fc1", f"{at}.mlp.fc1", (hidden, inner)),
        ]
    return [
        *rows, ("final_norm", f"{TOWER}.encoder.final_layernorm", (hidden,)),
        ("projector.in", f"{PROJECTOR}.proj.0", (4 * hidden, 4 * hidden)),
        ("projector.out", f"{PROJECTOR}.proj.2", (config.text_hidden_size, 4 * hidden)),
        ("projector.norm", f"{PROJECTOR}.post_norm", (config.text_hidden_size,)),
    ]


def vision_tensor_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Every checkpoint tensor of tower and projector, with its shape, in storage order."""
    return {f"{source}.weight": shape for _, source, shape in _tensors(config)}


def weight_specs(config: VisionConfig, formats: Mapping[str, Format], settings: ImageSettings) -> list[WeightSpec]:
    """Every weight that the vision graphs read, in storage order: the checkpoint's as they are, and two tables.

    Args:
        formats: planned format of each checkpoint tensor.
        settings: of the model's image processor; its normalization becomes a table.
    Raises:
        CheckpointError: VISION_SETTINGS; the processor makes other patches than the tower reads.
        PlanError: VISION_FORMAT; a tensor is planned to be converted.
    """
    _check_settings(config, settings)
    specs = []
    for name, stem, shape in _tensors(config):
        source = f"{stem}.weight"
        if formats[source] not in (Format.BF16, Format.F32):
            raise PlanError("VISION_FORMAT", "the image tower and its projector are never converted", where=source,
                            expected="BF16 or F32", got=formats[source].name,
                            hint="take this tensor out of the recipe's rule")
        specs.append(WeightSpec(name=f"vision.{name}", blob="vision", owner="vision", checkpoint="target",
                                sources=(source,), recipe="copy/1", format=formats[source], shape=shape))
    tables = (("pixel_table", "pixel-table/1", torch.from_numpy(settings.pixel_table())),
              ("rope_table", "rope-table/1", grid_rope_table(config.head_dim, MAX_SIDE_PATCHES)))
    return specs + [WeightSpec(name=f"vision.{name}", blob="vision", owner="vision", checkpoint="target", sources=(),
                               recipe=recipe, format=Format.F32, shape=tuple(table.shape), data=table)
                    for name, recipe, table in tables]


def _check_settings(config: VisionConfig, settings: ImageSettings) -> None:
    for name, got, expected, fits in (
        ("patch_size", settings.patch_size, config.patch_size, settings.patch_size == config.patch_size),
        ("merge_kernel_size", settings.merge_size, MERGE, settings.merge_size == MERGE),
        ("patch_limit_on_one_side", settings.max_side_patches, f"at most {MAX_SIDE_PATCHES}",
         settings.max_side_patches <= MAX_SIDE_PATCHES),
    ):
        if not fits:
            raise CheckpointError("VISION_SETTINGS", f"the image processor's {name} is not the tower's",
                                  where=PREPROCESSOR_CONFIG, expected=expected, got=got,
                                  hint="the files are of two revisions: fetch the checkpoint again")


def grid_rope_table(head_dim: int, places: int) -> torch.Tensor:
    """Cosines and sines of every place along a side, fp32 [places, 2, head_dim / 4]: angle j is
    place * 10000^(-4 j / head_dim), with the roundings of every rope table."""
    return rope_table(RopeParameters(RopeType.DEFAULT, ROPE_THETA), head_dim // 2, places)


def record_encoder(fwd: Forward, config: VisionConfig, image: ImageRows, levels: Tensor) -> Tensor:
    """Record tower and projector.

    Args:
        levels: u8 [patches, 3 * patch_size^2].
    Returns:
        [patches / 4, text_hidden_size]; rows beyond the image's are zeros.
    """
    residual = _embed(fwd, config, image, levels)
    delta: Tensor | None = None
    for block in range(config.num_layers):
        here = f"vision.blocks.{block}"
        normed = _norm(fwd, residual, delta, f"{here}.norm0")
        mixed = _attention(fwd, config, image, fwd.linear(normed, f"{here}.wqkv", "qkv"), here)
        normed = _norm(fwd, residual, fwd.linear(mixed, f"{here}.wo", "delta"), f"{here}.norm1")
        inner = _gelu(fwd, fwd.linear(normed, f"{here}.fc0", "inner"), "gelu_tanh", here)
        delta = fwd.linear(inner, f"{here}.fc1", "delta")
    return _project(fwd, config, image, _norm(fwd, residual, delta, "vision.final_norm"))


def _embed(fwd: Forward, config: VisionConfig, image: ImageRows, levels: Tensor) -> Tensor:
    table = fwd.plain("vision.pixel_table")
    pixels = fwd.scratch("pixels", config.patch_values, rows=image.count)
    fwd.graph.call("dflash.pixel_patches/1", {"levels": levels, "table": table, "grid": image.grid, "out": pixels},
                   label="vision.pixels", rows=image.count, channels=3, pixels=config.patch_size**2, act=fwd.act)
    weight = fwd.plain("vision.patch_embed").reshape(config.hidden_size, config.patch_values)
    residual = fwd.scratch("residual", config.hidden_size, rows=image.count)
    fwd.graph.call("dflash.linear/1", {"x": pixels, "weight": weight, "out": residual}, label="vision.patch_embed",
                   rows=image.count, in_features=config.patch_values, out_features=config.hidden_size,
                   tile_rows=TILE_ROWS, act=fwd.act, w=weight.dtype, result=fwd.act)
    position = fwd.plain("vision.pos_emb")
    fwd.graph.call("dflash.grid_embedding/1", {"table": position, "grid": image.grid, "x": residual},
                   label="vision.pos_emb", rows=image.count, height=config.grid_height, width=config.grid_width,
                   cols=config.hidden_size, act=fwd.act, w=position.dtype)
    return residual


def _norm(fwd: Forward, residual: Tensor, delta: Tensor | None, name: str, eps: float = NORM_EPS,
          out: str = "normed") -> Tensor:
    """Add `delta` to the residual stream, if there is one, and normalize."""
    weight = fwd.plain(name)
    rows, cols = residual.shape
    normed = fwd.scratch(out, cols, rows=rows)
    op, operands = "dflash.rms_norm_once/1", {"x": residual, "weight": weight, "out": normed}
    if delta is not None:
        op = "dflash.add_rms_norm_once/1"
        operands = {"residual": residual, "delta": delta, "weight": weight, "out": normed}
    fwd.graph.call(op, operands, label=name, rows=rows, cols=cols, eps=eps, act=fwd.act, w=weight.dtype)
    return normed


def _attention(fwd: Forward, config: VisionConfig, image: ImageRows, qkv: Tensor, here: str) -> Tensor:
    table, wide = fwd.plain("vision.rope_table"), config.num_heads * config.head_dim
    q, k, mixed = (fwd.scratch(name, wide, rows=image.count) for name in ("q", "k", "mixed"))
    heads = {"rows": image.count, "heads": config.num_heads, "head_dim": config.head_dim, "act": fwd.act}
    fwd.graph.call("dflash.rope_grid/1", {"qkv": qkv, "rope_table": table, "grid": image.grid, "q": q, "k": k},
                   label=here, positions=table.shape[0], **heads)
    fwd.graph.call("dflash.image_attention/1", {"q": q, "k": k, "qkv": qkv, "grid": image.grid, "out": mixed},
                   label=here, scale=config.head_dim**-0.5, **heads)
    return mixed


def _gelu(fwd: Forward, x: Tensor, form: str, label: str) -> Tensor:
    out = fwd.scratch("gelu", x.shape[1], rows=x.shape[0])
    fwd.graph.call(f"dflash.{form}/1", {"x": x, "out": out}, label=label, rows=x.shape[0], cols=x.shape[1], act=fwd.act)
    return out


def _project(fwd: Forward, config: VisionConfig, image: ImageRows, x: Tensor) -> Tensor:
    merged = fwd.scratch("merged", 4 * config.hidden_size, rows=image.count // 4)
    fwd.graph.call("dflash.merge_patches/1", {"x": x, "grid": image.grid, "out": merged}, label="vision.projector",
                   rows=image.count, cols=config.hidden_size, act=fwd.act)
    inner = _gelu(fwd, fwd.linear(merged, "vision.projector.in", "inner"), "gelu", "vision.projector")
    projected = fwd.linear(inner, "vision.projector.out", "projected")
    return _norm(fwd, projected, None, "vision.projector.norm", config.projector_eps, "image_rows")
