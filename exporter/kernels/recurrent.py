"""What the op calls of a recurrent layer become: `kda` where rows are few, `kda_blocks` for a prefill chunk."""

from __future__ import annotations

from collections.abc import Sequence

from exporter.kernels import kda
from exporter.kernels.kda_blocks import kda_blocks, kda_blocks_scan
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.rows import cdiv, check_act, copy_block, power_of_two
from exporter.kernels.tuning import (
    KDA_BLOCK,
    KDA_BLOCK_COLUMNS,
    KDA_BLOCK_STAGES,
    KDA_BLOCK_WARPS,
    KDA_COLUMNS,
    KDA_STAGES,
    KDA_WARPS,
    MAX_BLOCK_ROWS,
)
from exporter.program.builder import Program, Tensor
from runtime.ops import DType
from runtime.ops.kda import L2_EPS

RECURRENCE = ("dflash.short_conv/1", "dflash.kda_gates/1", "dflash.kda_scan/1")
HEAD_TILE_VALUES = 512  # of a block that computes heads of one row


def lower_recurrence(calls: Sequence[OpCall], commit: OpCall | None, program: Program) -> list[Launch]:
    """Convolution, gates and scan, with the commit of the same rows where it follows at once.

    Args:
        calls: one of each of RECURRENCE, in this order.
        commit: dflash.kda_commit of the rows that the scan made, at the same positions.
    """
    conv, gates, scan = calls
    check_act(scan)
    o, heads, head_dim = scan.operands, scan.number("heads"), scan.number("head_dim")
    rows, width = scan.number("groups") * scan.number("block_rows"), heads * head_dim
    queries = program.scratch("kda_queries", DType.F32, (rows, width))
    made = _rows_launch(conv, gates, scan, queries)
    if commit is not None and scan.number("block_rows") > MAX_BLOCK_ROWS:
        return [made, *_blocks_launches(scan, commit, queries, program)]
    columns = min(KDA_COLUMNS, power_of_two(head_dim))
    ops, nodes = (scan.op,), (scan.node_id,)
    constants: dict[str, int | float | None] = {
        "BLOCK_ROWS": scan.number("block_rows"), "HEADS": heads, "HEAD_DIM": head_dim, "K": power_of_two(head_dim),
        "V": columns, "COMMIT": commit is not None, "STAGES": KDA_STAGES}
    arguments = {"queries_ptr": queries, "keys_ptr": o["keys"], "qkv_ptr": o["qkv"], "log_decay_ptr": o["log_decay"],
                 "strength_ptr": o["strength"], "positions_ptr": o["positions"], "slots_ptr": o["slots"],
                 "state_ptr": o["state"], "out_ptr": o["out"]}
    reads = tuple(t for n, t in arguments.items() if n != "out_ptr")
    writes = [o["out"]]
    if commit is None:
        arguments["changes_ptr"] = o["changes"]
        writes.append(o["changes"])
    else:
        constants["changes_ptr"] = None
        ops, nodes = (scan.op, commit.op), (scan.node_id, commit.node_id)
        writes.append(o["state"])
    kernel = Kernel(kda.kda_scan, ops, constants, num_warps=KDA_WARPS)
    return [made, Launch(kernel, arguments, (cdiv(head_dim, columns), heads, scan.number("groups")), reads,
                         tuple(writes), nodes, scan.label)]


def _rows_launch(conv: OpCall, gates: OpCall, scan: OpCall, queries: Tensor) -> Launch:
    c, g, s = conv.operands, gates.operands, scan.operands
    heads, head_dim = scan.number("heads"), scan.number("head_dim")
    tile = _head_tile(heads, head_dim)
    kernel = Kernel(
        kda.kda_rows, (conv.op, gates.op),
        {"BLOCK_ROWS": scan.number("block_rows"), "HEADS": heads, "HEAD_DIM": head_dim, "HEAD_TILE": tile,
         "D": power_of_two(head_dim), "HISTORY": conv.number("history"), "LOWER_BOUND": gates.real("lower_bound"),
         "L2_EPS": float(L2_EPS)}, num_warps=4)
    arguments: dict[str, Tensor | float] = {
        "x_ptr": c["x"], "window_ptr": c["window"], "conv_ptr": c["weight"], "decay_ptr": g["decay"],
        "beta_ptr": g["beta"], "a_log_ptr": g["a_log"], "dt_bias_ptr": g["dt_bias"], "positions_ptr": s["positions"],
        "slots_ptr": s["slots"], "qkv_ptr": s["qkv"], "queries_ptr": queries, "keys_ptr": s["keys"],
        "log_decay_ptr": s["log_decay"], "strength_ptr": s["strength"], "scale": float(head_dim) ** -0.5}
    writes = (s["qkv"], queries, s["keys"], s["log_decay"], s["strength"])
    reads = tuple(t for t in arguments.values() if isinstance(t, Tensor) and t not in writes)
    rows = scan.number("groups") * scan.number("block_rows")
    return Launch(kernel, arguments, (rows, cdiv(heads, tile), 1), reads, writes, (conv.node_id, gates.node_id),
                  conv.label)


def _blocks_launches(scan: OpCall, commit: OpCall, queries: Tensor, program: Program) -> list[Launch]:
    o, heads, head_dim, rows = scan.operands, scan.number("heads"), scan.number("head_dim"), scan.number("block_rows")
    assert scan.number("groups") == 1, scan.label
    size = {"BLOCK_ROWS": rows, "HEADS": heads, "HEAD_DIM": head_dim, "K": max(16, power_of_two(head_dim)),
            "C": KDA_BLOCK}
    made = {f"{name}_ptr": program.scratch(f"kda_blocks_{name}", DType.F32, (rows, heads * head_dim))
            for name in ("sums", "u", "w", "q", "k")}
    made["p_ptr"] = program.scratch("kda_blocks_p", DType.F32, (rows, heads * KDA_BLOCK))
    given = {"queries_ptr": queries, "keys_ptr": o["keys"], "qkv_ptr": o["qkv"], "log_decay_ptr": o["log_decay"],
             "strength_ptr": o["strength"], "positions_ptr": o["positions"]}
    blocks = Launch(Kernel(kda_blocks, (scan.op,), size, num_warps=KDA_BLOCK_WARPS), {**given, **made},
                    (cdiv(rows, KDA_BLOCK), heads, 1), (*given.values(), made["sums_ptr"]), tuple(made.values()),
                    (), scan.label)
    columns = min(KDA_BLOCK_COLUMNS, max(16, power_of_two(head_dim)))
    slices = max(1, min(KDA_BLOCK_WARPS, size["K"] // 16))  # a product's parts have at least 16 channels
    kernel = Kernel(kda_blocks_scan, (scan.op, commit.op),
                    {**size, "V": columns, "SLICES": slices, "STAGES": KDA_BLOCK_STAGES},
                    num_warps=KDA_BLOCK_WARPS, num_stages=KDA_BLOCK_STAGES)
    where = {"positions_ptr": o["positions"], "slots_ptr": o["slots"], "state_ptr": o["state"]}
    walk = Launch(kernel, {**made, **where, "out_ptr": o["out"]}, (cdiv(head_dim, columns), heads, 1),
                  (*made.values(), *where.values()), (o["out"], o["state"]), (scan.node_id, commit.node_id), scan.label)
    return [blocks, walk]


def lower_kda_commit(call: OpCall, program: Program) -> list[Launch]:
    """States move on by the rows that a step keeps."""
    o, heads, head_dim = call.operands, call.number("heads"), call.number("head_dim")
    columns = min(KDA_COLUMNS, power_of_two(head_dim))
    kernel = Kernel(kda.kda_commit, (call.op,),
                    {"BLOCK_ROWS": call.number("block_rows"), "HEADS": heads, "HEAD_DIM": head_dim,
                     "K": power_of_two(head_dim), "V": columns, "STAGES": KDA_STAGES}, num_warps=KDA_WARPS)
    arguments = {f"{name}_ptr": o[name] for name in ("keys", "changes", "log_decay", "positions", "slots", "state")}
    return [Launch(kernel, arguments, (cdiv(head_dim, columns), heads, call.number("groups")),
                   tuple(arguments.values()), (o["state"],), (call.node_id,), call.label)]


def lower_conv_window(call: OpCall, program: Program) -> list[Launch]:
    """Windows move on by the rows that a step keeps."""
    check_act(call)
    o, channels, history = call.operands, call.number("channels"), call.number("history")
    block = copy_block(channels)
    kernel = Kernel(kda.conv_window, (call.op,),
                    {"BLOCK_ROWS": call.number("block_rows"), "CHANNELS": channels, "HISTORY": history,
                     "H": power_of_two(history), "BLOCK": block}, num_warps=max(1, block // 256))
    arguments = {f"{name}_ptr": o[name] for name in ("x", "positions", "slots", "window")}
    return [Launch(kernel, arguments, (call.number("groups"), cdiv(channels, block), 1), tuple(arguments.values()),
                   (o["window"],), (call.node_id,), call.label)]


def lower_gated_norm(call: OpCall, program: Program) -> list[Launch]:
    """The norm of a recurrence's result, per head, under its gate."""
    check_act(call)
    o, heads, head_dim = call.operands, call.number("heads"), call.number("head_dim")
    tile = _head_tile(heads, head_dim)
    kernel = Kernel(kda.gated_norm, (call.op,),
                    {"HEADS": heads, "HEAD_DIM": head_dim, "HEAD_TILE": tile, "D": power_of_two(head_dim),
                     "EPS": call.real("eps")}, num_warps=4)
    arguments = {f"{name}_ptr": o[name] for name in ("x", "gate", "weight", "out")}
    return [Launch(kernel, arguments, (call.number("rows"), cdiv(heads, tile), 1), (o["x"], o["gate"], o["weight"]),
                   (o["out"],), (call.node_id,), call.label)]


def _head_tile(heads: int, head_dim: int) -> int:
    return min(power_of_two(heads), max(1, HEAD_TILE_VALUES // power_of_two(head_dim)))
