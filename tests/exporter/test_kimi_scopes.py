"""Which tensors each scope converts, over random small configs, restated here from the family's tensor table alone."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from dflash_core.effective import Origin
from dflash_core.errors import PlanError
from dflash_core.formats import Format

from exporter.plan import PrecisionPlan, PrecisionSettings, plan_precision
from exporter.recipe import load_recipe
from tests.exporter.kimi_inventory import Inventory, add
from tests.oracles.kimi_pair import K3, KIMI_LINEAR, published_name, text_shapes, vision_shapes

SCOPES = ["kda-input", "kda-input=full", "kda-input=qkv", "all"]
WIDTHS = (32, 48, 64, 80, 96)

KDA_QKV = r"layers\.(\d+)\.self_attn\.[qkv]_proj\.weight"
KDA_INPUT = r"layers\.(\d+)\.self_attn\.(q|k|v|g|g_a|f_a|b)_proj\.weight"
KDA_OUT = r"layers\.(\d+)\.self_attn\.o_proj\.weight"
MLA = r"layers\.(\d+)\.self_attn\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|g_proj|o_proj)\.weight"
MOE = r"layers\.\d+\.block_sparse_moe\.(shared_experts\.(gate|up|down)_proj|routed_expert_(down|up)_proj)\.weight"


def in_scope(name: str, scope: str, config: Mapping[str, Any]) -> bool:
    """Whether the table puts a tensor in a scope; `name` is bare."""
    text = config.get("text_config", config)
    layer = re.match(r"layers\.(\d+)\.", name)
    is_kda = layer is not None and int(layer[1]) + 1 in text["linear_attn_config"]["kda_layers"]
    if scope == "kda-input=qkv":
        return is_kda and re.fullmatch(KDA_QKV, name) is not None
    kda_input = is_kda and re.fullmatch(KDA_INPUT, name) is not None
    if scope in ("kda-input", "kda-input=full"):
        return kda_input
    if is_kda:
        return kda_input or re.fullmatch(KDA_OUT, name) is not None or re.fullmatch(MOE, name) is not None
    return re.fullmatch(MLA, name) is not None or re.fullmatch(MOE, name) is not None


def random_config(seed: int) -> dict[str, Any]:
    """A small config of either family, some of its widths no multiple of 32."""
    rng = random.Random(seed)
    family = rng.choice((KIMI_LINEAR, K3))
    layers = rng.randint(2, 7)
    mla = sorted(rng.sample(range(1, layers + 1), rng.randint(1, layers - 1)))
    text = dict(family.get("text_config", family))
    text |= {
        "num_hidden_layers": layers, "hidden_size": rng.choice(WIDTHS), "intermediate_size": rng.choice(WIDTHS),
        "kv_lora_rank": rng.choice(WIDTHS), "v_head_dim": rng.choice((8, 12, 16)),
        "num_attention_heads": rng.choice((2, 3, 4)), "moe_intermediate_size": rng.choice(WIDTHS),
        "first_k_dense_replace": rng.randint(0, layers - 1), "moe_layer_freq": rng.choice((1, 1, 2)),
        "num_experts": rng.choice((2, 4)), "num_shared_experts": rng.choice((1, 2)),
        "q_lora_rank": rng.choice(WIDTHS) if family is K3 or rng.random() < 0.5 else None,
        "linear_attn_config": {
            **text["linear_attn_config"], "kda_layers": [i for i in range(1, layers + 1) if i not in mla],
            "full_attn_layers": mla, "num_heads": rng.choice((2, 3)), "head_dim": rng.choice((16, 32, 48))}}
    if family is K3:
        text["routed_expert_hidden_size"] = rng.choice(WIDTHS)
        vision = {**K3["vision_config"], "text_hidden_size": text["hidden_size"]}
        return {**K3, "text_config": text, "vision_config": vision}
    return text


def planned(config: Mapping[str, Any], scope: str | None) -> PrecisionPlan:
    tensors: dict[str, Any] = {}
    for name, shape in text_shapes(config).items():
        add(tensors, published_name(config, name), "BF16", shape)
    if "vision_config" in config:
        for name, shape in vision_shapes(config).items():
            add(tensors, name, "BF16", shape)
    recipe = load_recipe("kimi-k3" if "text_config" in config else "kimi-linear")
    return plan_precision(Inventory(dict(config), tensors), recipe, None, None,
                          PrecisionSettings(online_mxfp8_scope=scope))


@pytest.mark.parametrize("scope", SCOPES)
def test_converted_tensors_are_those_of_the_table_whose_rows_divide(scope: str) -> None:
    seen = {"converted": 0, "too narrow": 0}
    for seed in range(60):
        config = random_config(seed)
        shapes = {published_name(config, name): (name, shape) for name, shape in text_shapes(config).items()}
        covered = {full: shape for full, (name, shape) in shapes.items() if in_scope(name, scope, config)}
        expected = {full for full, shape in covered.items() if shape[1] % 32 == 0}

        plan = planned(config, scope)

        assert {t.name for t in plan.target if t.format is Format.MXFP8} == expected, seed
        skipped = {t.name: t.reason for t in plan.skipped}
        narrow = {full: f"last dimension {shape[1]} is not divisible by 32" for full, shape in covered.items()
                  if shape[1] % 32}
        assert narrow.items() <= skipped.items(), seed
        assert all(t.format is not Format.MXFP8 for t in plan.target if t.name.startswith(("vision", "mm_")))
        seen["converted"] += len(expected)
        seen["too narrow"] += len(narrow)
    assert min(seen.values()) > 100


def test_scope_that_is_not_given_is_kda_input_in_full() -> None:
    formats = [{t.name: t.format for t in planned(K3, scope).target} for scope in (None, "kda-input", "kda-input=full")]
    assert formats[0] == formats[1] == formats[2]
    assert planned(K3, None).recorded.scope_origin is Origin.DEFAULT
    assert planned(K3, "kda-input=full").recorded.online_mxfp8_scope == "kda-input"
    assert planned(K3, "kda-input=qkv").recorded.online_mxfp8_scope == "kda-input=qkv"


@pytest.mark.parametrize("scope", ["kda-input=kv", "kda_input", "ALL", ""])
def test_unknown_scope_is_refused_by_name(scope: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(K3, scope)

    assert caught.value.code == "SCOPE_UNDECLARED"
    assert repr(scope) in str(caught.value) and "kda-input or kda-input=qkv or all" in str(caught.value)
