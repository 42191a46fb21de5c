"""Op calls of mixtures of experts, their activations and residual parts, over empty arrays of real models' sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case
from tests.exporter.kernels.shapes import BF16, F32, I32, TYPES, empty

U8 = np.uint8


@dataclass(frozen=True)
class Mixture:
    """Sizes of a model's mixtures; `dense` is the widest gated activation, `width` what routed experts read."""

    experts: int
    top_k: int
    width: int
    inner: int
    hidden: int
    dense: int
    parts: int
    groups: int = 1
    top_groups: int = 1
    situ_beta: float = 0.0
    situ_linear_beta: float = 0.0


TINY = Mixture(experts=8, top_k=2, width=96, inner=32, hidden=48, dense=40, parts=3, groups=4, top_groups=2)
KIMI_LINEAR = Mixture(experts=256, top_k=8, width=2304, inner=1024, hidden=2304, dense=9216, parts=1)
KIMI_K3 = Mixture(experts=896, top_k=16, width=3584, inner=3072, hidden=7168, dense=33792, parts=9, situ_beta=4.0,
                  situ_linear_beta=25.0)
MIXTURES = {"tiny": TINY, "Kimi-Linear": KIMI_LINEAR, "Kimi K3": KIMI_K3}


def gated_ops(m: Mixture, rows: int) -> dict[str, tuple[str, Case]]:
    """Everything around the experts: name to (lowering, case)."""
    gate_up, dense = empty(BF16, rows, 2 * m.dense), empty(BF16, rows, m.dense)
    shape = {"rows": rows, "cols": m.dense, "act": DType.BF16}
    return {
        "silu_mul": ("activation.lower_gated", Case({"gate_up": gate_up, "out": dense},
                                                    [("dflash.silu_mul/1", shape)])),
        "situ_mul": ("activation.lower_gated", Case(
            {"gate_up": gate_up, "out": dense},
            [("dflash.situ_mul/1", {**shape, "situ_beta": 4.0, "situ_linear_beta": 25.0})])),
        "sigmoid_mul": ("activation.lower_sigmoid_mul", Case({"x": dense, "gate": dense, "out": dense},
                                                             [("dflash.sigmoid_mul/1", shape)])),
        "residual_mix": ("residual_mix.lower_residual_mix", Case(
            {"x": empty(BF16, m.parts, rows, m.hidden), "norm": empty(BF16, m.hidden), "score": empty(BF16, m.hidden),
             "out": empty(BF16, rows, m.hidden)},
            [("dflash.residual_mix/1", {"parts": m.parts, "rows": rows, "cols": m.hidden, "eps": 1e-5, **TYPES})])),
        "route": ("router.lower_route", Case(
            {"logits": empty(F32, rows, m.experts), "bias": empty(BF16, m.experts), **choice(m, rows)},
            [("dflash.route/1", {"rows": rows, "experts": m.experts, "top_k": m.top_k, "groups": m.groups,
                                 "top_groups": m.top_groups, "renormalize": 1, "scale": 2.446, "w": DType.BF16})])),
    }


def choice(m: Mixture, rows: int) -> dict[str, Any]:
    return {"ids": empty(I32, rows, m.top_k), "weights": empty(F32, rows, m.top_k)}


def experts_case(m: Mixture, rows: int, *, weights: str) -> Case:
    """The experts of a mixture in bf16, mxfp4 or nvfp4."""
    up_rows, down_rows = m.experts * 2 * m.inner, m.experts * m.width
    arrays = {"x": empty(BF16, rows, m.width), "positions": empty(I32, rows), **choice(m, rows),
              "out": empty(BF16, rows, m.width)}
    shape = {"rows": rows, "width": m.width, "inner": m.inner, "experts": m.experts, "top_k": m.top_k,
             "situ_beta": m.situ_beta, "situ_linear_beta": m.situ_linear_beta, "act": DType.BF16}
    if weights == "bf16":
        arrays |= {"gate_up": empty(ml_dtypes.bfloat16, up_rows, m.width),
                   "down": empty(ml_dtypes.bfloat16, down_rows, m.inner)}
        return Case(arrays, [("dflash.experts/1", {**shape, "w": DType.BF16})])
    block = {"mxfp4": 32, "nvfp4": 16}[weights]
    arrays |= {"gate_up": empty(U8, up_rows, m.width // 2), "gate_up_scale": empty(U8, up_rows, m.width // block),
               "down": empty(U8, down_rows, m.inner // 2), "down_scale": empty(U8, down_rows, m.inner // block)}
    if weights == "mxfp4":
        return Case(arrays, [("dflash.experts_mxfp4/1", shape)])
    arrays |= {"gate_up_global": empty(F32, m.experts, 2), "down_global": empty(F32, m.experts)}
    return Case(arrays, [("dflash.experts_nvfp4/1", shape)],
                codes={"gate_up_scale": DType.E4M3, "down_scale": DType.E4M3})
