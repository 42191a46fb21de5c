"""Which tensors a draft holds, under whichever of their published names.

    names = check_draft_tensors(draft, config, target)
    weight = read_tensor(draft, names["layers.0.self_attn.q_proj.weight"])
"""

from __future__ import annotations

import re

from dflash_core.errors import CheckpointError

from exporter.checkpoint import Checkpoint, same_bytes
from exporter.draft_config import DraftConfig, DraftMla
from exporter.draft_kind import DraftMethod
from exporter.target_config import EMBEDDING_NAME, head_tensor_name
from exporter.tensor_claims import claim_tensors

RENAMED = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
IGNORED = re.compile(r"t2d|(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
FUSED = re.compile(r".*\.(qkv_proj|gate_up_proj)\.weight")
EMBEDDING_COPY, HEAD_COPY = "embed_tokens.weight", "lm_head.weight"
NESTED_TABLES = {EMBEDDING_COPY: "language_model.model.embed_tokens.weight", HEAD_COPY: "language_model.lm_head.weight"}


def draft_tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a draft by its canonical name, the one in published files without `model.`.

    Source: the layers of z-lab's `dflash` package. 11 · L + 3 tensors for DFlash, 15 · L + 6 for DFlash2.
    """
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    attention: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (q_rows, hidden),
        "k_proj.weight": (kv_rows, hidden),
        "v_proj.weight": (kv_rows, hidden),
        "o_proj.weight": (hidden, q_rows),
        "q_norm.weight": (head,),
        "k_norm.weight": (head,),
    } if config.mla is None else _mla_shapes(config, config.mla)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        **{f"self_attn.{name}": shape for name, shape in attention.items()},
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        **_conv_shapes(config),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
    }
    for layer_idx in range(config.num_layers):
        shapes |= {f"layers.{layer_idx}.{name}": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (hidden,)
    if config.method is DraftMethod.DFLASH2:
        assert config.selector_rank is not None
        codebook = (config.vocab_size, config.selector_rank)
        shapes["candidate_selector.predecessor_codebook"] = codebook
        shapes["candidate_selector.successor_codebook"] = codebook
        shapes["candidate_selector.hidden_projection.weight"] = (config.selector_rank, hidden)
    return shapes


def draft_tensor_names(config: DraftConfig) -> tuple[str, ...]:
    """The canonical names of a draft's tensors, in the order of `draft_tensor_shapes`."""
    return tuple(draft_tensor_shapes(config))


def check_draft_tensors(checkpoint: Checkpoint, config: DraftConfig, target: Checkpoint) -> dict[str, str]:
    """Check that a draft checkpoint holds exactly its tensors, and find each one's name in the file.

    Copies of the target's embedding table or output head are skipped when they equal the target's byte for byte.

    Args:
        checkpoint: the draft.
        config: what `read_draft_config` gave for it.
        target: the target checkpoint, for comparing copies.
    Returns:
        Checkpoint name by canonical name.
    Raises:
        CheckpointError: DRAFT_QUANTIZED, DRAFT_FUSED for layouts that are not read; TENSORS with all that is missing,
            unclaimed, given twice, misshapen or mistyped; DRAFT_OWN_TABLE for a copy that is not the target's.
    """
    if config.has_own_quantization:
        raise CheckpointError(
            "DRAFT_QUANTIZED", "draft is quantized already (quantization_config)", where=str(checkpoint.path),
            expected="an unquantized draft", got="a quantization_config of its own",
            hint="export the draft as it was first published; --draft-body-quantization converts its body",
        )
    found = {name: canonical_name(name) for name in checkpoint.tensors}
    fused = [name for name in found if FUSED.fullmatch(name)]
    if fused:
        raise CheckpointError(
            "DRAFT_FUSED", "draft with fused projections is not read yet", where=f"{fused[0]} in {checkpoint.path}",
            expected="q_proj, k_proj, v_proj, gate_proj and up_proj as tensors of their own",
            got=f"{len(fused)} fused tensors", hint="split them by rows: q, k, v and gate, up",
        )
    copies = {name: canonical for name, canonical in found.items() if canonical in (EMBEDDING_COPY, HEAD_COPY)}
    body = {
        name: canonical for name, canonical in found.items() if name not in copies and not IGNORED.fullmatch(canonical)
    }
    names = claim_tensors(checkpoint, draft_tensor_shapes(config), body)
    for name, canonical in copies.items():
        original = _target_table(target, canonical)
        if original not in target.tensors or not same_bytes(checkpoint, name, target, original):
            raise CheckpointError(
                "DRAFT_OWN_TABLE", f"draft's {canonical} is not a copy of the target's", where=f"{name} in"
                f" {checkpoint.path}", expected=f"the bytes of {original}", got="other bytes, dtype or shape",
                hint="a draft with an embedding or head of its own is another format, which is not supported",
            )
    return names


def _target_table(target: Checkpoint, canonical: str) -> str:
    """The target's embedding table or output head, which some families nest in a language model."""
    nested = NESTED_TABLES[canonical]
    if nested in target.tensors:
        return nested
    return EMBEDDING_NAME if canonical == EMBEDDING_COPY else head_tensor_name(target)


def canonical_name(name: str) -> str:
    """A draft tensor's name without `model.`, and with the alternative spellings undone."""
    bare = name.removeprefix("model.")
    if bare.startswith("midlayer."):
        bare = "layers.0." + bare.removeprefix("midlayer.")
    return RENAMED.get(bare, bare)


def _mla_shapes(config: DraftConfig, mla: DraftMla) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_heads
    return {
        "q_a_proj.weight": (mla.q_rank, hidden),
        "q_a_layernorm.weight": (mla.q_rank,),
        "q_b_proj.weight": (heads * config.head_dim, mla.q_rank),
        "kv_a_proj_with_mqa.weight": (mla.row_width, hidden),
        "kv_a_layernorm.weight": (mla.kv_rank,),
        "kv_b_proj.weight": (heads * (mla.nope_dim + mla.v_dim), mla.kv_rank),
        "o_proj.weight": (hidden, heads * mla.v_dim),
    }


def _conv_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    if config.method is not DraftMethod.DFLASH2:
        return {}
    assert config.conv_kernel_size is not None and config.conv_group_size is not None
    base = (2, config.conv_kernel_size, config.hidden_size)
    groups = config.hidden_size // config.conv_group_size
    projection = (2 * config.conv_kernel_size * groups, config.hidden_size)
    return {
        f"{sublayer}.{name}": shape
        for sublayer in ("attention_conv", "mlp_conv")
        for name, shape in {"base_kernel": base, "kernel_projection.weight": projection}.items()
    }
