"""The first stage of every greedy choice: each chunk of a row of logits keeps the key of its best id.

A row's argmax is then the highest of a few keys, which the kernel that decides reads itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.order import LOWEST, key_of, ordered
from exporter.kernels.rows import cdiv, power_of_two
from exporter.program.builder import Program, Tensor
from runtime.ops import DType

CHUNK = 2048


@triton.jit
def best_of_chunks(logits_ptr, positions_ptr, slots_ptr, keys_ptr, BLOCK_ROWS: tl.constexpr, VOCAB: tl.constexpr,
                   LIVE: tl.constexpr, CHUNKS: tl.constexpr, SIZE: tl.constexpr, CHAINED: tl.constexpr):
    """keys[row, chunk]. Grid: chunks, rows. Rows that are dead, or (without positions) an anchor's, are not read."""
    begin(CHAINED)
    chunk, row = tl.program_id(0), tl.program_id(1)
    if positions_ptr is None:
        live = row % BLOCK_ROWS > 0
    else:
        live = (tl.load(positions_ptr + row) >= 0) & (tl.load(slots_ptr + row // BLOCK_ROWS) >= 0)
    if live:
        idx = chunk * SIZE + tl.arange(0, SIZE)
        x = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + idx, mask=idx < LIVE, other=0.0)
        keys = tl.where(idx < LIVE, key_of(ordered(x), idx), LOWEST)
        tl.store(keys_ptr + row * CHUNKS + chunk, tl.max(keys, axis=0))


@triton.jit
def best_key(keys_ptr, row, live, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """The best key of a row (scalar row), or of each of several (rows [n], live [n]); LOWEST where not live."""
    c = tl.arange(0, CHUNKS_PAD)
    if len(row.shape) == 0:
        keys = tl.load(keys_ptr + row * CHUNKS + c, mask=live & (c < CHUNKS), other=0).to(tl.int64)
        return tl.max(tl.where(live & (c < CHUNKS), keys, LOWEST), axis=0)
    else:
        mask = live[:, None] & (c < CHUNKS)[None, :]
        keys = tl.load(keys_ptr + row[:, None] * CHUNKS + c[None, :], mask=mask, other=0).to(tl.int64)
        return tl.max(tl.where(mask, keys, LOWEST), axis=1)


@dataclass(frozen=True, slots=True)
class BestKeys:
    """Where the keys lie: `tensor` u64 [rows, chunks]."""

    tensor: Tensor
    chunks: int

    def constants(self) -> dict[str, int]:
        return {"CHUNKS": self.chunks, "CHUNKS_PAD": power_of_two(self.chunks)}


def lower_best_keys(call: OpCall, program: Program, *, rows: int, block_rows: int) -> tuple[Launch, BestKeys]:
    """The launch that fills the keys of an op's logits, and the keys.

    Rows of empty lanes and without a position are left out where the op has positions, anchor rows where it has none.
    """
    o, live_vocab = call.operands, call.number("live_vocab")
    chunks = cdiv(live_vocab, CHUNK)
    keys = BestKeys(program.scratch("best_keys", DType.U64, (rows, chunks)), chunks)
    arguments = {"logits_ptr": o["logits"], "keys_ptr": keys.tensor}
    constants: dict[str, int | None] = {"BLOCK_ROWS": block_rows, "VOCAB": call.number("vocab"), "LIVE": live_vocab,
                                        "CHUNKS": chunks, "SIZE": CHUNK}
    reads = [o["logits"]]
    for name in ("positions", "slots"):
        if "positions" in o:
            arguments[f"{name}_ptr"] = o[name]
            reads.append(o[name])
        else:
            constants[f"{name}_ptr"] = None
    kernel = Kernel(best_of_chunks, (call.op,), constants, num_warps=4)
    return Launch(kernel, arguments, (chunks, rows, 1), tuple(reads), (keys.tensor,), (), call.label), keys
