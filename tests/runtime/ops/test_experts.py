"""Routing against transformers' router, experts against a plain loop, and MXFP4 experts against another library."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from dflash_core.errors import FormatError

from runtime.ops import DType, call

ROWS, WIDTH, INNER, EXPERTS, TOP = 9, 64, 32, 8, 2
F32, BF16 = DType.F32, DType.BF16
SITU = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
SILU = {"situ_beta": 0.0, "situ_linear_beta": 0.0}


def random(*shape, seed=0, scale=1.0):
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(np.float32)


def route(logits, bias, top=TOP, groups=1, top_groups=1, renormalize=1, scale=1.0):
    rows, experts = logits.shape
    ids, weights = np.empty((rows, top), np.int32), np.empty((rows, top), np.float32)
    call("dflash.route/1", {"logits": logits, "bias": bias, "ids": ids, "weights": weights}, rows=rows, experts=experts,
         top_k=top, groups=groups, top_groups=top_groups, renormalize=renormalize, scale=scale, w=F32)
    return ids, weights


ROUTERS = [
    pytest.param(1, 1, True, 2.446, id="one group"), pytest.param(4, 2, True, 1.0, id="two of four groups"),
    pytest.param(2, 1, False, 2.5, id="not renormalized"),
]


@pytest.mark.parametrize(("groups", "top_groups", "renormalize", "scale"), ROUTERS)
def test_choice_and_weights_are_those_of_transformers(groups, top_groups, renormalize, scale):
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearTopkRouter

    module = KimiLinearTopkRouter(SimpleNamespace(
        num_experts_per_tok=3, num_local_experts=16, hidden_size=8, routed_scaling_factor=scale, n_group=groups,
        topk_group=top_groups, norm_topk_prob=renormalize))
    x = torch.from_numpy(random(50, 8))
    module.weight.data = torch.from_numpy(random(16, 8, seed=1))
    module.e_score_correction_bias = torch.from_numpy(random(16, seed=2, scale=0.3))
    with torch.no_grad():
        logits, expected_weights, expected_ids = module(x)

    ids, weights = route(logits.numpy(), module.e_score_correction_bias.numpy(), 3, groups, top_groups,
                         int(renormalize), scale)

    order = expected_ids.argsort(-1)
    assert np.sort(ids, -1).tolist() == expected_ids.gather(1, order).tolist()
    np.testing.assert_allclose(np.take_along_axis(weights, ids.argsort(-1), 1),
                               expected_weights.gather(1, order).numpy(), rtol=1e-6)


def test_equal_experts_are_taken_by_ascending_id_and_the_bias_does_not_weigh():
    ids, weights = route(np.zeros((1, 6), np.float32), np.float32([0, 0, 1, 0, 1, 0]), 3, scale=3.0)

    assert (ids.tolist(), weights.tolist()) == ([[2, 4, 0]], [[1.0, 1.0, 1.0]])


@pytest.mark.parametrize("counts", [{"groups": 3}, {"groups": 4, "top_groups": 5}, {"top": 9},
                                    {"groups": 8, "top_groups": 4}, {"groups": 0, "top_groups": 0}], ids=str)
def test_impossible_choice_is_refused(counts):
    with pytest.raises(FormatError, match="cannot be made"):
        route(random(1, EXPERTS), random(EXPERTS), **counts)


class Mixture:
    """Experts, rows and their choice; row 4 is dead and full of NaN."""

    def __init__(self, act=F32, w=F32, seed=0):
        self.act, self.w = act, w
        self.gate_up = random(EXPERTS * 2 * INNER, WIDTH, seed=seed, scale=0.2).astype(w.numpy)
        self.down = random(EXPERTS * WIDTH, INNER, seed=seed + 1, scale=0.2).astype(w.numpy)
        self.x = random(ROWS, WIDTH, seed=seed + 2).astype(act.numpy)
        self.positions = np.arange(ROWS, dtype=np.int32)
        self.ids, self.weights = route(random(ROWS, EXPERTS, seed=seed + 3), np.zeros(EXPERTS, np.float32))
        self.x[4], self.positions[4] = np.nan, -1

    def run(self, rows=slice(None), activation=SITU):
        x = np.ascontiguousarray(self.x[rows])
        out = np.full(x.shape, -77, self.act.numpy)
        call("dflash.experts/1",
             {"x": x, "positions": self.positions[rows], "ids": np.ascontiguousarray(self.ids[rows]),
              "weights": np.ascontiguousarray(self.weights[rows]), "gate_up": self.gate_up, "down": self.down,
              "out": out}, w=self.w, **shape(len(x), self.act), **activation)
        return out

    def plain(self, activation):
        """In float64, expert by expert."""
        gate_up = self.gate_up.astype(np.float64).reshape(EXPERTS, 2, INNER, WIDTH)
        down = self.down.astype(np.float64).reshape(EXPERTS, WIDTH, INNER)
        out = np.zeros((ROWS, WIDTH))
        for row in (r for r in range(ROWS) if r != 4):
            for e, weight in zip(self.ids[row], self.weights[row], strict=True):
                gate, up = gate_up[e] @ self.x[row].astype(np.float64)
                hidden = gate / (1 + np.exp(-gate)) * up
                if activation is SITU:
                    hidden = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
                out[row] += weight * (down[e] @ hidden)
        return out


def shape(rows, act):
    return {"rows": rows, "width": WIDTH, "inner": INNER, "experts": EXPERTS, "top_k": TOP, "act": act}


@pytest.mark.parametrize("activation", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize(("act", "w", "bound"), [(F32, F32, 2e-6), (F32, BF16, 2e-6), (BF16, BF16, 1e-2)], ids=str)
def test_mixture_is_the_weighted_sum_of_the_chosen_experts(act, w, bound, activation):
    mixture = Mixture(act, w)
    expected = mixture.plain(activation)

    got = mixture.run(activation=activation).astype(np.float64)

    assert np.abs(got - expected).max() <= bound * np.abs(expected).max()
    assert not got[4].any()


@pytest.mark.parametrize("act", [F32, BF16], ids=["f32", "bf16"])
def test_row_gives_the_same_bytes_alone_and_among_others(act):
    mixture = Mixture(act)
    together = mixture.run()

    for row in range(ROWS):
        assert mixture.run(slice(row, row + 1)).tobytes() == together[row:row + 1].tobytes()
    assert mixture.run(slice(None, None, -1)).tobytes() == together[::-1].tobytes()


def test_mxfp4_experts_decode_as_compressed_tensors_does():
    """Codes and scales from the other library's decoder: bytes are random, its values are the weights of `experts`."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rng = np.random.default_rng(0)
    mixture, stored, plain = Mixture(), {}, {}
    for name, (rows, cols) in {"gate_up": (EXPERTS * 2 * INNER, WIDTH), "down": (EXPERTS * WIDTH, INNER)}.items():
        codes = rng.integers(0, 256, (rows, cols // 2), np.uint8)
        scales = rng.integers(118, 128, (rows, cols // 32), np.uint8)
        values = unpack_fp4_from_uint8(torch.from_numpy(codes), rows, cols, dtype=torch.float32).numpy()
        plain[name] = values * np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, axis=1)
        stored |= {name: codes, f"{name}_scale": scales}
    mixture.gate_up, mixture.down = plain["gate_up"], plain["down"]
    out = np.empty_like(mixture.x)

    call("dflash.experts_mxfp4/1", {"x": mixture.x, "positions": mixture.positions, "ids": mixture.ids,
                                    "weights": mixture.weights, "out": out, **stored}, **shape(ROWS, F32), **SITU)

    assert out.tobytes() == mixture.run().tobytes()
