"""An op's declaration decides shapes, bytes and dtypes of its operands; every registered op is sound."""

import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import FormatError

from runtime.ops import DTYPE_BY_NAME, OPS, DType, Operand, Prepared, call, find_op
from runtime.ops.registry import ACT, F32, I32, U32, DTypeOf, arena, op, reads, round_to, to_f32, updates, writes

REGISTERED = [
    "dflash.absorb_query/1", "dflash.accept/1", "dflash.accepted_positions/1", "dflash.add/1",
    "dflash.add_rms_norm/1", "dflash.add_rms_norm_once/1", "dflash.argmax_proposals/1", "dflash.attention/1",
    "dflash.block_attention/1", "dflash.block_positions/1", "dflash.block_tokens/1", "dflash.chunk_positions/1",
    "dflash.commit/1", "dflash.commit_chunk/1", "dflash.conv_window/1", "dflash.embedding/1",
    "dflash.expand_values/1", "dflash.experts/1", "dflash.experts_mxfp4/1", "dflash.experts_nvfp4/1",
    "dflash.gated_norm/1", "dflash.gelu/1", "dflash.gelu_tanh/1", "dflash.grid_embedding/1", "dflash.grouped_conv/1",
    "dflash.image_attention/1",
    "dflash.kda_commit/1", "dflash.kda_gates/1", "dflash.kda_scan/1", "dflash.last_row/1",
    "dflash.latent_attention/1", "dflash.latent_block_attention/1", "dflash.latent_cache/1",
    "dflash.latent_rows/1", "dflash.latent_store/1", "dflash.linear/1", "dflash.linear_mxfp8/1",
    "dflash.linear_nvfp4/1", "dflash.load_slot/1", "dflash.merge_patches/1", "dflash.norm_rope/1",
    "dflash.norm_rope_cache/1", "dflash.norm_rope_context/1", "dflash.pixel_patches/1", "dflash.residual_mix/1",
    "dflash.rms_norm/1", "dflash.rms_norm_once/1", "dflash.rope_cache/1", "dflash.rope_grid/1",
    "dflash.rope_query/1", "dflash.route/1", "dflash.sample/1", "dflash.save_slot/1", "dflash.selector_walk/1",
    "dflash.short_conv/1", "dflash.sigmoid_mul/1", "dflash.silu_mul/1", "dflash.situ_mul/1",
    "dflash.splice_embedding/1", "dflash.store_image/1", "dflash.tap/1", "dflash.top_candidates/1",
    "dflash.verify_tokens/1",
]  # fmt: skip


def test_registry_holds_these_ops():
    """A core names them: an entry here is never renamed, and never changes its bits."""
    assert sorted(OPS) == REGISTERED


@pytest.mark.parametrize("name", REGISTERED)
def test_op_is_documented_and_its_axes_and_dtypes_are_scalars_of_its_own(name):
    found = find_op(name)
    ones = {s.name: 1 for s in found.scalars}

    assert found.doc
    assert len({p.name for p in found.params}) == len(found.params)
    for operand in found.operands:
        assert operand.read or operand.write
        operand.shape(ones)
        assert isinstance(operand.element(ones), DType)


def test_refuses_an_op_that_this_runtime_does_not_have():
    with pytest.raises(FormatError) as refused:
        find_op("dflash.linear/2")

    assert (refused.value.code, refused.value.where) == ("OP_UNKNOWN", "dflash.linear/2")


def test_name_can_be_registered_once():
    with pytest.raises(AssertionError, match=r"dflash\.add/1"):
        op("dflash.add/1")(lambda args: lambda: None)


SCALARS = {"rows": 6, "cols": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "none": 0, "act": 2, "w": 1}


@pytest.mark.parametrize(
    ("axes", "shape"),
    [
        pytest.param((1,), (1,), id="number"),
        pytest.param(("rows", "cols"), (6, 64), id="names"),
        pytest.param(("2*cols",), (128,), id="number times name"),
        pytest.param(("cols/32",), (2,), id="quotient"),
        pytest.param(("rows/4",), (1,), id="quotient is rounded down"),
        pytest.param(("rows*head_dim/4*2",), (24,), id="left to right"),
        pytest.param(("heads*head_dim+2*kv_heads*head_dim",), (64,), id="sum of products"),
        pytest.param(("cols/none",), (0,), id="division by zero is empty"),
        pytest.param((), (), id="no axis"),
    ],
)
def test_axes_are_sums_of_products(axes, shape):
    assert reads("x", ACT, *axes).shape(SCALARS) == shape


@pytest.mark.parametrize(
    ("operand", "nbytes"),
    [
        pytest.param(reads("x", ACT, "rows", "cols"), 768, id="bf16"),
        pytest.param(reads("x", DTypeOf("w"), "rows", "cols"), 1536, id="f32 by scalar"),
        pytest.param(reads("x", DType.E2M1, "rows", "cols"), 192, id="two codes a byte"),
        pytest.param(reads("x", DType.U64, "rows"), 48, id="u64"),
        pytest.param(arena("kv", read=True), 0, id="arena: to the end of its buffer"),
    ],
)
def test_operand_covers_these_bytes(operand, nbytes):
    assert operand.nbytes(SCALARS) == nbytes


@pytest.mark.parametrize("code", [0, 8, 255])
def test_refuses_an_element_type_that_does_not_exist(code):
    with pytest.raises(FormatError) as refused:
        reads("x", ACT, "rows").element({"rows": 1, "act": code})

    assert (refused.value.code, refused.value.where, refused.value.got) == ("OP_DTYPE", "x", str(code))


@pytest.mark.parametrize(
    ("dtype", "number", "name", "bits", "numpy"),
    [
        (DType.F32, 1, "f32", 32, np.float32), (DType.BF16, 2, "bf16", 16, ml_dtypes.bfloat16),
        (DType.I32, 3, "i32", 32, np.int32), (DType.U8, 4, "u8", 8, np.uint8), (DType.U64, 5, "u64", 64, np.uint64),
        (DType.E4M3, 6, "f8e4m3", 8, np.uint8), (DType.E2M1, 7, "f4e2m1", 4, np.uint8),
    ],
)  # fmt: skip
def test_element_types_keep_their_numbers(dtype, number, name, bits, numpy):
    assert (int(dtype), dtype.view_name, dtype.bits, dtype.numpy) == (number, name, bits, np.dtype(numpy))
    assert DTYPE_BY_NAME[name] is dtype


def test_scalars_take_four_bytes():
    assert [t.nbytes for t in (U32, I32, F32)] == [4, 4, 4]
    assert [t.value for t in (U32, I32, F32)] == ["<I", "<i", "<f"]


@pytest.mark.parametrize(
    ("made", "read", "write"),
    [
        (reads("x", ACT, 1), True, False), (writes("x", ACT, 1), False, True), (updates("x", ACT, 1), True, True),
        (arena("x", read=True), True, False), (arena("x", write=True), False, True),
    ],
)  # fmt: skip
def test_operand_says_whether_it_is_read_or_written(made: Operand, read, write):
    assert (made.read, made.write) == (read, write)


def test_derived_weights_are_made_once_per_source_and_form():
    prepared, first, second = Prepared(), np.zeros(4, np.float32), np.zeros(4, np.float32)
    made = []

    def make():
        made.append(1)
        return np.ones(4)

    assert prepared.get((first,), ("decoded",), make) is prepared.get((first,), ("decoded",), make)
    assert prepared.get((second,), ("decoded",), make) is not prepared.get((first,), ("packed",), make)
    assert len(made) == 3


def test_derived_weights_tell_views_of_one_place_apart_by_shape_and_type():
    prepared, base = Prepared(), np.zeros((2, 4), np.float32)

    made = [prepared.get((view,), ("decoded",), lambda: np.zeros(1)) for view in
            (base, base[:1], base.reshape(4, 2), base.view(np.int32))]

    assert len({id(m) for m in made}) == 4


@pytest.mark.parametrize(
    "arrays",
    [
        pytest.param({"residual": np.zeros((1, 2), np.float32), "delta": np.zeros((1, 3), np.float32)}, id="shape"),
        pytest.param({"residual": np.zeros((1, 2), np.float32), "delta": np.zeros((1, 2))}, id="dtype"),
    ],
)
def test_call_insists_on_the_declared_arrays(arrays):
    with pytest.raises(AssertionError, match="delta"):
        call("dflash.add/1", arrays, rows=1, cols=2, act=DType.F32)


def test_rounding_goes_to_nearest_even_and_leaves_fp32_alone():
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -257], np.float32)

    assert round_to(values, np.dtype(ml_dtypes.bfloat16)).tolist() == [1, 1.015625, 1.0078125, -256]
    assert round_to(values, np.dtype(np.float32)) is values
    assert to_f32(values) is values
    assert to_f32(values.astype(ml_dtypes.bfloat16)).dtype == np.float32
