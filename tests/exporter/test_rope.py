"""Rope parameters are read from both spellings, and the table agrees with transformers."""

import hashlib
import math

import pytest
import torch
from dflash_core.errors import CheckpointError, ExitCode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from exporter.config_fields import Fields
from exporter.rope import (
    RopeParameters,
    RopeSpelling,
    RopeType,
    inverse_frequencies,
    read_rope,
    rope_table,
    rotary_dims,
)

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 4096}

TYPES = [
    pytest.param({"rope_type": "default", "rope_theta": 100000.0}, 64, id="default"),
    pytest.param({"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}, 128, id="linear"),
    pytest.param(LLAMA3, 128, id="llama3"),
    pytest.param({**LLAMA3, "factor": 32.0, "high_freq_factor": 2.5}, 64, id="llama3 other factors"),
    pytest.param(YARN, 128, id="yarn"),
    pytest.param({**YARN, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}, 128, id="yarn untruncated"),
    pytest.param({**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, 64, id="yarn mscale"),
    pytest.param({**YARN, "attention_factor": 1.25}, 64, id="yarn attention factor"),
    pytest.param({**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 16}, 32, id="yarn short ramp"),
]


def read(config, first=RopeSpelling.NESTED, head_dim=128):
    return read_rope(Fields(config, "config.json"), head_dim=head_dim, first=first)


def transformers_embedding(parameters, head_dim):
    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=4, head_dim=head_dim,
        max_position_embeddings=131072, rope_parameters=dict(parameters),
    )  # fmt: skip
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("parameters", "head_dim"), TYPES)
def test_frequencies_and_table_agree_with_transformers(parameters, head_dim):
    theirs = transformers_embedding(parameters, head_dim)
    positions = torch.tensor([0, 1, 2, 7, 100, 1023, 2047])

    rope, notices = read({"rope_parameters": parameters, "max_position_embeddings": 131072}, head_dim=head_dim)
    frequencies = inverse_frequencies(rope, head_dim)
    table = rope_table(rope, head_dim, 2048)[positions]

    cosines, sines = theirs(torch.zeros(1, dtype=torch.float32), positions[None])
    half = head_dim // 2
    assert notices == ()
    assert rope.attention_factor == theirs.attention_scaling
    # fp32 powers differ between processors by one unit in the last place; ours are rounded from float64.
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=2.5e-7, atol=0)
    same = frequencies == theirs.inv_freq
    assert same.float().mean() >= 0.9
    torch.testing.assert_close(table[:, 0][:, same], cosines[0, :, :half][:, same], rtol=0, atol=2.4e-7)
    torch.testing.assert_close(table[:, 1][:, same], sines[0, :, :half][:, same], rtol=0, atol=2.4e-7)


def test_table_holds_cosines_then_sines_of_position_times_frequency():
    rope = RopeParameters(RopeType.DEFAULT, theta=10000.0)

    table = rope_table(rope, head_dim=4, max_context=4)

    assert table.shape == (4, 2, 2)
    assert table.dtype == torch.float32
    assert table[0].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert table[3, 0].tolist() == pytest.approx([-0.9899924966, 0.9995500338], abs=6e-8)
    assert table[3, 1].tolist() == pytest.approx([0.1411200081, 0.0299954998], abs=6e-8)


def test_table_of_the_example_model_is_the_same_bytes_everywhere():
    rope = RopeParameters(RopeType.DEFAULT, theta=100000.0)

    digest = hashlib.sha256(rope_table(rope, 64, 512).numpy().tobytes()).hexdigest()

    assert digest == "fab0df4b5c50ae1882c7f384d4857fa7cb2603cff2c3800064844d408e1f67f5"


def test_long_table_agrees_with_short_one_across_chunks(monkeypatch):
    rope = RopeParameters(RopeType.DEFAULT, theta=10000.0)
    whole = rope_table(rope, 8, 50)
    monkeypatch.setattr("exporter.rope.CHUNK_POSITIONS", 16)

    assert torch.equal(rope_table(rope, 8, 50), whole)


def test_attention_factor_multiplies_the_table():
    rope = RopeParameters(RopeType.DEFAULT, theta=10000.0, attention_factor=1.5)

    table = rope_table(rope, head_dim=4, max_context=1)

    assert table[0].tolist() == [[1.5, 1.5], [0.0, 0.0]]


def test_partial_factor_takes_the_first_dims_of_the_head():
    rope, _ = read({"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, head_dim=8)

    assert rotary_dims(rope, 8) == 4
    assert inverse_frequencies(rope, 8).tolist() == pytest.approx([1.0, 0.01])


SPELLINGS = [
    pytest.param({"rope_theta": 1e6}, RopeParameters(RopeType.DEFAULT, 1e6), id="flat theta"),
    pytest.param({"rope_parameters": {"rope_theta": 1e7}}, RopeParameters(RopeType.DEFAULT, 1e7), id="nested theta"),
    pytest.param({"rope_scaling": {"rope_theta": 5e5}}, RopeParameters(RopeType.DEFAULT, 5e5), id="old nested theta"),
    pytest.param(
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
        RopeParameters(RopeType.LINEAR, 1e4, factor=2.0), id="old type key",
    ),
    pytest.param({"rope_theta": 1e4, "rope_scaling": None}, RopeParameters(RopeType.DEFAULT, 1e4), id="null is absent"),
    pytest.param({"rope_theta": 1e4, "rope_dim": 32}, RopeParameters(RopeType.DEFAULT, 1e4, 0.25), id="rope_dim"),
    pytest.param(
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        RopeParameters(RopeType.DEFAULT, 1e4, 0.5), id="nested partial factor",
    ),
    pytest.param(
        {"rope_theta": 5e4, "max_position_embeddings": 262144,
         "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768}},
        RopeParameters(RopeType.YARN, 5e4, 1.0, 8.0, 32768, attention_factor=0.1 * math.log(8.0) + 1.0),
        id="yarn factor from the context lengths",
    ),
    pytest.param(
        {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 1}},
        RopeParameters(RopeType.YARN, 5e4, 1.0, 1.0, 8192), id="yarn original context from max_position_embeddings",
    ),
    pytest.param(
        {"original_max_position_embeddings": 2048, "rope_parameters": LLAMA3},
        RopeParameters(RopeType.LLAMA3, 5e5, 1.0, 8.0, 2048, 1.0, 4.0), id="top-level original context wins",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), SPELLINGS)
def test_reads_every_spelling(config, expected):
    assert read(config) == (expected, ())


@pytest.mark.parametrize(
    ("first", "theta", "notice"),
    [
        pytest.param(
            RopeSpelling.FLAT, 10000.0, "rope_theta is 10000.0 and in the rope parameters 1000000.0: using 10000.0",
            id="flat first",
        ),
        pytest.param(
            RopeSpelling.NESTED, 1000000.0,
            "rope_theta is 10000.0 and in the rope parameters 1000000.0: using 1000000.0", id="nested first",
        ),
    ],
)  # fmt: skip
def test_disagreeing_spellings_give_a_notice_with_both_values(first, theta, notice):
    rope, notices = read({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, first)

    assert rope.theta == theta
    assert notices == (notice,)


REFUSALS = [
    pytest.param({}, "FIELD_MISSING", ["rope_theta or rope_parameters.rope_theta"], id="no theta"),
    pytest.param({"rope_theta": 1}, "FIELD_VALUE", ["rope_theta", "a number > 1"], id="theta of one"),
    pytest.param({"rope_theta": True}, "FIELD_VALUE", ["rope_theta", "finite number", "true"], id="boolean theta"),
    pytest.param(
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "ROPE_TYPE", ["default linear llama3 yarn", '"dynamic"'], id="dynamic",
    ),
    pytest.param(
        {"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, "ROPE_TYPE", ['"longrope"'], id="longrope",
    ),
    pytest.param(
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "default"}},
        "ROPE_CONFLICT", ["rope_parameters and rope_scaling", "differ"], id="two disagreeing objects",
    ),
    pytest.param(
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "ROPE_LAYERED", ["per layer type"], id="layered",
    ),
    pytest.param(
        {"rope_theta": 1e4, "rope_scaling": {"mrope_section": [16, 24, 24]}}, "ROPE_MULTIMODAL", ["mrope"], id="mrope",
    ),
    pytest.param(
        {"rope_theta": 1e4, "partial_rotary_factor": 0.008}, "ROPE_DIMS", ["even number up to 128", "hint: download"],
        id="one dim",
    ),
    pytest.param({"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "ROPE_DIMS", ["192"], id="more than the head"),
    pytest.param(
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_dim": 32}, "FIELD_VALUE", ["rope_dim", "64"],
        id="rope_dim contradicts the factor",
    ),
    pytest.param({"rope_theta": 1e4, "rope_scaling": "yarn"}, "FIELD_VALUE", ["an object"], id="rope is a string"),
    pytest.param(
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "FIELD_MISSING", ["factor"], id="no factor",
    ),
    pytest.param(
        {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "FIELD_VALUE", ["above low_freq_factor 1"],
        id="llama3 factors equal",
    ),
    pytest.param(
        {"rope_parameters": {**YARN, "beta_slow": 40.0}}, "FIELD_VALUE", ["beta_fast", "≥ beta_slow 40"],
        id="yarn betas reversed",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "code", "words"), REFUSALS)
def test_refuses_rope_that_it_would_get_wrong(config, code, words):
    with pytest.raises(CheckpointError) as caught:
        read(config)

    assert caught.value.code == code
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert caught.value.hint
    assert all(word in str(caught.value) for word in words), str(caught.value)
