"""Linear layers accumulate in fp32, round once, and give a row the same bytes at every place and in every company."""

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType, call, linear
from runtime.ops.decode import decode_mxfp8, decode_nvfp4, decode_plain
from runtime.ops.parallel import Crew

BF16 = ml_dtypes.bfloat16
TILE = 8
ONE_E4M3, ONE_E8M0 = 0x38, 127
FORMATS = [pytest.param(name, id=name) for name in ("bf16", "mxfp8", "nvfp4")]


def bf16(values):
    return np.array(values, np.float32).astype(BF16)


def run(x, weight, *, result=DType.BF16, block_scale=None, global_scale=None, out_features=None):
    """y = W x by the op that the given parts belong to; x and weight are arrays as stored."""
    rows, in_features = x.shape
    out_features = out_features or len(weight)
    out = np.full((rows, out_features), -77, result.numpy)
    act = DType.F32 if x.dtype == np.float32 else DType.BF16
    arrays = {"x": x, "weight": weight, "out": out}
    scalars = {"rows": rows, "in_features": in_features, "out_features": out_features, "tile_rows": TILE, "act": act,
               "result": result}
    if block_scale is None:
        call("dflash.linear/1", arrays, w=DType.F32 if weight.dtype == np.float32 else DType.BF16, **scalars)
    elif global_scale is None:
        call("dflash.linear_mxfp8/1", {**arrays, "block_scale": block_scale}, **scalars)
    else:
        scale = np.array([global_scale], np.float32)
        call("dflash.linear_nvfp4/1", {**arrays, "block_scale": block_scale, "global_scale": scale}, **scalars)
    return out


def test_sum_is_kept_in_fp32_and_rounded_once():
    """256 + 1 + 1 = 258. A sum that is rounded to bf16 at every step, or in two halves, stays at 256."""
    x, ones = bf16([[256, 1, 1, 0]]), bf16([[1, 1, 1, 1]])

    assert run(x, ones).tolist() == [[258]]
    assert float(BF16(256 + float(BF16(1)))) == 256


def test_result_in_fp32_is_not_rounded():
    assert run(bf16([[256, 1, 0.5, 0]]), bf16([[1, 1, 1, 1]]), result=DType.F32).tolist() == [[257.5]]


def test_fp32_activations_and_weights_are_used_as_they_are():
    x, weight = np.array([[1 + 2.0**-12, 0]], np.float32), np.array([[1, 5], [2, 5]], np.float32)

    assert run(x, weight, result=DType.F32).tolist() == [[1 + 2.0**-12, 2 + 2.0**-11]]


def test_bf16_activations_meet_fp32_weights_unrounded():
    weight = np.array([[1 + 2.0**-12]], np.float32)

    assert run(bf16([[2]]), weight, result=DType.F32).tolist() == [[2 + 2.0**-11]]


def test_fp32_activations_are_not_rounded_to_the_type_of_the_result():
    """257 + 1 = 258; 257 in bf16 is 256, and 256 + 1 rounds back to 256."""
    assert run(np.array([[257, 1]], np.float32), bf16([[1, 1]])).tolist() == [[258]]


def test_mxfp8_weight_is_code_times_block_scale():
    """Blocks of 32 with scales 1 and 2**-3: 32 + 32 / 8 + one code of 448 / 8 in place of 1 / 8."""
    codes = np.full((2, 64), ONE_E4M3, np.uint8)
    codes[1, 63] = 0x7E
    scale = np.array([[ONE_E8M0, ONE_E8M0 - 3]] * 2, np.uint8)

    out = run(np.ones((1, 64), np.float32), codes, block_scale=scale, result=DType.F32)

    assert out.tolist() == [[36, 91.875]]


def test_mxfp8_activations_stay_in_bf16():
    """1.0078125 is no E4M3 value; an op that quantized its input would give 32."""
    out = run(bf16([[1.0078125] * 32]), np.full((1, 32), ONE_E4M3, np.uint8), result=DType.F32,
              block_scale=np.array([[ONE_E8M0]], np.uint8))

    assert out.tolist() == [[32.25]]


def nvfp4_ones(x, global_scale, result):
    codes = np.full((1, len(x[0]) // 2), 0x22, np.uint8)
    scale = np.full((1, len(x[0]) // 16), ONE_E4M3, np.uint8)
    return run(bf16(x), codes, block_scale=scale, global_scale=global_scale, result=result, out_features=1).tolist()


def test_nvfp4_global_scale_multiplies_the_fp32_sum():
    """259 * 0.75 = 194.25 -> 194. A sum rounded to bf16 first is 260, and gives 195."""
    x = [[256, 1, 1, 1] + [0] * 12]

    assert nvfp4_ones(x, 0.75, DType.BF16) == [[194]]
    assert float(BF16(float(BF16(259)) * 0.75)) == 195


def test_nvfp4_global_scale_is_not_folded_into_bf16_weights():
    """Three ones by 0.1 in fp32; weights of bf16(0.1) = 205/2048 would give 615/2048 = 0.30029296875."""
    x = [[1, 1, 1] + [0] * 13]

    assert nvfp4_ones(x, 0.1, DType.F32) == [[float(np.float32(3) * np.float32(0.1))]]
    assert nvfp4_ones(x, 0.1, DType.F32)[0][0] == pytest.approx(0.3, rel=1e-6)


def test_nvfp4_reads_low_nibbles_first_and_scales_blocks_of_sixteen():
    codes = np.full((1, 16), 0x72, np.uint8)
    x = np.zeros((2, 32), np.float32)
    x[0, 0] = x[1, 17] = 1

    out = run(x, codes, block_scale=np.array([[ONE_E4M3, 0x30]], np.uint8), global_scale=2.0, result=DType.F32,
              out_features=1)

    assert out.tolist() == [[2], [6]]


def make(fmt, out_features, in_features, seed=0):
    """A random weight: keyword arguments for `run`, and its decoded value in float64."""
    rng = np.random.default_rng([seed, out_features, in_features])
    if fmt == "bf16":
        weight = bf16(rng.normal(size=(out_features, in_features)))
        return {"weight": weight}, decode_plain(weight).astype(np.float64)
    if fmt == "mxfp8":
        codes = rng.integers(0, 256, (out_features, in_features), np.uint8)
        codes[(codes & 127) == 127] = 0
        scale = rng.integers(118, 128, (out_features, in_features // 32), np.uint8)
        return {"weight": codes, "block_scale": scale}, decode_mxfp8(codes, scale).astype(np.float64)
    codes = rng.integers(0, 256, (out_features, in_features // 2), np.uint8)
    scale = rng.integers(1, 100, (out_features, in_features // 16), np.uint8)
    parts = {"weight": codes, "block_scale": scale, "global_scale": 0.01, "out_features": out_features}
    return parts, decode_nvfp4(codes, scale).astype(np.float64) * np.float64(np.float32(0.01))


SHAPES = [
    pytest.param(16, 32, id="16x32"),
    pytest.param(1, 64, id="1x64: fewer than a block"),
    pytest.param(50, 96, id="50x96: no block divides"),
    pytest.param(144, 576, id="144x576"),
    pytest.param(200, 576, id="200x576: a short last block"),
    pytest.param(96, 1536, id="96x1536"),
    pytest.param(1000, 320, id="1000x320: split among threads, a short last block"),
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_result_is_the_matrix_product(out_features, in_features, fmt):
    parts, exact = make(fmt, out_features, in_features)
    x = np.random.default_rng(1).normal(size=(11, in_features)).astype(np.float32)

    out = run(x, result=DType.F32, **parts)

    bound = 2e-6 * np.sqrt(in_features) * (np.abs(x.astype(np.float64)) @ np.abs(exact).T)
    assert (np.abs(out - x.astype(np.float64) @ exact.T) <= bound).all()


@pytest.mark.parametrize("act", [pytest.param(BF16, id="bf16"), pytest.param(np.float32, id="f32")])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_row_gives_the_same_bytes_at_every_count_place_and_company(out_features, in_features, fmt, act):
    parts, _ = make(fmt, out_features, in_features)
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, in_features)).astype(np.float32).astype(act)
    expected = [row.tobytes() for row in run(x, result=DType.F32, **parts)]

    for count in (1, 2, 3, 7, 8, 9, 16, 17, 25, 40):
        out = run(np.ascontiguousarray(x[40 - count :]), result=DType.F32, **parts)
        assert [row.tobytes() for row in out] == expected[40 - count :], f"{count} rows"
    for place in range(2 * TILE):
        for company in (np.zeros_like(x[:16]), (rng.normal(size=(16, in_features)) * 1e4).astype(act)):
            company[place] = x[0]
            assert run(company, result=DType.F32, **parts)[place].tobytes() == expected[0], f"place {place}"


@pytest.mark.parametrize("fmt", FORMATS)
def test_infinity_and_nan_stay_in_their_row(fmt):
    parts, _ = make(fmt, 50, 96)
    x = np.random.default_rng(3).normal(size=(9, 96)).astype(np.float32)
    clean = run(x, result=DType.F32, **parts)
    x[[1, 4, 7]] = [[np.nan] * 96, [np.inf] * 96, [-np.inf] * 96]

    with np.errstate(invalid="ignore"):
        out = run(x, result=DType.F32, **parts)

    kept = [0, 2, 3, 5, 6, 8]
    assert out[kept].tobytes() == clean[kept].tobytes()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1000, 320), (1504, 192)])
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_number_of_threads_changes_no_byte(threads, out_features, in_features, fmt, monkeypatch):
    parts, _ = make(fmt, out_features, in_features)
    x = np.random.default_rng(4).normal(size=(9, in_features)).astype(np.float32)
    assert out_features * in_features >= linear.SPLIT_ELEMENTS
    expected = run(x, result=DType.F32, **parts)

    workers, asked, block_rows = Crew(threads), [], linear._block_rows
    monkeypatch.setattr(linear, "crew", lambda: workers)
    monkeypatch.setattr(linear, "_block_rows", lambda *shape: asked.append(shape) or block_rows(*shape))

    assert run(x, result=DType.F32, **parts).tobytes() == expected.tobytes()
    assert asked == [(out_features, in_features, TILE)]


@pytest.mark.parametrize(
    ("out_features", "in_features", "block"),
    [
        pytest.param(576, 576, 48, id="48 rows of 576 fill 2**18 / 8 and divide 576"),
        pytest.param(960, 576, 48, id="960x576"),
        pytest.param(576, 1536, 16, id="at least 16 rows"),
        pytest.param(64, 65536, 16, id="long rows: still 16"),
        pytest.param(49152, 576, 48, id="a vocabulary"),
        pytest.param(64, 32, 64, id="small matrix: all of it"),
        pytest.param(50, 96, 50, id="no multiple of 16 divides: all of it"),
        pytest.param(1000, 576, 48, id="no multiple of 16 divides: whole blocks and a rest"),
    ],
)
def test_blocks_of_weight_rows_follow_the_shape_alone(out_features, in_features, block):
    """The block decides the GEMM's shape, and with it the bits of every result."""
    assert linear._block_rows(out_features, in_features, TILE) == block
