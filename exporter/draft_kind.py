"""Which kind of draft a checkpoint is, decided by what it says and cross-checked by what it holds.

Drafts of different kinds share tensor names, so one kind run as another raises nothing and merely proposes wrong
tokens. Hence architectures are matched exactly, then speculators' own field, then the tensors must bear it out; any
doubt is a refusal that names the fact.

    method = recognise_draft(draft)          # DraftMethod.DFLASH2, or a CheckpointError
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dflash_core.errors import CheckpointError

from exporter.checkpoint import Checkpoint
from exporter.config_fields import short


class DraftMethod(Enum):
    """How proposals are made. The value is the method's name in recipes and manifests."""

    DFLASH = "dflash"
    DFLASH2 = "dflash2"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kind of draft that is known and not exported."""

    code: str
    what: str
    hint: str


DSPARK = Refusal(
    "DRAFT_DSPARK", "this is a DSpark draft",
    "its slots predict the next token and add a Markov term: run as DFlash it would shift every proposal by one",
)
DOMINO = Refusal("DRAFT_DOMINO", "this is a Domino draft", "its recurrent prefix projector would be lost")
LAGUNA = Refusal("DRAFT_LAGUNA", "this is a Laguna draft", "its attention gates and per-tap norms would be lost")
KIMI_K3 = Refusal(
    "DRAFT_KIMI_K3", "this is a Kimi K3 draft with gated latent attention, which is not built yet",
    "its attention has no rope and its MLP another activation: run as DFlash both would be lost",
)
MLA = Refusal(
    "DRAFT_MLA", "this draft has latent attention and does not say so",
    "its config must have attention_mode mla, or it would be run with grouped-query attention",
)
MINIMAX = Refusal(
    "DRAFT_VARIANT", "MiniMaxDFlash2DraftModel is a DFlash2 variant that is not supported yet",
    "take a DFlash2DraftModel or a DFlashDraftModel of the same target",
)
BEAM = Refusal(
    "DRAFT_VARIANT", "DFlash2BeamDraftModel is a DFlash2 variant that is not supported yet",
    "take a DFlash2DraftModel or a DFlashDraftModel of the same target",
)

MUSE_ASSISTANT = "MuseGlimmerAssistantModel"
ARCHITECTURES: Mapping[str, DraftMethod | Refusal] = {
    "DFlash2DraftModel": DraftMethod.DFLASH2,
    "DFlashDraftModel": DraftMethod.DFLASH,
    "DFlashSpeculator": DraftMethod.DFLASH,
    MUSE_ASSISTANT: DraftMethod.DFLASH,
    "Qwen3DFlashDraftModel": DraftMethod.DFLASH,
    "MiniMaxDFlash2DraftModel": MINIMAX,
    "DFlash2BeamDraftModel": BEAM,
    "DFlashLagunaForCausalLM": LAGUNA,
    "KimiK3DFlashDraftModel": KIMI_K3,
    "Qwen3DSparkModel": DSPARK,
    "DSparkDraftModel": DSPARK,
    "K3DSparkModel": DSPARK,
    "LingDSparkModel": DSPARK,
    "Lfm2DSparkDraftModel": DSPARK,
    "DSparkMiniMaxDraftModel": DSPARK,
    "DeepseekV4ForCausalLMDSpark": DSPARK,
    "DSparkSpeculator": DSPARK,
}
SPECULATORS: Mapping[str, DraftMethod | Refusal] = {
    "dflash": DraftMethod.DFLASH, "dflash2": DraftMethod.DFLASH2, "dspark": DSPARK,
}  # fmt: skip

DSPARK_KEYS = re.compile(r"markov_rank|markov_head_type|enable_confidence_head|sample_from_anchor|dspark_.*")
TENSOR_SIGNS: tuple[tuple[re.Pattern[str], Refusal], ...] = (
    (re.compile(r"markov_head\..*|confidence_head\..*|conf_proj(\..*)?"), DSPARK),
    (re.compile(r"prefix_gru(\..*)?|embed_proj(\..*)?"), DOMINO),
    (re.compile(r"(.*\.)?g_proj(\..*)?|aux_hidden_norms?(\..*)?"), LAGUNA),
    (re.compile(r"(.*\.)?kv_a_proj_with_mqa\..*"), MLA),
)
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DFLASH2_TENSORS = re.compile(r"candidate_selector\..*|(layers\.\d+|midlayer)\.(attention|mlp)_conv\..*")
EXPECTED = "a DFlash2DraftModel or DFlashDraftModel checkpoint"


def recognise_draft(draft: Checkpoint, target_architecture: str = "") -> DraftMethod:
    """The draft's method, from architectures, then speculators_model_type, borne out by keys and tensors.

    Args:
        draft: the checkpoint passed as draft.
        target_architecture: the target's class, to tell when it was passed twice.
    Raises:
        CheckpointError: DRAFT_DSPARK, DRAFT_DOMINO, DRAFT_LAGUNA, DRAFT_KIMI_K3, DRAFT_MLA, DRAFT_VARIANT for kinds
            that are known and refused; DRAFT_IS_TARGET, DRAFT_IS_CAUSAL_LM, DRAFT_UNKNOWN for what is no draft;
            DRAFT_CONTRADICTION when the facts disagree.
    """
    architecture = read_architecture(draft.config)
    speculators = draft.config.get("speculators_model_type")
    names = frozenset(name.removeprefix("model.") for name in draft.tensors)
    where = str(draft.path)

    # 1. What the config claims.
    claimed = ARCHITECTURES.get(architecture)
    if isinstance(claimed, Refusal):
        raise _refused(claimed, where, f"architecture {architecture}")
    by_speculators = _speculators_method(speculators, where)
    if claimed is None and by_speculators is None:
        raise _not_a_draft(architecture, target_architecture, draft.config, names, where)
    if claimed and by_speculators and claimed is not by_speculators:
        raise _contradiction(where, f"architecture {architecture}", f"speculators_model_type {speculators}")
    method = claimed or by_speculators
    assert method is not None

    # 2. Signs of a kind that would be misread.
    _refuse_dspark_keys(draft.config, where)
    _refuse_tensor_signs(names, where, says_mla(draft.config))

    # 3. DFlash2's own keys and tensors: all there or none.
    claim = f"architecture {architecture}" if claimed else f"speculators_model_type {speculators}"
    _check_dflash2_signs(method, claim, draft.config, names, where)
    return method


def draft_sign(config: Mapping[str, Any]) -> str | None:
    """What marks a config as some draft's, or None: used to refuse a draft that is passed as the target."""
    architecture = read_architecture(config)
    if architecture in ARCHITECTURES:
        return f"architecture {architecture}"
    for key in ("speculators_model_type", "dflash_config"):
        if config.get(key) is not None:
            return key
    return None


def read_architecture(config: Mapping[str, Any]) -> str:
    """The one class name in `architectures`; empty when absent.

    Raises:
        CheckpointError: ARCHITECTURES when the field is no list of one string.
    """
    value = config.get("architectures")
    if value is None:
        return ""
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], str):
        raise CheckpointError(
            "ARCHITECTURES", "architectures does not name one class", where="config.json",
            expected='a list of one string, such as ["LlamaForCausalLM"]', got=short(value),
            hint="download config.json again, or name the one class of the model",
        )
    return value[0]


def _speculators_method(value: Any, where: str) -> DraftMethod | None:
    if value is None:
        return None
    known = SPECULATORS.get(value) if isinstance(value, str) else None
    if known is None:
        raise CheckpointError(
            "DRAFT_UNKNOWN", "speculators_model_type is not supported", where=where, expected=" ".join(SPECULATORS),
            got=short(value), hint="take a draft of one of these kinds, or leave --draft out",
        )
    if isinstance(known, Refusal):
        raise _refused(known, where, f"speculators_model_type {value}")
    return known


def _not_a_draft(
    architecture: str, target_architecture: str, config: Mapping[str, Any], names: Iterable[str], where: str
) -> CheckpointError:
    got = f"architecture {architecture or 'absent'}"
    if str(config.get("model_type", "")) == "k3_dspark":
        return _refused(DSPARK, where, "model_type k3_dspark")
    if architecture and architecture == target_architecture:
        return CheckpointError(
            "DRAFT_IS_TARGET", "the target was passed as the draft", where=where, expected=EXPECTED, got=got,
            hint="pass the target first and the draft with --draft",
        )
    if "embed_tokens.weight" in names and not any(name.endswith("fc.weight") for name in names):
        return CheckpointError(
            "DRAFT_IS_CAUSAL_LM", "this is a target-style model", where=where, expected=EXPECTED,
            got=f"{got}, with an embedding table and no fc.weight",
            hint="take a draft that was trained for this target, or leave --draft out",
        )
    return CheckpointError(
        "DRAFT_UNKNOWN", "this is no draft that dflash knows", where=where, expected=EXPECTED, got=got,
        hint="class names must match exactly",
    )


def _refuse_dspark_keys(config: Mapping[str, Any], where: str) -> None:
    nested = config.get("dflash_config")
    for values in (config, nested if isinstance(nested, dict) else {}):
        for key, value in values.items():
            if value and DSPARK_KEYS.fullmatch(key):
                raise _refused(DSPARK, where, f"{key} {short(value)}")
    if config.get("model_type") == "k3_dspark":
        raise _refused(DSPARK, where, "model_type k3_dspark")


def says_mla(config: Mapping[str, Any]) -> bool:
    """Whether a draft's config asks for latent attention, flat or nested."""
    nested = config.get("dflash_config")
    found = config.get("attention_mode") or (nested.get("attention_mode") if isinstance(nested, dict) else None)
    return found == "mla"


def _refuse_tensor_signs(names: Iterable[str], where: str, is_mla: bool) -> None:
    for name in sorted(names):
        for pattern, refusal in TENSOR_SIGNS:
            if pattern.fullmatch(name) and not (refusal is MLA and is_mla):
                raise _refused(refusal, where, f"tensor {name}")


def _check_dflash2_signs(
    method: DraftMethod, claim: str, config: Mapping[str, Any], names: Iterable[str], where: str
) -> None:
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, dict) else {}
    tensors = sorted(name for name in names if DFLASH2_TENSORS.fullmatch(name))
    keys = [key for key in DFLASH2_KEYS if config.get(key) is not None or nested.get(key) is not None]
    if method is DraftMethod.DFLASH and (tensors or keys):
        raise _contradiction(where, claim, f"DFlash2's {'tensor ' + tensors[0] if tensors else 'field ' + keys[0]}")
    if method is DraftMethod.DFLASH2 and not tensors:
        raise _contradiction(where, claim, "no convolution or selector tensor")
    if method is DraftMethod.DFLASH2 and len(keys) != len(DFLASH2_KEYS):
        absent = next(key for key in DFLASH2_KEYS if key not in keys)
        raise _contradiction(where, claim, f"no {absent} (nor dflash_config.{absent})")


def _refused(refusal: Refusal, where: str, sign: str) -> CheckpointError:
    return CheckpointError(
        refusal.code, refusal.what, where=where, expected=EXPECTED, got=sign, hint=refusal.hint
    )


def _contradiction(where: str, first: str, second: str) -> CheckpointError:
    return CheckpointError(
        "DRAFT_CONTRADICTION", "what the draft says and what it holds disagree", where=where, expected=first,
        got=second, hint="config.json and weights are of two models, or the draft was converted wrongly",
    )
