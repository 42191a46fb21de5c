#!/usr/bin/env python3
"""Graphs of larger models on an NVIDIA GPU, with random weights, beside PyTorch in the same run. JSON on stdout.

    python scripts/bench_gpu_shapes.py           # a GPU with 60 GB free, PyTorch with CUDA, about five minutes

A checkpoint of the right shapes is a sparse file; its plan, layout and graphs are the exporter's own. Triton launches
the kernels into a captured stream, as for a witness, and the driver's graph of them is timed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import struct
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from dflash_core.v1 import graph_pb2 as pb

from exporter.capture.record import record_gpu
from exporter.capture.witness import Witness
from exporter.checkpoint import open_checkpoint
from exporter.draft_config import read_draft_config
from exporter.draft_tensors import draft_tensor_shapes
from exporter.export import (
    ExportRequest,
    open_models,
    plan_models,
    record,
    serving_shape,
    weight_specs,
)
from exporter.plan_rules import PrecisionSettings
from exporter.progress import Silent
from exporter.target_config import read_target_config, target_tensor_shapes
from exporter.weights import WeightLayout, layout_weights
from runtime.gpu.nodes import Addresses

CAPABILITY = 90
CONTEXT = 1024
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "torch_dtype": "bfloat16"}
WIDE: dict[str, Any] = {**QWEN3_8B, "hidden_size": 5120, "intermediate_size": 512, "num_hidden_layers": 5,
                        "vocab_size": 248320}
"""A target that carries a 27B model's draft: its own layers are small."""


def draft_of(target: Mapping[str, Any], layers: int, intermediate: int) -> dict[str, Any]:
    """Config of a DFlash2 draft in the published form, with a block of eight."""
    return {
        "architectures": ["DFlash2DraftModel"], "model_type": "qwen3",
        "hidden_size": target["hidden_size"], "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": target["vocab_size"],
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "max_position_embeddings": 40960, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
        "num_target_layers": target["num_hidden_layers"], "is_causal": False, "dtype": "bfloat16",
        "layer_types": ["full_attention"] * layers,
        "dflash_config": {"block_size": 8, "mask_token_id": 1, "target_layer_ids": [0, 1, 2, 3, 4],
                          "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}}


def write_sparse(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
                 packed: Collection[str] = ()) -> None:
    """A checkpoint of these tensors, bf16 or, if `packed`, bytes, that takes no room on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        dtype, element_nbytes = ("U8", 1) if name in packed else ("BF16", 2)
        nbytes = prod(shape) * element_nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)


@dataclass(frozen=True, slots=True)
class Pair:
    """A recorded program and where its buffers lie on the device."""

    recorded: Any
    layout: WeightLayout
    launched: dict[str, Any]
    memory: dict[int, torch.Tensor]
    addresses: Addresses
    witness: Witness

    def io(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A named buffer's elements."""
        found = next(b.buffer_id for b in self.recorded.program.buffers if b.name == name)
        return self.memory[found].view(dtype)


def record_pair(folder: Path, target: Mapping[str, Any], draft: Mapping[str, Any] | None, settings: PrecisionSettings,
                max_context: int) -> tuple[Any, WeightLayout, dict[str, Any]]:
    """Plan, record and compile: the program, the layout of its weights, and each graph with its launches."""
    write_sparse(folder / "target", target, {})
    config = read_target_config(open_checkpoint(folder / "target"))
    write_sparse(folder / "target", target, target_tensor_shapes(config))
    if draft is not None:
        write_sparse(folder / "draft", draft, {"candidate_selector.predecessor_codebook": (1, 1)})
        draft_config = read_draft_config(open_checkpoint(folder / "draft"), config)
        write_sparse(folder / "draft", draft, draft_tensor_shapes(draft_config))
    return record_request(ExportRequest(
        target=folder / "target", draft=folder / "draft" if draft else None, out=folder / "core", settings=settings,
        capability=CAPABILITY, max_context=max_context))


def record_request(request: ExportRequest) -> tuple[Any, WeightLayout, dict[str, Any]]:
    """Plan, record and compile what an export would, and stop before weights are read."""
    models = open_models(request, Silent())
    plan = plan_models(models, request.settings)
    shape = serving_shape(models, plan, request)
    layout = layout_weights(weight_specs(models, plan, shape))
    recorded = record(models, plan, layout, shape, request)
    launched: dict[str, Any] = {}
    record_gpu(recorded.program, zip(recorded.graphs, recorded.calls, strict=True), CAPABILITY, first_module_id=1,
               witness=lambda graph, launches: launched.update({graph.name: (graph, launches)}))
    return recorded, layout, launched


def make_pair(folder: Path, target: Mapping[str, Any], draft: Mapping[str, Any] | None, settings: PrecisionSettings,
              max_context: int) -> Pair:
    """A recorded pair in device memory, with random weights."""
    return place_pair(*record_pair(folder, target, draft, settings, max_context))


def place_pair(recorded: Any, layout: WeightLayout, launched: dict[str, Any]) -> Pair:
    """Device memory for every buffer, weights filled at random."""
    sizes = {b.blob_id: b.size_bytes for b in layout.blobs}
    symbols = {s.symbol_id: s.default_value for s in recorded.program.symbols}
    memory = {}
    for buffer in recorded.program.buffers:
        nbytes = sizes[buffer.blob_id] if buffer.HasField("blob_id") else buffer.fixed_bytes
        nbytes += sum(t.bytes * symbols[t.symbol_id] for t in buffer.size_terms)
        memory[buffer.buffer_id] = torch.zeros(max(nbytes, 16), dtype=torch.uint8, device="cuda")
        if buffer.buffer_class == pb.KV_ARENA:
            memory[buffer.buffer_id].view(torch.bfloat16).normal_()
    fill_weights(recorded.program, layout, memory)
    addresses = Addresses({i: m.data_ptr() for i, m in memory.items()}, symbols)
    return Pair(recorded, layout, launched, memory, addresses, Witness.open(recorded.program))


def fill_weights(program: Any, layout: WeightLayout, memory: Mapping[int, torch.Tensor]) -> None:
    """Random values of each view's type: never zeros, never NaN."""
    for blob in layout.blobs:
        held = memory[next(b.buffer_id for b in program.buffers if b.HasField("blob_id") and b.blob_id == blob.blob_id)]
        for weight in blob.weights:
            for view in weight.views:
                part = held[view.offset_bytes:view.offset_bytes + view.size_bytes]
                if weight.spec.data is not None:
                    part.copy_(torch.from_numpy(weight.spec.data.numpy()).reshape(-1).view(torch.uint8))
                elif view.dtype == "bf16":
                    norm = len(view.shape) == 1
                    part.view(torch.bfloat16).normal_(1.0 if norm else 0.0, 0.1 if norm else 0.02)
                elif view.dtype == "f32":
                    part.view(torch.float32).fill_(0.01)
                elif view.dtype == "f8e4m3" or view.name.endswith("block_scale"):
                    scale = view.name.endswith("block_scale")
                    part.random_(112, 120) if scale and view.dtype == "u8" else part.random_(8, 64)
                else:
                    part.random_(0, 256)


def stage(pair: Pair, length: int, max_context: int) -> None:
    """One sequence of this length in slot 0."""
    pair.io("slots", torch.int32).fill_(-1)[0] = 0
    pair.io("length", torch.int32)[0] = length
    pair.io("limit", torch.int32)[0] = max_context
    pages = pair.io("page_table", torch.int32)
    pages.copy_(torch.arange(pages.numel(), device="cuda", dtype=torch.int32))
    pair.io("anchor", torch.int32)[0] = 5


def time_graph(pair: Pair, name: str, before: Callable[[], None], runs: int) -> tuple[float, list[float]]:
    """Median and samples, in microseconds, of a graph captured as it will be launched."""
    driver, stream = pair.witness.driver, pair.witness.stream
    _, launched = pair.launched[name]
    handle = pair.witness.capture(launched, pair.addresses)
    executable = driver.make_executable(handle, name)
    start, end = driver.create_event(timing=True), driver.create_event(timing=True)
    samples = []
    for _ in range(runs + 3):
        before()
        torch.cuda.synchronize()
        driver.record(start, stream)
        driver.launch(executable, stream, name)
        driver.record(end, stream)
        driver.synchronize(stream)
        samples.append(driver.elapsed_ms(start, end) * 1e3)
    driver.destroy_executable(executable)
    driver.destroy_graph(handle)
    return statistics.median(samples[3:]), samples[3:]


def time_torch(work: Callable[[], Any], runs: int) -> float:
    """Median microseconds of work on the current stream."""
    samples = []
    for _ in range(runs + 3):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples[3:])


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GiB."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / time_torch(lambda: b.copy_(a), 20) * 1e6


def verify_step(folder: Path, bandwidth: float) -> dict[str, Any]:
    """The target's verify step at 8B shapes: eight rows of one sequence at a context of 1,024."""
    pair = make_pair(folder, QWEN3_8B, draft_of(QWEN3_8B, 1, 256), PrecisionSettings(), 2048)
    target = next(b for b in pair.layout.blobs if b.key == "target")
    embedding = next(w for w in target.weights if w.spec.name == "target.embedding").views[0].size_bytes
    read = target.size_bytes - embedding
    stage(pair, CONTEXT, 2048)
    us, samples = time_graph(pair, "verify.b1", lambda: stage(pair, CONTEXT, 2048), 20)
    kinds = time_kinds(pair, "verify.b1", lambda: stage(pair, CONTEXT, 2048))
    pair.witness.close()
    return {"us": us, "samples_us": samples, "weight_bytes": read, "bandwidth_share": read / us * 1e6 / bandwidth,
            "kinds_us": kinds}


def time_kinds(pair: Pair, name: str, before: Callable[[], None]) -> dict[str, float]:
    """Microseconds of graphs that hold the launches of one kind alone, those of all layers one after another."""
    graph, launched = pair.launched[name]
    kinds: dict[str, list[Any]] = {}
    for launch, compiled in launched:
        label = re.sub(r"[.]\d+", "", launch.label)
        kinds.setdefault(f"{launch.kernel.function.__name__} {label}", []).append((launch, compiled))
    for kind, members in kinds.items():
        pair.launched[kind] = (graph, members)
    return {f"{len(members)} x {kind}": time_graph(pair, kind, before, 10)[0] for kind, members in kinds.items()}


def draft_body(folder: Path, settings: PrecisionSettings) -> dict[str, Any]:
    """A 27B model's draft: one step of eight rows; the graph without its head, and the head alone."""
    pair = make_pair(folder, WIDE, draft_of(WIDE, 5, 17408), settings, 2048)
    stage(pair, CONTEXT, 2048)
    graph, launched = pair.launched["draft.b1"]
    body = [(launch, compiled) for launch, compiled in launched if launch.label.startswith("draft.")]
    head = [(launch, compiled) for launch, compiled in launched if launch.arguments.get("w_ptr") is not None
            and launch.kernel.constants.get("OUT") == WIDE["vocab_size"]]
    pair.launched.update({"body": (graph, body), "head": (graph, head)})
    times = {name: time_graph(pair, name, lambda: None, 30)[0] for name in ("draft.b1", "body", "head")}
    nbytes = {b.key: b.size_bytes for b in pair.layout.blobs}
    pair.witness.close()
    return {"us": times, "nodes": {"body": len(body), "head": len(head)}, "weight_bytes": nbytes}


def prefill(folder: Path, tokens: int) -> dict[str, Any]:
    """A prompt at 8B shapes, chunk by chunk, and PyTorch's compiled layers with SDPA on the same device."""
    pair = make_pair(folder, QWEN3_8B, None, PrecisionSettings(), tokens)
    name = next(n for n in pair.launched if n.startswith("prefill"))
    chunk = int(name.split(".c")[1])
    stage(pair, 0, tokens)
    pair.io("chunk_tokens", torch.int32).random_(0, 150000)
    pair.io("chunk_count", torch.int32)[0] = chunk
    driver, stream = pair.witness.driver, pair.witness.stream
    handle = pair.witness.capture(pair.launched[name][1], pair.addresses)
    executable = driver.make_executable(handle, name)
    samples = []
    for _ in range(3):
        pair.io("length", torch.int32)[0] = 0
        torch.cuda.synchronize()
        start, end = driver.create_event(timing=True), driver.create_event(timing=True)
        driver.record(start, stream)
        for _ in range(tokens // chunk):
            driver.launch(executable, stream, name)
        driver.record(end, stream)
        driver.synchronize(stream)
        samples.append(driver.elapsed_ms(start, end) / 1e3)
    pair.witness.close()
    seconds = statistics.median(samples)
    return {"tokens": tokens, "chunk": chunk, "ttft_s": seconds, "samples_s": samples, "tokens_per_s": tokens / seconds}


def torch_prefill(tokens: int, chunk: int) -> dict[str, Any]:
    """The same layers in PyTorch: SDPA over the whole cache so far, torch.compile, chunks as ours."""
    import torch.nn.functional as F
    from torch.nn.attention.bias import causal_lower_right

    c = QWEN3_8B
    hidden, heads, kv, dim, inter = 4096, 32, 8, 128, c["intermediate_size"]
    gen = {"device": "cuda", "dtype": torch.bfloat16}
    layers = [{"qkv": torch.randn((heads + 2 * kv) * dim, hidden, **gen) * 0.02,
               "o": torch.randn(hidden, heads * dim, **gen) * 0.02,
               "gu": torch.randn(2 * inter, hidden, **gen) * 0.02, "d": torch.randn(hidden, inter, **gen) * 0.02}
              for _ in range(c["num_hidden_layers"])]
    cache = [(torch.empty(1, kv, tokens, dim, **gen), torch.empty(1, kv, tokens, dim, **gen)) for _ in layers]
    angles = torch.arange(tokens, device="cuda")[:, None] / 1e6 ** (torch.arange(64, device="cuda") / 64)
    cos, sin = (f(torch.cat([angles, angles], 1)).to(torch.bfloat16) for f in (torch.cos, torch.sin))

    def before(x: torch.Tensor, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.rms_norm(x, (hidden,)) @ qkv.T
        q, k, v = y.split([heads * dim, kv * dim, kv * dim], 1)
        def turn(t: torch.Tensor, n: int) -> torch.Tensor:
            t = F.rms_norm(t.view(-1, n, dim), (dim,))
            return t * cos[:, None] + torch.cat([-t[..., 64:], t[..., :64]], -1) * sin[:, None]
        return turn(q, heads), turn(k, kv), v.view(-1, kv, dim)

    def after(x: torch.Tensor, a: torch.Tensor, o: torch.Tensor, gu: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        x = x + a @ o.T
        g, u = (F.rms_norm(x, (hidden,)) @ gu.T).chunk(2, 1)
        return x + (F.silu(g) * u) @ d.T

    before, after = torch.compile(before), torch.compile(after)
    x0 = torch.randn(chunk, hidden, **gen)

    def run() -> None:
        for start in range(0, tokens, chunk):
            x, end = x0, start + chunk
            for w, (keys, values) in zip(layers, cache, strict=True):
                q, k, v = before(x, w["qkv"], cos[start:end], sin[start:end])
                keys[0, :, start:end], values[0, :, start:end] = k.transpose(0, 1), v.transpose(0, 1)
                a = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[:, :, :end], values[:, :, :end],
                                                   attn_mask=causal_lower_right(chunk, end), enable_gqa=True)
                x = after(x, a[0].transpose(0, 1).reshape(chunk, -1), w["o"], w["gu"], w["d"])

    run()
    torch.cuda.synchronize()
    seconds = time_torch(run, 1) / 1e6
    return {"ttft_s": seconds, "tokens_per_s": tokens / seconds}


def machine() -> dict[str, str]:
    query = "name,driver_version,clocks.sm,clocks.mem"
    found = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], check=True,
                           capture_output=True, text=True).stdout.strip().splitlines()[0]
    return dict(zip(query.split(","), (part.strip() for part in found.split(",")), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-tokens", type=int, default=32768)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        bandwidth = copy_bandwidth()
        result: dict[str, Any] = {"machine": machine(), "copy_bytes_per_s": bandwidth}
        result["draft_27b"] = {}
        for name, settings in (("bf16", PrecisionSettings()), ("both", PrecisionSettings(draft_body="mxfp8",
                                                                                        draft_head="nvfp4"))):
            result["draft_27b"][name] = draft_body(root / name, settings)
            torch.cuda.empty_cache()
        slow, fast = (result["draft_27b"][n]["us"] for n in ("bf16", "both"))
        result["draft_27b"]["ratios"] = {part: slow[part] / fast[part] for part in slow}
        result["verify_8b"] = verify_step(root / "verify", bandwidth)
        torch.cuda.empty_cache()
        result["prefill_8b"] = prefill(root / "prefill", args.prefill_tokens)
        torch.cuda.empty_cache()
        result["prefill_8b"]["torch"] = torch_prefill(args.prefill_tokens, result["prefill_8b"]["chunk"])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
