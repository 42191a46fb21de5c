"""A recorded graph of ops becomes launches of fused kernels.

What is fused, and never changes a bit of what the ops say:
- positions, tokens and embedding at the start of a graph;
- a norm into the linear that alone reads it; a residual add, or SiLU times up, into the linear before it;
- accept and the context positions that follow from it;
- a recurrent layer's convolution and gates, and the commit of all its rows into the scan that made them.
Every other op is a kernel of its own. A launch keeps the numbers of the op calls it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dflash_core.errors import CaptureError, PlanError
from dflash_core.formats import Format

from exporter.kernels import (
    accept,
    activation,
    candidates,
    conv,
    experts,
    gelu,
    image_attention,
    latent,
    latent_attention,
    latent_attention_many,
    norm_once,
    recurrent,
    residual_mix,
    router,
    rows,
    sampling,
    selector,
    slot_copy,
    vision,
)
from exporter.kernels.attention import paged_attention
from exporter.kernels.attention_many import prefill_attention
from exporter.kernels.epilogue import ADD, SILU, STORE, STORE_F32
from exporter.kernels.latent import pages_of
from exporter.kernels.launch import Kernel, Launch
from exporter.kernels.linear import FORMAT_CODE, linear_rows
from exporter.kernels.linear_packed import linear_packed
from exporter.kernels.linear_whole import linear_whole
from exporter.kernels.norm import norm_rows
from exporter.kernels.rope import rope_heads
from exporter.kernels.tuning import (
    MAX_BLOCK_ROWS,
    MAX_LANES,
    MAX_STEP_ROWS,
    PACKED_ROWS,
    PACKED_STAGES,
    PREFILL_QUERY_ROWS,
    PREFILL_STAGES,
    PREFILL_WARPS,
    STEP_ATTENTION_WARPS,
    STEP_QUERY_ROWS,
    WHOLE_ELEMENTS,
    WHOLE_ROWS,
    image_tile,
    linear_tile,
    packed_slices,
    split_tokens,
    takes_norm,
    whole_tile,
)
from exporter.program.builder import OpCall, Program, Tensor
from runtime.ops import DType, find_op

LINEAR = {"dflash.linear/1": Format.BF16, "dflash.linear_mxfp8/1": Format.MXFP8, "dflash.linear_nvfp4/1": Format.NVFP4}

Lower = Callable[[OpCall, Program], list[Launch]]

ALONE: dict[str, Lower] = {
    "dflash.pixel_patches/1": vision.lower_pixel_patches,
    "dflash.grid_embedding/1": vision.lower_grid_embedding,
    "dflash.rope_grid/1": vision.lower_rope_grid,
    "dflash.merge_patches/1": vision.lower_merge_patches,
    "dflash.store_image/1": vision.lower_store_image,
    "dflash.splice_embedding/1": vision.lower_splice_embedding,
    "dflash.image_attention/1": image_attention.lower_image_attention,
    "dflash.rms_norm_once/1": norm_once.lower_norm_once,
    "dflash.add_rms_norm_once/1": norm_once.lower_norm_once,
    "dflash.gelu/1": gelu.lower_gelu,
    "dflash.gelu_tanh/1": gelu.lower_gelu,
    "dflash.save_slot/1": slot_copy.lower_slot_copy,
    "dflash.load_slot/1": slot_copy.lower_slot_copy,
    "dflash.tap/1": rows.lower_tap,
    "dflash.last_row/1": rows.lower_last_row,
    "dflash.commit/1": rows.lower_commit,
    "dflash.commit_chunk/1": rows.lower_commit_chunk,
    "dflash.grouped_conv/1": conv.lower_grouped_conv,
    "dflash.top_candidates/1": candidates.lower_top_candidates,
    "dflash.selector_walk/1": selector.lower_selector_walk,
    "dflash.argmax_proposals/1": selector.lower_argmax_proposals,
    "dflash.sample/1": sampling.lower_sample,
    "dflash.conv_window/1": recurrent.lower_conv_window,
    "dflash.kda_commit/1": recurrent.lower_kda_commit,
    "dflash.gated_norm/1": recurrent.lower_gated_norm,
    "dflash.silu_mul/1": activation.lower_gated,
    "dflash.situ_mul/1": activation.lower_gated,
    "dflash.sigmoid_mul/1": activation.lower_sigmoid_mul,
    "dflash.residual_mix/1": residual_mix.lower_residual_mix,
    "dflash.route/1": router.lower_route,
    "dflash.experts/1": experts.lower_experts,
    "dflash.experts_mxfp4/1": experts.lower_experts,
    "dflash.experts_nvfp4/1": experts.lower_experts,
    "dflash.latent_cache/1": latent.lower_latent_cache,
    "dflash.latent_rows/1": latent.lower_latent_rows,
    "dflash.latent_store/1": latent.lower_latent_store,
    "dflash.rope_query/1": latent.lower_rope_query,
    "dflash.absorb_query/1": latent.lower_absorb_query,
    "dflash.expand_values/1": latent.lower_expand_values,
    "dflash.latent_attention/1": latent_attention_many.lower_latent_attention,
    "dflash.latent_block_attention/1": latent_attention.lower_latent_block_attention,
}


def lower_graph(calls: Sequence[OpCall], program: Program) -> list[Launch]:
    """Launches that compute the calls, in order.

    Raises:
        CaptureError: GPU_OP or GPU_ACT; an op, or an activation type, that no kernel computes.
    """
    return _Lowering(calls, program).run()


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm that waits for the linear that reads it."""

    x: Tensor
    weight: Tensor
    eps: float
    op: str
    node_id: int


class _Lowering:
    def __init__(self, calls: Sequence[OpCall], program: Program) -> None:
        self.calls, self.program = calls, program
        # An image's rows have one tile shape, whatever the bucket: the same image has the same rows from each.
        self.one_tile = calls[0].op == "dflash.pixel_patches/1"
        self.done: set[int] = set()
        self.norms: dict[int, _Norm] = {}  # by buffer of the normalized rows

    def run(self) -> list[Launch]:
        starts = self.calls[0].op in ("dflash.block_positions/1", "dflash.chunk_positions/1")
        launches = self._begin() if starts else []
        for index, call in enumerate(self.calls):
            if index not in self.done:
                launches += self._lower(index, call)
        return launches

    def _begin(self) -> list[Launch]:
        count = next(i for i, c in enumerate(self.calls) if c.op == "dflash.embedding/1") + 1
        self.done |= set(range(count))
        return rows.lower_begin(self.calls[:count], self.program)

    def _lower(self, index: int, call: OpCall) -> list[Launch]:
        if call.op in LINEAR:
            return self._linear(index, call)
        if call.op == "dflash.rms_norm/1":
            return self._norm(index, call, call.operands["x"], None)
        if call.op == "dflash.add_rms_norm/1":
            return self._norm(index, call, call.operands["residual"], call.operands["delta"])
        if call.op == "dflash.add/1":
            return [_norm_launch(call, call.operands["residual"], call.operands["delta"], None)]
        if call.op == "dflash.accept/1":
            return self._accept(index, call)
        if call.op == recurrent.RECURRENCE[0]:
            return self._recurrence(index)
        if call.op in ("dflash.rope_cache/1", "dflash.norm_rope_cache/1"):
            follow = self.calls[index + 1] if index + 1 < len(self.calls) else call
            if follow.op == "dflash.attention/1" and follow.number("block_rows") <= STEP_QUERY_ROWS:
                self.done.add(index + 1)
                return [self._attention(follow, rope=call)]
            return [_rope(call)]
        if call.op in ("dflash.norm_rope/1", "dflash.norm_rope_context/1"):
            return [_rope(call)]
        if call.op in ("dflash.attention/1", "dflash.block_attention/1"):
            return [self._attention(call)]
        if call.op in ALONE:
            return ALONE[call.op](call, self.program)
        raise CaptureError("GPU_OP", "no kernel computes this op", where=call.label, got=call.op)

    def _readers(self, index: int, tensor: Tensor) -> list[int]:
        """Calls after `index` that read `tensor`, until something else is written there."""
        found = []
        for later in range(index + 1, len(self.calls)):
            call = self.calls[later]
            touched = [p for p in find_op(call.op).operands if call.operands[p.name].buffer_id == tensor.buffer_id]
            if any(p.read for p in touched):
                found.append(later)
            if any(p.write for p in touched):
                break
        return found

    def _norm(self, index: int, call: OpCall, x: Tensor, delta: Tensor | None) -> list[Launch]:
        """Leave the norm to the one linear that reads it, where repeating it in every block costs less than a launch;
        otherwise launch it."""
        out = call.operands["out"]
        readers = self._readers(index, out)
        reader = self.calls[readers[0]] if len(readers) == 1 else call
        alone = reader.op in LINEAR and takes_norm(reader.number("out_features"), reader.number("in_features"),
                                                   reader.number("rows"))
        if not alone:
            return [_norm_launch(call, x, delta, out)]
        self.norms[out.buffer_id] = _Norm(x, call.operands["weight"], call.real("eps"), "dflash.rms_norm/1",
                                          call.node_id)
        return [] if delta is None else [_norm_launch(call, x, delta, None)]

    def _linear(self, index: int, call: OpCall) -> list[Launch]:
        x, out = call.operands["x"], call.operands["out"]
        norm = self.norms.pop(x.buffer_id, None)
        epilogue = STORE_F32 if out.dtype is DType.F32 else STORE
        ops, nodes, residual = [call.op], [call.node_id], None
        launches: list[Launch] = []
        follow = index + 1
        readers = self._readers(index, out)
        if readers == [follow] and self.calls[follow].op == "dflash.silu_mul/1":
            epilogue, out = SILU, self.calls[follow].operands["out"]
            ops.append("dflash.silu_mul/1")
            nodes.append(self.calls[follow].node_id)
            self.done.add(follow)
        elif readers == [follow] and self.calls[follow].op in ("dflash.add/1", "dflash.add_rms_norm/1"):
            after = self.calls[follow]
            epilogue, residual = ADD, after.operands["residual"]
            ops.append("dflash.add/1")
            nodes.append(after.node_id)
            self.done.add(follow)
            if after.op == "dflash.add_rms_norm/1":
                launches = self._norm(follow, after, residual, None)
        if norm is not None:
            ops.insert(0, norm.op)
            nodes.insert(0, norm.node_id)
        fused = _linear_launch(call, norm, epilogue, residual, out, tuple(ops), tuple(nodes), self.one_tile)
        return [fused, *launches]

    def _accept(self, index: int, call: OpCall) -> list[Launch]:
        follow = index + 1
        if follow < len(self.calls) and self.calls[follow].op == "dflash.accepted_positions/1":
            self.done.add(follow)
            return accept.lower_accept([call, self.calls[follow]], self.program)
        return accept.lower_accept([call], self.program)

    def _recurrence(self, index: int) -> list[Launch]:
        """A recurrent layer's rows and scan; its commit too, where that is told to keep all the rows."""
        calls = self.calls[index:index + len(recurrent.RECURRENCE)]
        if tuple(c.op for c in calls) != recurrent.RECURRENCE:
            raise CaptureError("GPU_OP", "no kernel computes a recurrence in this order", where=calls[0].label,
                               expected=", ".join(recurrent.RECURRENCE), got=", ".join(c.op for c in calls))
        self.done |= {index + 1, index + 2}
        scan = calls[-1]
        for later in self._readers(index + 2, scan.operands["changes"]):
            commit = self.calls[later]
            if commit.op == "dflash.kda_commit/1" and commit.operands["positions"] == scan.operands["positions"]:
                self.done.add(later)
                return recurrent.lower_recurrence(calls, commit, self.program)
        return recurrent.lower_recurrence(calls, None, self.program)

    def _attention(self, call: OpCall, rope: OpCall | None = None) -> Launch:
        """Attention, with the rotation and the cache write before it where all rows of a group fit one tile."""
        o = call.operands
        block = call.op == "dflash.block_attention/1"
        heads, kv_heads, head_dim = call.number("heads"), call.number("kv_heads"), call.number("head_dim")
        groups, block_rows = call.number("groups"), call.number("block_rows")
        page_tokens, max_pages = call.number("page_tokens"), call.number("max_pages")
        if not block and block_rows > MAX_BLOCK_ROWS:
            return _prefill_attention(call)
        tile = STEP_QUERY_ROWS
        repeat = heads // kv_heads
        m = max(16, 1 << (repeat * tile - 1).bit_length())
        tiles = -(-block_rows // tile)
        split = max(split_tokens(page_tokens * max_pages), page_tokens)
        splits = -(-(page_tokens * max_pages) // split)
        lanes = groups * tiles * kv_heads
        assert lanes <= MAX_LANES, lanes
        partial = self.program.scratch("attention_partial", DType.F32, (lanes * splits, m * (head_dim + 2)))
        counters = self.program.once("attention_counters", DType.I32, (MAX_LANES,))
        kv = pages_of(o["kv"])
        v = _columns(o["qkv"], (heads + kv_heads) * head_dim) if block else None
        fused = ("q_weight_ptr", "k_weight_ptr", "table_ptr", "qkv_ptr")
        absent: dict[str, None] = {"k_ptr": None, "v_ptr": None} if not block else {}
        absent |= dict.fromkeys(("q_ptr",) if rope else fused)
        if rope and "q_weight" not in rope.operands:
            absent |= {"q_weight_ptr": None, "k_weight_ptr": None}
        kernel = Kernel(
            paged_attention, (*((rope.op,) if rope else ()), call.op),
            {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "R": tile, "M": m,
             "PAGE_TOKENS": page_tokens, "PAGE_BYTES": call.number("page_bytes"), "MAX_PAGES": max_pages,
             "SPLIT_TOKENS": split, "SPLITS": splits, "CAUSAL": bool(call.number("causal")) if block else True,
             "WINDOW": call.number("window") if block else 0,
             "ROTARY": rope.number("rotary_dims") if rope else head_dim,
             "EPS": rope.real("eps") if rope and "eps" in rope.scalars else 0.0, **absent},
            num_warps=STEP_ATTENTION_WARPS, num_stages=2)
        arguments: dict[str, Tensor | int | float] = {
            "positions_ptr": o["positions"], "slots_ptr": o["slots"],
            "page_table_ptr": o["page_table"], "kv_ptr": kv, "out_ptr": o["out"], "partial_ptr": partial,
            "counter_ptr": counters, "block_rows": block_rows, "v_stride": (heads + 2 * kv_heads) * head_dim,
            "scale": call.real("scale")}
        reads = [o["positions"], o["slots"], o["page_table"], kv, counters, partial]
        writes = [o["out"], partial, counters]
        if v is not None:
            arguments |= {"k_ptr": o["k"], "v_ptr": v}
            reads += [o["k"], o["qkv"]]
        if rope is None:
            arguments["q_ptr"] = o["q"]
            reads.append(o["q"])
            return Launch(kernel, arguments, (groups * tiles, kv_heads, splits), tuple(reads), tuple(writes),
                          (call.node_id,), call.label)
        made = rope.operands
        arguments |= {"qkv_ptr": made["qkv"], "table_ptr": made["rope_table"]}
        if "q_weight" in made:
            arguments |= {"q_weight_ptr": made["q_weight"], "k_weight_ptr": made["k_weight"]}
        reads += [t for n, t in made.items() if n in ("qkv", "rope_table", "q_weight", "k_weight")]
        return Launch(kernel, arguments, (groups * tiles, kv_heads, splits), tuple(reads), (*writes, kv),
                      (rope.node_id, call.node_id), call.label)


def _prefill_attention(call: OpCall) -> Launch:
    """Attention of a chunk of one sequence, whose keys and values are in the cache already."""
    o, rows, heads = call.operands, call.number("block_rows"), call.number("heads")
    assert call.number("groups") == 1, call.label
    kernel = Kernel(
        prefill_attention, (call.op,),
        {"HEADS": heads, "KV_HEADS": call.number("kv_heads"), "HEAD_DIM": call.number("head_dim"),
         "BM": PREFILL_QUERY_ROWS, "PAGE_TOKENS": call.number("page_tokens"), "PAGE_BYTES": call.number("page_bytes"),
         "MAX_PAGES": call.number("max_pages"), "STAGES": PREFILL_STAGES},
        num_warps=PREFILL_WARPS, num_stages=PREFILL_STAGES)
    arguments: dict[str, Tensor | int | float] = {
        "q_ptr": o["q"], "positions_ptr": o["positions"], "slots_ptr": o["slots"], "page_table_ptr": o["page_table"],
        "kv_ptr": pages_of(o["kv"]), "out_ptr": o["out"], "rows": rows, "scale": call.real("scale")}
    reads = (o["q"], o["positions"], o["slots"], o["page_table"], pages_of(o["kv"]))
    return Launch(kernel, arguments, (-(-rows // PREFILL_QUERY_ROWS), heads, 1), reads, (o["out"],), (call.node_id,),
                  call.label)


def _columns(x: Tensor, first: int) -> Tensor:
    """A pointer into the rows of `x`, `first` columns on."""
    return replace(x, offset=x.offset + first * x.dtype.bits // 8, shape=(0,))


def _check_act(call: OpCall) -> None:
    if "act" in call.scalars and call.number("act") != DType.BF16:
        raise CaptureError("GPU_ACT", "GPU cores compute in bf16", where=call.label, expected="bf16",
                           got=DType(call.number("act")).view_name, hint="leave out --compute-dtype")


def _norm_launch(call: OpCall, x: Tensor, delta: Tensor | None, out: Tensor | None) -> Launch:
    _check_act(call)
    count, cols = x.shape
    constants: dict[str, int | float | None] = {"COLS": cols, "BLOCK": 1 << (cols - 1).bit_length(),
                                                "EPS": call.real("eps") if out else 0.0}
    arguments: dict[str, Tensor] = {"x_ptr": x}
    ops = []
    if delta is None:
        constants["delta_ptr"] = None
    else:
        arguments["delta_ptr"] = delta
        ops.append("dflash.add/1")
    if out is None:
        constants |= {"out_ptr": None, "weight_ptr": None}
    else:
        arguments |= {"out_ptr": out, "weight_ptr": call.operands["weight"]}
        ops.append("dflash.rms_norm/1")
    writes = [t for t in (out, x if delta is not None else None) if t is not None]
    reads = [x, *(t for t in (delta, call.operands.get("weight") if out else None) if t is not None)]
    return Launch(Kernel(norm_rows, tuple(ops), constants, num_warps=4), arguments, (count, 1, 1), tuple(reads),
                  tuple(writes), (call.node_id,), call.label)


def _linear_launch(call: OpCall, norm: _Norm | None, epilogue: int, residual: Tensor | None, out: Tensor,
                   ops: tuple[str, ...], nodes: tuple[int, ...], one_tile: bool) -> Launch:
    _check_act(call)
    o = call.operands
    fmt = Format.F32 if o["weight"].dtype is DType.F32 else LINEAR[call.op]
    count, in_features = call.number("rows"), call.number("in_features")
    out_features = call.number("out_features") // (2 if epilogue == SILU else 1)
    x = norm.x if norm else o["x"]
    constants: dict[str, int | float | None] = {
        "IN": in_features, "OUT": out_features, "FORMAT": FORMAT_CODE[fmt], "EPILOGUE": epilogue}
    few, gated = count <= MAX_STEP_ROWS and not one_tile, epilogue == SILU
    short = fmt is not Format.F32 and (norm is not None or gated or out_features * in_features < WHOLE_ELEMENTS)
    whole = whole_tile(out_features, in_features, fmt, gated=gated) if few and short else None
    slices = packed_slices(out_features * (2 if gated else 1), in_features, fmt) if few and norm is None else None
    function = linear_rows
    if whole is not None:
        function = linear_whole
        tile_rows, tile_out, num_warps, stages = WHOLE_ROWS, whole.out, whole.slices, 1
        constants |= {"R": tile_rows, "BN": tile_out, "SLICES": whole.slices, "WIDTH": whole.width,
                      "EPS": norm.eps if norm else 0.0}
    elif slices is not None:
        function = linear_packed
        tile_rows, tile_out, num_warps, stages = PACKED_ROWS, 64 // slices, 4, PACKED_STAGES
        constants |= {"SLICES": slices, "STAGES": stages}
    else:
        tile = image_tile(in_features) if one_tile else linear_tile(
            out_features, in_features, count, fmt, gated=gated, normalized=norm is not None)
        tile_rows, tile_out, num_warps, stages = tile.rows, tile.out, tile.num_warps, tile.stages
        constants |= {"R": tile_rows, "BN": tile_out, "BK": tile.depth, "STAGES": stages,
                      "EPS": norm.eps if norm else 0.0, "NORM_BK": min(1024, 1 << (in_features - 1).bit_length())}
    optional: dict[str, Tensor | None] = {
        "scale_ptr": o.get("block_scale"), "global_ptr": o.get("global_scale"), "residual_ptr": residual,
        "out_ptr": None if epilogue == ADD else out}
    if function is not linear_packed:
        optional["norm_ptr"] = norm.weight if norm else None
    arguments: dict[str, Tensor | int] = {"x_ptr": x, "w_ptr": o["weight"], "rows": count}
    for name, tensor in optional.items():
        if tensor is None:
            constants[name] = None
        else:
            arguments[name] = tensor
    target = residual if residual is not None else out
    reads = tuple(t for t in arguments.values() if isinstance(t, Tensor) and t is not out)
    row_tiles, out_tiles = -(-count // tile_rows), -(-out_features // tile_out)
    grid = (out_tiles, row_tiles, 1) if whole else (row_tiles, out_tiles, 1)
    kernel = Kernel(function, ops, constants, num_warps=num_warps, num_stages=stages)
    return Launch(kernel, arguments, grid, reads, (target,), nodes, call.label)


def _rope(call: OpCall) -> Launch:
    _check_act(call)
    o, op = call.operands, call.op
    context, cached = op == "dflash.norm_rope_context/1", op != "dflash.norm_rope/1"
    heads = 0 if context else call.number("heads")
    kv_heads, head_dim = call.number("kv_heads"), call.number("head_dim")
    if head_dim & (head_dim - 1):
        raise PlanError("GPU_HEAD_DIM", "GPU kernels need a head size that is a power of two", where=call.label,
                        expected="16, 32, 64, 128 …", got=head_dim, hint="export for --device cpu")
    constants: dict[str, int | float | None] = {
        "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "ROTARY": call.number("rotary_dims"),
        "EPS": call.real("eps") if "eps" in call.scalars else 0.0,
        "PAGE_TOKENS": call.number("page_tokens") if cached else 1,
        "PAGE_BYTES": call.number("page_bytes") if cached else 2,
        "MAX_PAGES": call.number("max_pages") if cached else 1}
    x = o["kv_rows"] if context else o["qkv"]
    arguments: dict[str, Tensor | int] = {
        "x_ptr": x, "table_ptr": o["rope_table"], "positions_ptr": o["positions"],
        "block_rows": call.number("block_rows") if cached else 1}
    optional = {"q_weight_ptr": o.get("q_weight"), "k_weight_ptr": o.get("k_weight"), "q_ptr": o.get("q"),
                "k_ptr": o.get("k"), "slots_ptr": o.get("slots") if cached else None,
                "page_table_ptr": o.get("page_table") if cached else None,
                "kv_ptr": pages_of(o["kv"]) if cached else None}
    for name, tensor in optional.items():
        if tensor is None:
            constants[name] = None
        else:
            arguments[name] = tensor
    writes = tuple(t for t in (optional["q_ptr"], optional["k_ptr"], optional["kv_ptr"]) if t is not None)
    reads = tuple(t for t in arguments.values() if isinstance(t, Tensor) and t not in writes)
    value_heads = kv_heads if cached else 0
    return Launch(Kernel(rope_heads, (op,), constants, num_warps=1), arguments,
                  (call.number("rows"), heads + kv_heads + value_heads, 1), reads, writes, (call.node_id,), call.label)
