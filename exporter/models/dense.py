"""The dense decoder of the llama and qwen3 families: grouped-query attention, gated MLP, rotary positions.

Qwen3 differs by a per-head normalization of q and k. Logical weight names are "target.<...>"; q, k and v are stored as
one matrix, and so are gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_core.formats import Format

from exporter.models.context import Forward, HiddenRows, PagedCache
from exporter.program.builder import Tensor
from exporter.rope import rope_table, rotary_dims
from exporter.target_config import TargetConfig
from exporter.weights import WeightSpec

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def weight_specs(config: TargetConfig, formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]],
                 max_context: int) -> list[WeightSpec]:
    """Every weight that the target's graphs read, in storage order.

    Args:
        formats, shapes: planned format and shape of each checkpoint tensor.
        max_context: positions in the rope table.
    """
    def stored(name: str, *sources: str) -> WeightSpec:
        rows = sum(shapes[s][0] for s in sources)
        recipe = "copy/1" if len(sources) == 1 else "concat-rows/1"
        return WeightSpec(name=f"target.{name}", blob="target", owner="target", checkpoint="target", sources=sources,
                          recipe=recipe, format=formats[sources[0]], shape=(rows, *shapes[sources[0]][1:]))

    specs = [stored("embedding", EMBEDDING)]
    for i in range(config.num_layers):
        at, here = f"model.layers.{i}", f"layers.{i}"
        specs += [
            stored(f"{here}.input_norm", f"{at}.input_layernorm.weight"),
            stored(f"{here}.qkv", *(f"{at}.self_attn.{p}_proj.weight" for p in "qkv")),
            stored(f"{here}.o", f"{at}.self_attn.o_proj.weight"),
            stored(f"{here}.mlp_norm", f"{at}.post_attention_layernorm.weight"),
            stored(f"{here}.gate_up", f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"),
            stored(f"{here}.down", f"{at}.mlp.down_proj.weight"),
        ]
        if config.qk_norm:
            specs += [stored(f"{here}.{p}_norm", f"{at}.self_attn.{p}_norm.weight") for p in "qk"]
    specs.append(stored("norm", "model.norm.weight"))
    if not config.tie_word_embeddings:
        specs.append(stored("head", HEAD))
    table = rope_table(config.rope, config.head_dim, max_context)
    specs.append(WeightSpec(name="target.rope_table", blob="target", owner="target", checkpoint="target", sources=(),
                            recipe="rope-table/1", format=Format.F32, shape=tuple(table.shape), data=table))
    return specs


def head_name(config: TargetConfig) -> str:
    """Logical name of the verification head: the embedding itself where the checkpoint ties them."""
    return "target.embedding" if config.tie_word_embeddings else "target.head"


def head_source(config: TargetConfig) -> str:
    """Checkpoint name of the head's tensor."""
    return EMBEDDING if config.tie_word_embeddings else HEAD


def record_layers(fwd: Forward, config: TargetConfig, cache: PagedCache, tokens: Tensor,
                  taps: Sequence[int]) -> HiddenRows:
    """Record embedding and layers for the rows of `fwd`; K and V of live rows go to the cache.

    Args:
        tokens: i32 [rows].
        taps: layers whose output goes into the features, in the order of their columns.
    """
    eps = config.rms_norm_eps
    features = fwd.scratch("features", len(taps) * config.hidden_size) if taps else None
    residual = fwd.embedding(tokens, "target.embedding", "residual")
    delta: Tensor | None = None
    for i in range(config.num_layers):
        here = f"target.layers.{i}"
        if delta is None:
            normed = fwd.rms_norm(residual, f"{here}.input_norm", eps, "normed")
        else:
            normed = fwd.add_rms_norm(residual, delta, f"{here}.input_norm", eps, "normed")
            fwd.tap(residual, features, taps, i - 1)
        delta = _attention(fwd, config, cache, normed, i)
        normed = fwd.add_rms_norm(residual, delta, f"{here}.mlp_norm", eps, "normed")
        delta = fwd.gated_mlp(normed, here)
    assert delta is not None
    fwd.add(residual, delta, "target.layers.last")
    fwd.tap(residual, features, taps, config.num_layers - 1)
    return HiddenRows(residual, features)


def _attention(fwd: Forward, config: TargetConfig, cache: PagedCache, x: Tensor, layer_idx: int) -> Tensor:
    here = f"target.layers.{layer_idx}"
    rows, table = fwd.rows, fwd.plain("target.rope_table")
    heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
    qkv = fwd.linear(x, f"{here}.qkv", "qkv")
    q = fwd.scratch("q", config.num_heads * config.head_dim)
    kv = cache.layer(layer_idx)
    operands = {"qkv": qkv, "rope_table": table, "positions": rows.positions, "slots": rows.slots,
                "page_table": cache.page_table, "q": q, "kv": kv}
    scalars = {**heads, "rotary_dims": rotary_dims(config.rope, config.head_dim), "interleaved": 0,
               "context": table.shape[0], "act": fwd.act, "rows": rows.count, "block_rows": rows.block_rows,
               **cache.scalars()}
    if config.qk_norm:
        q_weight, k_weight = fwd.plain(f"{here}.q_norm"), fwd.plain(f"{here}.k_norm")
        fwd.graph.call("dflash.norm_rope_cache/1", {**operands, "q_weight": q_weight, "k_weight": k_weight},
                       label=here, eps=config.rms_norm_eps, w=q_weight.dtype, **scalars)
    else:
        fwd.graph.call("dflash.rope_cache/1", operands, label=here, **scalars)
    mixed = fwd.scratch("mixed", config.num_heads * config.head_dim)
    fwd.graph.call("dflash.attention/1",
                   {"q": q, "positions": rows.positions, "slots": rows.slots, "page_table": cache.page_table, "kv": kv,
                    "out": mixed},
                   label=here, groups=rows.groups, block_rows=rows.block_rows, scale=config.head_dim ** -0.5,
                   act=fwd.act, **heads, **cache.scalars())
    return fwd.linear(mixed, f"{here}.o", "delta")
