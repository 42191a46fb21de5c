"""Attention equals a slow float64 restatement, and a row's bytes depend on its query and its visible keys alone."""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import pytest

from runtime.ops import DType, call

BF16 = ml_dtypes.bfloat16
ACTS = [pytest.param(DType.BF16, id="bf16"), pytest.param(DType.F32, id="f32")]


@dataclass(frozen=True)
class Case:
    """Sequences in a paged cache and a batch of query rows over it.

    Attributes:
        positions: of each row, by group; -1: dead.
        window, causal: of a draft block; None: the target's attention.
        table: page table of every slot; by default pages are handed out backwards.
        slots: by group; by default group i serves slot i.
    """

    positions: list
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_tokens: int = 64
    act: DType = DType.F32
    window: int | None = None
    causal: bool | None = None
    table: tuple | None = None
    slots: tuple | None = None
    seed: int = 0
    parts: dict = field(default_factory=dict)

    @property
    def groups(self):
        return len(self.positions)

    @property
    def block_rows(self):
        return len(self.positions[0])

    @property
    def pages_per_slot(self):
        return max(max(max(g) for g in self.positions), 0) // self.page_tokens + 1

    def page_table(self):
        if self.table is not None:
            return np.array(self.table, np.int32)
        count = self.groups * self.pages_per_slot
        return np.arange(count - 1, -1, -1, dtype=np.int32).reshape(self.groups, -1)

    def sequences(self):
        """K and V of every slot at every position, [groups, positions, kv_heads, head_dim]."""
        rng = np.random.default_rng(self.seed)
        shape = (self.groups, self.pages_per_slot * self.page_tokens, self.kv_heads, self.head_dim)
        return [rng.normal(size=shape).astype(self.act.numpy) for _ in "kv"]

    def rows(self):
        """q, and for a draft block its own k and qkv, as stored."""
        rng = np.random.default_rng(self.seed + 1)
        count, n, m, d = self.groups * self.block_rows, self.heads, self.kv_heads, self.head_dim
        widths = {"q": n * d, "k": m * d, "qkv": (n + 2 * m) * d}
        made = {name: (2 * rng.normal(size=(count, width))).astype(self.act.numpy) for name, width in widths.items()}
        return {**made, **self.parts}

    def filled_arena(self, garbage):
        """The arena with every position of every sequence in its page; the other pages hold `garbage`."""
        tables, (keys, values) = self.page_table(), self.sequences()
        pages = int(tables.max()) + 3
        arena = np.full((pages, 2, self.kv_heads, self.page_tokens, self.head_dim), garbage, self.act.numpy)
        for slot, table in enumerate(tables):
            for index, page in enumerate(table[: self.pages_per_slot]):
                span = slice(index * self.page_tokens, (index + 1) * self.page_tokens)
                arena[page, 0] = keys[slot, span].transpose(1, 0, 2)
                arena[page, 1] = values[slot, span].transpose(1, 0, 2)
        return arena

    def run(self, *, garbage=0.0, spoil=None):
        """[rows, heads * head_dim]; `spoil(arena)` changes the filled arena first."""
        arena = self.filled_arena(garbage)
        if spoil is not None:
            spoil(arena)
        rows, tables = self.rows(), self.page_table()
        out = np.full(rows["q"].shape, -77, self.act.numpy)
        slots = self.slots if self.slots is not None else range(self.groups)
        arrays = {"q": rows["q"], "positions": np.array(self.positions, np.int32).reshape(-1),
                  "slots": np.array(slots, np.int32), "page_table": tables, "kv": arena.reshape(-1).view(np.uint8),
                  "out": out}
        scalars = {"groups": self.groups, "block_rows": self.block_rows, "heads": self.heads,
                   "kv_heads": self.kv_heads, "head_dim": self.head_dim, "scale": self.head_dim**-0.5, "act": self.act,
                   "page_tokens": self.page_tokens, "page_bytes": arena[0].nbytes, "kv_pages": len(arena),
                   "max_slots": len(tables), "max_pages": tables.shape[1]}
        if self.causal is None:
            call("dflash.attention/1", arrays, **scalars)
        else:
            call("dflash.block_attention/1", {**arrays, "k": rows["k"], "qkv": rows["qkv"]}, causal=int(self.causal),
                 window=self.window or 0, **scalars)
        return out

    def slow(self):
        """The same in float64, one query and head at a time; dead rows are zero."""
        keys, values = self.sequences()
        rows, n, m, d = self.rows(), self.heads, self.kv_heads, self.head_dim
        q = rows["q"].reshape(self.groups, self.block_rows, n, d).astype(np.float64)
        own_k = rows["k"].reshape(self.groups, self.block_rows, m, d).astype(np.float64)
        own_v = rows["qkv"].reshape(self.groups, self.block_rows, n + 2 * m, d)[:, :, n + m :].astype(np.float64)
        out = np.zeros((self.groups, self.block_rows, n, d))
        for group, positions in enumerate(self.positions):
            start = positions[0]
            for row, position in enumerate(positions):
                if position < 0 or start < 0:
                    continue
                seen = []
                if self.causal is None:
                    seen = [(p, keys[group, p], values[group, p]) for p in range(position + 1)]
                else:
                    seen = [(p, keys[group, p], values[group, p]) for p in range(start)]
                    seen += [(p, own_k[group, i], own_v[group, i]) for i, p in enumerate(positions) if p >= 0]
                    seen = [s for s in seen if not self.causal or s[0] <= position]
                    seen = [s for s in seen if not self.window or abs(position - s[0]) < self.window]
                for head in range(n):
                    kv = head // (n // m)
                    scores = np.array([q[group, row, head] @ k[kv].astype(np.float64) for _, k, _ in seen]) / d**0.5
                    weights = np.exp(scores - scores.max())
                    total = sum(w * v[kv].astype(np.float64) for w, (_, _, v) in zip(weights, seen, strict=True))
                    out[group, row, head] = total / weights.sum()
        return out.reshape(-1, n * d)


def block(start, live, rows=8):
    """Positions of a block of `rows` that starts at `start`, of which `live` are live."""
    return [start + i if i < live else -1 for i in range(rows)]


DEAD = [-1] * 8
TARGET = [
    pytest.param(Case([[0]]), id="first token"),
    *(pytest.param(Case([[n - 1]]), id=f"length {n}") for n in (63, 64, 65, 200)),
    pytest.param(Case([block(60, 8)]), id="block across a page border"),
    pytest.param(Case([block(0, 8)]), id="block at the start"),
    pytest.param(Case([block(0, 20, 20)]), id="chunk of three tiles"),
    pytest.param(Case([block(120, 5), DEAD, block(3, 8)]), id="shortened block, dead lane, other length"),
    pytest.param(Case([[7], [90]], heads=3, kv_heads=3), id="a K/V head for every head"),
    pytest.param(Case([[7], [90]], heads=9, kv_heads=3), id="three heads share one"),
    pytest.param(Case([[7], [90]], heads=8, kv_heads=1, head_dim=40), id="all heads share one"),
    pytest.param(Case([block(10, 8)], page_tokens=4), id="pages of four"),
]
BLOCK = [
    *(pytest.param(Case([block(start, 8)], causal=False), id=f"all of it, start {start}") for start in (0, 1, 64, 130)),
    pytest.param(Case([block(70, 8)], causal=True), id="causal"),
    pytest.param(Case([block(70, 8)], causal=False, window=5), id="window 5"),
    pytest.param(Case([block(70, 8)], causal=True, window=5), id="causal, window 5"),
    pytest.param(Case([block(70, 8)], causal=True, window=1), id="window 1: itself"),
    pytest.param(Case([block(66, 8)], causal=False, window=6), id="window across a page border"),
    pytest.param(Case([block(70, 8)], causal=False, window=500), id="window wider than the sequence"),
    pytest.param(Case([block(0, 8)], causal=True, window=3), id="no context, window 3"),
    pytest.param(Case([block(40, 3), DEAD, block(0, 8), block(9, 1)], causal=False), id="short blocks, a dead lane"),
    pytest.param(Case([block(30, 16, 16)], causal=False), id="block of 16"),
    pytest.param(Case([block(30, 5, 5)], causal=True), id="block of 5"),
    pytest.param(Case([block(6, 10, 10)], causal=False, page_tokens=4), id="block longer than a page"),
    pytest.param(Case([block(33, 8)], causal=False, heads=9, kv_heads=3, head_dim=24), id="three heads share one"),
]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("case", TARGET + BLOCK)
def test_equals_the_slow_restatement(case, act):
    case = replace(case, act=act)

    out = case.run()

    tolerance = {"rtol": 2e-5, "atol": 2e-6} if act is DType.F32 else {"rtol": 2.0**-8, "atol": 2e-6}
    np.testing.assert_allclose(out.astype(np.float64), case.slow(), **tolerance)
    dead = np.array(case.positions).reshape(-1) < 0
    assert not out[dead].any()


def test_probabilities_are_not_rounded():
    """Three equal scores and values 200, 0, 0: a third of 200 is 133.3/2 -> 66.5.

    A third in bf16 is 171/512; 200 of it is 66.797 = 133.6/2 and would give 67.
    """
    case = Case([[2]], heads=1, kv_heads=1, head_dim=1, page_tokens=4, act=DType.BF16, table=((0,),))

    def write(arena):
        arena[0, 0, 0, :, 0] = 0
        arena[0, 1, 0, :, 0] = [200, 0, 0, 55]

    assert case.run(spoil=write).tolist() == [[66.5]]
    assert float(BF16(200 * float(BF16(1 / 3)))) == 67


def test_query_is_scaled_in_fp32_before_the_product():
    """q = 3, scale 0.1, keys -16 and 0: the first weighs 1 / (1 + e**4.8) = 0.0081626, and 1024 of it is 133.7/16.

    0.3 in bf16 is 154/512: the score is then -4.8125, and the result 132.1/16 -> 8.25.
    """
    out = np.zeros((1, 1), BF16)
    arrays = {"q": np.array([[3]], BF16), "positions": np.array([1], np.int32), "slots": np.array([0], np.int32),
              "page_table": np.array([[0]], np.int32), "kv": np.array([-16, 0, 1024, 0], BF16).view(np.uint8),
              "out": out}
    call("dflash.attention/1", arrays, groups=1, block_rows=1, heads=1, kv_heads=1, head_dim=1, scale=0.1,
         act=DType.BF16, page_tokens=2, page_bytes=8, kv_pages=1, max_slots=1, max_pages=1)

    assert out.tolist() == [[8.375]]
    assert float(BF16(1024 / (1 + np.exp(16 * float(BF16(0.3)))))) == 8.25


LENGTHS = [1, 63, 64, 65, 200]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("causal", [pytest.param(None, id="target"), pytest.param(False, id="draft block")])
def test_sequence_gives_the_same_bytes_alone_and_in_a_batch(causal, act):
    together = Case([block(n - 1, 8) for n in LENGTHS], causal=causal, act=act)
    out, (keys, values), rows = together.run(), together.sequences(), together.rows()

    for lane, length in enumerate(LENGTHS):
        span = slice(lane * 8, lane * 8 + 8)
        alone = Case([block(length - 1, 8)], causal=causal, act=act, table=((3, 1, 5, 0),),
                     parts={name: array[span] for name, array in rows.items()})

        def write(arena, alone=alone, lane=lane):
            for index, page in enumerate(alone.table[0][: alone.pages_per_slot]):
                piece = slice(index * 64, index * 64 + 64)
                arena[page, 0] = keys[lane, piece].transpose(1, 0, 2)
                arena[page, 1] = values[lane, piece].transpose(1, 0, 2)

        assert alone.run(spoil=write).tobytes() == out[span].tobytes(), f"length {length}"


@pytest.mark.parametrize("act", ACTS)
def test_row_gives_the_same_bytes_in_a_decode_step_a_block_and_a_chunk(act):
    """What speculation rests on: verifying eight rows gives the bits of decoding one by one, and of prefilling."""
    chunk = Case([block(0, 200, 200)], act=act)
    expected = chunk.run()

    for position in (0, 7, 62, 63, 64, 65, 128, 199):
        for first, rows in ((position, 1), (max(position - 3, 0), 8)):
            row = position - first
            step = Case([block(first, min(rows, 200 - first), rows)], act=act, table=((3, 2, 1, 0),),
                        parts={"q": np.resize(chunk.rows()["q"][first:], (rows, 64))})

            def write(arena):
                arena[[3, 2, 1, 0]] = chunk.filled_arena(0.0)[[3, 2, 1, 0]]

            out = step.run(spoil=write)
            assert out[row].tobytes() == expected[position].tobytes(), f"position {position}, {rows} rows"


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("causal", [pytest.param(None, id="target"), pytest.param(False, id="draft block")])
@pytest.mark.parametrize("table", [((0, 1, 2, 3),), ((3, 2, 1, 0),), ((7, 0, 5, 2),)], ids=str)
def test_place_of_the_pages_does_not_matter(table, causal, act):
    case = Case([block(190, 8)], causal=causal, act=act)

    assert replace(case, table=table).run().tobytes() == case.run().tobytes()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38], ids=str)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("causal", [pytest.param(None, id="target"), pytest.param(False, id="draft block")])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_garbage_in_unused_pages_and_beyond_the_length_does_not_matter(length, causal, act, garbage, recwarn):
    case = Case([block(length - 1, 3)], causal=causal, act=act, table=((3, 1, 5, 0),))
    used = length + 2 if causal is None else length - 1

    def spoil(arena):
        for index, page in enumerate(case.table[0]):
            arena[page, :, :, max(used - index * 64, 0) :] = garbage

    assert case.run(garbage=garbage, spoil=spoil).tobytes() == case.run().tobytes()
    assert not recwarn.list


@pytest.mark.parametrize("garbage", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("causal", [None, False, True])
def test_garbage_in_dead_rows_does_not_matter(causal, garbage, recwarn):
    case = Case([block(60, 5), DEAD], causal=causal)
    spoiled = {name: array.copy() for name, array in case.rows().items()}
    for array in spoiled.values():
        array[5:] = garbage

    assert replace(case, parts=spoiled).run().tobytes() == case.run().tobytes()
    assert not recwarn.list
