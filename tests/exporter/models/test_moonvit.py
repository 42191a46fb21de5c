"""Kimi K3's tower by its config: sizes, tensors, stored weights, and what is refused by name."""

import numpy as np
import pytest
import torch
from dflash_core.errors import CheckpointError, PlanError
from dflash_core.formats import Format

from exporter.config_fields import Fields
from exporter.models import moonvit
from exporter.models.moonvit import grid_rope_table, read_vision_config, vision_tensor_shapes, weight_specs
from runtime.vision.settings import ImageSettings
from tests.exporter.kimi_inventory import kimi_k3
from tests.tiny_vision import VISION, vision_config

# As published with Kimi K3.
PUBLISHED = {
    "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "init_pos_emb_height": 64, "init_pos_emb_time": 4,
    "init_pos_emb_width": 64, "linear_bias": False, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
    "mlp_type": "mlp2", "mm_hidden_size": 1024, "mm_projector_type": "patchmergerv2", "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False, "patch_size": 14, "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05,
    "qkv_hidden_size": 1536, "text_hidden_size": 7168, "vt_hidden_size": 1024, "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12, "vt_num_hidden_layers": 27,
}  # fmt: skip


def read(**changes):
    return read_vision_config(Fields({**PUBLISHED, **changes}, "config.json: vision_config"), 7168)


def test_published_config_has_the_published_tensors():
    """168 tensors of 0.4 billion weights, as the inventory that was written from published names has them."""
    listed = {name: entry.shape for name, entry in kimi_k3(1, 1).tensors.items()
              if name.startswith(("vision_tower.", "mm_projector."))}

    shapes = vision_tensor_shapes(read())

    assert len(shapes) == 168
    assert shapes == listed
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 447_358_976


def test_absent_fields_mean_what_the_published_code_takes():
    names = ("vt_hidden_size", "vt_intermediate_size", "vt_num_attention_heads", "vt_num_hidden_layers",
             "qkv_hidden_size")

    assert read_vision_config(Fields({name: PUBLISHED[name] for name in names}, "vision_config"), 7168) == read()


@pytest.mark.parametrize(
    ("changes", "code", "named", "got"),
    [
        ({"pos_emb_interpolation_mode": "bicubic"}, "VISION_UNSUPPORTED", "pos_emb_interpolation_mode", '"bicubic"'),
        ({"norm_type": "layernorm"}, "VISION_UNSUPPORTED", "norm_type", '"layernorm"'),
        ({"activation_func": "silu"}, "VISION_UNSUPPORTED", "activation_func", '"silu"'),
        ({"merge_kernel_size": [4, 4]}, "VISION_UNSUPPORTED", "merge_kernel_size", "[4, 4]"),
        ({"mm_projector_type": "patchmerger"}, "VISION_UNSUPPORTED", "mm_projector_type", '"patchmerger"'),
        ({"attn_bias": True}, "VISION_UNSUPPORTED", "attn_bias", "true"),
        ({"patch_embed_proj_bias": True}, "VISION_UNSUPPORTED", "patch_embed_proj_bias", "true"),
        ({"rope_theta": 500000.0}, "VISION_UNSUPPORTED", "rope_theta", "500000.0"),
        ({"qkv_hidden_size": 1530}, "FIELD_VALUE", "qkv_hidden_size", "1530"),
        ({"mm_hidden_size": 1152}, "FIELD_VALUE", "mm_hidden_size", "1152"),
        ({"text_hidden_size": 4096}, "FIELD_VALUE", "text_hidden_size", "4096"),
        ({"vt_num_hidden_layers": 0}, "FIELD_VALUE", "vt_num_hidden_layers", "0"),
        ({"vt_hidden_size": None}, "FIELD_MISSING", "vt_hidden_size", None),
        ({"projector_ln_eps": 0}, "FIELD_VALUE", "projector_ln_eps", "0"),
    ],
)  # fmt: skip
def test_refuses_another_tower_by_field(changes, code, named, got):
    with pytest.raises(CheckpointError) as refused:
        read(**changes)

    assert (refused.value.code, refused.value.got) == (code, got)
    assert named in refused.value.what
    assert "vision_config" in refused.value.where


def test_weights_are_stored_as_the_checkpoint_has_them_in_a_blob_of_their_own():
    config = vision_config()
    shapes = vision_tensor_shapes(config)
    specs = weight_specs(config, dict.fromkeys(shapes, Format.BF16), ImageSettings())

    assert [s.sources[0] for s in specs if s.data is None] == list(shapes)
    assert all(s.shape == shapes[s.sources[0]] and s.recipe == "copy/1" for s in specs if s.data is None)
    assert {(s.blob, s.owner, s.checkpoint) for s in specs} == {("vision", "vision", "target")}
    assert [(s.name, s.format, s.shape) for s in specs if s.data is not None] == [
        ("vision.pixel_table", Format.F32, (3, 256)), ("vision.rope_table", Format.F32, (512, 2, 8))]
    assert [s.name for s in specs[:4]] == ["vision.patch_embed", "vision.pos_emb", "vision.blocks.0.norm0",
                                           "vision.blocks.0.wqkv"]


@pytest.mark.parametrize("name", ["vision_tower.encoder.blocks.1.wqkv.weight", "mm_projector.proj.0.weight"])
@pytest.mark.parametrize("fmt", [Format.MXFP8, Format.NVFP4])
def test_refuses_to_convert_tower_or_projector(name, fmt):
    formats = {**dict.fromkeys(vision_tensor_shapes(vision_config()), Format.BF16), name: fmt}

    with pytest.raises(PlanError) as refused:
        weight_specs(vision_config(), formats, ImageSettings())

    assert (refused.value.code, refused.value.where, refused.value.got) == ("VISION_FORMAT", name, fmt.name)


@pytest.mark.parametrize(
    ("settings", "named", "expected", "got"),
    [
        (ImageSettings(patch_size=16), "patch_size", "14", "16"),
        (ImageSettings(merge_size=4), "merge_kernel_size", "2", "4"),
        (ImageSettings(max_side_patches=514), "patch_limit_on_one_side", "at most 512", "514"),
    ],
)
def test_refuses_a_processor_that_makes_other_patches(settings, named, expected, got):
    formats = dict.fromkeys(vision_tensor_shapes(vision_config()), Format.BF16)

    with pytest.raises(CheckpointError, match=named) as refused:
        weight_specs(vision_config(), formats, settings)

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("VISION_SETTINGS", expected, got)


def test_rope_table_holds_each_places_angles():
    table = grid_rope_table(128, 512)
    theta = 1.0 / 10000.0 ** (torch.arange(0, 128, 4).float() / 128)
    angles = (torch.arange(512).float()[:, None] * theta).double()

    assert table.shape == (512, 2, 32)
    assert torch.equal(table[:, 0], angles.cos().float())
    assert torch.equal(table[:, 1], angles.sin().float())
    assert (table[0].tolist(), table[1, 1, 0].item()) == ([[1.0] * 32, [0.0] * 32], pytest.approx(np.sin(1), abs=1e-7))


def test_epsilon_of_the_tower_is_fp32s():
    assert moonvit.NORM_EPS == 2.0**-23
    assert VISION.get("rms_norm_eps") is None
