"""Latent attention kernels against the CPU ops: splits, windows, dead lanes, tiles of several rows and heads."""

from __future__ import annotations

import numpy as np
import pytest

from exporter.kernels.latent_attention import latent_step
from exporter.kernels.latent_attention_many import latent_chunk
from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower, same_bits
from tests.exporter.kernels.latent_shapes import Mla
from tests.exporter.kernels.shapes import BF16, F32

TARGET = "latent_attention_many.lower_latent_attention"
DRAFT = "latent_attention.lower_latent_block_attention"
MLA = Mla(heads=6, nope=16, rope=8, v_dim=16, rank=24, page_tokens=16, max_pages=40, layers=2)


def attention_case(lengths, lives, block_rows, *, mla=MLA, block=None, seed=0):
    """Groups of rows over paged caches that hold NaN where nothing was written; `block` (causal, window) asks for a
    draft block's attention, whose own rows are not in the cache."""
    rng = np.random.default_rng(seed)
    groups, rows = len(lengths), len(lengths) * block_rows
    positions = np.full(rows, -1, np.int32)
    table = rng.permutation(groups * mla.max_pages).astype(np.int32).reshape(groups, mla.max_pages)
    pages = mla.pages(groups)
    cache = np.full((pages["kv_pages"], mla.layers, mla.page_tokens, mla.width), np.nan, BF16)
    for g, (length, live) in enumerate(zip(lengths, lives, strict=True)):
        positions[g * block_rows:g * block_rows + live] = length + np.arange(live)
        written = np.arange(length if block else length + live)
        where = table[g, written // mla.page_tokens], 0, written % mla.page_tokens
        cache[where] = rng.standard_normal((len(written), mla.width)).astype(BF16)
    arrays = {"q": (2 * rng.standard_normal((rows, mla.heads * mla.width))).astype(BF16), "positions": positions,
              "slots": np.array([g if live else -1 for g, live in enumerate(lives)], np.int32), "page_table": table,
              "kv": cache.view(np.uint8).reshape(-1), "out": np.full((rows, mla.heads * mla.rank), 77, BF16)}
    scalars = {"groups": groups, "block_rows": block_rows, "heads": mla.heads, "rank": mla.rank, "rope_dim": mla.rope,
               "scale": (mla.nope + mla.rope) ** -0.5, "act": DType.BF16, **pages}
    if block is None:
        return Case(arrays, [("dflash.latent_attention/1", scalars)])
    own = rng.standard_normal((rows, mla.width)).astype(BF16)
    own[positions < 0] = np.nan
    causal, window = block
    return Case({**arrays, "rows": own},
                [("dflash.latent_block_attention/1", {**scalars, "causal": causal, "window": window})])


def assert_near(got, want):
    difference = np.abs(got.astype(F32) - want.astype(F32))
    assert difference.max() <= 2.0**-8 * np.abs(want.astype(F32)).max()
    assert (got == want).mean() > 0.97  # sums in another order round apart once in a while


WIDE = Mla(heads=17, nope=16, rope=20, v_dim=16, rank=40, page_tokens=64, max_pages=10)
CASES = [
    pytest.param([100], [1], 1, MLA, id="decode"),
    pytest.param([5, 270], [8, 3], 8, MLA, id="verify, two sequences, one shortened"),
    pytest.param([124, 40], [8, 0], 8, MLA, id="a block across two splits beside an empty lane"),
    pytest.param([630], [8], 8, MLA, id="five splits"),
    pytest.param([0], [8], 8, MLA, id="the first tokens"),
    pytest.param([200, 3], [3, 3], 3, WIDE, id="a page of two tiles of keys, heads that fill no tile"),
    pytest.param([30], [33], 72, MLA, id="a prefill chunk"),
    pytest.param([64], [70], 70, WIDE, id="a later chunk"),
    pytest.param([17], [1], 100, MLA, id="a chunk of which one row is live"),
]


@pytest.mark.parametrize(("lengths", "lives", "block_rows", "mla"), CASES)
def test_attention_computes_what_the_op_says(interpreter, lengths, lives, block_rows, mla):
    case = attention_case(lengths, lives, block_rows, mla=mla)

    got, want = interpreter.run(TARGET, case)["out"], case.expected()["out"]

    assert_near(got, want)
    assert not got[case.arrays["positions"] < 0].any()


@pytest.mark.parametrize(("causal", "window"), [(0, 0), (1, 0), (0, 6), (1, 50)])
def test_a_draft_block_sees_its_context_and_itself(interpreter, causal, window):
    case = attention_case([7, 128, 300, 530], [8, 5, 8, 0], 8, block=(causal, window))

    got, want = interpreter.run(DRAFT, case)["out"], case.expected()["out"]

    assert_near(got, want)
    assert not got[case.arrays["positions"] < 0].any()


def test_a_draft_block_without_an_anchor_is_dead(interpreter):
    case = attention_case([40], [8], 8, block=(0, 0))
    case.arrays["positions"][0] = -1

    got = interpreter.run(DRAFT, case)["out"]

    assert same_bits(got, case.expected()["out"]) and not got.any()


@pytest.mark.parametrize("block_rows", [8, 16])
def test_a_row_has_the_same_bits_in_verify_and_in_decode(interpreter, block_rows):
    verify = attention_case([124], [block_rows], block_rows)
    done = interpreter.run(TARGET, verify)["out"]
    for row in range(0, block_rows, 3):
        assert decoded(interpreter, verify, row, 124 + row).tobytes() == done[row].tobytes(), row


def test_a_row_has_the_same_bits_beside_another_sequence(interpreter):
    both = attention_case([250, 130], [8, 5], 8)
    done = interpreter.run(TARGET, both)["out"]
    for group, length in enumerate([250, 130]):
        for row in (0, 4):
            alone = decoded(interpreter, both, group * 8 + row, length + row, group)
            assert alone.tobytes() == done[group * 8 + row].tobytes(), (group, row)


def decoded(interpreter, case, row, position, slot=0):
    """The result of one row of `case` by itself."""
    arrays = {**case.arrays, "q": case.arrays["q"][row:row + 1], "out": case.arrays["out"][row:row + 1],
              "positions": np.array([position], np.int32), "slots": np.array([slot], np.int32)}
    op, scalars = case.ops[0]
    return interpreter.run(TARGET, Case(arrays, [(op, {**scalars, "groups": 1, "block_rows": 1})]))["out"]


def test_a_row_has_the_same_bits_however_a_prompt_is_cut(interpreter):
    whole = attention_case([0], [140], 140)
    done = interpreter.run(TARGET, whole)["out"]
    op, scalars = whole.ops[0]
    for first, count, rows in [(0, 128, 128), (64, 76, 90)]:
        q = np.zeros((rows, *whole.arrays["q"].shape[1:]), BF16)
        q[:count] = whole.arrays["q"][first:first + count]
        positions = np.full(rows, -1, np.int32)
        positions[:count] = first + np.arange(count)
        arrays = {**whole.arrays, "q": q, "positions": positions, "out": np.full((rows, done.shape[1]), 77, BF16)}

        part = interpreter.run(TARGET, Case(arrays, [(op, {**scalars, "block_rows": rows})]))["out"]

        assert same_bits(part[:count], done[first:first + count])


def test_a_chunk_has_a_kernel_of_its_own():
    for block_rows, function in [(1, latent_step), (64, latent_step), (65, latent_chunk)]:
        program, _, calls = attention_case([5], [1], block_rows).recorded()
        assert [launch.kernel.function for launch in lower("lower.lower_graph", calls, program)] == [function]


def test_every_step_has_one_tile_shape():
    kernels = []
    for groups, block_rows in [(1, 1), (1, 8), (2, 16)]:
        scalars = {"kv_pages": 80, "max_slots": 2}
        case = attention_case([5] * groups, [1] * groups, block_rows)
        program, _, calls = Case(case.arrays, [(case.ops[0][0], {**case.ops[0][1], **scalars})]).recorded()
        kernels.append(lower(TARGET, calls, program)[0].kernel.constants)

    assert kernels[0] == kernels[1] == kernels[2]


def test_a_merge_leaves_the_counters_for_the_next(interpreter):
    one = attention_case([300], [8], 8)
    twice = Case({**one.arrays, "again": one.arrays["out"]}, [one.ops[0], one.ops[0]], names={1: {"out": "again"}})

    got = interpreter.run("lower.lower_graph", twice)

    assert same_bits(got["again"], got["out"]) and (got["again"] != twice.arrays["again"]).any()
