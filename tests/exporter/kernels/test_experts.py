"""Mixtures of experts against the CPU ops: shared experts, dead rows, sizes that no tile divides, extreme scales."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import CaptureError

from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower, same_bits

BF16 = ml_dtypes.bfloat16
SILU, SITU = (0.0, 0.0), (4.0, 25.0)
FORMATS = ("bf16", "mxfp4", "nvfp4")
INNERS = (64, 256)
BY_ROW = ("x", "positions", "ids", "weights", "out")


def mxfp4(rng, rows, cols):
    """Random codes, with scales that make weights of about 1 / sqrt(cols)."""
    middle = 127 - 1 - round(np.log2(cols) / 2)
    return (rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8),
            rng.integers(middle - 2, middle + 1, (rows, cols // 32), dtype=np.uint8))


def nvfp4(rng, rows, cols):
    """Random codes, with block scales of 1 to 448."""
    return rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8), rng.integers(56, 127, (rows, cols // 16),
                                                                                 dtype=np.uint8)


def experts_case(rows, *, width=64, inner=32, experts=5, top_k=3, fmt="bf16", situ=SITU, dead=(), seed=0):
    """Rows whose choices overlap; dead rows are NaN."""
    rng = np.random.default_rng([seed, rows, width, inner])
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :top_k].astype(np.int32)
    positions = np.arange(rows, dtype=np.int32)
    positions[list(dead)] = -1
    x = rng.standard_normal((rows, width)).astype(BF16)
    x[list(dead)] = np.nan
    arrays = {"x": x, "positions": positions, "ids": ids,
              "weights": rng.uniform(0.1, 1, (rows, top_k)).astype(np.float32),
              "out": np.full((rows, width), 77, BF16)}
    scalars = {"rows": rows, "width": width, "inner": inner, "experts": experts, "top_k": top_k,
               "situ_beta": situ[0], "situ_linear_beta": situ[1], "act": DType.BF16}
    shapes = {"gate_up": (experts * 2 * inner, width), "down": (experts * width, inner)}
    for name, shape in shapes.items():
        if fmt == "bf16":
            arrays[name] = (rng.standard_normal(shape) / shape[1]**0.5).astype(BF16)
        else:
            arrays[name], arrays[f"{name}_scale"] = {"mxfp4": mxfp4, "nvfp4": nvfp4}[fmt](rng, *shape)
        if fmt == "nvfp4":  # a scale for each tensor, far apart, that makes weights of about 1 / sqrt(cols)
            parts = (experts, 2) if name == "gate_up" else (experts,)
            arrays[f"{name}_global"] = (rng.uniform(0.2, 2, parts) / 400 / shape[1]**0.5).astype(np.float32)
    if fmt == "bf16":
        return Case(arrays, [("dflash.experts/1", {**scalars, "w": DType.BF16})])
    codes = {"gate_up_scale": DType.E4M3, "down_scale": DType.E4M3} if fmt == "nvfp4" else {}
    return Case(arrays, [(f"dflash.experts_{fmt}/1", scalars)], codes)


def only(case, rows):
    """The same mixture for some of the rows."""
    (op, scalars), = case.ops
    return replace(case, arrays={n: a[rows] if n in BY_ROW else a for n, a in case.arrays.items()},
                   ops=[(op, {**scalars, "rows": len(rows)})])


def check(got, case):
    got, want = got["out"].astype(np.float32), case.expected()["out"].astype(np.float32)
    # fp32 sums in another order: a hidden value, or the result, may round the other way
    assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()
    assert (got == want).mean() > 0.97
    dead = case.arrays["positions"] < 0
    assert (got[dead] == 0).all()


CASES = [
    pytest.param(1, {}, id="decode"),
    pytest.param(1, {"top_k": 1, "experts": 1}, id="one expert"),
    pytest.param(7, {"dead": (0, 5)}, id="dead rows"),
    pytest.param(20, {"experts": 3, "top_k": 2, "dead": (19,)}, id="more rows of an expert than a block takes"),
    pytest.param(3, {"width": 96, "inner": 160, "situ": SILU, "dead": (1,)}, id="no multiple of a tile"),
    pytest.param(3, {"situ": (0.5, 0.0)}, id="up unbounded"),
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "options"), CASES)
def test_computes_what_the_ops_say(interpreter, rows, options, fmt):
    case = experts_case(rows, fmt=fmt, **options)

    check(interpreter.run("lower.lower_graph", case), case)


def test_choices_beyond_one_scan(interpreter):
    case = experts_case(10, experts=50, top_k=14, width=16, inner=16, situ=SILU, dead=(1,))

    check(interpreter.run("experts.lower_experts", case), case)


PREFILLS = [
    pytest.param(130, {"experts": 4, "dead": (*range(3), *range(120, 130))}, id="tiles of one expert"),
    pytest.param(140, {"experts": 12, "top_k": 8, "width": 32, "inner": 160, "situ": SILU}, id="more than a scan"),
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "options"), PREFILLS)
def test_a_prefill_computes_what_the_ops_say(interpreter, rows, options, fmt):
    case = experts_case(rows, fmt=fmt, **options)

    check(interpreter.run("lower.lower_graph", case), case)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_codes_decoded_eight_at_a_time(interpreter, fmt):
    step = experts_case(5, experts=3, top_k=2, width=256, inner=256, fmt=fmt, dead=(1,))
    prefill = experts_case(130, experts=2, top_k=2, width=256, inner=256, fmt=fmt, dead=(1,))

    for case in (step, prefill):
        check(interpreter.run("experts.lower_experts", case), case)


def test_experts_that_no_row_of_a_prefill_chose_are_left_out(interpreter):
    case = experts_case(129, experts=6, top_k=2, width=32, inner=32)
    case.arrays["ids"][:, 0], case.arrays["ids"][:, 1] = 5, 2
    for name in ("gate_up", "down"):
        by_expert = case.arrays[name].reshape(6, -1)
        by_expert[[0, 1, 3, 4]] = np.nan

    check(interpreter.run("experts.lower_experts", case), case)


@pytest.mark.parametrize("rows", [6, 132])
def test_experts_are_added_by_ascending_id(interpreter, rows):
    """Every expert makes ones; only (2**24 - 2**24) + 1 keeps the last."""
    case = experts_case(rows, width=16, inner=16, experts=4, top_k=3, situ=(1.0, 0.0))
    a = case.arrays
    a["x"][...], a["gate_up"][...], a["down"][...] = 1, 100, 2.0**-4 / 1600
    a["ids"][...] = [[3, 1, 0], [0, 3, 1], [1, 0, 3], [3, 0, 1], [0, 1, 3], [1, 3, 0]] * (rows // 6)
    by_expert = np.float32([2.0**24, -2.0**24, np.nan, 1])
    a["weights"][...] = by_expert[a["ids"]]

    got = interpreter.run("experts.lower_experts", case)["out"]

    assert (got == got[0, 0]).all() and got[0, 0] > 0
    check({"out": got}, case)


def test_width_need_not_be_a_multiple_of_sixteen(interpreter):
    case = experts_case(4, width=20, inner=24)

    check(interpreter.run("experts.lower_experts", case), case)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("codes", [0x21, 0x97, 0xEB, 0x3D, 0xC8], ids=hex)
def test_every_scale_decodes_as_the_op_decodes_it(interpreter, codes, inner):
    """Output n is the sum of two codes times scale n, subnormals and the infinities included; NaN even where neither a
    code nor a hidden value is 0, which would make it of an infinity too."""
    case = experts_case(1, experts=1, width=256, inner=inner, top_k=1, fmt="mxfp4", situ=SILU)
    a = case.arrays
    a["x"][...], a["weights"][...] = 0, 1
    a["x"][0, 0] = 1
    a["gate_up"][...], a["gate_up_scale"][...] = 0, 127
    a["gate_up"][:, 0] = 2
    a["gate_up"][[1, inner + 1], 0] = 6, 3  # gate 1, and one of 4; up 1, and one of 1.5
    a["down"][...], a["down_scale"][...] = 0, 127
    a["down"][:, 0], a["down_scale"][:, 0] = codes, np.arange(256)
    a["down"][255] = codes

    with np.errstate(all="ignore"):
        want = case.expected()["out"]
    assert np.isnan(want[0, 255].astype(np.float32)) and want[0, 1] != 0

    got, expected = (out.astype(np.float32)[0] for out in (interpreter.run("experts.lower_experts", case)["out"], want))
    finite = np.isfinite(expected)  # what overflows half way may be infinite to a matrix unit, and NaN to a processor
    assert np.array_equal(got[finite], expected[finite]) and not np.isfinite(got[~finite]).any()
    assert np.isnan(got[255])


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("codes", [0x21, 0x97, 0xEB, 0x3D, 0xC8], ids=hex)
def test_every_block_scale_of_nvfp4_decodes_as_the_op_decodes_it(interpreter, codes, inner):
    """Output n is the sum of two codes times scale n, subnormals and negative ones included, times a global scale that
    makes it round; NaN of 127 and 255."""
    case = experts_case(1, experts=1, width=256, inner=inner, top_k=1, fmt="nvfp4", situ=SILU)
    a = case.arrays
    a["x"][...], a["weights"][...] = 0, 1
    a["x"][0, 0] = 1
    a["gate_up"][...], a["gate_up_scale"][...], a["gate_up_global"][...] = 0, 0x38, [[0.375, 2.75]]
    a["gate_up"][:, 0] = 2
    a["gate_up"][[1, inner + 1], 0] = 6, 3  # gate 0.375, and one of 1.5; up 2.75, and one of 4.125
    a["down"][...], a["down_scale"][...], a["down_global"][...] = 0, 0x38, 1 / 3
    a["down"][:, 0], a["down_scale"][:, 0] = codes, np.arange(256)

    want = case.expected()["out"].astype(np.float32)
    assert np.isnan(want[0, [127, 255]]).all() and np.isfinite(want[0, 1]) and want[0, 1] != 0

    got = interpreter.run("experts.lower_experts", case)["out"].astype(np.float32)

    assert np.array_equal(got, want, equal_nan=True)


def test_an_experts_gate_up_and_down_have_global_scales_of_their_own(interpreter):
    """Twice the global scale of one of them is twice its codes' block scales."""
    for rows, width in ((3, 48), (1, 256)):
        case = experts_case(rows, experts=2, top_k=2, width=width, inner=width, fmt="nvfp4")
        for name in ("gate_up_scale", "down_scale"):
            np.minimum(case.arrays[name], 0x70, out=case.arrays[name])
        plain = interpreter.run("experts.lower_experts", case)["out"]
        for name, tensor, shape in (("gate_up", (1, 0), (2, 2, -1)), ("gate_up", (0, 1), (2, 2, -1)),
                                    ("down", (1,), (2, -1))):
            coarse, fine = (replace(case, arrays={n: a.copy() for n, a in case.arrays.items()}) for _ in range(2))
            coarse.arrays[f"{name}_global"][tensor] *= 2
            fine.arrays[f"{name}_scale"].reshape(shape)[tensor] += 8

            one, other = (interpreter.run("experts.lower_experts", c)["out"] for c in (coarse, fine))

            assert same_bits(one, other) and not same_bits(one, plain)


@pytest.mark.parametrize(("fmt", "inner", "nan"), [("mxfp4", 96, 255), ("nvfp4", 48, 127)])
def test_a_block_scale_stays_in_its_row(interpreter, fmt, inner, nan):
    """A tile is deeper than a row: what lies behind it belongs to the next one."""
    case = experts_case(2, experts=2, top_k=2, width=32, inner=inner, fmt=fmt)
    case.arrays["down_scale"][5, 0] = nan

    got = interpreter.run("experts.lower_experts", case)["out"].astype(np.float32)

    assert np.isnan(got[:, 5]).all() and np.isfinite(np.delete(got, 5, axis=1)).all()


@pytest.mark.parametrize(("fmt", "width"), [("bf16", 32), ("mxfp4", 32), ("mxfp4", 256), ("nvfp4", 48), ("nvfp4", 256)])
def test_a_row_has_the_same_bits_in_any_company(interpreter, fmt, width):
    case = experts_case(12, experts=2, top_k=2, width=width, fmt=fmt, dead=(2, 9))

    together = interpreter.run("experts.lower_experts", case)["out"]

    for row in (0, 11):
        single = interpreter.run("experts.lower_experts", only(case, [row]))["out"]
        assert same_bits(together[row:row + 1], single)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_of_a_prefill_has_the_same_bits_in_any_chunk(interpreter, fmt):
    case = experts_case(200, experts=3, top_k=2, width=64, inner=32, fmt=fmt)
    dead = np.r_[0:20, 190:200]
    other = only(case, [*range(64, 200)])
    other.arrays["positions"] = other.arrays["positions"].copy()
    other.arrays["positions"][dead[20:] - 64] = -1

    whole, cut = (interpreter.run("experts.lower_experts", c)["out"] for c in (case, other))

    assert same_bits(whole[64:190], cut[:126])
    assert (cut[126:].astype(np.float32) == 0).all()


def test_fp32_weights_are_refused():
    case = experts_case(2)
    for name in ("gate_up", "down"):
        case.arrays[name] = case.arrays[name].astype(np.float32)
    program, _, calls = case.recorded()

    with pytest.raises(CaptureError, match="bf16 weights"):
        lower("experts.lower_experts", calls, program)
