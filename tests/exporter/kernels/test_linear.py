"""The linear kernels, with what is fused into them, against the CPU ops: every format, epilogue and row count."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from exporter.kernels.linear import linear_rows
from exporter.kernels.linear_packed import linear_packed
from exporter.kernels.linear_whole import linear_whole
from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower
from tests.exporter.kernels.test_compile import check_compiles

BF16 = ml_dtypes.bfloat16
FORMATS = {"bf16": "dflash.linear/1", "f32": "dflash.linear/1", "mxfp8": "dflash.linear_mxfp8/1",
           "nvfp4": "dflash.linear_nvfp4/1"}
WEIGHT_TYPES = {"bf16": DType.BF16, "f32": DType.F32}


def weight_arrays(rng, fmt, out_features, in_features):
    """Codes and scales of a random weight, E8M0 scale 0 and every kind of code among them."""
    if fmt == "bf16":
        return {"weight": (rng.standard_normal((out_features, in_features)) / in_features**0.5).astype(BF16)}, {}
    if fmt == "f32":
        return {"weight": (rng.standard_normal((out_features, in_features)) / in_features**0.5).astype(np.float32)}, {}
    if fmt == "mxfp8":
        codes = rng.integers(0, 256, (out_features, in_features), dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 1
        scale = rng.integers(112, 122, (out_features, in_features // 32), dtype=np.uint8)
        scale[0, 0] = 0
        return {"weight": codes, "block_scale": scale}, {"weight": DType.E4M3}
    packed = rng.integers(0, 256, (out_features, in_features // 2), dtype=np.uint8)
    scale = rng.integers(0x08, 0x30, (out_features, in_features // 16), dtype=np.uint8)
    return ({"weight": packed, "block_scale": scale, "global_scale": np.array([0.37], np.float32)},
            {"weight": DType.E2M1})


def fused_case(fmt, rows, in_features, out_features, *, norm, epilogue):
    """norm? -> linear -> epilogue, as model code records them."""
    rng = np.random.default_rng(rows * 1000 + in_features)
    width = out_features * 2 if epilogue == "silu" else out_features
    weights, codes = weight_arrays(rng, fmt, width, in_features)
    arrays = {"x": rng.standard_normal((rows, in_features)).astype(BF16), **weights,
              "y": np.zeros((rows, width), np.float32 if epilogue == "f32" else BF16)}
    ops, names = [], {}
    linear = {"rows": rows, "in_features": in_features, "out_features": width, "tile_rows": 8, "act": DType.BF16,
              "result": DType.F32 if epilogue == "f32" else DType.BF16}
    if fmt in WEIGHT_TYPES:
        linear["w"] = WEIGHT_TYPES[fmt]
    if norm:
        arrays["norm_weight"] = (1 + 0.1 * rng.standard_normal(in_features)).astype(BF16)
        arrays["normed"] = np.zeros((rows, in_features), BF16)
        names[0] = {"weight": "norm_weight", "out": "normed"}
        ops.append(("dflash.rms_norm/1", {"rows": rows, "cols": in_features, "eps": 1e-5, "act": DType.BF16,
                                          "w": DType.BF16}))
    names[len(ops)] = {"out": "y", **({"x": "normed"} if norm else {})}
    ops.append((FORMATS[fmt], linear))
    if epilogue == "add":
        arrays["residual"] = rng.standard_normal((rows, out_features)).astype(BF16)
        names[len(ops)] = {"delta": "y"}
        ops.append(("dflash.add/1", {"rows": rows, "cols": out_features, "act": DType.BF16}))
    if epilogue == "silu":
        arrays["gated"] = np.zeros((rows, out_features), BF16)
        names[len(ops)] = {"gate_up": "y", "out": "gated"}
        ops.append(("dflash.silu_mul/1", {"rows": rows, "cols": out_features, "act": DType.BF16}))
    result = {"add": "residual", "silu": "gated"}.get(epilogue, "y")
    return Case(arrays, ops, codes, names), result


SHAPES = [
    pytest.param(1, 192, 48, id="one row, looped"),
    pytest.param(5, 576, 96, id="five rows, the reduction at once"),
    pytest.param(20, 576, 48, id="three row tiles"),
    pytest.param(150, 64, 64, id="prefill tiles"),
]
LARGE = [
    pytest.param("bf16", 9, 192, 96, "add", id="bf16, looped"),
    pytest.param("nvfp4", 5, 192, 96, "store", id="nvfp4, looped, too narrow to be renumbered"),
    pytest.param("mxfp8", 3, 1024, 128, "store", id="mxfp8, the reduction in four parts"),
    pytest.param("mxfp8", 9, 768, 128, "silu", id="mxfp8, normalized and gated, two row tiles"),
    pytest.param("nvfp4", 3, 2048, 64, "silu", id="nvfp4, normalized and gated, the reduction in four parts"),
    pytest.param("nvfp4", 9, 768, 96, "f32", id="nvfp4, two row tiles, the last tile half full"),
]
SMALL_IS_LARGE = {"STREAMED_ELEMENTS": 1 << 14}


@pytest.mark.parametrize("epilogue", ["store", "f32", "add", "silu"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "in_features", "out_features"), SHAPES)
def test_computes_what_the_ops_say(interpreter, fmt, rows, in_features, out_features, epilogue):
    case, result = fused_case(fmt, rows, in_features, out_features, norm=epilogue != "add", epilogue=epilogue)

    got = interpreter.run("lower.lower_graph", case)[result].astype(np.float32)

    want = case.expected()[result].astype(np.float32)
    # fp32 sums in another order: one rounding of the result apart at most, and rarely
    assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()
    assert epilogue == "f32" or (got == want).mean() > 0.99


@pytest.mark.parametrize(("fmt", "rows", "in_features", "out_features", "epilogue"), LARGE)
def test_large_matrix_computes_what_the_ops_say(interpreter, fmt, rows, in_features, out_features, epilogue):
    case, result = fused_case(fmt, rows, in_features, out_features, norm=epilogue == "silu", epilogue=epilogue)
    case = replace(case, tuning=SMALL_IS_LARGE)
    function = linear_rows if in_features < 256 else linear_packed
    assert [launch.kernel.function for launch in launches_of(case)][-1] is function

    got = interpreter.run("lower.lower_graph", case)[result].astype(np.float32)

    want = case.expected()[result].astype(np.float32)
    assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()
    assert epilogue == "f32" or (got == want).mean() > 0.99


def launches_of(case):
    program, _, calls = case.recorded()
    return lower("lower.lower_graph", calls, program, tuning=case.tuning)


def test_a_norm_and_an_activation_are_part_of_the_one_launch_that_needs_them():
    case, _ = fused_case("bf16", 8, 576, 96, norm=True, epilogue="silu")

    (launch,) = launches_of(case)

    assert launch.kernel.function is linear_whole
    assert launch.kernel.ops == ("dflash.rms_norm/1", "dflash.linear/1", "dflash.silu_mul/1")
    assert launch.nodes == (10, 11, 12)


def test_a_residual_add_is_part_of_the_linear_before_it():
    case, _ = fused_case("nvfp4", 8, 192, 96, norm=False, epilogue="add")

    (launch,) = launches_of(case)

    assert launch.kernel.function is linear_whole
    assert launch.kernel.ops == ("dflash.linear_nvfp4/1", "dflash.add/1")
    assert [t.name for t in launch.writes] == ["residual"]


def test_a_norm_that_two_linears_read_is_launched_on_its_own():
    case, _ = fused_case("bf16", 8, 192, 48, norm=True, epilogue="store")
    second = {**case.ops[1][1]}
    arrays = {**case.arrays, "z": np.zeros((8, 48), BF16)}
    twice = Case(arrays, [*case.ops, ("dflash.linear/1", second)], case.codes,
                 {**case.names, 2: {"x": "normed", "out": "z"}})

    names = [launch.kernel.ops for launch in launches_of(twice)]

    assert names == [("dflash.rms_norm/1",), ("dflash.linear/1",), ("dflash.linear/1",)]


@pytest.mark.parametrize("tuning", [{}, SMALL_IS_LARGE], ids=["whole", "packed"])
@pytest.mark.parametrize("rows", [1, 8, 20])
def test_a_row_has_the_same_bits_in_any_company(interpreter, rows, tuning):
    case, result = fused_case("mxfp8", rows, 768, 64, norm=True, epilogue="silu")
    case = replace(case, tuning=tuning)
    alone = replace(case, arrays={**case.arrays, "x": case.arrays["x"][:1], "normed": case.arrays["normed"][:1],
                                  "y": case.arrays["y"][:1], "gated": case.arrays["gated"][:1]},
                    ops=[(op, {**scalars, "rows": 1}) for op, scalars in case.ops])

    together, single = (interpreter.run("lower.lower_graph", c)[result] for c in (case, alone))

    assert together[0].tobytes() == single[0].tobytes()


@pytest.mark.parametrize("rows", [1, 9, 150])
@pytest.mark.parametrize("epilogue", ["f32", "store"])
def test_fp32_weights_are_multiplied_in_fp32(interpreter, rows, epilogue):
    """A router's: rounding them to bf16 first would be off by a thousand times the bound."""
    case, result = fused_case("f32", rows, 192, 40, norm=False, epilogue=epilogue)

    got, want = interpreter.run("lower.lower_graph", case), case.expected()

    wide, expected = got[result].astype(np.float32), want[result].astype(np.float32)
    bound = 2e-6 if epilogue == "f32" else 2.0**-8
    assert np.abs(wide - expected).max() <= bound * np.abs(expected).max()


def test_fp32_weights_compile_for_kimi_k3s_router(tmp_path):
    for rows in (8, 64, 2048):
        case, _ = fused_case("f32", rows, 7168, 896, norm=False, epilogue="f32")
        check_compiles("lower.lower_graph", case, tmp_path, most_shared=96 * 1024)
