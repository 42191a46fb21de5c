"""Root-mean-square norm of whole rows, with or without the residual add before it, and the add alone."""

from __future__ import annotations

import triton
import triton.language as tl

from exporter.kernels.dependency import begin


@triton.jit
def norm_rows(x_ptr, delta_ptr, weight_ptr, out_ptr, COLS: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
              CHAINED: tl.constexpr):
    """One block per row. With delta_ptr, x += delta first, in place; with out_ptr, out = norm(x) * weight.

    Rounded as dflash.add_rms_norm rounds: the sum, the normalized value, and the product.
    """
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    mask = c < COLS
    x = tl.load(x_ptr + row * COLS + c, mask=mask, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        x += tl.load(delta_ptr + row * COLS + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * COLS + c, x.to(tl.bfloat16), mask=mask)
        x = x.to(tl.bfloat16).to(tl.float32)
    if out_ptr is not None:
        mean = tl.sum(x * x, axis=0) / COLS
        y = (x * tl.div_rn(1.0, tl.sqrt_rn(mean + EPS))).to(tl.bfloat16).to(tl.float32)
        w = tl.load(weight_ptr + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * COLS + c, (y * w).to(tl.bfloat16), mask=mask)
