"""The recurrence's kernels against its CPU ops: rows, scan and commit, blocks of a prefill, dead rows, other starts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import CaptureError

from exporter.kernels.kda import conv_window, gated_norm, kda_commit, kda_rows, kda_scan
from exporter.kernels.kda_blocks import kda_blocks, kda_blocks_scan
from runtime.ops import DType
from tests.exporter.kernels.interpreter import Case, lower, same_bits
from tests.exporter.kernels.test_compile import MAX_SHARED_BYTES, check_compiles

BF16, F32 = ml_dtypes.bfloat16, np.float32
HISTORY = 3
TYPES = {np.float32: DType.F32, BF16: DType.BF16}


def kda_case(starts, lives, block_rows, *, heads=3, head_dim=24, bound=0.0, commit=None, weights=F32, empty=False):
    """A layer's ops over groups that start at these positions; `commit`, rows to keep per group, or None for all.
    `empty`: over arrays that take no memory."""
    rng = np.random.default_rng(0)
    groups, rows, width = len(starts), len(starts) * block_rows, heads * head_dim
    positions, kept = (np.full(rows, -1, np.int32) for _ in range(2))
    for g, (start, live) in enumerate(zip(starts, lives, strict=True)):
        positions[g * block_rows:g * block_rows + live] = start + np.arange(live)
        count = live if commit is None else commit[g]
        kept[g * block_rows:g * block_rows + count] = start + np.arange(count)
    slots = np.array([2 * g + 1 if live else -1 for g, live in enumerate(lives)], np.int32)
    max_slots = 2 * groups

    def normal(*shape):
        return np.broadcast_to(np.float32(0), shape) if empty else rng.standard_normal(shape).astype(np.float32)

    dead = np.float32(np.nan)
    arrays = {
        "inputs": normal(rows, 3 * width).astype(BF16), "window": normal(max_slots, HISTORY, 3 * width).astype(BF16),
        "conv": (0.5 * normal(3 * width, HISTORY + 1)).astype(weights), "decay": (2 * normal(rows, width)).astype(BF16),
        "beta": normal(rows, heads).astype(BF16), "a_log": normal(heads).astype(weights),
        "dt_bias": normal(width).astype(weights), "positions": positions, "kept": kept, "slots": slots,
        "state": normal(max_slots, heads, head_dim, head_dim), "qkv": np.full((rows, 3 * width), dead, BF16),
        "gate": normal(rows, width).astype(BF16), "norm": (1 + 0.1 * normal(head_dim)).astype(weights),
        "mixed": np.zeros((rows, width), BF16),
        **{n: np.full((rows, width), dead, F32) for n in ("log_decay", "out", "keys", "changes")},
        "strength": np.full((rows, heads), dead, F32)}
    per_head, grouped = {"heads": heads, "head_dim": head_dim}, {"groups": groups, "block_rows": block_rows}
    slotted = {**grouped, "max_slots": max_slots}
    conv = {**slotted, "channels": 3 * width, "history": HISTORY, "act": DType.BF16}
    ops = [("dflash.short_conv/1", {**conv, "w": TYPES[weights]}),
           ("dflash.kda_gates/1", {"rows": rows, **per_head, "lower_bound": bound, "act": DType.BF16,
                                   "a_w": TYPES[weights], "bias_w": TYPES[weights]}),
           ("dflash.kda_scan/1", {**slotted, **per_head, "act": DType.BF16}),
           ("dflash.gated_norm/1", {"rows": rows, **per_head, "eps": 1e-5, "act": DType.BF16, "w": TYPES[weights]}),
           ("dflash.conv_window/1", conv), ("dflash.kda_commit/1", {**slotted, **per_head})]
    names = {0: {"x": "inputs", "weight": "conv", "out": "qkv"}, 3: {"x": "out", "weight": "norm", "out": "mixed"},
             4: {"x": "inputs"}, 5: {}}
    if commit is not None:
        names[4] |= {"positions": "kept"}
        names[5] |= {"positions": "kept"}
    return Case(arrays, ops, names=names)


def assert_near(got, want, bound, equal=0.0):
    """Within `bound` of the largest magnitude, and this share of elements equal."""
    wide, expected = got.astype(np.float64), want.astype(np.float64)
    assert np.abs(wide - expected).max() <= bound * np.abs(expected).max()
    assert (wide == expected).mean() >= equal


CASES = [
    pytest.param([5], [1], 1, {}, id="decode"),
    pytest.param([0], [8], 8, {"bound": -5.0}, id="the first rows of a sequence, a bounded decay"),
    pytest.param([9, 0, 4], [4, 3, 0], 4, {}, id="two sequences, one shortened, beside an empty lane"),
    pytest.param([2], [7], 8, {"weights": BF16, "heads": 2, "head_dim": 16}, id="bf16 weights, a dead row"),
]


@pytest.mark.parametrize(("starts", "lives", "block_rows", "options"), CASES)
def test_a_step_that_keeps_all_its_rows(interpreter, starts, lives, block_rows, options):
    case = kda_case(starts, lives, block_rows, **options)
    with np.errstate(all="ignore"):
        got, want = interpreter.run("lower.lower_graph", case), case.expected()

    assert_near(got["qkv"], want["qkv"], 2.0**-7, 0.97)
    for name in ("log_decay", "strength", "keys", "out"):
        assert_near(got[name], want[name], 2e-6)
    assert_near(got["mixed"], want["mixed"], 2.0**-7, 0.97)
    assert_near(got["state"], want["state"], 2e-6)
    assert same_bits(got["window"], want["window"])
    untouched = np.arange(len(want["state"])) % 2 == 0
    assert same_bits(got["state"][untouched], case.arrays["state"][untouched])


@pytest.mark.parametrize("start", [0, 11])
def test_the_kept_rows_of_a_verified_block_leave_the_bits_of_decoding_them(interpreter, start):
    """For every count, with another sequence beside."""
    block_rows, size = 3, {"heads": 2, "head_dim": 16}
    states, windows, arrays = [], [], None
    full = kda_case([start, 3], [block_rows, 2], block_rows, commit=[0, 0], **size)
    for row in range(block_rows):
        one = kda_case([start + row], [1], 1, **size)
        rows = {n: a[row:row + 1] for n, a in full.arrays.items() if n not in ("window", "state", "conv", "a_log",
                                                                              "dt_bias", "norm", "positions", "kept",
                                                                              "slots")}
        fixed = {n: full.arrays[n] for n in ("conv", "a_log", "dt_bias", "norm", "window", "state")}
        held = {n: arrays[n] for n in ("window", "state")} if arrays else {}
        scalars = [(op, {**s, "max_slots": 4} if "max_slots" in s else s) for op, s in one.ops]
        arrays = interpreter.run("lower.lower_graph", Case(
            {**one.arrays, **rows, **fixed, **held}, scalars, names=one.names))
        states.append(arrays["state"][1])
        windows.append(arrays["window"][1])
        if row == 0:
            first = arrays
    for count in range(block_rows + 1):
        case = kda_case([start, 3], [block_rows, 2], block_rows, commit=[count, 1], **size)

        got = interpreter.run("lower.lower_graph", case)

        assert same_bits(got["out"][:1], first["out"])
        for name, wanted in (("state", states), ("window", windows)):
            before = case.arrays[name][1]
            assert same_bits(got[name][1], wanted[count - 1] if count else before), (name, count)


@pytest.mark.parametrize(("start", "live", "heads", "bound"), [(0, 70, 1, 0.0), (64, 37, 2, -5.0), (0, 1, 1, -5.0)])
def test_a_prefill_chunk_in_blocks_is_the_recurrence(interpreter, start, live, heads, bound):
    case = kda_case([start], [live], 70, heads=heads, head_dim=16, bound=bound)
    with np.errstate(all="ignore"):
        got, want = interpreter.run("lower.lower_graph", case), case.expected()

    assert_near(got["out"], want["out"], 1e-5)
    assert (got["out"][live:] == 0).all()
    assert_near(got["mixed"][:live], want["mixed"][:live], 2.0**-7, 0.97)
    assert_near(got["state"], want["state"], 3e-6)
    assert same_bits(got["window"], want["window"])


def test_a_state_does_not_depend_on_where_a_prompt_was_cut(interpreter):
    whole = kda_case([0], [66], 66, heads=1, head_dim=16)
    at_once = interpreter.run("lower.lower_graph", whole)
    held, out = {n: whole.arrays[n] for n in ("window", "state")}, []
    for first, last in ((0, 64), (64, 66)):
        part = kda_case([first], [last - first], 66, heads=1, head_dim=16)
        rows = {n: np.concatenate([whole.arrays[n][first:last], part.arrays[n][last - first:]])
                for n in ("inputs", "decay", "beta", "gate")}
        weights = {n: whole.arrays[n] for n in ("conv", "a_log", "dt_bias", "norm")}
        done = interpreter.run("lower.lower_graph", Case({**part.arrays, **weights, **rows, **held}, part.ops,
                                                         names=part.names))
        held = {n: done[n] for n in ("window", "state")}
        out.append(done["out"][:last - first])

    assert same_bits(held["state"], at_once["state"]) and same_bits(held["window"], at_once["window"])
    assert same_bits(np.concatenate(out), at_once["out"])


def functions(case):
    program, _, calls = case.recorded()
    return [launch.kernel.function for launch in lower("lower.lower_graph", calls, program)]


def test_a_commit_of_all_rows_joins_the_scan():
    assert functions(kda_case([5], [4], 4)) == [kda_rows, kda_scan, gated_norm, conv_window]
    assert functions(kda_case([5], [4], 4, commit=[2])) == [kda_rows, kda_scan, gated_norm, conv_window, kda_commit]
    assert functions(kda_case([64], [4], 80)) == [kda_rows, kda_blocks, kda_blocks_scan, gated_norm, conv_window]


def test_refuses_a_recurrence_in_another_order():
    case = kda_case([5], [4], 4)
    program, _, calls = case.recorded()

    with pytest.raises(CaptureError) as refused:
        lower("lower.lower_graph", [calls[0], calls[2], calls[1]], program)

    assert refused.value.code == "GPU_OP"


@pytest.mark.parametrize(("starts", "block_rows", "commit"), [([5], 8, [3]), ([5] * 8, 1, None), ([0], 512, None)])
def test_compiles_at_the_shapes_of_kimi_k3(starts, block_rows, commit, tmp_path):
    case = kda_case(starts, [1] * len(starts), block_rows, heads=96, head_dim=128, bound=-5.0, commit=commit,
                    empty=True)
    check_compiles("lower.lower_graph", case, tmp_path, most_shared=2 * MAX_SHARED_BYTES)  # a prefill's three stages
