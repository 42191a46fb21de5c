"""Kimi delta attention against flash-linear-attention and transformers; and its state, which is kept to the bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dflash_core.errors import FormatError

from runtime.ops import DType, call
from runtime.ops.kda import softplus, unit_rows
from tests.oracles import fla_kda, kimi_numpy

HEADS, DIM, SLOTS = 3, 8, 4
P = HEADS * DIM
F32 = DType.F32


def random(*shape, seed=0, scale=1.0):
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(np.float32)


class Scan:
    """States of one layer. Slots hold NaN before: what a slot held is never read at position 0."""

    def __init__(self, rows=40, seed=0, act=F32):
        self.act = act
        self.qkv = random(rows, 3 * P, seed=seed).astype(act.numpy)
        self.log_decay = -np.abs(random(rows, P, seed=seed + 1, scale=0.3))
        self.strength = 1 / (1 + np.exp(-random(rows, HEADS, seed=seed + 2)))
        self.state = np.full((SLOTS, HEADS, DIM, DIM), np.nan, np.float32)
        self.records = {}

    def shape(self, groups, rows):
        return {"groups": groups, "block_rows": rows // groups, "heads": HEADS, "head_dim": DIM, "max_slots": SLOTS}

    def run(self, take, positions, slots):
        """Rows `take` (indices) at `positions`."""
        take = list(take)
        common = {"log_decay": self.log_decay[take], "positions": np.array(positions, np.int32),
                  "slots": np.array(slots, np.int32), "state": self.state}
        made = {name: np.full((len(take), P), -77, np.float32) for name in ("out", "keys", "changes")}
        call("dflash.kda_scan/1", {**common, **made, "qkv": self.qkv[take], "strength": self.strength[take]},
             act=self.act, **self.shape(len(slots), len(take)))
        self.records = {**common, "keys": made["keys"], "changes": made["changes"]}
        return made["out"]

    def keep(self, positions):
        slots = self.records["slots"]
        call("dflash.kda_commit/1", {**self.records, "positions": np.array(positions, np.int32)},
             **self.shape(len(slots), len(positions)))

    def step(self, take, positions, slots):
        out = self.run(take, positions, slots)
        self.keep(positions)
        return out

    def operands(self, rows):
        """q, k, v, g, beta of the first rows as float64 [T, H, D], q and k of unit length."""
        q, k, v = self.qkv[:rows].astype(np.float64).reshape(rows, 3, HEADS, DIM).transpose(1, 0, 2, 3)
        return (kimi_numpy.unit(q) * DIM ** -0.5, kimi_numpy.unit(k), v,
                self.log_decay[:rows].astype(np.float64).reshape(rows, HEADS, DIM), self.strength[:rows])


def relative(got, expected):
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def recorded(name, *shape):
    return np.float32(fla_kda.read()[name]).reshape(shape)


def test_scan_is_the_plain_recurrence_of_flash_linear_attention():
    rows, heads, dim = fla_kda.ROWS, fla_kda.HEADS, fla_kda.DIM
    q, k, v, g = (recorded(name, rows, heads, dim) for name in ("q", "k", "v", "g"))
    state = recorded("initial", 1, heads, dim, dim)
    shape = {"groups": 1, "block_rows": rows, "heads": heads, "head_dim": dim, "max_slots": 1}
    common = {"log_decay": g.reshape(rows, -1), "positions": np.arange(5, 5 + rows, dtype=np.int32),
              "slots": np.zeros(1, np.int32), "state": state}
    out, keys, changes = (np.empty((rows, heads * dim), np.float32) for _ in range(3))

    call("dflash.kda_scan/1", {**common, "qkv": np.stack([q, k, v], 1).reshape(rows, -1),
                               "strength": recorded("beta", rows, heads), "out": out, "keys": keys,
                               "changes": changes}, act=F32, **shape)
    call("dflash.kda_commit/1", {**common, "keys": keys, "changes": changes}, **shape)

    assert relative(out, recorded("out", rows, heads * dim)) <= 2e-6
    assert relative(state, recorded("state", 1, heads, dim, dim)) <= 2e-6


@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_scan_is_the_blocked_form_within_1e_5(chunk):
    scan = Scan(150)
    expected, state = kimi_numpy.chunk_scan(*scan.operands(150), np.zeros((HEADS, DIM, DIM)), chunk)

    out = scan.step(range(150), range(150), [0])

    assert relative(out.reshape(150, HEADS, DIM), expected) <= 1e-5
    assert relative(scan.state[0], state) <= 1e-5


def test_literal():
    """One head of one channel, k and q of length 1 up to 1e-6: S = 0.5 S + k * 0.5 (v - 0.5 S k), from S = 4 and v = 3.

    0.5 * 4 = 2; the change is 0.5 * (3 - 2) = 0.5; S = 2.5 and so is the output.
    """
    one = np.ones((1, 1), np.float32)
    state = np.full((1, 1, 1, 1), 4, np.float32)
    out, keys, changes = (np.empty((1, 1), np.float32) for _ in range(3))
    call("dflash.kda_scan/1",
         {"qkv": np.float32([[1000, 1000, 3]]), "log_decay": np.log(one * 0.5), "strength": one * 0.5,
          "positions": np.int32([7]), "slots": np.int32([0]), "state": state, "out": out, "keys": keys,
          "changes": changes}, groups=1, block_rows=1, heads=1, head_dim=1, max_slots=1, act=F32)

    assert (out[0, 0], keys[0, 0], changes[0, 0], state[0, 0, 0, 0]) == (2.5, 1, 0.5, 4)


@pytest.mark.parametrize("act", [DType.F32, DType.BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("cuts", [[40], [1] * 40, [7, 1, 25, 7]], ids=["whole", "one by one", "uneven"])
def test_any_cut_of_a_sequence_gives_the_same_bytes(cuts, act):
    whole = Scan(act=act)
    expected = whole.step(range(40), range(40), [2])

    scan, first = Scan(act=act), 0
    for count in cuts:
        rows = range(first, first + count)
        assert scan.step(rows, rows, [2]).tobytes() == expected[first:first + count].tobytes()
        first += count

    assert scan.state[2].tobytes() == whole.state[2].tobytes()
    assert np.isnan(scan.state[[0, 1, 3]]).all()


@pytest.mark.parametrize("start", [0, 1, 12], ids=lambda n: f"after {n}")
@pytest.mark.parametrize("kept", range(9))
def test_state_after_a_block_is_that_of_decoding_the_kept_rows(kept, start):
    """Eight rows of which some are kept: the committed state is untouched before, and afterwards to the bit that of
    going on row by row."""
    one_by_one, verified = Scan(), Scan()
    for scan in (one_by_one, verified):
        if start:
            scan.step(range(start), range(start), [3])
    for row in range(start, start + kept):
        one_by_one.step([row], [row], [3])
    before = verified.state.tobytes()

    verified.run(range(start, start + 8), range(start, start + 8), [3])
    assert verified.state.tobytes() == before
    verified.keep([start + i if i < kept else -1 for i in range(8)])

    assert verified.state.tobytes() == one_by_one.state.tobytes()


def test_lanes_use_their_own_slots_and_empty_lanes_change_nothing():
    alone = Scan()
    first, second = (alone.step(range(20, 24), range(4), [slot]) for slot in (0, 1))
    assert first.tobytes() == second.tobytes(), "the slot does not matter"

    scan = Scan()
    scan.step(range(10), range(10), [2])
    tail = scan.run(range(10, 14), range(10, 14), [2])
    out = scan.run([*range(20, 24), *range(30, 34), *range(10, 14)], [*range(4), -1, -1, -1, -1, *range(10, 14)],
                   [3, -1, 2])
    scan.keep([0, 1, 2, 3, -1, -1, -1, -1, 10, -1, -1, -1])

    assert out[:4].tobytes() == first.tobytes() and out[8:].tobytes() == tail.tobytes()
    assert not out[4:8].any()
    assert scan.state[3].tobytes() == alone.state[0].tobytes()
    assert np.isnan(scan.state[[0, 1]]).all()


def test_sequence_that_starts_in_a_used_slot_starts_from_zeros():
    fresh, used = Scan(), Scan()
    used.step(range(20, 30), range(10), [1])

    assert used.step(range(8), range(8), [1]).tobytes() == fresh.step(range(8), range(8), [1]).tobytes()
    assert used.state[1].tobytes() == fresh.state[1].tobytes()


# Gates.


def gates(raw, beta, a_log, dt_bias, lower_bound=0.0, act=F32):
    rows = len(raw)
    log_decay, strength = np.empty((rows, P), np.float32), np.empty((rows, HEADS), np.float32)
    call("dflash.kda_gates/1",
         {"decay": raw.astype(act.numpy), "beta": beta.astype(act.numpy), "a_log": a_log, "dt_bias": dt_bias,
          "log_decay": log_decay, "strength": strength}, rows=rows, heads=HEADS, head_dim=DIM, lower_bound=lower_bound,
         act=act, a_w=F32, bias_w=F32)
    return log_decay, strength


@pytest.mark.parametrize(("name", "bound"), [("gate", 0.0), ("bounded", -5.0)])
def test_gates_are_flash_linear_attentions(name, bound):
    rows, heads, dim = fla_kda.ROWS, fla_kda.HEADS, fla_kda.DIM
    log_decay, strength = np.empty((rows, heads * dim), np.float32), np.empty((rows, heads), np.float32)

    call("dflash.kda_gates/1",
         {"decay": recorded("raw", rows, heads * dim), "beta": recorded("beta", rows, heads),
          "a_log": recorded("a_log", heads), "dt_bias": recorded("dt_bias", heads * dim), "log_decay": log_decay,
          "strength": strength}, rows=rows, heads=heads, head_dim=dim, lower_bound=bound, act=F32, a_w=F32, bias_w=F32)

    np.testing.assert_allclose(log_decay, recorded(name, rows, heads * dim), rtol=2e-6, atol=1e-12)


def test_bounded_gate_is_transformers_and_no_clamp_of_the_other():
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate

    module = Glm5NextTextForgetGate(SimpleNamespace(linear_head_dim=DIM, linear_num_heads=HEADS, hidden_size=16,
                                                    linear_lower_bound=-5.0))
    torch.manual_seed(0)
    torch.nn.init.normal_(module.A_log)
    torch.nn.init.normal_(module.dt_bias)
    x = torch.randn(11, 16)
    with torch.no_grad():
        expected = module(x[None])[0].numpy()
        raw = module.f_b_proj(module.f_a_proj(x)).numpy()
    a_log, bias = module.A_log.detach().numpy().reshape(-1), module.dt_bias.detach().numpy().reshape(-1)

    log_decay, _ = gates(raw, random(11, HEADS), a_log, bias, -5.0)
    unbounded, _ = gates(raw, random(11, HEADS), a_log, bias)

    np.testing.assert_allclose(log_decay.reshape(11, HEADS, DIM), expected, rtol=1e-6)
    assert (log_decay < 0).all() and (log_decay > -5).all()
    assert relative(np.maximum(unbounded, -5), log_decay) > 0.1


def test_strength_and_decay_are_not_rounded_to_the_activation():
    """In bf16 the strength would be 0.5 + a multiple of 2**-8, and a decay of exp(-0.001) would be 1."""
    log_decay, strength = gates(np.full((1, P), -6.9), np.full((1, HEADS), 0.013), np.zeros(HEADS, np.float32),
                                np.zeros(P, np.float32), act=DType.BF16)

    assert strength[0, 0] == np.float32(1 / (1 + np.exp(-np.float64(DType.BF16.numpy.type(0.013)))))
    assert 0 < strength[0, 0] - 0.5 < 2.0**-8
    assert -0.0011 < log_decay[0, 0] < -0.0009


def test_softplus_is_exact_far_out_and_unit_rows_of_zeros_are_zeros():
    assert softplus(np.float32([-200, 0, 200])).tolist() == [0.0, pytest.approx(np.log(2), rel=1e-6), 200.0]
    assert unit_rows(np.zeros((1, 4), np.float32)).tolist() == [[0, 0, 0, 0]]
    assert unit_rows(np.float32([[3e-4, 4e-4]])).tolist() == [pytest.approx([3e-4 / np.sqrt(1.25e-6),
                                                                            4e-4 / np.sqrt(1.25e-6)], rel=1e-6)]


@pytest.mark.parametrize("bound", [1.0, np.nan, -np.inf])
def test_impossible_lower_bound_is_refused(bound):
    with pytest.raises(FormatError, match="lower bound"):
        gates(random(1, P), random(1, HEADS), random(HEADS), random(P), bound)


# The output norm.


@pytest.mark.parametrize("act", [DType.F32, DType.BF16], ids=["f32", "bf16"])
def test_output_norm_is_gated_by_a_sigmoid_and_rounded_once(act):
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated

    x, gate, weight = random(5, P), random(5, P, seed=1).astype(act.numpy), random(DIM, seed=2)
    module = KimiLinearRMSNormGated(DIM, eps=1e-5)
    module.weight.data = torch.from_numpy(weight)
    with torch.no_grad():
        expected = module(torch.from_numpy(x).view(5, HEADS, DIM),
                          torch.from_numpy(gate.astype(np.float32)).view(5, HEADS, DIM)).numpy()
    out = np.empty((5, P), act.numpy)

    call("dflash.gated_norm/1", {"x": x, "gate": gate, "weight": weight, "out": out}, rows=5, heads=HEADS,
         head_dim=DIM, eps=1e-5, act=act, w=F32)

    got = out.astype(np.float32).reshape(5, HEADS, DIM)
    assert relative(got, expected) <= (1e-6 if act is F32 else 2.0**-8)
    if act is DType.BF16:  # a value near a tie may round apart; rounding twice would differ in a quarter of them
        assert (got != expected.astype(act.numpy).astype(np.float32)).mean() < 0.02
