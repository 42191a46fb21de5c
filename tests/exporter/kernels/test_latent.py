"""Rows of latent attention, and the products per head, against the CPU ops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dflash_core.errors import CaptureError

from exporter.kernels.latent import head_products, head_tiles
from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower, same_bits
from tests.exporter.kernels.latent_shapes import TINY, Mla
from tests.exporter.kernels.shapes import BF16, F32, TYPES

ODD = Mla(heads=3, nope=24, rope=4, v_dim=20, rank=48, max_pages=3, layers=2)
REAL = Mla(heads=2, nope=128, rope=64, v_dim=128, rank=512, max_pages=2)  # but for the number of heads
SIZES = [pytest.param(TINY, id="tiny"), pytest.param(ODD, id="odd")]


def weight_of(rng, w, *shape):
    return (1 + 0.1 * rng.standard_normal(shape)).astype(w)


def rope_table(context, dims):
    angles = np.arange(context)[:, None] / 100 ** (np.arange(dims // 2) * 2 / dims)
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(F32)


def cached_case(mla, positions, slots, w=BF16):
    """kv_a rows of `len(slots)` groups at these positions, over pages of which every byte is the start of a NaN; both
    ops store to the second layer of a page, or the only one."""
    rng = np.random.default_rng(len(positions))
    groups, rows, live = len(slots), len(positions), 3
    pages = mla.pages(live)
    layer = pages["page_bytes"] // mla.layers * (mla.layers - 1)
    arrays = {"kv_a": rng.standard_normal((rows, mla.width)).astype(BF16), "weight": weight_of(rng, w, mla.rank),
              "positions": np.array(positions, np.int32), "slots": np.array(slots, np.int32),
              "page_table": rng.permutation(live * mla.max_pages).astype(np.int32).reshape(live, mla.max_pages),
              "kv": np.full(pages["kv_pages"] * pages["page_bytes"] - layer, 0xFF, np.uint8)}
    scalars = {"groups": groups, "block_rows": rows // groups, "rank": mla.rank, "rope_dim": mla.rope,
               "act": DType.BF16, **pages}
    return Case(arrays, [("dflash.latent_cache/1", {
        **scalars, "eps": 1e-5, "w": DType.F32 if w is F32 else DType.BF16})])


@pytest.mark.parametrize("mla", SIZES)
@pytest.mark.parametrize("w", [BF16, F32])
def test_live_rows_are_stored_normalized_at_their_positions(interpreter, mla, w):
    case = cached_case(mla, [62, 63, 64, -1, 0, 1, -1, -1, -1, -1, -1, -1], [2, 0, -1], w)

    got, want = interpreter.run("latent.lower_latent_cache", case)["kv"], case.expected()["kv"]

    assert same_bits(got, want)
    assert (got != case.arrays["kv"]).any()


def test_a_mean_summed_in_another_order_moves_a_stored_value_by_one_step_at_most(interpreter):
    case = cached_case(REAL, range(40, 72), [0])

    got, want = (x["kv"].view(np.int16) for x in (interpreter.run("latent.lower_latent_cache", case), case.expected()))

    assert np.abs(got.astype(np.int32) - want).max() <= 1
    assert (got != want).mean() < 0.001


@pytest.mark.parametrize("live", [pytest.param([5, 6, -1, -1], id="two of four"), pytest.param([-1] * 4, id="none")])
def test_accepted_rows_of_a_draft_are_stored_as_they_are(interpreter, live):
    case = cached_case(ODD, [*live, 130, 131, 132, 133], [1, 0])
    arrays = {n: a for n, a in case.arrays.items() if n not in ("kv_a", "weight")} | {"rows": case.arrays["kv_a"]}
    scalars = {k: v for k, v in case.ops[0][1].items() if k not in ("eps", "w")}
    store = Case(arrays, [("dflash.latent_store/1", scalars)])

    assert same_bits(interpreter.run("latent.lower_latent_store", store)["kv"], store.expected()["kv"])


@pytest.mark.parametrize(("mla", "rotary"), [(TINY, 8), (ODD, 4), (ODD, 2)])
@pytest.mark.parametrize("w", [BF16, F32])
def test_rows_of_a_draft_are_normalized_and_rotated(interpreter, mla, rotary, w):
    rng = np.random.default_rng(3)
    arrays = {"kv_a": rng.standard_normal((6, mla.width)).astype(BF16), "weight": weight_of(rng, w, mla.rank),
              "rope_table": rope_table(90, rotary), "positions": np.array([0, 1, 88, 89, -1, 7], np.int32),
              "out": np.full((6, mla.width), 77, BF16)}
    case = Case(arrays, [("dflash.latent_rows/1", {
        "rows": 6, "rank": mla.rank, "rope_dim": mla.rope, "eps": 1e-5, "w": DType.F32 if w is F32 else DType.BF16,
        "rotary_dims": rotary, "interleaved": 0, "context": 90, "act": DType.BF16})])

    assert same_bits(interpreter.run("latent.lower_latent_rows", case)["out"], case.expected()["out"])


@pytest.mark.parametrize(("mla", "rotary"), [(TINY, 8), (ODD, 4), (ODD, 2)])
def test_queries_are_rotated_behind_their_first_part(interpreter, mla, rotary):
    q = np.random.default_rng(4).standard_normal((5, mla.heads * (mla.nope + mla.rope))).astype(BF16)
    case = Case({"q": q, "rope_table": rope_table(90, rotary), "positions": np.array([3, 4, -1, 89, 0], np.int32),
                 "out": np.full_like(q, 77)},
                [("dflash.rope_query/1", {
                    "rows": 5, "heads": mla.heads, "nope_dim": mla.nope, "rope_dim": mla.rope, "rotary_dims": rotary,
                    "interleaved": 0, "context": 90, "act": DType.BF16})])

    assert same_bits(interpreter.run("latent.lower_rope_query", case)["out"], case.expected()["out"])


LOWERINGS = {"absorb_query": ("q", "latent.lower_absorb_query"), "expand_values": ("x", "latent.lower_expand_values")}


def product_case(op, mla, rows, w=BF16):
    rng = np.random.default_rng(5)
    x_width, out_width = {"absorb_query": (mla.nope + mla.rope, mla.width), "expand_values": (mla.rank, mla.v_dim)}[op]
    arrays = {LOWERINGS[op][0]: rng.standard_normal((200, mla.heads * x_width))[:rows].astype(BF16),
              "kv_b": rng.standard_normal((mla.heads * (mla.nope + mla.v_dim), mla.rank)).astype(w),
              "out": np.full((rows, mla.heads * out_width), 77, BF16)}
    return Case(arrays, [(f"dflash.{op}/1", {
        "rows": rows, "heads": mla.heads, "rank": mla.rank, "nope_dim": mla.nope, "rope_dim": mla.rope,
        "v_dim": mla.v_dim, **TYPES, "w": DType.F32 if w is F32 else DType.BF16})])


def assert_near(got, want):
    """An fp32 sum in another order rounds to the neighbouring bf16 once in a while."""
    difference = np.abs(got.astype(F32) - want.astype(F32))
    assert difference.max() <= 2.0**-8 * np.abs(want.astype(F32)).max()
    assert (got == want).mean() > 0.97


@pytest.mark.parametrize("op", LOWERINGS)
@pytest.mark.parametrize("mla", [*SIZES, pytest.param(REAL, id="real")])
@pytest.mark.parametrize("rows", [1, 19, 33, 130])
def test_products_per_head_are_what_the_ops_say(interpreter, op, mla, rows):
    case = product_case(op, mla, rows)

    got, want = interpreter.run(LOWERINGS[op][1], case)["out"], case.expected()["out"]

    assert_near(got, want)
    if op == "absorb_query":
        rest = [x.reshape(rows, mla.heads, -1)[..., mla.rank:] for x in (got, want)]
        assert same_bits(*(np.ascontiguousarray(x) for x in rest))


@pytest.mark.parametrize("op", LOWERINGS)
def test_a_row_has_the_same_bits_in_every_step(interpreter, op):
    whole = interpreter.run(LOWERINGS[op][1], product_case(op, ODD, 128))["out"]

    for rows in (1, 8, 40):
        assert same_bits(interpreter.run(LOWERINGS[op][1], product_case(op, ODD, rows))["out"], whole[:rows]), rows


@pytest.mark.parametrize("op", LOWERINGS)
@pytest.mark.parametrize("rows", [3, 130])
def test_a_row_and_a_head_of_nan_stay_by_themselves(interpreter, op, rows):
    name, lowering = LOWERINGS[op]
    case = product_case(op, ODD, rows)
    clean = interpreter.run(lowering, case)["out"].reshape(rows, ODD.heads, -1)
    x = case.arrays[name].reshape(rows, ODD.heads, -1)
    x[1], x[0, 1] = np.nan, np.nan

    got = interpreter.run(lowering, case)["out"].reshape(rows, ODD.heads, -1)

    assert np.isnan(got[1]).all() and np.isnan(got[0, 1]).all()
    assert same_bits(got[2:], clean[2:]) and same_bits(got[0, ::2], clean[0, ::2])


@pytest.mark.parametrize("op", LOWERINGS)
def test_every_step_has_one_tile_shape_and_prefill_another(op):
    kernels = {}
    for rows in (1, 8, 128, 129):
        program, _, calls = product_case(op, TINY, 200).recorded()
        calls = [replace(calls[0], scalars={**calls[0].scalars, "rows": rows})]
        kernels[rows] = lower(LOWERINGS[op][1], calls, program)[0].kernel

    assert [k.function for k in kernels.values()] == [head_products] * 3 + [head_tiles]
    assert kernels[1].constants == kernels[8].constants == kernels[128].constants


@pytest.mark.parametrize("op", LOWERINGS)
def test_refuses_weights_that_are_not_bf16(op):
    program, _, calls = product_case(op, TINY, 1, F32).recorded()

    with pytest.raises(CaptureError, match="GPU kernels read bf16 weights"):
        lower(LOWERINGS[op][1], calls, program)
