"""DFlash and DFlash2 drafts: context K/V from the target's taps, a block forward, and the proposals it makes.

The context's K and V are projected from the shared feature as it is: neither the layer's input norm nor its convolution
touches it. The block's own K and V are never stored: the anchor re-enters as a feature once the target has verified it.
Logical weight names are "draft.<...>".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dflash_core.formats import Format

from exporter.draft_config import DraftConfig
from exporter.draft_kind import DraftMethod
from exporter.models import mla_draft
from exporter.models.context import Forward, PagedCache
from exporter.program.builder import Tensor
from exporter.rope import rope_table, rotary_dims
from exporter.weights import WeightSpec
from runtime.ops import DType

PREPARE, FINISH = 0, 1
GQA_WEIGHTS = {"qkv": ("q_proj", "k_proj", "v_proj"), "q_norm": ("q_norm",), "k_norm": ("k_norm",), "o": ("o_proj",)}
MLA_WEIGHTS = {"mla_in": ("q_a_proj", "kv_a_proj_with_mqa"), "q_norm": ("q_a_layernorm",), "q_b": ("q_b_proj",),
               "kv_norm": ("kv_a_layernorm",), "kv_b": ("kv_b_proj",), "o": ("o_proj",)}


@dataclass(frozen=True, slots=True)
class ProposalBuffers:
    """What the draft graph writes and the verify graph reads, per lane of the batch."""

    proposals: Tensor        # i32 [batch, depth]
    proposal_ids: Tensor     # i32 [batch, depth, candidates]
    proposal_probs: Tensor   # f32 [batch, depth, candidates]


def candidates(config: DraftConfig) -> int:
    """Candidates per slot over which the draft's distribution is kept."""
    return config.selector_top_k or 1


def cache_values(config: DraftConfig) -> int:
    """Values that a layer stores per token of context."""
    return 2 * config.num_kv_heads * config.head_dim if config.mla is None else config.mla.row_width


def weight_specs(config: DraftConfig, names: Mapping[str, str], formats: Mapping[str, Format],
                 shapes: Mapping[str, tuple[int, ...]], max_context: int) -> list[WeightSpec]:
    """Every draft weight that the graphs read, in storage order.

    Args:
        names: canonical tensor name to the checkpoint's own spelling.
        formats, shapes: planned format and shape of each tensor, by the checkpoint's spelling.
        max_context: positions in the rope table.
    """
    def stored(name: str, *canonical: str) -> WeightSpec:
        sources = tuple(names[c] for c in canonical)
        recipe = "copy/1" if len(sources) == 1 else "concat-rows/1"
        shape = (sum(shapes[s][0] for s in sources), *shapes[sources[0]][1:])
        return WeightSpec(name=f"draft.{name}", blob="draft", owner="draft", checkpoint="draft", sources=sources,
                          recipe=recipe, format=formats[sources[0]], shape=shape)

    specs = [stored("fc", "fc.weight"), stored("hidden_norm", "hidden_norm.weight"), stored("norm", "norm.weight")]
    for i in range(config.num_layers):
        at, here = f"layers.{i}", f"layers.{i}"
        specs += [
            stored(f"{here}.input_norm", f"{at}.input_layernorm.weight"),
            *(stored(f"{here}.{name}", *(f"{at}.self_attn.{source}.weight" for source in sources))
              for name, sources in (GQA_WEIGHTS if config.mla is None else MLA_WEIGHTS).items()),
            stored(f"{here}.mlp_norm", f"{at}.post_attention_layernorm.weight"),
            stored(f"{here}.gate_up", f"{at}.mlp.gate_proj.weight", f"{at}.mlp.up_proj.weight"),
            stored(f"{here}.down", f"{at}.mlp.down_proj.weight"),
        ]
        if config.method is DraftMethod.DFLASH2:
            for conv in ("attention_conv", "mlp_conv"):
                specs += [stored(f"{here}.{conv}.base", f"{at}.{conv}.base_kernel"),
                          stored(f"{here}.{conv}.projection", f"{at}.{conv}.kernel_projection.weight")]
    if config.method is DraftMethod.DFLASH2:
        specs += [stored("selector.predecessor", "candidate_selector.predecessor_codebook"),
                  stored("selector.successor", "candidate_selector.successor_codebook"),
                  stored("selector.projection", "candidate_selector.hidden_projection.weight")]
    table = rope_table(config.rope, _rotated_dims(config), max_context)
    specs.append(WeightSpec(name="draft.rope_table", blob="draft", owner="draft", checkpoint="draft", sources=(),
                            recipe="rope-table/1", format=Format.F32, shape=tuple(table.shape), data=table))
    return specs


def record_context(fwd: Forward, config: DraftConfig, cache: PagedCache, features: Tensor, positions: Tensor) -> None:
    """Turn tap features into each layer's context K and V, stored at `positions`; rows at -1 are left out."""
    projected = fwd.linear(features, "draft.fc", "draft_feature")
    shared = fwd.rms_norm(projected, "draft.hidden_norm", config.rms_norm_eps, "draft_shared")
    if config.mla is not None:
        for i in range(config.num_layers):
            mla_draft.record_context(fwd, config, config.mla, cache, shared, positions, i)
        return
    table = fwd.plain("draft.rope_table")
    kv_rows = config.num_kv_heads * config.head_dim
    for i in range(config.num_layers):
        here = f"draft.layers.{i}"
        kv = fwd.linear(shared, f"{here}.qkv", "draft_kv_rows", part=(config.num_heads * config.head_dim, 2 * kv_rows))
        k_weight = fwd.plain(f"{here}.k_norm")
        fwd.graph.call(
            "dflash.norm_rope_context/1",
            {"kv_rows": kv, "k_weight": k_weight, "rope_table": table, "positions": positions,
             "slots": fwd.rows.slots, "page_table": cache.page_table, "kv": cache.layer(i)},
            label=here, rows=fwd.rows.count, block_rows=fwd.rows.block_rows, kv_heads=config.num_kv_heads,
            eps=config.rms_norm_eps, w=k_weight.dtype, **_rotation(fwd, config), **cache.scalars())


def record_block(fwd: Forward, config: DraftConfig, cache: PagedCache, tokens: Tensor) -> Tensor:
    """Record the block forward; returns the normalized hidden rows, [rows, hidden]."""
    eps, conv = config.rms_norm_eps, config.method is DraftMethod.DFLASH2
    residual = fwd.embedding(tokens, "target.embedding", "draft_residual", scale=config.input_embedding_scale)
    delta: Tensor | None = None
    for i in range(config.num_layers):
        here = f"draft.layers.{i}"
        normed = (fwd.rms_norm(residual, f"{here}.input_norm", eps, "draft_normed") if delta is None
                  else fwd.add_rms_norm(residual, delta, f"{here}.input_norm", eps, "draft_normed"))
        x, kernel = _convolve_in(fwd, config, normed, f"{here}.attention_conv") if conv else (normed, None)
        y = _attention(fwd, config, cache, x, i)
        delta = _convolve_out(fwd, config, y, kernel, f"{here}.attention_conv") if kernel else y
        normed = fwd.add_rms_norm(residual, delta, f"{here}.mlp_norm", eps, "draft_normed")
        x, kernel = _convolve_in(fwd, config, normed, f"{here}.mlp_conv") if conv else (normed, None)
        y = fwd.gated_mlp(x, here)
        delta = _convolve_out(fwd, config, y, kernel, f"{here}.mlp_conv") if kernel else y
    assert delta is not None
    return fwd.add_rms_norm(residual, delta, "draft.norm", eps, "draft_hidden")


def record_proposals(fwd: Forward, config: DraftConfig, hidden: Tensor, head: str, tokens: Tensor,
                     sampling: Mapping[str, Tensor], out: ProposalBuffers, live_vocab: int) -> None:
    """Record head, candidates and selection for the rows of a block.

    Args:
        head: logical name of the proposal head.
        sampling: "temperature" f32 and "seed" u64, both [max_slots].
        live_vocab: rows of the head that stand for tokens; the rest are padding.
    """
    rows = fwd.rows
    depth = rows.block_rows - 1
    logits = fwd.linear(hidden, head, "draft_logits", result=DType.F32)
    shape: dict[str, int] = {"groups": rows.groups, "block_rows": rows.block_rows, "depth": depth}
    vocab = logits.shape[1]
    made = {"proposals": out.proposals, "proposal_ids": out.proposal_ids, "proposal_probs": out.proposal_probs}
    if config.method is DraftMethod.DFLASH:
        fwd.graph.call("dflash.argmax_proposals/1", {"logits": logits, **made}, vocab=vocab, live_vocab=live_vocab,
                       **shape)
        return
    top_k, rank = config.selector_top_k, config.selector_rank
    ids = fwd.scratch("candidate_ids", top_k, dtype=DType.I32)
    scores = fwd.scratch("candidate_scores", top_k, dtype=DType.F32)
    fwd.graph.call("dflash.top_candidates/1", {"logits": logits, "candidate_ids": ids, "candidate_scores": scores},
                   rows=rows.count, vocab=vocab, live_vocab=live_vocab, top_k=top_k,
                   multiplier=config.output_multiplier, cap=config.final_logit_softcapping or 0.0)
    projected = fwd.linear(hidden, "draft.selector.projection", "draft_selector")
    predecessor, successor = fwd.plain("draft.selector.predecessor"), fwd.plain("draft.selector.successor")
    fwd.graph.call(
        "dflash.selector_walk/1",
        {"candidate_ids": ids, "candidate_scores": scores, "projected": projected, "predecessor": predecessor,
         "successor": successor, "tokens": tokens, "positions": rows.positions, "slots": rows.slots,
         "temperature": sampling["temperature"], "seed": sampling["seed"], **made},
        top_k=top_k, rank=rank, vocab=predecessor.shape[0], max_slots=sampling["seed"].shape[0], act=fwd.act,
        w=predecessor.dtype, **shape)


def _rotation(fwd: Forward, config: DraftConfig) -> dict[str, int]:
    return {"head_dim": config.head_dim, "rotary_dims": rotary_dims(config.rope, config.head_dim),
            "interleaved": 0, "context": fwd.plain("draft.rope_table").shape[0],
            "act": fwd.act}


def _rotated_dims(config: DraftConfig) -> int:
    return config.head_dim if config.mla is None else config.mla.rope_dim


def _attention(fwd: Forward, config: DraftConfig, cache: PagedCache, x: Tensor, layer_idx: int) -> Tensor:
    if config.mla is not None:
        return mla_draft.record_attention(fwd, config, config.mla, cache, x, layer_idx)
    here, rows, layer = f"draft.layers.{layer_idx}", fwd.rows, config.layers[layer_idx]
    heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    qkv = fwd.linear(x, f"{here}.qkv", "draft_qkv")
    q = fwd.scratch("draft_q", config.num_heads * config.head_dim)
    k = fwd.scratch("draft_k", config.num_kv_heads * config.head_dim)
    q_weight, k_weight = fwd.plain(f"{here}.q_norm"), fwd.plain(f"{here}.k_norm")
    fwd.graph.call("dflash.norm_rope/1",
                   {"qkv": qkv, "q_weight": q_weight, "k_weight": k_weight,
                    "rope_table": fwd.plain("draft.rope_table"), "positions": rows.positions, "q": q, "k": k},
                   label=here, rows=rows.count, eps=config.rms_norm_eps, w=q_weight.dtype, **heads,
                   **_rotation(fwd, config))
    mixed = fwd.scratch("draft_mixed", config.num_heads * config.head_dim)
    fwd.graph.call("dflash.block_attention/1",
                   {"q": q, "k": k, "qkv": qkv, "positions": rows.positions, "slots": rows.slots,
                    "page_table": cache.page_table, "kv": cache.layer(layer_idx), "out": mixed},
                   label=here, groups=rows.groups, block_rows=rows.block_rows, head_dim=config.head_dim,
                   scale=config.head_dim ** -0.5, act=fwd.act, causal=int(layer.causal), window=layer.window or 0,
                   **heads, **cache.scalars())
    return fwd.linear(mixed, f"{here}.o", "draft_sublayer")


def _convolve_in(fwd: Forward, config: DraftConfig, x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The convolved sublayer input, and the dynamic kernel that both sides share."""
    kernel = fwd.linear(x, f"{name}.projection", "draft_kernel")
    return _convolve(fwd, config, x, kernel, name, PREPARE, "draft_prepared"), kernel


def _convolve_out(fwd: Forward, config: DraftConfig, y: Tensor, kernel: Tensor, name: str) -> Tensor:
    return _convolve(fwd, config, y, kernel, name, FINISH, "draft_finished")


def _convolve(fwd: Forward, config: DraftConfig, x: Tensor, kernel: Tensor, name: str, side: int, out: str) -> Tensor:
    base = fwd.plain(f"{name}.base")
    y = fwd.scratch(out, x.shape[1])
    fwd.graph.call("dflash.grouped_conv/1", {"x": x, "delta": kernel, "base": base, "out": y}, label=name,
                   rows=fwd.rows.count, hidden=x.shape[1], block_rows=fwd.rows.block_rows,
                   taps=config.conv_kernel_size, group_size=config.conv_group_size, side=side, act=fwd.act,
                   w=base.dtype)
    return y
