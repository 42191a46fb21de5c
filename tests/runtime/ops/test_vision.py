"""What each op of an image encoder means, against torch where torch has it; dead rows are zeros and change nothing."""

import ml_dtypes
import numpy as np
import pytest
import torch
from dflash_core.errors import CompatibilityError

from exporter.models.moonvit import grid_rope_table
from runtime.ops import DType, call

BF16 = ml_dtypes.bfloat16
ACTS = pytest.mark.parametrize("act", [DType.F32, DType.BF16])


def i32(*values):
    return np.array(values, np.int32)


def pixel_patches(levels, table, grid, act=DType.F32):
    rows, width = levels.shape
    out = np.full(levels.shape, 77, act.numpy)
    call("dflash.pixel_patches/1", {"levels": levels, "table": table, "grid": i32(*grid), "out": out}, rows=rows,
         channels=len(table), pixels=width // len(table), act=act)
    return out


def test_levels_are_looked_up_by_channel_and_rounded():
    """1/3 in bf16 is 171/512; the fourth patch is beyond the image."""
    table = np.stack([np.arange(256), np.full(256, 1 / 3)]).astype(np.float32)
    levels = np.array([[0, 9, 0, 255], [1, 200, 5, 6], [3, 4, 7, 8], [9, 9, 9, 9], [9, 9, 9, 9]], np.uint8)

    assert pixel_patches(levels, table, (2, 2), DType.BF16).tolist() == [
        [0, 9, 171 / 512, 171 / 512], [1, 200, 171 / 512, 171 / 512], [3, 4, 171 / 512, 171 / 512],
        [9, 9, 171 / 512, 171 / 512], [0, 0, 0, 0]]


def grid_embedding(x, table, grid):
    act, out = DType.BF16 if x.dtype == BF16 else DType.F32, x.copy()
    w = DType.BF16 if table.dtype == BF16 else DType.F32
    height, width, cols = table.shape
    call("dflash.grid_embedding/1", {"table": table, "grid": i32(*grid), "x": out}, rows=len(x), height=height,
         width=width, cols=cols, act=act, w=w)
    return out


@pytest.mark.parametrize("grid", [(8, 8), (2, 2), (6, 10), (16, 2), (4, 30), (32, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_position_embedding_is_torchs_bilinear_interpolation(grid, dtype):
    """Equal bits in bf16. In fp32 torch may fuse a product with a sum: a place on an axis of 8 moves by 2^-21, and the
    embedding by that times the step between two cells, at most 6 here."""
    torch.manual_seed(0)
    table = torch.randn(8, 8, 5).to(dtype)
    expected = torch.nn.functional.interpolate(table.permute(2, 0, 1)[None], size=grid, mode="bilinear")[0]
    expected = expected.permute(1, 2, 0).reshape(-1, 5).float().numpy()
    stored = table.float().numpy().astype(BF16 if dtype is torch.bfloat16 else np.float32)
    zeros = np.zeros((grid[0] * grid[1], 5), stored.dtype)

    found = grid_embedding(zeros, stored, grid).astype(np.float32)

    if dtype is torch.bfloat16:
        assert np.array_equal(found, expected)
    else:
        assert np.abs(found - expected).max() <= 6 * 2.0**-21


def test_position_embedding_is_rounded_before_it_is_added():
    """A quarter of the way from 1 to 1 + 1/64 lies 1 + 1/256, a tie that goes to 1, and so does 1 + 1/256 again. Added
    before it is rounded it would be 1 + 2/256, which bf16 holds."""
    table = np.array([1, 1 + 1 / 64], BF16).reshape(1, 2, 1)

    found = grid_embedding(np.full((8, 1), 1 / 256, BF16), table, (2, 4))[:4, 0]

    assert found.tolist() == [1, 1, 1 + 1 / 64, 1 + 1 / 64]
    wide = grid_embedding(np.full((8, 1), 1 / 256, np.float32), table.astype(np.float32), (2, 4))[:4, 0]
    assert wide.tolist() == [1 + 1 / 256, 1 + 2 / 256, 1 + 4 / 256, 1 + 5 / 256]


def rope_grid(qkv, table, grid, heads, head_dim):
    act = DType.BF16 if qkv.dtype == BF16 else DType.F32
    q, k = (np.full((len(qkv), heads * head_dim), 77, qkv.dtype) for _ in "qk")
    call("dflash.rope_grid/1", {"qkv": qkv, "rope_table": table, "grid": i32(*grid), "q": q, "k": k}, rows=len(qkv),
         heads=heads, head_dim=head_dim, positions=len(table), act=act)
    return q, k


def test_first_pair_turns_by_the_column_and_second_by_the_row():
    """A table whose place 1 is a quarter turn: (1, 2) becomes (-2, 1)."""
    table = np.array([[[1], [0]], [[0], [1]]], np.float32)
    qkv = np.tile(np.array([1, 2, 3, 4], np.float32), (5, 3))

    q, k = rope_grid(qkv, table, (2, 2), 1, 4)

    assert q.tolist() == [[1, 2, 3, 4], [-2, 1, 3, 4], [1, 2, -4, 3], [-2, 1, -4, 3], [0, 0, 0, 0]]
    assert k.tolist() == q.tolist()


def test_rotation_of_a_patch_is_rounded_once():
    """cos 0.6, sin 0.8 of (1, 1): -0.2 and 1.4 in bf16, as in test_rope."""
    table = np.array([[[0.6], [0.8]]] * 2, np.float32)
    qkv = np.ones((4, 12), BF16)

    q, _ = rope_grid(qkv, table, (2, 2), 1, 4)

    assert q[0].tolist() == [-0.2001953125, 1.3984375] * 2


def test_rotation_is_a_complex_product_with_published_angles():
    """torch's complex arithmetic, angles 10000^(-4 j / head_dim) of column and row, two heads of 128."""
    rows, cols, heads, head_dim = 4, 6, 2, 128
    torch.manual_seed(1)
    qkv = torch.randn(rows * cols, 3, heads, head_dim)
    theta = 1.0 / 10000.0 ** (torch.arange(0, head_dim, 4).float() / head_dim)
    col, row = torch.arange(rows * cols) % cols, torch.arange(rows * cols) // cols
    angles = torch.stack([col[:, None] * theta, row[:, None] * theta], -1).reshape(rows * cols, 1, head_dim // 2)
    turned = torch.view_as_complex(qkv.reshape(*qkv.shape[:3], -1, 2)) * torch.polar(torch.ones_like(angles), angles
                                                                                     )[:, None]
    expected = torch.view_as_real(turned).reshape(qkv.shape)

    q, k = rope_grid(qkv.reshape(rows * cols, -1).numpy(), grid_rope_table(head_dim, 512).numpy(), (rows, cols), heads,
                     head_dim)

    assert np.abs(q - expected[:, 0].reshape(24, -1).numpy()).max() <= 1e-6
    assert np.abs(k - expected[:, 1].reshape(24, -1).numpy()).max() <= 1e-6


def image_attention(q, k, v, grid, scale=1.0):
    """q, k, v: [rows, heads, head_dim]."""
    rows, heads, head_dim = q.shape
    act, out = DType.BF16 if q.dtype == BF16 else DType.F32, np.full((rows, heads * head_dim), 77, q.dtype)
    qkv = np.stack([np.full_like(q, 77), np.full_like(q, 77), v], axis=1).reshape(rows, -1)
    call("dflash.image_attention/1", {"q": q.reshape(rows, -1), "k": k.reshape(rows, -1), "qkv": qkv,
                                      "grid": i32(*grid), "out": out},
         rows=rows, heads=heads, head_dim=head_dim, scale=scale, act=act)
    return out.reshape(rows, heads, head_dim)


@pytest.mark.parametrize("grid", [(2, 2), (2, 16), (4, 16), (6, 12), (10, 14)])
def test_attention_is_torchs_over_the_live_patches(grid):
    """fp64 by torch; one key tile, a full one, and more; one query tile and more."""
    live, rows = grid[0] * grid[1], 144
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(3, rows, 3, 32)).astype(np.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x[:live]).double().transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1).numpy()

    found = image_attention(q, k, v, grid, 32**-0.5)

    assert np.abs(found[:live] - expected).max() <= 1e-6
    assert not found[live:].any()


def test_attention_rounds_its_result_alone():
    """Two keys at equal scores, values 1 and 1 + 1/64: the mean is 1 + 1/128; four values 1, 1, 1, 1 + 1/64 make
    1.00390625, which is a tie and goes to 1; probabilities in bf16 would be exact here, so q and k stay 0."""
    values = np.array([1, 1 + 1 / 64, 1, 1 + 1 / 64], BF16).reshape(4, 1, 1)
    zeros = np.zeros((4, 1, 1), BF16)

    assert image_attention(zeros, zeros, values, (2, 2)).ravel().tolist() == [1.0078125] * 4
    tie = np.array([1, 1, 1, 1 + 1 / 64], BF16).reshape(4, 1, 1)
    assert image_attention(zeros, zeros, tie, (2, 2)).ravel().tolist() == [1.0] * 4


def test_attention_keeps_probabilities_in_fp32():
    """Scores 0 and -1: shares 0.7310586 and 0.2689414 of values 1 and 0 (two of each); bf16 of 0.36552929 twice is the
    same, but of 0.13447071 twice times 1000 it is not: 268.94142 goes to 268, and rounded shares give 270."""
    q = np.ones((4, 1, 1), BF16)
    k = np.array([0, -1, 0, -1], BF16).reshape(4, 1, 1)
    v = np.array([0, 1000, 0, 1000], BF16).reshape(4, 1, 1)

    assert image_attention(q, k, v, (2, 2)).ravel().tolist() == [268.0] * 4
    assert float(BF16(2 * 1000 * np.float32(BF16(0.13447071)))) == 270.0


def merge(x, grid):
    out = np.full((len(x) // 4, 4 * x.shape[1]), 77, np.float32)
    call("dflash.merge_patches/1", {"x": x, "grid": i32(*grid), "out": out}, rows=len(x), cols=x.shape[1],
         act=DType.F32)
    return out


def test_groups_are_merged_in_reading_order():
    x = np.arange(12, dtype=np.float32).reshape(12, 1)

    assert merge(x, (2, 4)).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [0, 0, 0, 0]]
    assert merge(x, (4, 2)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 0, 0, 0]]
    assert merge(x, (2, 6)).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def store(x, grid, first, embeddings):
    call("dflash.store_image/1", {"x": x, "grid": i32(*grid), "first": i32(first), "embeddings": embeddings},
         rows=len(x), cols=x.shape[1], capacity=len(embeddings), act=DType.F32)


def test_image_is_stored_from_its_first_row_on_and_nothing_else_is_touched():
    embeddings = np.full((5, 1), 9, np.float32)

    store(np.array([[1], [2], [3]], np.float32), (2, 4), 2, embeddings)

    assert embeddings.ravel().tolist() == [9, 9, 1, 2, 9]


@pytest.mark.parametrize("first", [-1, 4, 2**31 - 1])
def test_refuses_to_store_an_image_where_there_is_no_room(first):
    with pytest.raises(CompatibilityError) as refused:
        store(np.zeros((3, 1), np.float32), (2, 4), first, np.zeros((5, 1), np.float32))

    assert (refused.value.code, refused.value.got) == ("IMAGE_ROWS", f"2 rows from {first}")


def splice(x, sources, embeddings):
    call("dflash.splice_embedding/1", {"sources": i32(*sources), "embeddings": embeddings, "x": x}, rows=len(x),
         cols=x.shape[1], capacity=len(embeddings), act=DType.BF16 if x.dtype == BF16 else DType.F32)


def test_placeholders_are_replaced_by_the_rows_they_name_bit_for_bit():
    embeddings = np.arange(8, dtype=np.float32).reshape(4, 2)
    x = np.full((5, 2), -5, np.float32)
    embeddings[3] = np.nan

    splice(x, (0, 3, 1, 0, 4), embeddings)

    assert x[:4].tolist() == [[-5, -5], [4, 5], [0, 1], [-5, -5]]
    assert x[4].tobytes() == embeddings[3].tobytes()


def test_prompt_without_an_image_is_left_alone_whatever_the_embeddings_hold():
    x = np.ones((2, 3), BF16)

    splice(x, (0, 0), np.full((4, 3), np.nan, BF16))

    assert x.tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize(("sources", "got"),
                         [((0, 5), "[5]"), ((1, -1), "[-1, 1]"), ((2**31 - 1, 4), "[4, 2147483647]")],
                         ids=["beyond", "negative", "huge"])
def test_refuses_a_row_that_does_not_exist(sources, got):
    with pytest.raises(CompatibilityError) as refused:
        splice(np.ones((2, 3), BF16), sources, np.zeros((4, 3), BF16))

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("IMAGE_ROWS", "0 to 4", got)


@pytest.mark.parametrize("grid", [(3, 2), (2, 3), (-2, -2), (4, 4), (2**16, 2**16)])
def test_refuses_a_grid_that_does_not_fit(grid):
    x = np.zeros((8, 2), np.float32)
    for act in (lambda: merge(x, grid), lambda: grid_embedding(x, np.zeros((2, 2, 2), np.float32), grid),
                lambda: pixel_patches(np.zeros((8, 2), np.uint8), np.zeros((1, 256), np.float32), grid),
                lambda: image_attention(*np.zeros((3, 8, 1, 2), np.float32), grid)):
        with pytest.raises(CompatibilityError) as refused:
            act()
        assert (refused.value.code, refused.value.where) == ("IMAGE_GRID", "image_grid")


def test_refuses_a_side_without_positions():
    with pytest.raises(CompatibilityError) as refused:
        rope_grid(np.zeros((8, 12), np.float32), np.zeros((2, 2, 1), np.float32), (2, 4), 1, 4)

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("IMAGE_GRID", "at most 2", "2 x 4")


@ACTS
@pytest.mark.parametrize("junk", [0, 1e30, np.nan, np.inf])
def test_live_rows_have_equal_bits_in_every_bucket_whatever_dead_rows_hold(act, junk):
    """Rows beyond the image are not read; each op's result for the live ones is the same bytes, the rest zeros."""
    grid, live, dim = (6, 12), 72, 16
    rng = np.random.default_rng(4)
    qkv = rng.normal(size=(live, 3 * dim)).astype(act.numpy)
    table, position = grid_rope_table(dim, 16).numpy(), rng.normal(size=(4, 4, 3 * dim)).astype(np.float32)

    def run(bucket):
        rows = np.full((bucket, 3 * dim), junk, act.numpy)
        rows[:live] = qkv
        q, k = rope_grid(rows, table, grid, 1, dim)
        v = rows.reshape(bucket, 3, 1, dim)[:, 2]
        mixed = image_attention(q.reshape(bucket, 1, dim), k.reshape(bucket, 1, dim), v, grid, 0.25)
        placed = grid_embedding(rows, position, grid)
        merged = merge(placed.astype(np.float32), grid)
        for whole, count in ((q, live), (k, live), (mixed, live), (placed, live), (merged, live // 4)):
            assert not whole[count:].any()
            yield whole[:count].tobytes()

    assert list(run(live)) == list(run(80)) == list(run(256))


def test_image_without_patches_gives_zeros():
    x = np.ones((4, 1, 2), np.float32)

    assert not image_attention(x, x, x, (0, 0)).any()
    assert not grid_embedding(np.ones((4, 2), np.float32), np.ones((2, 2, 2), np.float32), (0, 2)).any()
