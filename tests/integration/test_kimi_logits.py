"""Kimi-Linear against transformers, Kimi K3 against a float64 port, in float32; and no row knows how rows are cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from exporter.plan import PrecisionSettings
from runtime import LoadedCore
from runtime.ops import DType
from tests.exporter.test_kimi_scopes import in_scope
from tests.integration.cores import Signer, make_core, recipe_without_conversion
from tests.integration.drive import Lane
from tests.integration.watch import random_tokens
from tests.oracles.kimi_numpy import Kimi
from tests.oracles.kimi_pair import K3, KIMI_LINEAR, TAPS, make_pair, write_target
from tests.oracles.zlab_pair import HIDDEN, PairSpec

TOKENS, PROMPT = 150, 100
LAYER_BOUND = 1e-5   # of the largest value that the layer reads
LOGIT_BOUND = 2e-5   # of the row's largest logit
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """A config and how its checkpoint is written."""

    config: Mapping[str, Any]
    a_log_dtype: torch.dtype = torch.float32
    dense_spelling: str = "mlp"


def linear(**changes: Any) -> dict[str, Any]:
    return {**KIMI_LINEAR, **changes}


def k3(**changes: Any) -> dict[str, Any]:
    return {**K3, "text_config": {**K3["text_config"], **changes}}


CASES = [
    pytest.param(Case(KIMI_LINEAR), id="linear"),
    pytest.param(Case(linear(q_lora_rank=24, moe_renormalize=False), dense_spelling="block_sparse_moe"),
                 id="linear-q-lora-no-renorm"),
    pytest.param(Case(linear(num_expert_group=4, topk_group=2), a_log_dtype=torch.bfloat16), id="linear-groups-bf16-a"),
    pytest.param(Case(linear(first_k_dense_replace=2, intermediate_size=96, num_shared_experts=2)),
                 id="linear-two-dense"),
    pytest.param(Case(K3), id="k3"),
    pytest.param(Case(k3(attn_res_block_size=4, routed_scaling_factor=2.5, activation_situ_linear_beta=None)),
                 id="k3-long-blocks"),
]


@dataclass(frozen=True, slots=True)
class Exported:
    """A loaded core; what each layer and the final norm read, [TOKENS, hidden] each, and logits, by the oracle."""

    core: LoadedCore
    tokens: list[int]
    reads: list[F64]
    logits: F64


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, signer: Signer, tmp_path_factory: pytest.TempPathFactory,
             ) -> Iterator[Exported]:
    folder, case = tmp_path_factory.mktemp("kimi"), request.param
    weights = write_target(folder / "target", case.config, a_log_dtype=case.a_log_dtype,
                           dense_spelling=case.dense_spelling)
    tokens = random_tokens(TOKENS, seed=5)
    if "text_config" in case.config:
        run = Kimi(case.config, {n: w.double().numpy() for n, w in weights.items()}).forward(tokens)
        reads, logits = run.reads, run.logits
    else:
        reads, logits = _transformers(folder / "target", tokens)
    recipe = recipe_without_conversion("kimi-k3" if "text_config" in case.config else "kimi-linear", folder)
    with make_core(signer, folder / "core", folder / "target", max_context=256, recipe=recipe) as core:
        yield Exported(core, tokens, reads, logits)


def _transformers(folder: Path, tokens: list[int]) -> tuple[list[F64], F64]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    last = []
    model.model.norm.register_forward_hook(lambda module, given, result: last.append(given[0]))
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    states = [*out.hidden_states[:-1], last[0]]  # the last entry of hidden_states is normalized already
    return [state[0].double().numpy() for state in states], out.logits[0].double().numpy()


def _error(got: npt.NDArray[Any], expected: F64) -> float:
    assert got.shape == expected.shape
    return float((np.abs(got - expected).max(-1) / np.abs(expected).max(-1)).max())


def _whole_error(got: npt.NDArray[Any], expected: F64) -> float:
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def test_logits_of_every_position_are_the_oracles(exported: Exported) -> None:
    lane = Lane(exported.core, limit=TOKENS + 2)
    rows = [lane.prefill(exported.tokens[:1]), *(lane.decode(token) for token in exported.tokens[1:])]

    assert _error(np.array(rows), exported.logits) <= LOGIT_BOUND


def test_every_layer_reads_what_the_oracles_layer_reads(exported: Exported) -> None:
    """The rows of one prefill chunk, before each layer's first norm and before the final one."""
    core, count = exported.core, core_chunk(exported.core)
    lane = Lane(core, limit=TOKENS + 2)
    core.io["chunk_tokens"][:count], core.io["chunk_count"][0] = exported.tokens[:count], count
    core.io["slots"][:] = lane.slot
    expected = iter(exported.reads)
    graph = core.graph("prefill", 1)
    for step, node in zip(graph.steps, graph.bound, strict=True):
        if node is not None and node.op.name == "dflash.rms_norm/1" and node.node.debug_name.endswith("input_norm"):
            assert _whole_error(node.args.array("x")[:count], next(expected)[:count]) <= LAYER_BOUND, (
                node.node.debug_name)
        if node is not None and node.op.name == "dflash.last_row/1":
            assert _whole_error(node.args.array("x")[:count], next(expected)[:count]) <= LAYER_BOUND, "final norm"
        step()
    assert next(expected, None) is None


def core_chunk(core: LoadedCore) -> int:
    return len(core.io["chunk_tokens"])


@pytest.mark.parametrize("chunks", [[64, 36], [1] * 100, [63, 2, 35], [7, 57, 36]],
                         ids=["full", "ones", "odd", "seven"])
def test_prompt_and_decoding_give_the_bytes_of_one_prefill(exported: Exported, chunks: list[int]) -> None:
    lane = Lane(exported.core, limit=TOKENS + 2)
    whole = lane.prefill(exported.tokens).tobytes()
    lane.reset()

    lane.prefill(exported.tokens[:PROMPT], chunks)
    rows = [lane.decode(token) for token in exported.tokens[PROMPT:]]

    assert rows[-1].tobytes() == whole


@pytest.mark.parametrize("scope", ["kda-input=qkv", "kda-input", "all"])
def test_logits_of_a_converted_target_are_those_of_its_decoded_weights(signer: Signer, tmp_path: Path,
                                                                       scope: str) -> None:
    """The oracle's weights are converted here: those, and only those, that the tensor table puts in the scope."""
    weights = write_target(tmp_path / "target", K3)
    as_stored = {name: mxfp8(value) if in_scope(name, scope, K3) and value.shape[-1] % 32 == 0 else value.numpy()
                 for name, value in weights.items()}
    tokens = random_tokens(70, seed=5)
    expected = Kimi(K3, as_stored).forward(tokens).logits
    with make_core(signer, tmp_path / "core", tmp_path / "target",
                   settings=PrecisionSettings(online_mxfp8_scope=scope)) as core:
        lane = Lane(core, limit=72)
        rows = [lane.prefill(tokens[:1]), *(lane.decode(token) for token in tokens[1:])]

    assert _error(np.array(rows), expected) <= LOGIT_BOUND


def mxfp8(weight: torch.Tensor) -> npt.NDArray[np.float32]:
    """The values that MXFP8 keeps of a matrix: E4M3 times a power of two per 32 of a row, rounded up."""
    blocks = weight.numpy().reshape(len(weight), -1, 32)
    scale = np.exp2(np.ceil(np.log2(np.abs(blocks).max(-1, keepdims=True) / 448)))
    codes = (blocks / scale).astype(ml_dtypes.float8_e4m3fn)
    decoded: npt.NDArray[np.float32] = (codes.astype(np.float32) * scale).reshape(weight.shape)
    return decoded


@pytest.mark.parametrize("where", ["text_config", "top"])
def test_experts_published_in_mxfp4_keep_their_bytes_and_their_meaning(signer: Signer, tmp_path: Path,
                                                                       where: str) -> None:
    published = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    config = {**K3, "quantization_config": published} if where == "top" else k3(quantization_config=published)
    weights = write_target(tmp_path / "target", config, experts="mxfp4")
    tokens = random_tokens(40, seed=5)
    expected = Kimi(config, {n: w.numpy() for n, w in weights.items()}).forward(tokens).logits
    recipe = recipe_without_conversion("kimi-k3", tmp_path)
    with make_core(signer, tmp_path / "core", tmp_path / "target", recipe=recipe) as core:
        lane = Lane(core, limit=42)
        rows = [lane.prefill(tokens[:1]), *(lane.decode(token) for token in tokens[1:])]
        views = {view.name: view for view in core.manifest.tensor_views}

    assert _error(np.array(rows), expected) <= LOGIT_BOUND
    codes, scale = (views[f"target.layers.1.experts.gate_up{suffix}"] for suffix in ("", "_scale"))
    assert (codes.dtype, list(codes.shape), list(scale.shape)) == ("u8", [8 * 2 * 32, 16], [8 * 2 * 32, 1])
    assert codes.recipe == "keep-rows/1+mxfp4-e2m1-ue8m0-k32"
    assert codes.source_tensors[1] == "language_model.model.layers.1.block_sparse_moe.experts.0.w3.weight_packed"


@pytest.mark.parametrize("config", [KIMI_LINEAR, K3], ids=["linear", "k3"])
@pytest.mark.parametrize("experts", ["nvfp4-compressed-tensors", "nvfp4-modelopt"])
def test_experts_published_in_nvfp4_keep_their_bytes_and_their_meaning(signer: Signer, tmp_path: Path, experts: str,
                                                                       config: Mapping[str, Any]) -> None:
    weights = write_target(tmp_path / "target", config, experts=experts)
    published = load_file(tmp_path / "target" / "model.safetensors")
    tokens = random_tokens(40, seed=5)
    expected = Kimi(config, {n: w.double().numpy() for n, w in weights.items()}).forward(tokens).logits
    recipe = recipe_without_conversion("kimi-k3" if config is K3 else "kimi-linear", tmp_path)
    with make_core(signer, tmp_path / "core", tmp_path / "target", recipe=recipe) as core:
        lane = Lane(core, limit=42)
        rows = [lane.prefill(tokens[:1]), *(lane.decode(token) for token in tokens[1:])]
        views = {view.name: view for view in core.manifest.tensor_views}
        blobs = {b.blob_id: core.memory[b.buffer_id] for b in core.manifest.buffers if b.blob_id}
        stored = {name: blobs[view.blob_id][view.offset_bytes:view.offset_bytes + view.size_bytes].tobytes()
                  for name, view in views.items()}

    assert _error(np.array(rows), expected) <= LOGIT_BOUND
    at = f"{'language_model.' if config is K3 else ''}model.layers.1.block_sparse_moe.experts"
    codes, whole, made = ("weight", "weight_scale_2", "keep-rows/1") if experts == "nvfp4-modelopt" else (
        "weight_packed", "weight_global_scale", "reciprocal-rows/1")
    for name, matrices in (("gate_up", ("w1", "w3")), ("down", ("w2",))):
        here = f"target.layers.1.experts.{name}"
        stems = [f"{at}.{e}.{w}" for e in range(8) for w in matrices]
        for suffix, part, dtype in (("", codes, "u8"), ("_scale", "weight_scale", "f8e4m3")):
            parts = [published[f"{stem}.{part}"] for stem in stems]
            assert stored[here + suffix] == b"".join(p.view(torch.uint8).numpy().tobytes() for p in parts)
            view = views[here + suffix]
            assert (view.dtype, view.recipe) == (dtype, "keep-rows/1+nvfp4-e2m1-e4m3-k16")
        factors = np.float32([published[f"{stem}.{whole}"].item() for stem in stems])
        assert stored[f"{here}_global"] == (1 / factors if made.startswith("reciprocal") else factors).tobytes()
        view = views[f"{here}_global"]
        assert (list(view.shape), view.recipe) == ([8, 2] if name == "gate_up" else [8],
                                                   f"{made}+nvfp4-e2m1-e4m3-k16")
        assert list(view.source_tensors) == [f"{stem}.{whole}" for stem in stems]


@pytest.mark.parametrize("config", [KIMI_LINEAR, K3], ids=["linear", "k3"])
def test_taps_are_what_the_next_layer_reads(signer: Signer, tmp_path: Path, config: Mapping[str, Any]) -> None:
    """Under attention residuals that is the mixture before its norm, and not the running sum, which is another row."""
    pair = make_pair(tmp_path, config, PairSpec(block_size=4, fit_steps=0), lambda target, prompt: [])
    tokens = random_tokens(50, seed=5)
    run = pair.model.forward(tokens)
    recipe = recipe_without_conversion("kimi-k3" if config is K3 else "kimi-linear", tmp_path)
    with make_core(signer, tmp_path / "core", pair.target_path, pair.draft_path, recipe=recipe) as core:
        Lane(core, limit=60).prefill(tokens)
        buffer = next(b for b in core.manifest.buffers if b.name == "features")
        features = core.memory[buffer.buffer_id].view(np.float32).reshape(-1, len(TAPS), HIDDEN)[:len(tokens)]

    for index, tap in enumerate(TAPS):
        assert _whole_error(features[:, index], run.reads[tap + 1]) <= LAYER_BOUND, tap


def test_bf16_weights_and_activations_keep_the_oracles_choice(signer: Signer, tmp_path: Path) -> None:
    """Every activation is rounded, so rows agree to a few hundredths: less than what parts most best tokens."""
    weights = write_target(tmp_path / "target", KIMI_LINEAR, dtype=torch.bfloat16)
    tokens = random_tokens(60, seed=5)
    expected = Kimi(KIMI_LINEAR, {n: w.double().numpy() for n, w in weights.items()}).forward(tokens).logits
    recipe = recipe_without_conversion("kimi-linear", tmp_path)
    with make_core(signer, tmp_path / "core", tmp_path / "target", act=DType.BF16, recipe=recipe) as core:
        lane = Lane(core, limit=62)
        rows = np.array([lane.prefill(tokens[:1]), *(lane.decode(token) for token in tokens[1:])])

    error = np.abs(rows - expected).max(-1) / np.abs(expected).max(-1)
    assert np.median(error) < 0.05
    assert (rows.argmax(-1) == expected.argmax(-1)).mean() > 0.8
