"""GELU, exact and by tanh.

Rounding: once, from fp32. The exact form is computed in fp64 and rounded to fp32 first, so that its error function is
right to the last bit of fp32 on every machine; the tanh form is fp32 throughout, the cube as x * x * x.

Source of the error function: S. L. Moshier, Cephes Mathematical Library, `ndtr.c`: rational approximations of erf up
to 1 and of erfc beyond, good to about 2^-53.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from runtime.ops.registry import ACT, U32, Args, Scalar, Step, op, reads, to_f32, writes

F64Array = npt.NDArray[np.float64]

_ERF = ((9.60497373987051638749e0, 9.00260197203842689217e1, 2.23200534594684319226e3, 7.00332514112805075473e3,
         5.55923013010394962768e4),
        (1.0, 3.35617141647503099647e1, 5.21357949780152679795e2, 4.59432382970980127987e3, 2.26290000613890934246e4,
         4.92673942608635921086e4))
_ERFC = ((2.46196981473530512524e-10, 5.64189564831068821977e-1, 7.46321056442269912687e0, 4.86371970985681366614e1,
          1.96520832956077098242e2, 5.26445194995477358631e2, 9.34528527171957607540e2, 1.02755188689515710272e3,
          5.57535335369399327526e2),
         (1.0, 1.32281951154744992508e1, 8.67072140885989742329e1, 3.54937778887819891062e2, 9.75708501743205489753e2,
          1.82390916687909736289e3, 2.24633760818710981792e3, 1.65666309194161350182e3, 5.57535340817727675546e2))
_ERF_IS_ONE = 6.0  # erfc(6) is below 2^-54


def erf(x: F64Array) -> F64Array:
    """The error function, in fp64."""
    size = np.minimum(np.abs(x), _ERF_IS_ONE)
    square = size * size
    near = size * np.polyval(_ERF[0], square) / np.polyval(_ERF[1], square)
    far = 1.0 - np.exp(-square) * np.polyval(_ERFC[0], size) / np.polyval(_ERFC[1], size)
    return np.copysign(np.where(size < 1.0, near, far), x)


_SHAPE = (Scalar("rows", U32), Scalar("cols", U32), Scalar("act", U32), reads("x", ACT, "rows", "cols"),
          writes("out", ACT, "rows", "cols"))


@op("dflash.gelu/1", *_SHAPE)
def gelu(a: Args) -> Step:
    """out = r(x / 2 * (1 + erf(x / sqrt 2)))."""
    x, out = a.array("x"), a.array("out")

    def run() -> None:
        wide = to_f32(x).astype(np.float64)
        out[...] = (0.5 * wide * (1.0 + erf(wide * math.sqrt(0.5)))).astype(np.float32)

    return run


@op("dflash.gelu_tanh/1", *_SHAPE)
def gelu_tanh(a: Args) -> Step:
    """out = r(x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x x x))))."""
    x, out = a.array("x"), a.array("out")
    factor, cubic, half, one = (np.float32(v) for v in (math.sqrt(2 / math.pi), 0.044715, 0.5, 1))

    def run() -> None:
        wide = to_f32(x)
        out[...] = half * wide * (one + np.tanh(factor * (wide + cubic * (wide * wide * wide))))

    return run
