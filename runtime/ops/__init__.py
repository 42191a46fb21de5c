"""CPU reference ops: what each op means, rounding included.

A CPU core names these ops; a GPU kernel names the op that it computes. Importing this package registers them all.
"""

from runtime.ops import accept, activation, attention, candidates, conv, linear, norm, rope, rows, selector
from runtime.ops.registry import (
    DTYPE_BY_NAME,
    OPS,
    REGISTRY_NAME,
    REGISTRY_VERSION,
    Args,
    Array,
    DType,
    Op,
    Operand,
    Prepared,
    Scalar,
    ScalarType,
    Step,
    call,
    find_op,
)

__all__ = [
    "DTYPE_BY_NAME",
    "OPS",
    "REGISTRY_NAME",
    "REGISTRY_VERSION",
    "Args",
    "Array",
    "DType",
    "Op",
    "Operand",
    "Prepared",
    "Scalar",
    "ScalarType",
    "Step",
    "accept",
    "activation",
    "attention",
    "call",
    "candidates",
    "conv",
    "find_op",
    "linear",
    "norm",
    "rope",
    "rows",
    "selector",
]
