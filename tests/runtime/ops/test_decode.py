"""Every code of every weight format has the value that its specification gives it."""

import ml_dtypes
import numpy as np
import pytest

from runtime.ops.decode import (
    E2M1_VALUES,
    E4M3_VALUES,
    E8M0_VALUES,
    bf16_to_f32,
    decode_mxfp8,
    decode_nvfp4,
    decode_plain,
)

BF16 = ml_dtypes.bfloat16


def e4m3(code: int) -> float:
    """OCP 8-bit floating point, E4M3: bias 7, no infinities, only S.1111.111 is no number."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def same(found, expected) -> bool:
    """Equal bits, except that every NaN is alike."""
    found, expected = np.array(found, np.float32), np.array(expected, np.float32)
    return bool(((found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))).all())


def test_every_e4m3_code():
    assert same(E4M3_VALUES, [e4m3(code) for code in range(256)])
    assert [e4m3(code) for code in (0x01, 0x08, 0x38, 0x7E, 0xB8)] == [2.0**-9, 2.0**-6, 1.0, 448.0, -1.0]


def test_every_e8m0_code_is_a_power_of_two_and_the_last_no_number():
    assert same(E8M0_VALUES, [*(2.0 ** (code - 127) for code in range(255)), float("nan")])


def test_every_e2m1_code():
    assert same(E2M1_VALUES, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def test_every_bf16_value_is_widened_exactly():
    codes = np.arange(65536, dtype=np.uint16)

    wide = bf16_to_f32(codes.view(BF16))

    assert wide.view(np.uint32).tolist() == (codes.astype(np.uint32) << 16).tolist()


def test_mxfp8_scales_blocks_of_thirty_two():
    codes = np.full((2, 64), 0x38, np.uint8)
    codes[1, 33] = 0xFE

    out = decode_mxfp8(codes, np.array([[127, 128], [0, 121]], np.uint8))

    assert out[0].tolist() == [1.0] * 32 + [2.0] * 32
    assert out[1].tolist() == [2.0**-127] * 32 + [2.0**-6, -7.0] + [2.0**-6] * 30


def test_nvfp4_scales_blocks_of_sixteen_and_reads_the_low_nibble_first():
    codes = np.full((1, 16), 0x72, np.uint8)

    out = decode_nvfp4(codes, np.array([[0x38, 0x34]], np.uint8))

    assert out.tolist() == [[1.0, 6.0] * 8 + [0.75, 4.5] * 8]


def test_nvfp4_product_of_code_and_block_scale_is_exact_for_every_pair():
    """Sixteen codes by 127 scales: the exact product has at most 2 + 4 significant bits, so bf16 holds it too."""
    codes = np.tile(np.array([lo | lo + 1 << 4 for lo in range(0, 16, 2)], np.uint8), (127, 1))
    scales = np.arange(127, dtype=np.uint8)[:, None]

    out = decode_nvfp4(codes, scales)

    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert out.tolist() == [[v * e4m3(s) for v in values] for s in range(127)]
    assert np.array_equal(out.astype(BF16).astype(np.float32), out)


def test_plain_fp32_is_the_weight_itself_and_bf16_a_wide_copy():
    wide = np.array([[1.5, -0.0], [np.inf, 3e38]], np.float32)

    assert decode_plain(wide) is wide
    assert same(decode_plain(wide.astype(BF16)), wide.astype(BF16).astype(np.float32))


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_threads_share_rows_without_a_seam(rows):
    codes = np.random.default_rng(rows).integers(0, 127, (rows, 32), np.uint8)
    scale = np.arange(120, 120 + rows, dtype=np.uint8)[:, None]

    out = decode_mxfp8(codes, scale)

    assert out.tolist() == [[e4m3(int(c)) * 2.0 ** (int(s[0]) - 127) for c in row]
                            for row, s in zip(codes, scale, strict=True)]
