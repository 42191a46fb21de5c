"""What a target model is: its family, sizes and rope, read from config.json, and the tensors that follow from them.

    target = open_checkpoint(path)
    config = read_target_config(target)
    notices = config.notices + check_target_tensors(target, config)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dflash_core.errors import CheckpointError

from exporter.checkpoint import CONFIG_NAME, Checkpoint, read_side_file
from exporter.config_fields import Fields, short
from exporter.draft_kind import draft_sign, read_architecture
from exporter.json_object import parse_json_object
from exporter.rope import RopeParameters, RopeSpelling, read_rope
from exporter.tensor_claims import WEIGHT_DTYPES, claim_tensors

GENERATION_CONFIG_NAME = "generation_config.json"
EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
IGNORED_TENSORS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class TargetFamily(Enum):
    """Target families that can be exported. The value is the config's model_type."""

    LLAMA = "llama"
    QWEN3 = "qwen3"


ARCHITECTURES: Mapping[str, TargetFamily] = {
    "LlamaForCausalLM": TargetFamily.LLAMA, "Qwen3ForCausalLM": TargetFamily.QWEN3,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """A dense decoder, with every default filled in.

    Attributes:
        family: which decoder it is.
        num_kv_heads: heads of K and V; divides num_heads.
        head_dim: dims of one head; num_heads · head_dim need not equal hidden_size.
        rms_norm_eps: added to the mean square in every norm.
        rope: rotary embedding of Q and K.
        tie_word_embeddings: the output head is the embedding table.
        max_position_embeddings: longest context, in tokens.
        eos_token_ids: tokens that end a text; empty when neither config names any.
        qk_norm: Q and K are normalized per head, before rope.
        dtype: `bfloat16`, `float16` or `float32`: what the model was trained to run in.
        notices: what a reader of the export should know.
    """

    family: TargetFamily
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeParameters
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    qk_norm: bool
    dtype: str
    notices: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """The family's class name in `architectures`."""
        return next(name for name, family in ARCHITECTURES.items() if family is self.family)


def read_target_config(checkpoint: Checkpoint) -> TargetConfig:
    """Read and check a target's config; defaults are those of the family's class in transformers.

    Raises:
        CheckpointError: TARGET_IS_DRAFT, TARGET_UNSUPPORTED, TARGET_CONTRADICTION or TARGET_QUANTIZED for a model
            that is not exported; UNSUPPORTED_FIELD for a feature that would be lost; HEADS for head counts that do
            not divide; FIELD_MISSING, FIELD_VALUE, and the codes of `read_rope`.
    """
    fields = Fields(checkpoint.config, CONFIG_NAME)
    family = _family(checkpoint)
    _refuse_unsupported(fields)
    num_heads = fields.count("num_attention_heads")
    hidden_size = fields.count("hidden_size")
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads if family is TargetFamily.LLAMA else None)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            "HEADS", "attention heads do not divide into groups", where=CONFIG_NAME,
            expected=f"num_attention_heads {num_heads} divisible by num_key_value_heads", got=num_kv_heads,
            hint="download config.json again: one of the two is not the model's",
        )
    default_theta = 10000.0 if family is TargetFamily.LLAMA else None
    rope, notices = read_rope(fields, head_dim=head_dim, first=RopeSpelling.NESTED, default_theta=default_theta)
    if rope.partial_rotary_factor != 1.0:
        share = rope.partial_rotary_factor
        raise _unsupported("partial_rotary_factor", share, "the family rotates whole heads, and so would its layers")
    vocab_size = fields.count("vocab_size")
    return TargetConfig(
        family=family, hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"), num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, vocab_size=vocab_size,
        rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6), rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position_embeddings=fields.count("max_position_embeddings"),
        eos_token_ids=eos_token_ids(checkpoint, fields, vocab_size), qk_norm=family is TargetFamily.QWEN3,
        dtype=trained_dtype(checkpoint, fields), notices=notices,
    )  # fmt: skip


def target_tensor_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model by its published name; a tied head is not among them."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING_NAME: (config.vocab_size, hidden)}
    for layer_idx in range(config.num_layers):
        shapes |= {f"model.layers.{layer_idx}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD_NAME] = (config.vocab_size, hidden)
    return shapes


def check_target_tensors(checkpoint: Checkpoint, config: TargetConfig) -> tuple[str, ...]:
    """Check that the checkpoint holds exactly the target's tensors, in the shapes that the config implies.

    Returns:
        Notices. A tied model may carry a copy of its head, which is left out as transformers does.
    Raises:
        CheckpointError: TENSORS, naming every missing, unclaimed, misshapen or mistyped tensor.
    """
    expected = target_tensor_shapes(config)
    names = {name: name for name in checkpoint.tensors if not IGNORED_TENSORS.fullmatch(name)}
    if not config.tie_word_embeddings or HEAD_NAME not in names:
        claim_tensors(checkpoint, expected, names)
        return ()
    claim_tensors(checkpoint, {**expected, HEAD_NAME: expected[EMBEDDING_NAME]}, names)
    return (f"{HEAD_NAME} is left out: tie_word_embeddings makes {EMBEDDING_NAME} the output head",)


def head_tensor_name(checkpoint: Checkpoint) -> str:
    """Name of the tensor that a target checkpoint uses as its output head."""
    is_tied = checkpoint.config.get("tie_word_embeddings") is True
    return EMBEDDING_NAME if is_tied or HEAD_NAME not in checkpoint.tensors else HEAD_NAME


def _family(checkpoint: Checkpoint) -> TargetFamily:
    where = str(checkpoint.path)
    supported = " ".join(ARCHITECTURES)
    sign = draft_sign(checkpoint.config)
    if sign is not None:
        raise CheckpointError(
            "TARGET_IS_DRAFT", "a draft was passed as the target", where=where, expected=f"one of {supported}",
            got=sign, hint="pass the target first and the draft with --draft",
        )
    architecture = read_architecture(checkpoint.config)
    family = ARCHITECTURES.get(architecture)
    if family is None:
        raise CheckpointError(
            "TARGET_UNSUPPORTED", "target architecture is not supported", where=where,
            expected=f"one of {supported}", got=architecture or "none named",
            hint="choose a model of one of these classes; --plan also takes every family of manifests/recipes",
        )
    model_type = checkpoint.config.get("model_type", family.value)
    if model_type != family.value:
        raise CheckpointError(
            "TARGET_CONTRADICTION", f"model_type does not go with {architecture}", where=where,
            expected=family.value, got=short(model_type),
            hint="download config.json again: one of the two is of another model",
        )
    if checkpoint.config.get("quantization_config") is not None:
        raise CheckpointError(
            "TARGET_QUANTIZED", "target is quantized already (quantization_config)", where=where,
            expected="an unquantized checkpoint", got=short(checkpoint.config["quantization_config"]),
            hint="export the model as it was before quantization; the precision settings convert it",
        )
    return family


def _refuse_unsupported(fields: Fields) -> None:
    if fields.flag("attention_bias", default=False):
        raise _unsupported("attention_bias", True, "the biases of q, k, v and o would be lost")
    if fields.flag("mlp_bias", default=False):
        raise _unsupported("mlp_bias", True, "the biases of the MLP would be lost")
    if fields.text("hidden_act", default="silu") != "silu":
        raise _unsupported("hidden_act", fields.get("hidden_act"), "only silu is built")
    if fields.flag("use_sliding_window", default=False):
        raise _unsupported("use_sliding_window", True, "attention would reach further than in training")
    layer_types = fields.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types)
    ):
        raise _unsupported("layer_types", layer_types, "only full_attention layers are built for targets")


def _unsupported(key: str, value: Any, lost: str) -> CheckpointError:
    return CheckpointError(
        "UNSUPPORTED_FIELD", f"target with {key} {short(value)} is not supported: {lost}", where=CONFIG_NAME,
        hint="choose a model without it: the core would not compute what this one does",
    )


def _head_dim(fields: Fields, family: TargetFamily, hidden_size: int, num_heads: int) -> int:
    if fields.has("head_dim"):
        return fields.count("head_dim", minimum=2)
    if family is TargetFamily.QWEN3:
        return 128
    if hidden_size % num_heads:
        raise CheckpointError(
            "HEADS", "hidden_size does not divide into heads, and head_dim is absent", where=CONFIG_NAME,
            expected=f"hidden_size {hidden_size} divisible by num_attention_heads", got=num_heads,
            hint="add the head_dim that the model was trained with",
        )
    return hidden_size // num_heads


def eos_token_ids(checkpoint: Checkpoint, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a text, by generation_config.json or else by `config`; empty when neither names any.

    Raises:
        CheckpointError: FIELD_VALUE; an id that is none of the vocabulary.
    """
    data = read_side_file(checkpoint, GENERATION_CONFIG_NAME)
    generation = Fields(parse_json_object(data, GENERATION_CONFIG_NAME) if data else {}, GENERATION_CONFIG_NAME)
    fields = generation if generation.has("eos_token_id") else config
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise fields.wrong("eos_token_id", f"token ids below vocab_size {vocab_size}")
    return tuple(dict.fromkeys(ids))


def trained_dtype(checkpoint: Checkpoint, fields: Fields) -> str:
    """The element type that the config names, or else that of the embedding table.

    Raises:
        CheckpointError: FIELD_VALUE; a type that is not known.
    """
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(key):
        entry = checkpoint.tensors.get(EMBEDDING_NAME)
        stored = entry.dtype if entry is not None and entry.dtype in WEIGHT_DTYPES else "F32"
        return DTYPES[stored]
    word = fields.text(key).removeprefix("torch.")
    if word not in DTYPES.values():
        raise fields.wrong(key, " ".join(DTYPES.values()))
    return word
