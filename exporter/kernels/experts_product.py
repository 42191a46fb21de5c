"""The two products of an expert, for rows that chose it, with what surrounds them: activation, weight and place.

Weights are the matrix instruction's wide side, bf16 as stored or 4-bit codes decoded in registers to bf16, which holds
every code x block scale exactly, or (MXFP4) as the infinity that fp32 gives; MXFP4's scale 255 is NaN. NVFP4's global
scales multiply the sums, in fp32. `weight_tile` decodes any tile, code by code. `packed_step` decodes eight codes at a
time in the layout of exporter.kernels.linear_packed, and needs a reduction of a multiple of 256.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from dflash_core.errors import CaptureError

from exporter.kernels.activation import betas, gated
from exporter.kernels.launch import Kernel, Launch, OpCall
from exporter.kernels.linear_packed import RESULT_SCALE, THREADS, activations, fragments, nvfp4_values
from exporter.kernels.rows import cdiv, power_of_two
from exporter.kernels.tuning import PACKED_COLUMNS, PACKED_STAGES
from exporter.program.builder import Tensor
from runtime.ops import DType

BF16_WEIGHTS, MXFP4_WEIGHTS, NVFP4_WEIGHTS = 0, 1, 2
PACKED_MXFP4, PACKED_NVFP4 = 3, 4  # the same bytes, where `packed_step` reads them
PACKED = {MXFP4_WEIGHTS: PACKED_MXFP4, NVFP4_WEIGHTS: PACKED_NVFP4}

# Eight E2M1 codes $4 times two pairs of equal bf16 powers ($5, $6): the low codes of bytes 0 and 2 to $0, of 1 and 3 to
# $1, their high codes to $2 and $3. The bits of a code read as bf16 are its value times 2**-126, which is undone first:
# no single factor reaches over all powers.
E2M1_TIMES_POWER = tl.constexpr("""{
.reg .b32 a, b, c, s, m;
mov.b32 m, 0x7E807E80;
shl.b32 a, $4, 6;
shr.b32 b, $4, 2;
and.b32 a, a, 0x01C001C0;
and.b32 c, b, 0x01C001C0;
shl.b32 s, $4, 12;
lop3.b32 a, s, 0x80008000, a, 0xEA;
shl.b32 s, $4, 4;
lop3.b32 c, s, 0x80008000, c, 0xEA;
mul.rn.bf16x2 a, a, m;
mul.rn.bf16x2 c, c, m;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, c, $6;
shl.b32 a, $4, 2;
shr.b32 b, $4, 6;
and.b32 a, a, 0x01C001C0;
and.b32 b, b, 0x01C001C0;
shl.b32 s, $4, 8;
lop3.b32 a, s, 0x80008000, a, 0xEA;
lop3.b32 b, $4, 0x80008000, b, 0xEA;
mul.rn.bf16x2 a, a, m;
mul.rn.bf16x2 b, b, m;
mul.rn.bf16x2 $2, a, $5;
mul.rn.bf16x2 $3, b, $6;
}""")


@triton.jit
def power_of(scale):
    """The bf16 value of E8M0 bytes: 2**-127, a subnormal, for 0; NaN for 255."""
    bits = tl.where(scale == 255, 0x7FFF, tl.maximum(scale.to(tl.int32) << 7, 64))
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def weight_tile(w_ptr, scale_ptr, row, k0, IN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr):
    """Weight rows (i64 [BN]) from column k0 on, [BN, BK] in bf16; columns at or beyond IN are zero."""
    if FORMAT == 0:
        k = k0 + tl.arange(0, BK)
        return tl.load(w_ptr + row[:, None] * IN + k[None, :], mask=(k < IN)[None, :], other=0.0)
    else:
        SIZE: tl.constexpr = 32 if FORMAT == 1 else 16
        byte, block = k0 // 2 + tl.arange(0, BK // 2), k0 // SIZE + tl.arange(0, BK // SIZE)
        packed = tl.load(w_ptr + row[:, None] * (IN // 2) + byte[None, :], mask=(byte < IN // 2)[None, :], other=0)
        scale = tl.load(scale_ptr + row[:, None] * (IN // SIZE) + block[None, :], mask=(block < IN // SIZE)[None, :],
                        other=0)
        codes = tl.join(packed & 15, packed >> 4).reshape(BN, BK).to(tl.int16)
        magnitude = codes & 7
        # e2m1 to bf16 bits: exponents 1..3 are biased by 126; code 1 is the subnormal 0.5
        bits = tl.where(magnitude > 1, (magnitude << 6) + (126 << 7), magnitude * (126 << 7)) | ((codes & 8) << 12)
        values = bits.to(tl.bfloat16, bitcast=True)
        if FORMAT == 1:
            factor = power_of(scale)
        else:
            factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
        return (values.reshape(BN, BK // SIZE, SIZE) * factor[:, :, None]).reshape(BN, BK)


@triton.jit
def packed_row(i):
    """The row of a tile of 64 that the i-th weight row of `packed_step` belongs to."""
    return i // 8 % 4 * 16 + i // 32 * 8 + i % 8


@triton.jit
def mxfp4_values(w_ptr, scales, row, k0, PART: tl.constexpr, IN: tl.constexpr):
    """Columns k0 + 128 PART ... of rows, as `nvfp4_values` gives them, but not scaled.

    scales: i64 [64], the E8M0 bytes of columns k0 ... k0 + 255.
    """
    packed = tl.load(w_ptr + ((row * IN + k0) // 2 + PART * 64)[:, None] + tl.arange(0, 64)[None, :])
    shift = 32 * PART + 8 * tl.arange(0, THREADS)
    power = power_of((scales[:, None] >> shift[None, :]).to(tl.int32) & 255)
    packed, power = tl.broadcast(packed.reshape(64, THREADS, 2, 8), power[:, :, None, None])
    low, high = tl.inline_asm_elementwise(E2M1_TIMES_POWER, "=r,=r,=r,=r,r,r,r", [packed, power],
                                          dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    return tl.join(low, high).reshape(64, THREADS, 32)


@triton.jit
def packed_step(x_ptr, x_row, held, w_ptr, scale_ptr, row, k0, acc, IN: tl.constexpr, FORMAT: tl.constexpr):
    """acc [64, n] plus columns k0 ... k0 + 255 of weight rows (i64 [64], in the order of `packed_row`) times the n rows
    of x that are held; of NVFP4 without its global scale, and times 2**-8. Four warps."""
    if FORMAT == 3:
        scales = tl.load(scale_ptr.to(tl.pointer_type(tl.int64)) + (row * IN + k0) // 256)
    for part in tl.static_range(2):
        k = k0 + part * 128 + tl.arange(0, 128)
        x = tl.load(x_ptr + x_row[None, :, None].to(tl.int64) * IN + k[None, None, :], mask=held[None, :, None],
                    other=0.0)
        if FORMAT == 3:
            values = mxfp4_values(w_ptr, scales, row, k0, part, IN)
        else:
            values = nvfp4_values(w_ptr, scale_ptr, row * IN, k0 + part * 128, IN)
        values = fragments(values, 1, 128).reshape(64, 128)
        acc = tl.dot(values, activations(x, 1, 128).reshape(128, acc.shape[1]), acc)
    return acc


@triton.jit
def rows_tile(x_ptr, row, held, k0, IN: tl.constexpr, BK: tl.constexpr):
    """Rows of x as columns, [BK, rows]; zero where not held and at or beyond IN."""
    k = k0 + tl.arange(0, BK)
    return tl.load(x_ptr + row[None, :].to(tl.int64) * IN + k[:, None], mask=held[None, :] & (k < IN)[:, None],
                   other=0.0)


@triton.jit
def product(x_ptr, x_row, held, w_ptr, scale_ptr, row, IN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            FORMAT: tl.constexpr, STAGES: tl.constexpr):
    """Weight rows (i64 [BN], numbered by `tile_row`) times the n rows of x that are held: [BN, n] in fp32, of NVFP4
    without `global_factor`."""
    acc = tl.zeros([BN, x_row.shape[0]], tl.float32)
    for k0 in tl.range(0, IN, BK, num_stages=STAGES):
        if FORMAT >= 3:
            acc = packed_step(x_ptr, x_row, held, w_ptr, scale_ptr, row, k0, acc, IN, FORMAT)
        else:
            x = rows_tile(x_ptr, x_row, held, k0, IN, BK)
            acc = tl.dot(weight_tile(w_ptr, scale_ptr, row, k0, IN, BN, BK, FORMAT), x, acc)
    return acc


@triton.jit
def global_factor(global_ptr, at, FORMAT: tl.constexpr):
    """What the sums of an NVFP4 `product` are multiplied by: the global scale of a tensor, exactly brought to their
    scale."""
    factor = tl.load(global_ptr + at)
    if FORMAT == 4:
        factor *= RESULT_SCALE
    return factor


@triton.jit
def tile_row(BN: tl.constexpr, FORMAT: tl.constexpr):
    """Which row of the result belongs to each weight row that `product` is given."""
    i = tl.arange(0, BN)
    if FORMAT >= 3:
        i = packed_row(i)
    return i


@triton.jit
def ascending_place(ids_ptr, choice, held, expert, TOP_K: tl.constexpr, K_PAD: tl.constexpr):
    """Where a choice's output goes: row * TOP_K + how many experts of its row come before; for choices [n] of one
    expert."""
    row, k = choice // TOP_K, tl.arange(0, K_PAD)[None, :]
    ids = tl.load(ids_ptr + row[:, None] * TOP_K + k, mask=held[:, None] & (k < TOP_K), other=0x7FFFFFFF)
    before = (ids < expert) | ((ids == expert) & (k < (choice % TOP_K)[:, None]))
    return row * TOP_K + tl.sum(before.to(tl.int32), axis=1)


@triton.jit
def hidden_tile(x_ptr, w_ptr, scale_ptr, global_ptr, hidden_ptr, expert, choice, tile, IN: tl.constexpr,
                OUT: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, BETA: tl.constexpr,
                LINEAR_BETA: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """BN / 2 columns of hidden[choice] = r(act(gate x, up x)), for choices (row * TOP_K + rank) of one expert, [n], -1
    where there is none. The gate rows of a tile of weights lie before its up rows."""
    half: tl.constexpr = BN // 2
    t, held = tile_row(BN, FORMAT), choice >= 0
    column = tile * half + t % half
    row = (expert.to(tl.int64) * 2 + t // half) * OUT + tl.where(column < OUT, column, 0)
    acc = product(x_ptr, choice // TOP_K, held, w_ptr, scale_ptr, row, IN, BN, BK, FORMAT, STAGES)
    gate, up = tl.split(tl.permute(acc.reshape(2, half, acc.shape[1]), (1, 2, 0)))
    if global_ptr is not None:
        gate *= global_factor(global_ptr, expert * 2, FORMAT)
        up *= global_factor(global_ptr, expert * 2 + 1, FORMAT)
    n = tile * half + tl.arange(0, half)
    tl.store(hidden_ptr + choice[None, :].to(tl.int64) * OUT + n[:, None],
             gated(gate, up, BETA, LINEAR_BETA).to(tl.bfloat16), mask=held[None, :] & (n < OUT)[:, None])


@triton.jit
def output_tile(hidden_ptr, ids_ptr, weights_ptr, w_ptr, scale_ptr, global_ptr, y_ptr, expert, choice, tile,
                IN: tl.constexpr, OUT: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, FORMAT: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    """BN columns of y[row, place of the expert among the row's] = weight * down(hidden[choice]), in fp32."""
    column, held = tile * BN + tile_row(BN, FORMAT), choice >= 0
    row = expert.to(tl.int64) * OUT + tl.where(column < OUT, column, 0)
    acc = product(hidden_ptr, choice, held, w_ptr, scale_ptr, row, IN, BN, BK, FORMAT, STAGES)
    if global_ptr is not None:
        acc *= global_factor(global_ptr, expert, FORMAT)
    weight = tl.load(weights_ptr + choice, mask=held, other=0.0)
    place = ascending_place(ids_ptr, choice, held, expert, TOP_K, K_PAD)
    n = tile * BN + tl.arange(0, BN)
    tl.store(y_ptr + place[None, :].to(tl.int64) * OUT + n[:, None], acc * weight[None, :],
             mask=held[None, :] & (n < OUT)[:, None])


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """One of an expert's two matrices, and how a kernel takes it.

    Attributes:
        gates: 2 where gate and up rows lie in one matrix, else 1; `out_features` counts the result's columns.
        scale, global_scale: of 4-bit codes; the second of NVFP4 alone.
        format: BF16_WEIGHTS and so on.
        tile: weight rows of a block, BN.
        depth: columns of the reduction per step, BK.
    """

    codes: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    in_features: int
    out_features: int
    gates: int
    format: int
    tile: int = 0
    depth: int = 0
    num_warps: int = 4
    stages: int = 1

    @property
    def packs(self) -> bool:
        """Whether `packed_step` can read it."""
        return self.format in PACKED and self.in_features % PACKED_COLUMNS == 0

    def packed(self, stages: int) -> ExpertWeight:
        """As `packed_step` reads it."""
        return replace(self, format=PACKED[self.format], tile=64, depth=PACKED_COLUMNS, num_warps=4, stages=stages)


def expert_weight(call: OpCall, name: str) -> ExpertWeight:
    """The matrix called "gate_up" or "down".

    Raises:
        CaptureError: GPU_WEIGHT; it is fp32.
    """
    codes, scale, whole = (call.operands.get(f"{name}{part}") for part in ("", "_scale", "_global"))
    assert codes is not None, name
    if scale is None and codes.dtype is not DType.BF16:
        raise CaptureError("GPU_WEIGHT", "GPU kernels read bf16 weights", where=call.label, expected="bf16",
                           got=codes.dtype.view_name, hint="publish the checkpoint in bfloat16")
    width, inner = call.number("width"), call.number("inner")
    fmt = BF16_WEIGHTS if scale is None else MXFP4_WEIGHTS if whole is None else NVFP4_WEIGHTS
    if name == "gate_up":
        return ExpertWeight(codes, scale, whole, width, inner, 2, fmt)
    return ExpertWeight(codes, scale, whole, inner, width, 1, fmt)


def step_tile(weight: ExpertWeight) -> ExpertWeight:
    """The weight as the blocks of a step graph take it."""
    if weight.packs:
        return weight.packed(PACKED_STAGES)
    depth = min(128, max(32, power_of_two(weight.in_features)))
    return replace(weight, tile=16 * weight.gates, depth=depth, num_warps=1, stages=4)


def product_launch(call: OpCall, function: Any, weight: ExpertWeight, constants: Mapping[str, int],
                   arguments: Mapping[str, Tensor | int], out: Tensor, blocks: int) -> Launch:
    """A launch of a kernel that is `hidden_tile` or `output_tile` for its part of the choices.

    Args:
        constants, arguments: those that say which choices.
        out: the hidden rows, or the outputs.
        blocks: of each tile of columns.
    """
    top_k = call.number("top_k")
    fixed: dict[str, Any] = {
        **constants, "IN": weight.in_features, "OUT": weight.out_features, "TOP_K": top_k, "FORMAT": weight.format,
        "BN": weight.tile, "BK": weight.depth, "STAGES": weight.stages}
    given: dict[str, Tensor | int] = {**arguments, "w_ptr": weight.codes}
    for name, scale in (("scale_ptr", weight.scale), ("global_ptr", weight.global_scale)):
        if scale is None:
            fixed[name] = None
        else:
            given[name] = scale
    if weight.gates == 2:
        fixed |= betas(call)
        given |= {"x_ptr": call.operands["x"], "hidden_ptr": out}
    else:
        fixed["K_PAD"] = power_of_two(top_k)
        given |= {"ids_ptr": call.operands["ids"], "weights_ptr": call.operands["weights"], "y_ptr": out}
    reads = tuple(t for t in given.values() if isinstance(t, Tensor) and t is not out)
    kernel = Kernel(function, (call.op,), fixed, num_warps=weight.num_warps, num_stages=weight.stages)
    return Launch(kernel, given, (cdiv(weight.out_features * weight.gates, weight.tile), blocks, 1), reads, (out,), (),
                  call.label)
