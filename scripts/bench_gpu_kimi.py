#!/usr/bin/env python3
"""Kimi K3's layers at their real shapes on an NVIDIA GPU, with random weights. JSON on stdout.

    python scripts/bench_gpu_kimi.py           # a GPU with 60 GB free, PyTorch with CUDA, about two minutes

`kda`: the recurrence alone, over layers that each have a state of their own, so that nothing is read from a cache that
would not be in a whole model. `step`: one dense recurrent layer and one latent attention layer with its mixture of
experts, eight sequences of one row; a checkpoint of the right shapes is a sparse file, as in bench_gpu_shapes.py.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from exporter.capture.record import record_gpu  # noqa: E402
from exporter.capture.witness import Witness  # noqa: E402
from exporter.export import ExportRequest  # noqa: E402
from exporter.kernels import kda  # noqa: E402
from exporter.kernels.kda_blocks import kda_blocks, kda_blocks_scan  # noqa: E402
from exporter.program.builder import GraphRecorder, Program, Tensor  # noqa: E402
from runtime.gpu.nodes import Addresses  # noqa: E402
from runtime.ops import DType  # noqa: E402
from scripts.bench_gpu_shapes import (  # noqa: E402
    CAPABILITY,
    copy_bandwidth,
    machine,
    place_pair,
    record_request,
    time_graph,
    write_sparse,
)
from scripts.synth_checkpoint import KIMI_K3  # noqa: E402
from tests.exporter.kimi_inventory import kimi_k3  # noqa: E402

HEADS, HEAD_DIM, HISTORY, RUNS = 96, 128, 3, 30
TOP_K, NUM_EXPERTS = KIMI_K3["num_experts_per_token"], KIMI_K3["num_experts"]
WIDTH = HEADS * HEAD_DIM
STATE_NBYTES = 4 * HEADS * HEAD_DIM**2
LAYERS = 6  # states of eight sequences: 300 MB, six times the cache of an H200
PREFILL_TOKENS = 4096
ROW_KERNELS, BLOCK_KERNELS = (kda.kda_scan,), (kda_blocks, kda_blocks_scan)
CONTEXT = 1024
SEQUENCES = 8


class Bare:
    """Recurrent layers over buffers of their own in device memory, filled at random."""

    def __init__(self, layers: int, groups: int, block_rows: int, *, kept: bool) -> None:
        self.program = Program()
        graph = GraphRecorder(self.program, "kda", role="decode", batch=groups, query_tokens=block_rows)
        for layer in range(layers):
            record_layer(graph, layer, groups, block_rows, kept=kept)
        self.launched: dict[str, Any] = {}
        record_gpu(self.program, [(graph.graph, graph.calls)], CAPABILITY, first_module_id=1,
                   witness=lambda graph, launches: self.launched.update({graph.name: (graph, launches)}))
        self.memory = {b.buffer_id: torch.zeros(max(b.fixed_bytes, 16), dtype=torch.uint8, device="cuda")
                       for b in self.program.buffers}
        for buffer in self.program.buffers:
            fill(buffer.name, self.memory[buffer.buffer_id], groups, block_rows)
        self.addresses = Addresses({i: m.data_ptr() for i, m in self.memory.items()}, {})
        self.witness = Witness.open(self.program)

    def only(self, functions: Sequence[Any]) -> str:
        """A graph of the launches of these kernels alone."""
        graph, launched = self.launched["kda"]
        name = "+".join(f.__name__ for f in functions)
        self.launched[name] = (graph, [(a, b) for a, b in launched if a.kernel.function in functions])
        return name

    def microseconds(self, functions: Sequence[Any]) -> float:
        """Median of one layer's launches of these kernels."""
        name = self.only(functions)
        layers = sum(launch.kernel.function is functions[-1] for launch, _ in self.launched[name][1])
        return time_graph(self, name, lambda: None, RUNS)[0] / layers


def record_layer(graph: GraphRecorder, layer: int, groups: int, block_rows: int, *, kept: bool) -> None:
    """Record a recurrent layer's ops as the model does; `kept`: its rows are committed at once."""
    program, rows, f32 = graph.program, groups * block_rows, DType.F32

    def own(name: str, dtype: DType, *shape: int) -> Tensor:
        return program.state(f"{name}.{layer}", dtype, shape)

    def shared(name: str, dtype: DType, *shape: int) -> Tensor:
        return program.once(name, dtype, shape)

    where = {"positions": shared("positions", DType.I32, rows), "slots": shared("slots", DType.I32, groups)}
    window, state = own("window", DType.BF16, groups, HISTORY, 3 * WIDTH), own("state", f32, groups, HEADS, HEAD_DIM,
                                                                               HEAD_DIM)
    qkv, inputs = shared("qkv", DType.BF16, rows, 3 * WIDTH), shared("inputs", DType.BF16, rows, 3 * WIDTH)
    log_decay, keys, changes, out = (shared(n, f32, rows, WIDTH) for n in ("log_decay", "keys", "changes", "out"))
    strength = shared("strength", f32, rows, HEADS)
    slotted = {"groups": groups, "block_rows": block_rows, "max_slots": groups}
    heads = {"heads": HEADS, "head_dim": HEAD_DIM}
    graph.call("dflash.short_conv/1",
               {"x": inputs, "window": window, "weight": shared("conv", DType.BF16, 3 * WIDTH, HISTORY + 1),
                "out": qkv, **where}, channels=3 * WIDTH, history=HISTORY, act=DType.BF16, w=DType.BF16, **slotted)
    graph.call("dflash.kda_gates/1",
               {"decay": shared("decay", DType.BF16, rows, WIDTH), "beta": shared("beta", DType.BF16, rows, HEADS),
                "a_log": shared("a_log", f32, HEADS), "dt_bias": shared("dt_bias", f32, WIDTH),
                "log_decay": log_decay, "strength": strength}, rows=rows, lower_bound=-5.0, act=DType.BF16, a_w=f32,
               bias_w=f32, **heads)
    graph.call("dflash.kda_scan/1",
               {"qkv": qkv, "log_decay": log_decay, "strength": strength, "state": state, "out": out, "keys": keys,
                "changes": changes, **where}, act=DType.BF16, **slotted, **heads)
    if kept:
        graph.call("dflash.kda_commit/1",
                   {"keys": keys, "changes": changes, "log_decay": log_decay, "state": state, **where}, **slotted,
                   **heads)


def fill(name: str, memory: torch.Tensor, groups: int, block_rows: int) -> None:
    """Random values of a buffer's type, and rows after the first of each sequence."""
    if name == "positions":
        memory.view(torch.int32).copy_((torch.arange(groups * block_rows) % block_rows + block_rows).int())
    elif name == "slots":
        memory.view(torch.int32).copy_(torch.arange(groups).int())
    elif name in ("qkv", "inputs", "decay", "beta", "conv") or name.startswith("window"):
        memory.view(torch.bfloat16).normal_()
    elif name != "triton_scratch":
        values = memory.view(torch.float32).normal_(0.0, 0.1)
        if name == "log_decay":
            values.abs_().neg_()


def recurrence(bandwidth: float) -> dict[str, Any]:
    """The scan of a decode step, of a verified block, and of a prompt in both forms."""
    result: dict[str, Any] = {}
    decode = Bare(LAYERS, SEQUENCES, 1, kept=True)
    us, moved = decode.microseconds(ROW_KERNELS), 2 * SEQUENCES * STATE_NBYTES
    result["decode"] = {"us": us, "state_bytes": moved, "bandwidth_share": moved / us * 1e6 / bandwidth,
                        "rows_us": decode.microseconds((kda.kda_rows,))}
    decode.witness.close()
    verify = Bare(LAYERS, 1, SEQUENCES, kept=False)
    result["verify"] = {"us": verify.microseconds(ROW_KERNELS), "state_bytes": STATE_NBYTES}
    verify.witness.close()
    prompt = Bare(1, 1, PREFILL_TOKENS, kept=True)
    blocks = prompt.microseconds(BLOCK_KERNELS)
    parts = {f.__name__: prompt.microseconds((f,)) for f in BLOCK_KERNELS}
    prompt.witness.close()
    rows = Bare(1, 1, PREFILL_TOKENS, kept=False)
    walked = rows.microseconds(ROW_KERNELS)
    rows.witness.close()
    result["prefill"] = {"tokens": PREFILL_TOKENS, "blocks_us": blocks, "parts_us": parts, "rows_us": walked,
                         "ratio": walked / blocks}
    return result


def step(folder: Path, bandwidth: float) -> dict[str, Any]:
    """Layers 0 (recurrent, dense) and 1 (latent attention, mixture of experts) of Kimi K3, decoding."""
    program = record_step(folder)
    pair = place_pair(*program)
    tame_scales(pair)
    name = f"decode.b{SEQUENCES}"
    stage(pair)
    us, samples = time_graph(pair, name, lambda: stage(pair), 20)
    graph, launched = pair.launched[name]
    layers: dict[str, list[Any]] = {}
    for launch, compiled in launched:
        found = re.search(r"target\.layers\.(\d+)", launch.label)
        layers.setdefault(f"layer {found[1]}" if found else "rest", []).append((launch, compiled))
    result: dict[str, Any] = {"us": us, "samples_us": samples, "layers": {}}
    for part, members in layers.items():
        pair.launched[part] = (graph, members)
        result["layers"][part] = {"us": time_graph(pair, part, lambda: stage(pair), 20)[0], "launches": len(members)}
    result["weight_bytes"] = {b.key: b.size_bytes for b in pair.layout.blobs}
    for layer in (0, 1):
        read = weights_read(pair, layer)
        state = 2 * SEQUENCES * STATE_NBYTES if layer == 0 else 0
        row = result["layers"][f"layer {layer}"]
        row |= {"weight_bytes_read": read, "state_bytes": state,
                "bandwidth_share": (read + state) / row["us"] * 1e6 / bandwidth}
    pair.witness.close()
    return result


def record_step(folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Plan, record and compile the two layers."""
    whole = kimi_k3(num_layers=2, experts="mxfp4")
    text = {**KIMI_K3, **whole.config["text_config"]}
    text["linear_attn_config"] |= {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    config = {"architectures": whole.config["architectures"], "model_type": "kimi_k3", "text_config": text,
              "vision_config": whole.config["vision_config"]}
    write_sparse(folder / "target", config, {name: entry.shape for name, entry in whole.tensors.items()},
                 {name for name, entry in whole.tensors.items() if entry.dtype == "U8"})
    return record_request(ExportRequest(target=folder / "target", out=folder / "core", batches=(SEQUENCES,),
                                        capability=CAPABILITY, max_context=2 * CONTEXT))


def tame_scales(pair: Any) -> None:
    """Powers near 2^-7 for the experts' scales, so that nothing overflows."""
    buffers = {b.blob_id: b.buffer_id for b in pair.recorded.program.buffers if b.HasField("blob_id")}
    for blob in pair.layout.blobs:
        for weight in blob.weights:
            if weight.spec.name.endswith("_scale"):
                view = weight.views[0]
                held = pair.memory[buffers[blob.blob_id]]
                held[view.offset_bytes:view.offset_bytes + view.size_bytes].random_(118, 123)


def weights_read(pair: Any, layer: int) -> int:
    """Bytes of a layer's weights that a step needs: of the experts, those that were chosen."""
    total = 0
    chosen = len(set(pair.io("expert_ids", torch.int32)[:TOP_K * SEQUENCES].tolist()))
    for blob in pair.layout.blobs:
        for weight in blob.weights:
            if weight.spec.name.startswith(f"target.layers.{layer}."):
                nbytes = sum(view.size_bytes for view in weight.views)
                experts = ".experts." in weight.spec.name
                total += nbytes * chosen // NUM_EXPERTS if experts else nbytes
    return total


def stage(pair: Any) -> None:
    """Eight sequences of CONTEXT tokens."""
    pair.io("slots", torch.int32).copy_(torch.arange(SEQUENCES))
    pair.io("length", torch.int32).fill_(CONTEXT)
    pair.io("limit", torch.int32).fill_(2 * CONTEXT)
    pages = pair.io("page_table", torch.int32)
    pages.copy_(torch.arange(pages.numel(), device="cuda", dtype=torch.int32))
    pair.io("anchor", torch.int32).copy_(torch.arange(5, 5 + SEQUENCES))


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    bandwidth = copy_bandwidth()
    result: dict[str, Any] = {"machine": machine(), "copy_bytes_per_s": bandwidth, "kda": recurrence(bandwidth)}
    print(json.dumps(result, indent=1), file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        result["step"] = step(Path(folder), bandwidth)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
