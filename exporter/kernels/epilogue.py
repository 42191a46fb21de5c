"""What follows a product, fused into it: a store, the residual add, or SiLU times up, each rounded as its op rounds."""

from __future__ import annotations

import triton
import triton.language as tl

STORE, ADD, SILU, STORE_F32 = 0, 1, 2, 3


@triton.jit
def finish(acc, up, residual_ptr, out_ptr, n, r, live, OUT: tl.constexpr, EPILOGUE: tl.constexpr):
    """acc and up: [BN, R] fp32, columns n of rows r; rows that are not live and columns at or beyond OUT are left."""
    mask = live[None, :] & (n < OUT)[:, None]
    at = r[None, :].to(tl.int64) * OUT + n[:, None]
    if EPILOGUE == 0:
        tl.store(out_ptr + at, acc.to(tl.bfloat16), mask=mask)
    elif EPILOGUE == 1:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        delta = acc.to(tl.bfloat16).to(tl.float32)
        tl.store(residual_ptr + at, (residual + delta).to(tl.bfloat16), mask=mask)
    elif EPILOGUE == 2:
        gate = acc.to(tl.bfloat16).to(tl.float32)
        silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(tl.bfloat16).to(tl.float32)
        tl.store(out_ptr + at, (silu * up.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16), mask=mask)
    else:
        tl.store(out_ptr + at, acc, mask=mask)
