"""Tiny random decoders, saved and run by transformers; imports nothing of ours.

    model = make_checkpoint(tmp_path, CheckpointSpec(Family.QWEN3, head_dim=32))
    expected = every_logit(model, [3, 1, 4])      # [3, vocab]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


class Family(Enum):
    """Decoder families; the value is the config's model_type."""

    LLAMA = "llama"
    QWEN3 = "qwen3"


CLASSES: Mapping[Family, tuple[type[Any], type[Any]]] = {
    Family.LLAMA: (LlamaConfig, LlamaForCausalLM), Family.QWEN3: (Qwen3Config, Qwen3ForCausalLM),
}


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Sizes of a decoder, and how it is saved."""

    family: Family
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2
    vocab: int = 96
    tied: bool = False
    sharded: bool = False
    rope: Mapping[str, Any] = field(default_factory=lambda: DEFAULT_ROPE)


def make_checkpoint(folder: Path, spec: CheckpointSpec) -> PreTrainedModel:
    """Make a random decoder from a fixed seed and save it in float32, in shards of 64 kB where asked."""
    config_class, model_class = CLASSES[spec.family]
    torch.manual_seed(7)
    model = model_class(config_class(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=2 * spec.hidden,
        num_hidden_layers=spec.layers, num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=512, tie_word_embeddings=spec.tied, eos_token_id=None,
        bos_token_id=None, rope_parameters=dict(spec.rope))).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.6 * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(1 + 0.2 * torch.randn(weight.shape))
    model.save_pretrained(folder, max_shard_size="64KB" if spec.sharded else "1GB")
    return model


@torch.no_grad()
def every_logit(model: PreTrainedModel, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits of every position, [len(tokens), vocab], from one uncached forward."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
