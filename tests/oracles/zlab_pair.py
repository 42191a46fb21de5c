"""Tiny target and draft pairs, run by z-lab's own `dflash` package; imports nothing of ours.

A pair is written to disk in the published form: config.json with nested rope_parameters and dflash_config, codebooks
without a ".weight" suffix. The draft is fitted to the text it will be asked to propose, because a random draft is
almost never accepted and would leave rollback, bonus token and truncation unseen.

    pair = make_pair(tmp_path, PairSpec(block_size=5))
    trace = speculate(pair, 48)
    assert trace.tokens == greedy(pair, 48)
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import dflash.model
import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel, dflash_generate, extract_context_feature
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB, HIDDEN, TARGET_LAYERS, DRAFT_LAYERS = 96, 64, 8, 2
MASK_TOKEN = VOCAB - 1
TAPS = [1, 3, 4]
FIT_TOKENS = 64
OUTPUT_MULTIPLIER, SOFTCAP, EMBEDDING_SCALE = 0.5, 2.0, 1.5


class DraftKind(Enum):
    """The draft's class; the value is its name in `architectures`."""

    DFLASH = "DFlashDraftModel"
    DFLASH2 = "DFlash2DraftModel"


@dataclass(frozen=True, slots=True)
class PairSpec:
    """What tells one pair from another.

    Attributes:
        window: sliding window of every draft layer; None: full attention.
        scalars: the draft has an output multiplier, a softcap and an embedding scale.
        rope_theta: the draft's; the target's is 10000.
        fit_steps: optimizer steps on the target's greedy text; 0 leaves the draft random.
    """

    kind: DraftKind = DraftKind.DFLASH2
    block_size: int = 8
    window: int | None = 12
    causal: bool = False
    scalars: bool = False
    rope_theta: float = 10000.0
    prompt_tokens: int = 20
    fit_steps: int = 80


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair on disk and in memory, and the prompt its draft was fitted for."""

    spec: PairSpec
    target_path: Path
    draft_path: Path
    target: Qwen3ForCausalLM
    draft: DFlashDraftModel
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One draft-and-verify step: its anchor, the proposals, the ids they were chosen among, and tokens committed."""

    anchor: int
    drafts: tuple[int, ...]
    candidates: tuple[frozenset[int], ...]
    produced: int


@dataclass(frozen=True, slots=True)
class Trace:
    """New tokens, the prefill's included, and the blocks that made all but the first."""

    tokens: tuple[int, ...]
    blocks: tuple[Block, ...]


def make_pair(folder: Path, spec: PairSpec) -> Pair:
    """Make a pair from fixed seeds, fit its draft, and write both models as float32 checkpoints under `folder`."""
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(_target_config()).eval()
    _enliven(target)
    draft = draft_class(spec.kind)(Qwen3Config(**draft_json(spec)))
    init_draft(draft)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, MASK_TOKEN, (1, spec.prompt_tokens), generator=generator)
    text = _continue_greedily(target, prompt, FIT_TOKENS)
    with torch.no_grad():
        features = extract_context_feature(target(text, output_hidden_states=True).hidden_states, TAPS)
    fit_draft(draft, spec, text, features, target.get_input_embeddings().weight.detach(), target.lm_head)
    draft.eval()
    target.save_pretrained(folder / "target")
    save_draft(draft, draft_json(spec), folder / "draft")
    return Pair(spec, folder / "target", folder / "draft", target, draft, tuple(prompt[0].tolist()))


def greedy(pair: Pair, new_tokens: int) -> tuple[int, ...]:
    """The target's own greedy continuation of the prompt, every step from scratch."""
    ids = _continue_greedily(pair.target, torch.tensor([pair.prompt]), new_tokens)
    return tuple(ids[0, len(pair.prompt):].tolist())


def speculate(pair: Pair, new_tokens: int, *, stop: Sequence[int] = (), block_size: int | None = None) -> Trace:
    """Generate at temperature 0 with the reference's loop, and watch every block.

    Args:
        stop: generation ends after any of these.
        block_size: rows of a block where it should be less than the draft's own.
    """
    seen: list[tuple[list[int], list[list[int]]]] = []
    name = "propose" if pair.spec.kind is DraftKind.DFLASH2 else "compute_logits"
    original = getattr(pair.draft, name)

    def watched(*args: Any) -> Any:
        result = original(*args)
        if pair.spec.kind is DraftKind.DFLASH2:
            seen.append((result[0][0].tolist(), result[1][0].tolist()))
        else:
            drafts = result[0].argmax(-1).tolist()
            seen.append((drafts, [[token] for token in drafts]))
        return result

    # The package's clock synchronizes CUDA.
    with mock.patch.object(pair.draft, name, watched), mock.patch.object(dflash.model, "_cuda_time", time.perf_counter):
        stats = _generate(pair, new_tokens, stop=list(stop) or None, block_size=block_size, return_stats=True)
    output = stats.output_ids[0].tolist()
    blocks, start = [], len(pair.prompt)
    for (drafts, candidates), produced in zip(seen, stats.acceptance_lengths, strict=True):
        blocks.append(Block(output[start], tuple(drafts), tuple(map(frozenset, candidates)), produced))
        start += produced
    return Trace(tuple(output[len(pair.prompt):]), tuple(blocks))


def _generate(pair: Pair, new_tokens: int, *, stop: list[int] | None, block_size: int | None,
              return_stats: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the package calls transformers by an older argument name
        return dflash_generate(pair.draft, pair.target, torch.tensor([pair.prompt]), new_tokens, stop, 0.0,
                               block_size=block_size, return_stats=return_stats)


def draft_class(kind: DraftKind) -> type[DFlashDraftModel]:
    return DFlash2DraftModel if kind is DraftKind.DFLASH2 else DFlashDraftModel


def _target_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def draft_json(spec: PairSpec, *, target_layers: int = TARGET_LAYERS, taps: Sequence[int] = TAPS) -> dict[str, Any]:
    """The draft's config.json."""
    nested: dict[str, Any] = {"block_size": spec.block_size, "mask_token_id": MASK_TOKEN,
                              "target_layer_ids": list(taps)}
    if spec.kind is DraftKind.DFLASH2:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    if spec.scalars:
        nested |= {"output_multiplier": OUTPUT_MULTIPLIER, "final_logit_softcapping": SOFTCAP,
                   "input_embedding_scale": EMBEDDING_SCALE}
    layer_type = "full_attention" if spec.window is None else "sliding_attention"
    return {
        "architectures": [spec.kind.value], "model_type": "qwen3", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "intermediate_size": 96, "num_hidden_layers": DRAFT_LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "attention_dropout": 0.0, "max_position_embeddings": 512, "num_target_layers": target_layers,
        "layer_types": [layer_type] * DRAFT_LAYERS, "sliding_window": spec.window,
        "use_sliding_window": spec.window is not None, "max_window_layers": DRAFT_LAYERS, "is_causal": spec.causal,
        "tie_word_embeddings": False, "dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta}, "dflash_config": nested}


def _enliven(target: torch.nn.Module) -> None:
    """Larger weights than a new model has, so that its greedy text is not one token for ever."""
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1.0 if "embed" in name else 1.6 * weight.shape[-1] ** -0.5)


def init_draft(draft: torch.nn.Module) -> None:
    """Random weights, the convolutions near the identity."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in sorted(draft.named_parameters()):
            if name.endswith("base_kernel"):  # the identity at tap 0, and noise on every tap
                weight.normal_(0, 0.1, generator=generator)
                weight[:, 0] += 1
            elif weight.ndim == 1:
                weight.copy_(1 + 0.1 * torch.randn(weight.shape, generator=generator))
            else:
                spread = 0.5 if "codebook" in name else weight.shape[-1] ** -0.5
                weight.normal_(0, spread, generator=generator)


@torch.no_grad()
def _continue_greedily(target: Qwen3ForCausalLM, ids: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        ids = torch.cat([ids, target(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def fit_draft(draft: torch.nn.Module, spec: PairSpec, text: torch.Tensor, features: torch.Tensor,
              embedding: torch.Tensor, head: torch.nn.Module) -> None:
    """Fit the draft to predict `text`, block by block: cross-entropy of its logits, and of the selector's scores.

    Args:
        draft: one of the package's, or another that is called as those are.
        text: [1, tokens].
        features: the target's taps for it, [1, tokens, taps * hidden].
        embedding, head: the target's.
    """
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(draft.parameters(), lr=4e-3)
    positions = torch.arange(text.shape[1])[None]
    scale = EMBEDDING_SCALE if spec.scalars else 1.0
    for _ in range(spec.fit_steps):
        start = int(torch.randint(spec.prompt_tokens, text.shape[1] - spec.block_size, (1,), generator=generator))
        end = start + spec.block_size
        block = text[:, start:end].clone()
        block[:, 1:] = MASK_TOKEN
        hidden = draft(position_ids=positions[:, :end], target_hidden=features[:, :start],
                       noise_embedding=embedding[block] * scale)[:, 1:]
        logits = draft.compute_logits(hidden, head)
        scores = [logits]
        if spec.kind is DraftKind.DFLASH2:
            selector = draft.candidate_selector
            link = selector.predecessor_codebook(text[:, start:end - 1]) * selector.hidden_projection(hidden)
            scores.append(logits + link @ selector.successor_codebook.weight.T)
        wanted = text[0, start + 1:end]
        loss = sum(functional.cross_entropy(s.flatten(0, 1), wanted) for s in scores)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def save_draft(draft: torch.nn.Module, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    tensors = {name.replace("codebook.weight", "codebook"): value.contiguous().clone()
               for name, value in draft.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
