"""Latent attention in its absorbed form equals keys and values formed per head; a row's bits are its own."""

import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import FormatError

from runtime.ops import DType, call

HEADS, NOPE, ROPE, V_DIM, RANK = 3, 8, 4, 6, 16
PAGE, PAGES, SLOTS, LAYERS = 8, 12, 2, 2
WIDTH = RANK + ROPE
ACTS = [pytest.param(DType.F32, id="f32"), pytest.param(DType.BF16, id="bf16")]


class Mla:
    """One layer (the second of two in each page) over a cache that is full of NaN where nothing was written."""

    def __init__(self, act=DType.F32, seed=0, rows=40):
        rng = np.random.default_rng(seed)
        self.act, dtype = act, act.numpy
        self.q = rng.normal(size=(rows, HEADS * (NOPE + ROPE))).astype(dtype)
        self.kv_a = rng.normal(size=(rows, WIDTH)).astype(dtype)
        self.kv_b = rng.normal(size=(HEADS * (NOPE + V_DIM), RANK)).astype(ml_dtypes.bfloat16)
        self.norm = (1 + 0.1 * rng.normal(size=RANK)).astype(np.float32)
        self.layer_bytes = PAGE * WIDTH * dtype.itemsize
        self.arena = np.full(PAGES * LAYERS * PAGE * WIDTH, np.nan, dtype).view(np.uint8)
        self.table = np.arange(SLOTS * 6, dtype=np.int32)[::-1].reshape(SLOTS, 6).copy()

    def paged(self):
        return {"page_tokens": PAGE, "page_bytes": LAYERS * self.layer_bytes, "kv_pages": PAGES, "max_slots": SLOTS,
                "max_pages": 6}

    def run(self, take, positions, slots=(0,)):
        """Rows `take` (indices) at `positions`: cache them, attend, and give [rows, HEADS * V_DIM]."""
        take, rows = list(take), len(take)
        groups, dtype = len(slots), self.act.numpy
        where = {"positions": np.array(positions, np.int32), "slots": np.array(slots, np.int32),
                 "page_table": self.table, "kv": self.arena[self.layer_bytes:]}
        grouped = {"groups": groups, "block_rows": rows // groups, "rank": RANK, "rope_dim": ROPE, "act": self.act}
        heads = {"rows": rows, "heads": HEADS, "rank": RANK, "nope_dim": NOPE, "rope_dim": ROPE, "v_dim": V_DIM,
                 "act": self.act, "w": DType.BF16}
        absorbed, latent, out = (np.full((rows, n), -77, dtype) for n in (HEADS * WIDTH, HEADS * RANK, HEADS * V_DIM))
        call("dflash.latent_cache/1", {"kv_a": self.kv_a[take], "weight": self.norm, **where}, eps=1e-6, w=DType.F32,
             **grouped, **self.paged())
        call("dflash.absorb_query/1", {"q": self.q[take], "kv_b": self.kv_b, "out": absorbed}, **heads)
        call("dflash.latent_attention/1", {"q": absorbed, "out": latent, **where}, heads=HEADS,
             scale=(NOPE + ROPE) ** -0.5, **grouped, **self.paged())
        call("dflash.expand_values/1", {"x": latent, "kv_b": self.kv_b, "out": out}, **heads)
        return out

    def expanded(self, rows):
        """The same with every head's keys and values formed, in float64."""
        q, kv_a = (x[:rows].astype(np.float64) for x in (self.q, self.kv_a))
        c = kv_a[:, :RANK] / np.sqrt((kv_a[:, :RANK] ** 2).mean(-1, keepdims=True) + 1e-6) * self.norm
        kv = (c @ self.kv_b.astype(np.float64).T).reshape(rows, HEADS, NOPE + V_DIM)
        q = q.reshape(rows, HEADS, NOPE + ROPE)
        out = []
        for h in range(HEADS):
            k = np.concatenate([kv[:, h, :NOPE], kv_a[:, RANK:]], -1)
            scores = q[:, h] @ k.T * (NOPE + ROPE) ** -0.5
            scores[np.triu_indices(rows, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out.append(p / p.sum(-1, keepdims=True) @ kv[:, h, NOPE:])
        return np.concatenate(out, -1)


def relative(got, expected):
    return float(np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("act", "bound"), [(DType.F32, 2e-6), (DType.BF16, 2e-2)], ids=["f32", "bf16"])
def test_absorbed_attention_equals_expanded_attention(act, bound):
    mla = Mla(act)

    assert relative(mla.run(range(40), range(40)), mla.expanded(40)) <= bound


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("cuts", [[1] * 40, [5, 8, 1, 8, 18], [39, 1]], ids=["one by one", "uneven", "prompt and one"])
def test_any_cut_of_a_sequence_gives_the_same_bytes(cuts, act):
    expected = Mla(act).run(range(40), range(40))
    mla, first = Mla(act), 0
    for count in cuts:
        rows = range(first, first + count)
        assert mla.run(rows, rows).tobytes() == expected[first:first + count].tobytes(), first
        first += count


def test_lanes_read_their_own_pages_and_dead_rows_are_zeros():
    alone, both = Mla(), Mla()
    alone.run(range(10), range(10), [1])
    expected = alone.run([10, 11], [10, 11], [1])
    both.run([*range(20, 30), *range(10)], [*range(10), *range(10)], [0, 1])
    before = both.arena.copy()

    out = both.run([30, 31, 10, 11, 5, 5], [10, -1, 10, 11, -1, -1], [0, 1, -1])

    assert out[2:4].tobytes() == expected.tobytes()
    assert not out[1].any() and not out[4:].any()
    assert (both.arena != before).reshape(-1, WIDTH * 4).any(-1).sum() == 3, "three live rows are cached"


def test_first_layer_of_a_page_is_left_alone():
    mla = Mla()
    mla.run(range(40), range(40))

    first = mla.arena.view(np.float32).reshape(PAGES, LAYERS, PAGE, WIDTH)[:, 0]
    assert np.isnan(first).all()


def test_pages_beyond_the_arena_are_refused():
    mla = Mla()
    mla.arena = mla.arena[:-4]

    with pytest.raises(FormatError, match="reach beyond the arena"):
        mla.run([0], [0])
