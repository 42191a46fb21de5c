"""y = W x for a few rows and large MXFP8 or NVFP4 weights: no code changes hands between memory and matrix unit.

A tensor-core fragment wants each thread to hold particular columns of a row, sixteen-byte loads give it neighbours.
Which columns a product pairs is free as long as weights and activations agree, so columns are renumbered: thread t of a
row's four takes sixteen bytes in one load, and they are its columns of the next matrix instructions. Rows of a tile are
renumbered alike. So no code is exchanged between threads, and decoding is a few integer operations for four codes.

The reduction runs in one fixed order that no number of rows changes: SLICES parts of it side by side, one per warp
(where the matrix has too few rows to occupy the device otherwise), added in order at the end.
Source of the fragment layout: PTX ISA, mma.m16n8k16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin
from exporter.kernels.epilogue import finish

THREADS = tl.constexpr(4)  # of a fragment's row
ROWS = tl.constexpr(8)  # activation rows of a matrix instruction, and of a block: more would choose another one
# Four E4M3 codes $2 times two pairs of equal bf16 powers ($3, $4): codes 0 and 2 to $0, 1 and 3 to $1. The bits of a
# code read as bf16 are its value times 2**-120, subnormals included; both products are exact.
E4M3_TIMES_POWER = tl.constexpr("""{
.reg .b32 a, b, s, m;
mov.b32 m, 0x7B807B80;
shl.b32 a, $2, 4;
shl.b32 s, $2, 8;
shr.b32 b, $2, 4;
and.b32 a, a, 0x07F007F0;
and.b32 b, b, 0x07F007F0;
lop3.b32 a, s, 0x80008000, a, 0xEA;
lop3.b32 b, $2, 0x80008000, b, 0xEA;
mul.rn.bf16x2 a, a, m;
mul.rn.bf16x2 b, b, m;
mul.rn.bf16x2 $0, a, $3;
mul.rn.bf16x2 $1, b, $4;
}""")
# Eight E2M1 codes $4 times two pairs of equal bf16 factors ($5, $6): the low codes of bytes 0 and 2 to $0, of 1 and 3
# to $1, their high codes to $2 and $3. The bits of a code read as bf16 are its value times 2**-126.
E2M1_TIMES_FACTOR = tl.constexpr("""{
.reg .b32 a, b, c, s;
shl.b32 a, $4, 6;
shr.b32 b, $4, 2;
and.b32 a, a, 0x01C001C0;
and.b32 c, b, 0x01C001C0;
shl.b32 s, $4, 12;
lop3.b32 a, s, 0x80008000, a, 0xEA;
shl.b32 s, $4, 4;
lop3.b32 c, s, 0x80008000, c, 0xEA;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, c, $6;
shl.b32 a, $4, 2;
shr.b32 b, $4, 6;
and.b32 a, a, 0x01C001C0;
and.b32 b, b, 0x01C001C0;
shl.b32 s, $4, 8;
lop3.b32 a, s, 0x80008000, a, 0xEA;
lop3.b32 b, $4, 0x80008000, b, 0xEA;
mul.rn.bf16x2 $2, a, $5;
mul.rn.bf16x2 $3, b, $6;
}""")
FACTOR_SCALE = tl.constexpr(2.0**118)  # what NVFP4 block scales are multiplied by; the result lacks 2**8
RESULT_SCALE = tl.constexpr(2.0**8)


@triton.jit
def _mxfp8(w_ptr, scales, row, k0, PART: tl.constexpr, IN: tl.constexpr):
    """Columns k0 + 64 PART ... of rows: [64, 4, 16] bf16 by row, thread, and the thread's columns (0 2 1 3, 4 6 5 7).

    scales: i64 [64], the E8M0 bytes of columns k0 ... k0 + 255.
    """
    column = tl.arange(0, 64)
    codes = tl.load(w_ptr + (row + k0 + PART * 64)[:, None] + column[None, :])
    thread = tl.arange(0, THREADS)
    scale = (scales[:, None] >> (16 * PART + 8 * (thread // 2))[None, :]).to(tl.int32) & 255
    power = tl.maximum(scale << 7, 64).to(tl.int16).to(tl.bfloat16, bitcast=True)  # 2**-127 is subnormal
    codes, power = tl.broadcast(codes.reshape(64, THREADS, 16), power[:, :, None])
    return tl.inline_asm_elementwise(E4M3_TIMES_POWER, "=r,=r,r,r,r", [codes, power], dtype=tl.bfloat16, is_pure=True,
                                     pack=4)


@triton.jit
def nvfp4_values(w_ptr, scale_ptr, row, k0, IN: tl.constexpr):
    """Columns k0 ... k0 + 127 of rows: [64, 4, 32] bf16 by row, thread, and the thread's columns in the order of
    `activations`, times 2**-8.

    row: i64 [64], numbers of the rows times IN.
    """
    column = tl.arange(0, 64)
    packed = tl.load(w_ptr + ((row + k0) // 2)[:, None] + column[None, :])
    scales = tl.load(scale_ptr.to(tl.pointer_type(tl.int64)) + (row + k0) // 128)
    pair = (scales[:, None] >> (16 * tl.arange(0, THREADS))[None, :]).to(tl.int32)
    first = (pair & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    second = (pair >> 8 & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    factor = (tl.join(first, second) * FACTOR_SCALE).to(tl.bfloat16)
    packed, factor = tl.broadcast(packed.reshape(64, THREADS, 2, 8), factor[:, :, :, None])
    low, high = tl.inline_asm_elementwise(E2M1_TIMES_FACTOR, "=r,=r,=r,=r,r,r,r", [packed, factor],
                                          dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    return tl.join(low, high).reshape(64, THREADS, 32)


@triton.jit
def fragments(values, SLICES: tl.constexpr, WIDTH: tl.constexpr):
    """[64, 4, WIDTH / 4] values as [SLICES, 64 / SLICES, WIDTH]: renumbered, in the threads that have them."""
    each: tl.constexpr = 4 * (WIDTH // 64)  # columns that a thread holds of one pair of matrix instructions
    split = values.reshape(2, 4, 8, THREADS, WIDTH // (THREADS * each), each)  # half, warp, row, thread, step, column
    return tl.permute(split, (1, 0, 2, 4, 3, 5)).reshape(SLICES, 64 // SLICES, WIDTH)


@triton.jit
def activations(x, SLICES: tl.constexpr, WIDTH: tl.constexpr):
    """Rows x [SLICES, rows, WIDTH], renumbered as `fragments` renumbers columns: [SLICES, WIDTH, rows]."""
    rows: tl.constexpr = x.shape[1]
    each: tl.constexpr = 4 * (WIDTH // 64)
    steps: tl.constexpr = WIDTH // (THREADS * each)
    if WIDTH == 64:  # codes 0 2 1 3 of four
        split = x.reshape(SLICES, rows, THREADS, steps, 2, 2)
        ordered = tl.permute(split, (0, 1, 3, 2, 5, 4))
    else:  # low codes of bytes 0 2 1 3 alternate with their high codes
        split = x.reshape(SLICES, rows, THREADS, steps, 2, 2, 2)
        ordered = tl.permute(split, (0, 1, 3, 2, 5, 4, 6))
    return tl.permute(ordered.reshape(SLICES, rows, WIDTH), (0, 2, 1))


@triton.jit
def slices_product(w, x, acc):
    """w [SLICES, BN, WIDTH] times x [SLICES, WIDTH, ROWS] added to acc; without slices acc is [BN, ROWS]."""
    if len(acc.shape) == 2:
        return tl.dot(w.reshape(w.shape[1], w.shape[2]), x.reshape(x.shape[1], x.shape[2]), acc)
    else:
        return tl.dot(w, x, acc)


@triton.jit
def linear_packed(x_ptr, w_ptr, scale_ptr, global_ptr, residual_ptr, out_ptr, rows,
                  IN: tl.constexpr, OUT: tl.constexpr, SLICES: tl.constexpr, FORMAT: tl.constexpr,
                  EPILOGUE: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr):
    """Grid: tiles of eight rows, OUT * SLICES / 64. Four warps. OUT counts the result's columns; with SILU the weight
    has 2 * OUT rows, gate rows first. IN is a multiple of 256 * SLICES."""
    begin(CHAINED)
    BN: tl.constexpr = 64 // SLICES
    SLICE: tl.constexpr = IN // SLICES
    WIDTH: tl.constexpr = 64 if FORMAT == 1 else 128
    i = tl.arange(0, 64)  # half, warp, row
    if SLICES == 1:
        tile_row, first = i // 8 % 4 * 16 + i // 32 * 8 + i % 8, i * 0
    else:
        tile_row, first = i // 32 * 8 + i % 8, i // 8 % 4 * SLICE
    n = tl.program_id(1) * BN + tile_row
    row = tl.where(n < OUT, n, 0).to(tl.int64) * IN + first
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = r < rows
    s = tl.arange(0, SLICES)
    if SLICES == 1:
        acc = tl.zeros([BN, ROWS], tl.float32)
        up = tl.zeros([BN, ROWS], tl.float32)
    else:
        acc = tl.zeros([SLICES, BN, ROWS], tl.float32)
        up = tl.zeros([SLICES, BN, ROWS], tl.float32)
    for k0 in tl.range(0, SLICE, 256, num_stages=STAGES):
        if FORMAT == 1:
            eight = scale_ptr.to(tl.pointer_type(tl.int64))
            scales = tl.load(eight + (row + k0) // 256)
            if EPILOGUE == 2:
                up_scales = tl.load(eight + (row + k0 + OUT * IN) // 256)
        for part in tl.static_range(256 // WIDTH):
            k = s[:, None] * SLICE + k0 + part * WIDTH + tl.arange(0, WIDTH)[None, :]
            x = tl.load(x_ptr + r[None, :, None] * IN + k[:, None, :], mask=live[None, :, None], other=0.0)
            x = activations(x, SLICES, WIDTH)
            if FORMAT == 1:
                w = _mxfp8(w_ptr, scales, row, k0, part, IN)
            else:
                w = nvfp4_values(w_ptr, scale_ptr, row, k0 + part * WIDTH, IN)
            acc = slices_product(fragments(w, SLICES, WIDTH), x, acc)
            if EPILOGUE == 2:
                if FORMAT == 1:
                    w_up = _mxfp8(w_ptr, up_scales, row + OUT * IN, k0, part, IN)
                else:
                    w_up = nvfp4_values(w_ptr, scale_ptr, row + OUT * IN, k0 + part * WIDTH, IN)
                up = slices_product(fragments(w_up, SLICES, WIDTH), x, up)
    if SLICES > 1:
        acc = tl.sum(acc, axis=0)
        up = tl.sum(up, axis=0)
    if global_ptr is not None:
        factor = tl.load(global_ptr) * RESULT_SCALE
        acc = acc * factor
        up = up * factor
    finish(acc, up, residual_ptr, out_ptr, tl.program_id(1) * BN + tl.arange(0, BN), r, live, OUT, EPILOGUE)
