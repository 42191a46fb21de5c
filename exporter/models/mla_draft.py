"""Latent attention of a draft: context rows from the shared feature, and a block over them and itself, absorbed.

The shared key part is rotated in halves by the draft's own table; the scale of a score is that of a whole query head.
"""

from __future__ import annotations

from exporter.draft_config import DraftConfig, DraftMla
from exporter.models.context import Forward, PagedCache
from exporter.program.builder import Tensor
from exporter.rope import rotary_dims


def record_context(fwd: Forward, config: DraftConfig, mla: DraftMla, cache: PagedCache, shared: Tensor,
                   positions: Tensor, layer_idx: int) -> None:
    """Store one layer's context rows, made of the shared feature; rows at -1 are left out."""
    here = f"draft.layers.{layer_idx}"
    rows = _rows(fwd, config, mla, shared, positions, here)
    fwd.graph.call("dflash.latent_store/1",
                   {"rows": rows, "positions": positions, "slots": fwd.rows.slots, "page_table": cache.page_table,
                    "kv": cache.layer(layer_idx)}, label=here, act=fwd.act, **_groups(fwd, mla), **cache.scalars())


def record_attention(fwd: Forward, config: DraftConfig, mla: DraftMla, cache: PagedCache, x: Tensor,
                     layer_idx: int) -> Tensor:
    """One layer's attention for the rows of a block, output projection included."""
    here, rows, layer = f"draft.layers.{layer_idx}", fwd.rows, config.layers[layer_idx]
    heads, positions, kv_b = config.num_heads, fwd.rows.positions, fwd.plain(f"draft.layers.{layer_idx}.kv_b")
    q = fwd.linear(x, f"{here}.mla_in", "draft_q_in", part=(0, mla.q_rank))
    q = fwd.linear(fwd.rms_norm(q, f"{here}.q_norm", config.rms_norm_eps, "draft_q_normed"), f"{here}.q_b", "draft_q")
    rotated = fwd.scratch("draft_q_rotated", q.shape[1])
    fwd.graph.call("dflash.rope_query/1",
                   {"q": q, "rope_table": fwd.plain("draft.rope_table"), "positions": positions, "out": rotated},
                   label=here, rows=rows.count, heads=heads, nope_dim=mla.nope_dim, rope_dim=mla.rope_dim,
                   **_rotation(fwd, config, mla))
    shape = {"rows": rows.count, "heads": heads, "rank": mla.kv_rank, "nope_dim": mla.nope_dim,
             "rope_dim": mla.rope_dim, "v_dim": mla.v_dim, "act": fwd.act, "w": kv_b.dtype}
    absorbed = fwd.scratch("draft_absorbed", heads * mla.row_width)
    fwd.graph.call("dflash.absorb_query/1", {"q": rotated, "kv_b": kv_b, "out": absorbed}, label=here, **shape)
    own = _rows(fwd, config, mla, x, positions, here)
    latent = fwd.scratch("draft_latent", heads * mla.kv_rank)
    fwd.graph.call("dflash.latent_block_attention/1",
                   {"q": absorbed, "rows": own, "positions": positions, "slots": rows.slots,
                    "page_table": cache.page_table, "kv": cache.layer(layer_idx), "out": latent}, label=here,
                   heads=heads, scale=config.head_dim ** -0.5, causal=int(layer.causal), window=layer.window or 0,
                   act=fwd.act, **_groups(fwd, mla), **cache.scalars())
    mixed = fwd.scratch("draft_mixed", heads * mla.v_dim)
    fwd.graph.call("dflash.expand_values/1", {"x": latent, "kv_b": kv_b, "out": mixed}, label=here, **shape)
    return fwd.linear(mixed, f"{here}.o", "draft_sublayer")


def _rows(fwd: Forward, config: DraftConfig, mla: DraftMla, x: Tensor, positions: Tensor, here: str) -> Tensor:
    kv_a = fwd.linear(x, f"{here}.mla_in", "draft_kv_a", part=(mla.q_rank, mla.row_width))
    weight, rows = fwd.plain(f"{here}.kv_norm"), fwd.scratch("draft_latent_rows", mla.row_width)
    fwd.graph.call("dflash.latent_rows/1",
                   {"kv_a": kv_a, "weight": weight, "rope_table": fwd.plain("draft.rope_table"),
                    "positions": positions, "out": rows}, label=here, rows=fwd.rows.count, rank=mla.kv_rank,
                   rope_dim=mla.rope_dim, eps=config.rms_norm_eps, w=weight.dtype, **_rotation(fwd, config, mla))
    return rows


def _groups(fwd: Forward, mla: DraftMla) -> dict[str, int]:
    return {"groups": fwd.rows.groups, "block_rows": fwd.rows.block_rows, "rank": mla.kv_rank,
            "rope_dim": mla.rope_dim}


def _rotation(fwd: Forward, config: DraftConfig, mla: DraftMla) -> dict[str, int]:
    return {"rotary_dims": rotary_dims(config.rope, mla.rope_dim), "interleaved": 0,
            "context": fwd.plain("draft.rope_table").shape[0], "act": fwd.act}
