"""Routing against transformers' router, experts against a plain loop, 4-bit experts against another library."""

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


def nvfp4_bytes(seed=0):
    """Random codes and block scales (no NaN) of both matrices, and a global scale of its own for each tensor."""
    rng = np.random.default_rng(seed)
    stored = {}
    for name, (rows, cols) in {"gate_up": (EXPERTS * 2 * INNER, WIDTH), "down": (EXPERTS * WIDTH, INNER)}.items():
        scales = rng.integers(0, 127, (rows, cols // 16), np.uint8) | rng.integers(0, 2, (rows, cols // 16),
                                                                                   np.uint8) << 7
        stored |= {name: rng.integers(0, 256, (rows, cols // 2), np.uint8), f"{name}_scale": scales}
    stored["gate_up_global"] = (2.0 ** rng.uniform(-14, -10, (EXPERTS, 2))).astype(np.float32)
    stored["down_global"] = (2.0 ** rng.uniform(-14, -10, EXPERTS)).astype(np.float32)
    return stored


def run_nvfp4(mixture, stored, activation=SITU, rows=slice(None)):
    x = np.ascontiguousarray(mixture.x[rows])
    out = np.full_like(x, -77)
    call("dflash.experts_nvfp4/1",
         {"x": x, "positions": mixture.positions[rows], "ids": np.ascontiguousarray(mixture.ids[rows]),
          "weights": np.ascontiguousarray(mixture.weights[rows]), "out": out, **stored},
         **shape(len(x), mixture.act), **activation)
    return out


def e2m1(nibble):
    """A code's value by the definition of the format: a sign, two bits of exponent (bias 1), one of mantissa."""
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if nibble & 8 else size


def e4m3(byte):
    """Likewise: a sign, four bits of exponent (bias 7), three of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if byte & 128 else size


def nvfp4_values(codes, scales, factors):
    """float64 weights [rows, cols], one by one; `factors` has a global scale per row."""
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    values = np.zeros((rows, cols))
    for n in range(rows):
        for k in range(cols):
            nibble = int(codes[n, k // 2]) >> 4 * (k % 2) & 15
            values[n, k] = e2m1(nibble) * e4m3(int(scales[n, k // 16])) * float(factors[n])
    return values


@pytest.mark.parametrize("activation", [SITU, SILU], ids=["situ", "silu"])
@pytest.mark.parametrize(("act", "bound"), [(F32, 2e-6), (BF16, 1e-2)], ids=str)
def test_nvfp4_experts_are_what_their_format_says(act, bound, activation):
    mixture, stored = Mixture(act), nvfp4_bytes()
    mixture.gate_up = nvfp4_values(stored["gate_up"], stored["gate_up_scale"],
                                   np.repeat(stored["gate_up_global"].reshape(-1), INNER))
    mixture.down = nvfp4_values(stored["down"], stored["down_scale"], np.repeat(stored["down_global"], WIDTH))
    expected = mixture.plain(activation)

    got = run_nvfp4(mixture, stored, activation).astype(np.float64)

    assert np.abs(got - expected).max() <= bound * np.abs(expected).max()
    assert not got[4].any()


def test_nvfp4_row_gives_the_same_bytes_alone_and_among_others():
    mixture, stored = Mixture(), nvfp4_bytes()
    together = run_nvfp4(mixture, stored)

    for row in range(ROWS):
        assert run_nvfp4(mixture, stored, rows=slice(row, row + 1)).tobytes() == together[row:row + 1].tobytes()


def test_nvfp4_global_scale_multiplies_the_sum_once_as_linear_nvfp4_does():
    mixture, stored = Mixture(), nvfp4_bytes()
    mixture.ids[:, 0], mixture.weights[...] = 3, [1, 0]
    mixture.ids[:, 1] = 5
    live = mixture.positions >= 0

    def linear(x, name, expert, factor):
        codes, scales = (stored[n].reshape(EXPERTS, -1, stored[n].shape[1])[expert] for n in (name, f"{name}_scale"))
        y = np.empty((len(x), len(codes)), np.float32)
        call("dflash.linear_nvfp4/1",
             {"x": x, "weight": codes, "block_scale": scales, "global_scale": np.float32([factor]), "out": y},
             rows=len(x), in_features=x.shape[1], out_features=len(codes), tile_rows=8, act=F32, result=F32)
        return y

    x = mixture.x[live]
    halves = [linear(x, "gate_up", 3, stored["gate_up_global"][3, i])[:, i * INNER:][:, :INNER] for i in range(2)]
    hidden = np.empty((len(x), INNER), np.float32)
    call("dflash.silu_mul/1", {"gate_up": np.hstack(halves), "out": hidden}, rows=len(x), cols=INNER, act=F32)
    expected = linear(hidden, "down", 3, stored["down_global"][3])

    assert run_nvfp4(mixture, stored, SILU)[live].tobytes() == expected.tobytes()


def test_nvfp4_experts_decode_as_compressed_tensors_does():
    """Real weights, quantized by the other library under global scales (which divide) that are powers of two, so that
    nothing rounds: its dequantized weights are those of `experts`, to the bit."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def quantized(weight, exponent):
        weight, divisor = torch.from_numpy(weight), torch.tensor([2.0**exponent])
        scale = (weight.reshape(len(weight), -1, 16).abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn)
        packed = NVFP4PackedCompressor.compress(
            {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": divisor}, scheme)
        codes, scale = packed["weight_packed"], packed["weight_scale"]
        values = dequantize(unpack_fp4_from_uint8(codes, *weight.shape, dtype=torch.float32), scale.float(), args=args,
                            global_scale=divisor, dtype=torch.float32)
        assert (values - weight).abs().max() < 0.2 * weight.abs().max()
        return codes.numpy(), scale.view(torch.uint8).numpy(), 1 / divisor.numpy(), values.numpy()

    mixture, stored = Mixture(), {}
    for name, parts, global_shape in (("gate_up", EXPERTS * 2, (EXPERTS, 2)), ("down", EXPERTS, (EXPERTS,))):
        made = [quantized(weight, 9 + i % 3) for i, weight in enumerate(np.split(getattr(mixture, name), parts))]
        codes, scales, factors, values = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
        stored |= {name: codes, f"{name}_scale": scales, f"{name}_global": factors.reshape(global_shape)}
        setattr(mixture, name, values)

    assert run_nvfp4(mixture, stored).tobytes() == mixture.run().tobytes()
