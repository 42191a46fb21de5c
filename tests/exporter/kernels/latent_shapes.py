"""Latent attention's op calls at real models' sizes and at tiny ones, over empty arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case
from tests.exporter.kernels.shapes import BF16, F32, I32, TYPES, empty


@dataclass(frozen=True)
class Mla:
    """Sizes of a layer and of its cache."""

    heads: int
    nope: int
    rope: int
    v_dim: int
    rank: int
    page_tokens: int = 64
    max_pages: int = 512
    layers: int = 1

    @property
    def width(self) -> int:
        return self.rank + self.rope

    def pages(self, slots: int) -> dict[str, int]:
        return {"page_tokens": self.page_tokens, "page_bytes": self.layers * self.page_tokens * self.width * 2,
                "kv_pages": slots * self.max_pages, "max_slots": slots, "max_pages": self.max_pages}


K3 = Mla(heads=96, nope=128, rope=64, v_dim=128, rank=512, layers=2)
KIMI_LINEAR = Mla(heads=32, nope=128, rope=64, v_dim=128, rank=512, layers=2)
TINY = Mla(heads=4, nope=16, rope=8, v_dim=16, rank=24, max_pages=8)


def latent_ops(mla: Mla, groups: int, block_rows: int, slots: int = 8) -> dict[str, tuple[str, Case]]:
    """Every lowering with a case of this shape: name to (lowering, case)."""
    rows, context = groups * block_rows, mla.page_tokens * mla.max_pages
    paged: dict[str, Any] = {**mla.pages(slots), "groups": groups, "block_rows": block_rows, "rank": mla.rank,
                             "rope_dim": mla.rope, "act": DType.BF16}
    heads = {"rows": rows, "heads": mla.heads, "nope_dim": mla.nope, "rope_dim": mla.rope}
    turned = {"rotary_dims": mla.rope, "interleaved": 0, "context": context, **TYPES}
    table = empty(F32, context, 2, mla.rope // 2)
    where = {"positions": empty(I32, rows), "slots": empty(I32, groups),
             "page_table": empty(I32, slots, mla.max_pages),
             "kv": empty(np.uint8, paged["kv_pages"] * paged["page_bytes"])}
    made, weight = empty(BF16, rows, mla.width), empty(BF16, mla.rank)
    q, kv_b = empty(BF16, rows, mla.heads * (mla.nope + mla.rope)), empty(
        BF16, mla.heads * (mla.nope + mla.v_dim), mla.rank)
    absorbed, mixed = empty(BF16, rows, mla.heads * mla.width), empty(BF16, rows, mla.heads * mla.rank)
    without_w = {k: v for k, v in turned.items() if k != "w"}
    products = {**heads, "rank": mla.rank, "v_dim": mla.v_dim, **TYPES}
    return {
        "cache": ("latent.lower_latent_cache", Case(
            {"kv_a": made, "weight": weight, **where}, [("dflash.latent_cache/1", {**paged, "eps": 1e-6, **TYPES})])),
        "rows": ("latent.lower_latent_rows", Case(
            {"kv_a": made, "weight": weight, "rope_table": table, "positions": where["positions"], "out": made},
            [("dflash.latent_rows/1", {"rows": rows, "rank": mla.rank, "rope_dim": mla.rope, "eps": 1e-6, **turned})])),
        "store": ("latent.lower_latent_store", Case({"rows": made, **where}, [("dflash.latent_store/1", paged)])),
        "rope": ("latent.lower_rope_query", Case(
            {"q": q, "rope_table": table, "positions": where["positions"], "out": q},
            [("dflash.rope_query/1", {**heads, **without_w})])),
        "absorb": ("latent.lower_absorb_query", Case(
            {"q": q, "kv_b": kv_b, "out": absorbed}, [("dflash.absorb_query/1", products)])),
        "expand": ("latent.lower_expand_values", Case(
            {"x": mixed, "kv_b": kv_b, "out": empty(BF16, rows, mla.heads * mla.v_dim)},
            [("dflash.expand_values/1", products)])),
        "attention": ("latent_attention_many.lower_latent_attention", Case(
            {"q": absorbed, "out": mixed, **where},
            [("dflash.latent_attention/1", {**paged, "heads": mla.heads, "scale": 0.07})])),
        "block attention": ("latent_attention.lower_latent_block_attention", Case(
            {"q": absorbed, "rows": made, "out": mixed, **where},
            [("dflash.latent_block_attention/1", {**paged, "heads": mla.heads, "scale": 0.07, "causal": 1,
                                                  "window": 2048})])),
    }
