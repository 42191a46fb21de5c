"""Ends of a step: positions, tokens and embeddings in one launch, taps, the last row, and commits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import CaptureError

from exporter.kernels.launch import OpCall
from exporter.kernels.rows import lower_begin
from exporter.program.builder import Program
from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower, same_bits

BF16 = ml_dtypes.bfloat16
VOCAB, COLS = 11, 40


def i32(*values):
    return np.array(values, np.int32)


def step_case(tokens_op, *, block_rows, slots, length, limit, scale=1.0, w=BF16, anchor=(3, 5, 7, 9), proposals=None):
    groups, rows = len(slots), len(slots) * block_rows
    rng = np.random.default_rng(5)
    arrays = {
        "slots": i32(*slots), "length": i32(*length), "limit": i32(*limit), "anchor": i32(*anchor),
        "positions": np.full(rows, -7, np.int32), "tokens": np.full(rows, -7, np.int32),
        "table": rng.normal(size=(VOCAB, COLS)).astype(w), "out": np.zeros((rows, COLS), BF16),
    }  # fmt: skip
    block = {"groups": groups, "block_rows": block_rows, "max_slots": len(length)}
    if proposals is None:
        tokens = ("dflash.block_tokens/1", {**block, "mask_token_id": 10})
    else:
        arrays["proposals"] = i32(*proposals).reshape(groups, block_rows - 1)
        tokens = ("dflash.verify_tokens/1", {**block, "depth": block_rows - 1})
    embedding = ("dflash.embedding/1", {"rows": rows, "vocab": VOCAB, "cols": COLS, "scale": scale, "act": DType.BF16,
                                        "w": DType.F32 if w is np.float32 else DType.BF16})
    return Case(arrays, [("dflash.block_positions/1", block), tokens, embedding])


@pytest.mark.parametrize(
    ("slots", "length", "limit", "positions"),
    [
        pytest.param([0], [8, 0], [99, 99], [8, 9, 10], id="whole block"),
        pytest.param([1], [8, 0], [99, 2], [0, 1, -1], id="shortened by the limit"),
        pytest.param([1, 0], [5, 6], [6, 8], [6, 7, -1, -1, -1, -1], id="nothing can follow the anchor"),
        pytest.param([0, -1], [4, 4], [9, 9], [4, 5, 6, -1, -1, -1], id="empty lane"),
    ],
)
def test_draft_begins_with_positions_tokens_and_embeddings(interpreter, slots, length, limit, positions):
    case = step_case("draft", block_rows=3, slots=slots, length=length, limit=limit, anchor=(3, 5))

    got = interpreter.run("rows.lower_begin", case)

    expected = case.expected()
    assert got["positions"].tolist() == positions
    assert got["tokens"].tolist() == [t for s in slots for t in ((3, 5)[s] if s >= 0 else 10, 10, 10)]
    assert same_bits(got["out"], expected["out"])


def test_verification_begins_with_the_proposals(interpreter):
    case = step_case("verify", block_rows=4, slots=[2, -1, 0], length=[1, 2, 3, 4], limit=[9] * 4,
                     proposals=[1, 2, 3, 0, 0, 0, 8, 9, 10])

    got = interpreter.run("rows.lower_begin", case)

    assert got["tokens"].tolist() == [7, 1, 2, 3, 0, 0, 0, 0, 3, 8, 9, 10]
    assert got["positions"].tolist() == [3, 4, 5, 6, -1, -1, -1, -1, 1, 2, 3, 4]
    assert same_bits(got["out"], case.expected()["out"])


def test_decode_begins_with_one_row_per_lane(interpreter):
    case = step_case("decode", block_rows=1, slots=[3, 1], length=[1, 2, 3, 4], limit=[9] * 4)

    got = interpreter.run("rows.lower_begin", case)

    assert (got["tokens"].tolist(), got["positions"].tolist()) == ([9, 5], [4, 2])
    assert same_bits(got["out"], case.expected()["out"])


@pytest.mark.parametrize("w", [BF16, np.float32])
def test_embedding_is_scaled_in_fp32_and_rounded_once(interpreter, w):
    case = step_case("draft", block_rows=2, slots=[0], length=[1], limit=[9], scale=1.7, w=w, anchor=(6,))

    got = interpreter.run("rows.lower_begin", case)["out"]

    assert same_bits(got, case.expected()["out"])
    assert not same_bits(got, case.arrays["table"][[6, 10]].astype(BF16))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_token_outside_the_vocabulary_embeds_as_nan(interpreter, token):
    case = step_case("draft", block_rows=2, slots=[0], length=[1], limit=[9], anchor=(token,))

    got = interpreter.run("rows.lower_begin", case)["out"].astype(np.float32)

    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize(
    ("slot", "count", "positions"),
    [(1, 3, [7, 8, 9, -1]), (0, 4, [2, 3, 4, 5]), (1, 0, [-1, -1, -1, -1])],
)
def test_chunk_begins_with_positions_and_embeddings(interpreter, slot, count, positions):
    rng = np.random.default_rng(6)
    arrays = {"slots": i32(slot), "count": i32(count), "length": i32(2, 7), "tokens": i32(4, 0, 10, 2),
              "positions": np.full(4, -7, np.int32), "table": rng.normal(size=(VOCAB, COLS)).astype(BF16),
              "out": np.zeros((4, COLS), BF16)}
    case = Case(arrays, [("dflash.chunk_positions/1", {"rows": 4, "max_slots": 2}),
                         ("dflash.embedding/1", {"rows": 4, "vocab": VOCAB, "cols": COLS, "scale": 1.0,
                                                 "act": DType.BF16, "w": DType.BF16})])

    got = interpreter.run("rows.lower_begin", case)

    assert got["positions"].tolist() == positions
    assert same_bits(got["out"], arrays["table"][[4, 0, 10, 2]])


def test_chunk_of_an_empty_lane_has_no_positions(interpreter):
    arrays = {"slots": i32(-1), "count": i32(2), "length": i32(2, 7), "tokens": i32(4, 0),
              "positions": np.full(2, -7, np.int32), "table": np.ones((VOCAB, COLS), BF16),
              "out": np.zeros((2, COLS), BF16)}
    case = Case(arrays, [("dflash.chunk_positions/1", {"rows": 2, "max_slots": 2}),
                         ("dflash.embedding/1", {"rows": 2, "vocab": VOCAB, "cols": COLS, "scale": 1.0,
                                                 "act": DType.BF16, "w": DType.BF16})])

    assert interpreter.run("rows.lower_begin", case)["positions"].tolist() == [-1, -1]


@pytest.mark.parametrize("cols", [8, 40, 1500])
@pytest.mark.parametrize("index", [0, 2])
def test_tap_fills_its_own_columns(interpreter, cols, index):
    rng = np.random.default_rng(7)
    arrays = {"x": rng.normal(size=(3, cols)).astype(BF16), "features": rng.normal(size=(3, 3 * cols)).astype(BF16)}
    case = Case(arrays, [("dflash.tap/1", {"rows": 3, "cols": cols, "taps": 3, "index": index, "act": DType.BF16})])

    assert same_bits(interpreter.run("rows.lower_tap", case)["features"], case.expected()["features"])


@pytest.mark.parametrize(
    ("positions", "row", "last"),
    [([5, 6, 7, 8, 9], 4, 9), ([5, 6, -1, -1, -1], 1, 6), ([-1, -1, -1, -1, -1], 0, -1)],
    ids=["full chunk", "part of a chunk", "no live row"],
)
def test_last_row_is_the_last_live_one(interpreter, positions, row, last):
    arrays = {"x": np.arange(5 * 1500).reshape(5, 1500).astype(BF16), "positions": i32(*positions),
              "out": np.zeros((1, 1500), BF16), "last_position": i32(-7)}
    case = Case(arrays, [("dflash.last_row/1", {"rows": 5, "cols": 1500, "act": DType.BF16})])

    got = interpreter.run("rows.lower_last_row", case)

    assert same_bits(got["out"], arrays["x"][row : row + 1])
    assert got["last_position"].tolist() == [last]


def test_commit_advances_the_slots_of_lanes_that_produced(interpreter):
    arrays = {"slots": i32(2, -1, 0, 1, 4), "produced": i32(3, 2, 0, 1, -1), "length": i32(10, 20, 30, 40, 50),
              "anchor": i32(1, 2, 3, 4, 5), "emitted": np.arange(60, 75, dtype=np.int32).reshape(5, 3)}
    case = Case(arrays, [("dflash.commit/1", {"groups": 5, "block_rows": 3, "max_slots": 5})])

    got = interpreter.run("rows.lower_commit", case)

    assert got["length"].tolist() == [10, 21, 33, 40, 50]
    assert got["anchor"].tolist() == [1, 69, 62, 4, 5]
    assert got["anchor"].tolist() == case.expected()["anchor"].tolist()


@pytest.mark.parametrize(
    ("slot", "length", "anchor"), [(1, [10, 27], [1, 99]), (-1, [10, 20], [1, 2])], ids=["a slot", "empty lane"]
)
def test_commit_chunk_advances_one_slot(interpreter, slot, length, anchor):
    arrays = {"slots": i32(slot), "count": i32(7), "emitted": i32(99).reshape(1, 1), "length": i32(10, 20),
              "anchor": i32(1, 2)}
    case = Case(arrays, [("dflash.commit_chunk/1", {"max_slots": 2})])

    got = interpreter.run("rows.lower_commit_chunk", case)

    assert (got["length"].tolist(), got["anchor"].tolist()) == (length, anchor)


def test_fused_launch_names_the_ops_and_nodes_that_it_computes():
    case = step_case("verify", block_rows=2, slots=[0], length=[1], limit=[9], proposals=[1])
    program, _, calls = case.recorded()

    [launch] = lower("rows.lower_begin", calls, program)

    assert launch.kernel.ops == ("dflash.block_positions/1", "dflash.verify_tokens/1", "dflash.embedding/1")
    assert launch.nodes == (10, 11, 12)


def test_refuses_a_graph_that_begins_otherwise():
    call = OpCall("dflash.tap/1", {}, {}, "draft", 0)

    with pytest.raises(CaptureError, match="begins with positions") as e:
        lower_begin([call], Program())

    assert (e.value.code, e.value.got) == ("GPU_BEGIN", "dflash.tap/1")


@pytest.mark.parametrize(
    ("lowering", "op", "scalars"),
    [
        ("rows.lower_tap", "dflash.tap/1", {}),
        ("rows.lower_last_row", "dflash.last_row/1", {}),
        ("conv.lower_grouped_conv", "dflash.grouped_conv/1", {}),
        ("selector.lower_selector_walk", "dflash.selector_walk/1", {}),
    ],
)
def test_refuses_fp32_activations(lowering, op, scalars):
    call = OpCall(op, {}, {"act": DType.F32, **scalars}, "draft.layers.1", 0)

    with pytest.raises(CaptureError) as e:
        lower(lowering, [call], Program())

    assert (e.value.code, e.value.expected, e.value.got) == ("GPU_ACT", "bf16", "f32")
    assert "draft.layers.1" in str(e.value)
