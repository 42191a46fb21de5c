"""The image tower's kernels against the CPU ops: grids that do not fill their bucket, odd sizes, and a whole graph."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from exporter.kernels.lower import lower_graph
from exporter.program.builder import Program
from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, same_bits
from tests.exporter.kernels.test_compile import MAX_SHARED_BYTES, check_compiles
from tests.exporter.kernels.test_linear import fused_case
from tests.tiny_vision import TinyVision

BF16, F32, ACT = ml_dtypes.bfloat16, np.float32, DType.BF16
PATCHES, HEADS, HEAD_DIM = 24, 2, 24
WIDE = HEADS * HEAD_DIM
GRIDS = [pytest.param(g, id=name) for g, name in (
    ((4, 6), "full"), ((2, 4), "part of the bucket"), ((6, 2), "upright"), ((0, 0), "none"))]
DEAD = np.float32(np.nan)


def normal(rng, *shape, dtype=BF16):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def image_arrays(grid, **arrays):
    return {"grid": np.array(grid, np.int32), **arrays}


def live_of(grid):
    return grid[0] * grid[1]


def run_op(interpreter, op, arrays, scalars, names=None):
    case = Case(arrays, [(op, scalars)], names={0: names or {}})
    with np.errstate(all="ignore"):
        return interpreter.run("lower.lower_graph", case), case.expected()


def near(got, want, bound=2.0**-7, equal=0.97):
    wide, expected = got.astype(np.float64), want.astype(np.float64)
    scale = np.abs(expected).max() if expected.size else 0
    assert np.abs(wide - expected).max(initial=0) <= bound * scale
    assert (wide == expected).mean() >= equal


@pytest.mark.parametrize("grid", GRIDS)
def test_levels_become_pixels_with_the_bits_of_the_cpu_op(interpreter, grid):
    rng = np.random.default_rng(1)
    arrays = image_arrays(grid, levels=rng.integers(0, 256, (PATCHES, 3 * 9), np.uint8),
                          table=normal(rng, 3, 256, dtype=F32), out=np.full((PATCHES, 27), DEAD, BF16))

    got, want = run_op(interpreter, "dflash.pixel_patches/1", arrays,
                       {"rows": PATCHES, "channels": 3, "pixels": 9, "act": ACT})

    assert same_bits(got["out"], want["out"])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("w", [BF16, F32])
def test_positions_are_added_with_the_bits_of_the_cpu_op(interpreter, grid, w):
    rng = np.random.default_rng(2)
    arrays = image_arrays(grid, table=normal(rng, 3, 5, 40, dtype=w), x=normal(rng, PATCHES, 40))

    got, want = run_op(interpreter, "dflash.grid_embedding/1", arrays,
                       {"rows": PATCHES, "height": 3, "width": 5, "cols": 40, "act": ACT,
                        "w": ACT if w is BF16 else DType.F32})

    assert same_bits(got["x"], want["x"])


@pytest.mark.parametrize("grid", GRIDS)
def test_queries_and_keys_turn_by_column_and_row_with_the_bits_of_the_cpu_op(interpreter, grid):
    rng = np.random.default_rng(3)
    arrays = image_arrays(grid, qkv=normal(rng, PATCHES, 3 * WIDE),
                          rope_table=normal(rng, 8, 2, HEAD_DIM // 4, dtype=F32),
                          q=np.full((PATCHES, WIDE), DEAD, BF16), k=np.full((PATCHES, WIDE), DEAD, BF16))

    got, want = run_op(interpreter, "dflash.rope_grid/1", arrays,
                       {"rows": PATCHES, "heads": HEADS, "head_dim": HEAD_DIM, "positions": 8, "act": ACT})

    assert same_bits(got["q"], want["q"]) and same_bits(got["k"], want["k"])


def attention_case(rng, grid, patches, rows=None):
    given = rows or {n: normal(rng, patches, c) for n, c in (("q", WIDE), ("k", WIDE), ("qkv", 3 * WIDE))}
    arrays = {n: np.concatenate([a[:patches], np.full((patches - len(a[:patches]), a.shape[1]), DEAD, BF16)])
              for n, a in given.items()}
    return Case(image_arrays(grid, **arrays, out=np.full((patches, WIDE), DEAD, BF16)),
                [("dflash.image_attention/1", {"rows": patches, "heads": HEADS, "head_dim": HEAD_DIM,
                                               "scale": HEAD_DIM**-0.5, "act": ACT})])


@pytest.mark.parametrize(("grid", "patches"), [((4, 6), 24), ((2, 4), 24), ((0, 0), 24), ((10, 10), 140)])
def test_patches_attend_to_all_live_patches(interpreter, grid, patches):
    case = attention_case(np.random.default_rng(4), grid, patches)
    with np.errstate(all="ignore"):
        got, want = interpreter.run("lower.lower_graph", case), case.expected()

    near(got["out"], want["out"])
    assert (got["out"][live_of(grid):] == 0).all()


def test_attention_of_an_image_has_the_same_bits_in_every_bucket(interpreter):
    """What lies beyond the image in a larger bucket may be anything."""
    small = attention_case(np.random.default_rng(5), (4, 6), 24)
    rows = {n: small.arrays[n] for n in ("q", "k", "qkv")}
    large = attention_case(None, (4, 6), 80, rows)

    one, other = (interpreter.run("lower.lower_graph", case)["out"] for case in (small, large))

    assert same_bits(one, other[:24])


@pytest.mark.parametrize("grid", GRIDS)
def test_groups_of_patches_are_gathered_and_kept(interpreter, grid):
    rng = np.random.default_rng(6)
    merged = image_arrays(grid, x=normal(rng, PATCHES, 20), out=np.full((PATCHES // 4, 80), DEAD, BF16))
    got, want = run_op(interpreter, "dflash.merge_patches/1", merged, {"rows": PATCHES, "cols": 20, "act": ACT})
    assert same_bits(got["out"], want["out"])

    kept = image_arrays(grid, x=normal(rng, PATCHES // 4, 20), first=np.array([5], np.int32),
                        embeddings=normal(rng, 12, 20))
    got, want = run_op(interpreter, "dflash.store_image/1", kept,
                       {"rows": PATCHES // 4, "cols": 20, "capacity": 12, "act": ACT})
    assert same_bits(got["embeddings"], want["embeddings"])


@pytest.mark.parametrize("first", [-1, 7])
def test_rows_that_do_not_fit_are_not_kept(interpreter, first):
    rng = np.random.default_rng(7)
    arrays = image_arrays((4, 6), x=normal(rng, 6, 20), first=np.array([first], np.int32),
                          embeddings=normal(rng, 12, 20))
    case = Case(arrays, [("dflash.store_image/1", {"rows": 6, "cols": 20, "capacity": 12, "act": ACT})])

    assert same_bits(interpreter.run("lower.lower_graph", case)["embeddings"], arrays["embeddings"])


def test_image_rows_take_the_place_of_placeholders(interpreter):
    rng = np.random.default_rng(8)
    arrays = {"sources": np.array([0, 3, 1, 0, 4], np.int32), "embeddings": normal(rng, 4, 20), "x": normal(rng, 5, 20)}

    got, want = run_op(interpreter, "dflash.splice_embedding/1", arrays,
                       {"rows": 5, "cols": 20, "capacity": 4, "act": ACT})

    assert same_bits(got["x"], want["x"])


@pytest.mark.parametrize("source", [-1, 5])
def test_an_image_row_that_does_not_exist_is_nan(interpreter, source):
    rng = np.random.default_rng(9)
    arrays = {"sources": np.array([0, source], np.int32), "embeddings": normal(rng, 4, 20), "x": normal(rng, 2, 20)}
    case = Case(arrays, [("dflash.splice_embedding/1", {"rows": 2, "cols": 20, "capacity": 4, "act": ACT})])

    got = interpreter.run("lower.lower_graph", case)["x"]

    assert same_bits(got[:1], arrays["x"][:1]) and np.isnan(got[1].astype(F32)).all()


@pytest.mark.parametrize("w", [BF16, F32])
@pytest.mark.parametrize("added", [False, True])
def test_norms_are_rounded_once(interpreter, w, added):
    rng = np.random.default_rng(10)
    arrays = {"x": normal(rng, 5, 40), "delta": normal(rng, 5, 40), "weight": normal(rng, 40, dtype=w),
              "out": np.full((5, 40), DEAD, BF16)}
    op, names = ("dflash.rms_norm_once/1", {}) if not added else ("dflash.add_rms_norm_once/1", {"residual": "x"})

    got, want = run_op(interpreter, op, arrays, {"rows": 5, "cols": 40, "eps": 1e-5, "act": ACT,
                                                 "w": ACT if w is BF16 else DType.F32}, names)

    near(got["out"], want["out"], equal=0.98)
    assert same_bits(got["x"], want["x"])


@pytest.mark.parametrize("op", ["gelu", "gelu_tanh"])
def test_gelu_is_right_from_one_end_of_bf16_to_the_other(interpreter, op):
    """Every sign, exponent and a few mantissas, in rows of an odd width."""
    bits = np.arange(0, 1 << 16, 37, np.uint16)
    x = bits.view(BF16)
    x = x[np.isfinite(x.astype(F32))][:1650].reshape(50, 33)

    got, want = run_op(interpreter, f"dflash.{op}/1", {"x": x.copy(), "out": np.full(x.shape, DEAD, BF16)},
                       {"rows": 50, "cols": 33, "act": ACT})

    wide, expected = got["out"].astype(F32), want["out"].astype(F32)
    lost = np.abs(x.astype(F32)) * 2.0**-22  # by the CPU op where 1 + tanh cancels
    assert (np.abs(wide - expected) <= 2.0**-7 * np.abs(expected) + lost + 2.0**-126).all()
    assert (wide == expected)[np.abs(expected) > 2.0**-100].mean() > 0.97


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("in_features", [588, 48])
def test_matrices_whose_reduction_no_step_divides(interpreter, rows, in_features):
    """14 x 14 pixels of three colours; what lies behind the last column is no part of a row."""
    case, result = fused_case("bf16", rows, in_features, 40, norm=False, epilogue="store")

    got, want = interpreter.run("lower.lower_graph", case), case.expected()

    near(got[result], want[result], 2.0**-8, 0.95)


@pytest.mark.parametrize("row_bytes", [64, 37])
@pytest.mark.parametrize(("slot", "place"), [(1, 2), (-1, 2), (1, -1), (0, 0)])
def test_a_slots_state_is_saved_and_restored_byte_for_byte(interpreter, row_bytes, slot, place):
    rng = np.random.default_rng(11)
    stride = row_bytes + 20
    arrays = {"slots": np.array([slot], np.int32), "snapshot": np.array([place], np.int32),
              "rows": rng.integers(0, 256, (3, row_bytes), np.uint8),
              "places": rng.integers(0, 256, 3 * stride, np.uint8)}
    scalars = {"max_slots": 3, "row_bytes": row_bytes, "snapshot_bytes": stride, "snapshots": 3}

    for op in ("save", "load"):
        got, want = run_op(interpreter, f"dflash.{op}_slot/1", arrays, scalars)
        assert same_bits(got["rows"], want["rows"]) and same_bits(got["places"], want["places"])


def test_a_place_that_does_not_exist_is_not_written(interpreter):
    rng = np.random.default_rng(12)
    arrays = {"slots": np.array([1], np.int32), "snapshot": np.array([2], np.int32),
              "rows": rng.integers(0, 256, (3, 64), np.uint8), "places": rng.integers(0, 256, 3 * 64, np.uint8)}
    case = Case(arrays, [("dflash.save_slot/1", {"max_slots": 3, "row_bytes": 64, "snapshot_bytes": 64,
                                                 "snapshots": 2})])

    assert same_bits(interpreter.run("lower.lower_graph", case)["places"], arrays["places"])


def test_a_tower_is_lowered_alike_for_every_bucket():
    """One matrix tile whatever the number of patches, so that an image's rows do not depend on the bucket."""
    tower = TinyVision.record(buckets=(16, 256), act=ACT)
    lowered = [lower_graph(calls, Program()) for calls in tower.recorded.calls]

    assert [len(launches) for launches in lowered] == [len(calls) for calls in tower.recorded.calls]
    small, large = ([(x.kernel.function, dict(x.kernel.constants)) for x in launches]
                    for launches in lowered)
    assert small == large


K3 = {"rows": 4096, "heads": 12, "head_dim": 128, "scale": 128**-0.5, "act": ACT}


def test_attention_compiles_at_the_shapes_of_kimi_k3(tmp_path):
    def empty(*shape, dtype=BF16):
        return np.broadcast_to(np.zeros((), dtype), shape)

    wide = K3["heads"] * K3["head_dim"]
    case = Case({"q": empty(4096, wide), "k": empty(4096, wide), "qkv": empty(4096, 3 * wide),
                 "grid": empty(2, dtype=np.int32), "out": empty(4096, wide)}, [("dflash.image_attention/1", K3)])

    check_compiles("lower.lower_graph", case, tmp_path, most_shared=3 * MAX_SHARED_BYTES, step=False)
