"""Recipes say what is wrong with them, and describe the published families exactly."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import RecipeError

from exporter.recipe import Recipe, RecipeKind, load_recipe
from exporter.recipe_match import config_symbols, match_tensors
from exporter.recipe_shape import evaluate
from exporter.safetensors_header import TensorEntry

EXAMPLES = Path(__file__).parents[2] / "examples"


def entries(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(name, dtype, shape, "model.safetensors", 0, 2 * prod(shape))
        for name, shape in shapes.items()
    }


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "toy.txtpb"
    path.write_text(text)
    return path


def toy(tmp_path: Path, rows: str = "", head: str = "") -> Recipe:
    return load_recipe(written(tmp_path, BASE + head + rows))


BASE = """
name: "toy" kind: "target" architectures: "Toy"
symbols { name: "hidden" keys: "hidden_size" }
symbols { name: "layers" keys: "num_hidden_layers" }
symbols { name: "experts" keys: "num_experts" expression: "2" }
conversions { group: "online_mxfp8" values: "kda-input" values: "all" }
"""
PROJ = 'tensors { pattern: "layers.{layer}.proj" shape: "hidden" role: "mlp" groups: "online_mxfp8:all" }\n'
CONFIG = {"hidden_size": 4, "num_hidden_layers": 2}


# Shapes.

EXPRESSIONS = [
    ("number", "12", 12),
    ("symbol", "hidden", 576),
    ("precedence", "2 + 3 * 4", 14),
    ("left-to-right", "10 - 3 - 2", 5),
    ("parentheses", "(2 + 3) * 4", 20),
    ("division", "2 * taps * hidden / group", 144),
    ("no-spaces", "hidden/(taps*group)", 18),
]


@pytest.mark.parametrize(("text", "value"), [row[1:] for row in EXPRESSIONS], ids=[row[0] for row in EXPRESSIONS])
def test_shape_expression_has_its_value(text: str, value: int) -> None:
    assert evaluate(text, {"hidden": 576, "taps": 2, "group": 16}) == value


BAD_EXPRESSIONS = [
    ("remainder", "7 / 2", "7 / 2, which is no whole number"),
    ("zero", "7 / 0", "7 / 0, which is no whole number"),
    ("unknown-symbol", "width", "symbol width, which has no value"),
    ("open", "(1 + 2", "a parenthesis that is not closed"),
    ("ends-early", "1 +", "got the end"),
    ("empty", "", "got the end"),
    ("two-numbers", "1 2", "unexpected '2'"),
    ("call", "print(1)", "symbol print, which has no value"),
    ("attribute", "a.b", "unexpected '.'"),
    ("power", "2 ** 3", "unexpected '*'"),
    ("deep", "(" * 2000 + "1" + ")" * 2000, "nested deeper than 32"),
]


@pytest.mark.parametrize(
    ("text", "got"), [row[1:] for row in BAD_EXPRESSIONS], ids=[row[0] for row in BAD_EXPRESSIONS]
)
def test_shape_expression_that_cannot_be_evaluated_is_refused(text: str, got: str) -> None:
    with pytest.raises(RecipeError) as caught:
        evaluate(text, {})

    assert caught.value.code == "SHAPE_EXPRESSION"
    assert got in str(caught.value)
    assert caught.value.hint == "mend the expression in the recipe, or the numbers in config.json that it divides"


# Reading.

BROKEN = [
    ("no-protobuf", "name: ", "RECIPE_SYNTAX", "recipe is malformed"),
    ("unknown-field", BASE + "colour: 3", "RECIPE_SYNTAX", 'no field named "colour"'),
    ("unknown-kind", BASE.replace('"target"', '"encoder"') + PROJ, "RECIPE_RULE",
     "kind of a recipe: expected target or draft, got 'encoder'"),
    ("no-rows", BASE, "RECIPE_RULE", "recipe lacks a name, an architecture or tensors"),
    ("unknown-conversion", BASE + PROJ + 'conversions { group: "vision" values: "mxfp8" }', "RECIPE_RULE",
     "unknown conversion group: expected online_mxfp8, draft_body or draft_head, got vision"),
    ("conversion-without-value", BASE + PROJ + 'conversions { group: "draft_body" }', "RECIPE_RULE",
     "conversion draft_body declares no usable value"),
    ("unknown-format", BASE + PROJ + 'conversions { group: "draft_body" values: "mxfp6" }', "RECIPE_RULE",
     "expected mxfp8 or nvfp4, got mxfp6"),
    ("conversion-twice", BASE + PROJ + 'conversions { group: "online_mxfp8" values: "all" }', "RECIPE_RULE",
     "declared twice"),
    ("undeclared-scope", BASE + PROJ.replace(":all", ":mlp"), "RECIPE_RULE",
     "row layers.{layer}.proj names a conversion that the recipe does not declare: "
     "expected one of online_mxfp8:kda-input, online_mxfp8:all, got online_mxfp8:mlp"),
    ("scope-left-out", BASE + PROJ.replace(":all", ""), "RECIPE_RULE", "got online_mxfp8"),
    ("undeclared-group", BASE + PROJ.replace("online_mxfp8:all", "draft_body"), "RECIPE_RULE", "got draft_body"),
    ("no-fate", BASE + 'tensors { pattern: "a" role: "mlp" }', "RECIPE_RULE",
     "row a does not say what becomes of its tensors"),
    ("two-fates", BASE + 'tensors { pattern: "a" role: "mlp" keep_reason: "x" ignored: true }', "RECIPE_RULE",
     "expected groups, keep_reason or both; or ignored"),
    ("no-role", BASE + 'tensors { pattern: "a" keep_reason: "x" }', "RECIPE_RULE", "row a lacks a pattern or a role"),
    ("no-pattern", BASE + 'tensors { role: "mlp" keep_reason: "x" }', "RECIPE_RULE", "lacks a pattern or a role"),
    ("unknown-placeholder", BASE + PROJ.replace("{layer}", "{stage}"), "RECIPE_RULE",
     "unknown placeholder: expected {layer} or {expert} or {block}, got {stage}"),
    ("part-of-a-part", BASE + PROJ.replace("layers.{layer}", "layer_{layer}"), "RECIPE_RULE",
     "not a whole part of a name: expected placeholders between dots, as in layers.{layer}.norm.weight"),
    ("uncounted-placeholder", BASE.replace('name: "layers"', 'name: "depth"') + PROJ, "RECIPE_RULE",
     "uses {layer} without its count: expected a symbol layers"),
    ("unknown-symbol", BASE + PROJ.replace('"hidden"', '"width"'), "RECIPE_RULE",
     "uses a symbol that is not given before it: expected one of experts, hidden, layers, got width"),
    ("symbol-before-its-use", 'symbols { name: "a" keys: "a" expression: "hidden" }' + BASE + PROJ, "RECIPE_RULE",
     "symbol a uses a symbol that is not given before it"),
    ("symbol-twice", BASE + PROJ + 'symbols { name: "hidden" keys: "h" }', "RECIPE_RULE", "got hidden"),
    ("symbol-from-nowhere", BASE + PROJ + 'symbols { name: "x" }', "RECIPE_RULE", "lacks a name or a source"),
    ("row-twice", BASE + PROJ + PROJ, "RECIPE_RULE", "two rows have the same pattern and layer type"),
    ("bad-expression", BASE + PROJ.replace('"hidden"', '"hidden ^ 2"'), "SHAPE_EXPRESSION", "unexpected '^'"),
]


@pytest.mark.parametrize(("text", "code", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_recipe_that_breaks_a_rule_says_which(tmp_path: Path, text: str, code: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, text))

    assert caught.value.code == code
    assert caught.value.hint
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["gpt7", "../llama", "", "nowhere/x.txtpb"])
def test_recipe_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)

    assert caught.value.code == "RECIPE_UNKNOWN"


def test_unknown_recipe_lists_those_that_exist() -> None:
    known = "dflash, dflash2, kimi-k3, kimi-linear, llama, muse-glimmer, qwen3, qwen3.5-hybrid"

    with pytest.raises(RecipeError, match=re.escape(known)):
        load_recipe("gpt7")


# Symbols.

SYMBOLS = [
    ("first-key", {"hidden_size": 4, "text_config": {"hidden_size": 8}}, 8),
    ("second-key", {"hidden_size": 4}, 4),
    ("null-is-absent", {"hidden_size": 4, "text_config": {"hidden_size": None}}, 4),
    ("list-counts", {"hidden_size": [1, 8, 14]}, 3),
    ("expression", {}, 7),
]


@pytest.mark.parametrize(("config", "value"), [row[1:] for row in SYMBOLS], ids=[row[0] for row in SYMBOLS])
def test_symbol_takes_the_first_key_that_is_there(tmp_path: Path, config: dict[str, Any], value: int) -> None:
    text = BASE.replace('keys: "hidden_size"', 'keys: "text_config/hidden_size" keys: "hidden_size" expression: "3+4"')
    recipe = load_recipe(written(tmp_path, text + PROJ))

    assert config_symbols(recipe, {"num_hidden_layers": 2, **config})["hidden"] == value


BAD_CONFIGS = [
    ("missing", {"num_hidden_layers": 2}, "SYMBOL_MISSING", "expected hidden_size in config.json"),
    ("text", {"hidden_size": "4", "num_hidden_layers": 2}, "SYMBOL_VALUE", "got '4'"),
    ("boolean", {"hidden_size": True, "num_hidden_layers": 2}, "SYMBOL_VALUE", "got True"),
    ("negative", {"hidden_size": -4, "num_hidden_layers": 2}, "SYMBOL_VALUE", "got -4"),
    ("absurd", {"hidden_size": 4, "num_hidden_layers": 10**12}, "SYMBOL_VALUE", "config asks for too many layers"),
]


@pytest.mark.parametrize(
    ("config", "code", "message"), [row[1:] for row in BAD_CONFIGS], ids=[row[0] for row in BAD_CONFIGS]
)
def test_config_that_lacks_a_number_is_refused(
    tmp_path: Path, config: dict[str, Any], code: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        match_tensors(toy(tmp_path, PROJ), {}, config)

    assert caught.value.code == code
    assert caught.value.hint
    assert message in str(caught.value)


# Matching.


def test_every_tensor_that_does_not_fit_is_named_in_one_error(tmp_path: Path) -> None:
    recipe = toy(tmp_path, PROJ)
    tensors = entries({"layers.0.proj": (5,), "layers.2.proj": (4,), "layers.00.proj": (4,), "extra": (4,)})

    with pytest.raises(RecipeError) as caught:
        match_tensors(recipe, tensors, CONFIG)

    assert caught.value.code == "TENSORS_UNMATCHED"
    assert caught.value.got == (
        "matches no row: layers.2.proj, layers.00.proj, extra; missing: layers.1.proj; "
        "wrong shape: layers.0.proj: expected [4], got [5]"
    )


def test_long_lists_are_cut(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        match_tensors(toy(tmp_path, PROJ), entries({f"x{i}": (1,) for i in range(14)}),
                      {**CONFIG, "num_hidden_layers": 99999})

    assert "x11 and 2 more; missing: layers.0.proj" in str(caught.value)
    assert "layers.12.proj" not in str(caught.value)


def test_tensor_that_matches_two_rows_is_refused(tmp_path: Path) -> None:
    second = 'tensors { pattern: "layers.0.proj" shape: "hidden" role: "mlp" keep_reason: "first layer" }'

    with pytest.raises(RecipeError) as caught:
        match_tensors(toy(tmp_path, PROJ + second), entries({"layers.0.proj": (4,), "layers.1.proj": (4,)}), CONFIG)

    assert "matches two rows: layers.0.proj (layers.{layer}.proj and layers.0.proj)" in str(caught.value)


def test_number_in_a_pattern_stands_for_itself(tmp_path: Path) -> None:
    rows = 'tensors { pattern: "proj.{expert}.0.w" shape: "hidden" role: "mlp" keep_reason: "x" }'

    matched = match_tensors(toy(tmp_path, rows), entries({"proj.0.0.w": (4,), "proj.1.0.w": (4,)}), CONFIG)

    assert [(tensor.name, tensor.layer) for tensor in matched] == [("proj.0.0.w", None), ("proj.1.0.w", None)]
    with pytest.raises(RecipeError, match=r"matches no row: proj\.1\.1\.w; missing: proj\.1\.0\.w"):
        match_tensors(toy(tmp_path, rows), entries({"proj.0.0.w": (4,), "proj.1.1.w": (4,)}), CONFIG)


def test_optional_and_ignored_rows_may_be_absent_or_of_any_shape(tmp_path: Path) -> None:
    rows = PROJ + 'tensors { pattern: "inv_freq" role: "rotary" optional: true ignored: true }'
    both = entries({"layers.0.proj": (4,), "layers.1.proj": (4,)})

    assert len(match_tensors(toy(tmp_path, rows), both, CONFIG)) == 2
    assert len(match_tensors(toy(tmp_path, rows), both | entries({"inv_freq": (9,)}), CONFIG)) == 3


def test_prefix_may_be_carried_or_lacking(tmp_path: Path) -> None:
    recipe = toy(tmp_path, PROJ, 'name_prefixes: "model."\n')

    matched = match_tensors(recipe, entries({"model.layers.0.proj": (4,), "layers.1.proj": (4,)}), CONFIG)

    assert [(tensor.name, tensor.layer) for tensor in matched] == [("model.layers.0.proj", 0), ("layers.1.proj", 1)]


LAYERED = """
layer_types { name: "kda" keys: "layer_types" }
layer_types { name: "mla" keys: "layer_types" }
tensors { pattern: "layers.{layer}.g_proj" shape: "hidden" role: "kda" groups: "online_mxfp8:kda-input"
          layer_type: "kda" }
tensors { pattern: "layers.{layer}.g_proj" shape: "hidden" role: "mla" groups: "online_mxfp8:all" layer_type: "mla" }
"""


@pytest.mark.parametrize(
    ("layer_types", "roles"), [(["kda", "mla"], ["kda", "mla"]), (["mla", "kda"], ["mla", "kda"])],
    ids=["as-is", "swapped"],
)
def test_layer_type_and_not_the_name_decides(tmp_path: Path, layer_types: list[str], roles: list[str]) -> None:
    tensors = entries({"layers.0.g_proj": (4,), "layers.1.g_proj": (4,)})

    matched = match_tensors(toy(tmp_path, LAYERED), tensors, {**CONFIG, "layer_types": layer_types})

    assert [tensor.row.role for tensor in matched] == roles


def test_layer_of_no_declared_type_matches_nothing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"matches no row: layers\.1\.g_proj"):
        match_tensors(toy(tmp_path, LAYERED), entries({"layers.0.g_proj": (4,), "layers.1.g_proj": (4,)}),
                      {**CONFIG, "layer_types": ["kda", "ssm"]})


# The families.


def draft_shapes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, taps: int, vocab: int, *, two: bool
) -> dict[str, tuple[int, ...]]:
    """Tensors of a published draft, with 16 channels to a convolution group and 256 to a codebook row."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (heads * head_dim, hidden),
            f"{at}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{at}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{at}self_attn.q_norm.weight": (head_dim,), f"{at}self_attn.k_norm.weight": (head_dim,),
            f"{at}mlp.gate_proj.weight": (inner, hidden), f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
        if two:
            for conv in ("attention_conv", "mlp_conv"):
                shapes[f"{at}{conv}.base_kernel"] = (2, 2, hidden)
                shapes[f"{at}{conv}.kernel_projection.weight"] = (4 * (hidden // 16), hidden)
    if two:
        shapes |= {
            "candidate_selector.predecessor_codebook": (vocab, 256),
            "candidate_selector.successor_codebook": (vocab, 256),
            "candidate_selector.hidden_projection.weight": (256, hidden),
        }
    return shapes


def draft_config(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "dflash_config": {"target_layer_ids": [5, 19, 33, 47, 61], "conv_kernel_size": 2, "conv_group_size": 16,
                          "selector_rank": 256, "selector_top_k": 16},
    }


PUBLISHED = [
    ("Qwen3.8-27B-DFlash2", (5120, 17408, 5, 32, 8, 128), 248320, True, 81, 3_848_808_960),
    ("Muse-Glimmer-30B-DFlash2", (6656, 19968, 5, 32, 8, 128), 202048, True, 81, 5_544_319_488),
    ("DFlash-of-the-first-kind", (4096, 12288, 5, 32, 8, 128), 151936, False, 58, 2_097_252_864),
]


@pytest.mark.parametrize(
    ("sizes", "vocab", "two", "count", "nbytes"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED]
)
def test_published_drafts_are_described_to_the_byte(
    sizes: tuple[int, int, int, int, int, int], vocab: int, two: bool, count: int, nbytes: int
) -> None:
    tensors = entries(draft_shapes(*sizes, 5, vocab, two=two))

    matched = match_tensors(load_recipe("dflash2" if two else "dflash"), tensors, draft_config(*sizes, vocab))

    assert len(matched) == count
    assert sum(tensor.entry.nbytes for tensor in matched) == nbytes


def test_draft_roles_are_those_that_keep_or_change_precision() -> None:
    tensors = entries(draft_shapes(64, 128, 2, 4, 2, 16, 5, 96, two=True))

    matched = match_tensors(load_recipe("dflash2"), tensors, draft_config(64, 128, 2, 4, 2, 16, 96))

    roles = {tensor.name: (tensor.row.role, tensor.row.groups != ()) for tensor in matched}
    assert {name for name, (role, _) in roles.items() if role == "body"} == {
        "fc.weight",
        *(f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    }
    assert {role for role, converted in roles.values() if converted} == {"body"}
    assert {role for role, _ in roles.values()} == {"body", "normalization", "convolution", "selector"}
    assert roles["candidate_selector.hidden_projection.weight"][0] == "selector"
    assert roles["layers.1.mlp_conv.kernel_projection.weight"][0] == "convolution"


def test_absent_taps_are_one_for_each_draft_layer() -> None:
    config = draft_config(64, 128, 2, 4, 2, 16, 96)
    del config["dflash_config"]["target_layer_ids"]

    assert config_symbols(load_recipe("dflash2"), config)["taps"] == 2


def smollm2_shapes() -> dict[str, tuple[int, ...]]:
    lines = (EXAMPLES / "smollm2-135m" / "tensors.sha256").read_text().splitlines()
    return {name: tuple(json.loads(shape)) for _, name, _, shape in (line.split("  ") for line in lines)}


def test_llama_describes_smollm2() -> None:
    config = json.loads((EXAMPLES / "smollm2-135m" / "config.json").read_text())

    matched = match_tensors(load_recipe("llama"), entries(smollm2_shapes()), config)

    assert len(matched) == 272
    assert {tensor.row.fused_group for tensor in matched} == {"", "qkv", "gate_up"}
    assert matched[-1].row.role == "normalization"


def test_qwen3_is_llama_with_norms_on_q_and_k() -> None:
    config = json.loads((EXAMPLES / "smollm2-135m" / "config.json").read_text())
    norms = {f"model.layers.{layer}.self_attn.{name}_norm.weight": (64,) for layer in range(30) for name in "qk"}
    head: dict[str, tuple[int, ...]] = {"lm_head.weight": (49152, 576)}

    matched = match_tensors(load_recipe("qwen3"), entries(smollm2_shapes() | norms | head), config)

    assert len(matched) == 272 + 60 + 1
    with pytest.raises(RecipeError, match=r"missing: model\.layers\.0\.self_attn\.q_norm\.weight"):
        match_tensors(load_recipe("qwen3"), entries(smollm2_shapes()), config)
    with pytest.raises(RecipeError, match="matches no row"):
        match_tensors(load_recipe("llama"), entries(smollm2_shapes() | norms), config)


DENSE = {"online_mxfp8": ("all",), "draft_body": ("mxfp8",), "draft_head": ("nvfp4", "mxfp8")}
DECLARED = [
    ("llama", RecipeKind.TARGET, DENSE),
    ("qwen3", RecipeKind.TARGET, DENSE),
    ("dflash2", RecipeKind.DRAFT, {"draft_body": ("mxfp8",)}),
    ("dflash", RecipeKind.DRAFT, {}),
]


@pytest.mark.parametrize(("name", "kind", "conversions"), DECLARED, ids=[row[0] for row in DECLARED])
def test_shipped_recipe_declares_its_conversions(name: str, kind: RecipeKind, conversions: dict[str, Any]) -> None:
    recipe = load_recipe(name)

    assert (recipe.name, recipe.kind, recipe.forward_implemented) == (name, kind, True)
    assert recipe.conversions == conversions
