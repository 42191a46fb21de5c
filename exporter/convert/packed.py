"""Weights that a checkpoint ships quantized already: which tensors belong together, in which format.

A published block format spreads one weight over several tensors: codes, block scales, perhaps a global scale. They are
recognised by names, dtypes and shapes that fit each other, never guessed from a config, and kept byte for byte.

    logical, packed = group_packed(checkpoint.tensors)
    packed["layers.1.experts.0.w1.weight"].kind         # PackedFormat.MXFP4
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dflash_core.errors import CheckpointError

from exporter.safetensors_header import TensorEntry

WEIGHT = ".weight"
# Suffixes of the tensors that accompany a weight's codes, in the order in which they are stored.
_COMPANIONS = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".input_scale",
               ".input_global_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".qzeros", ".scales",
               ".g_idx")
_CODES = (".weight_packed", ".qweight", WEIGHT)
_PLAIN = ("BF16", "F16", "F32")
_READ = "MXFP4 (u8 codes, u8 scales of 32), NVFP4 (u8 codes, F8_E4M3 scales of 16, F32 scale) or FP8 (F8_E4M3, " \
    "scales of 128 x 128)"
FP8_BLOCK = 128


class PackedFormat(Enum):
    """A block format that passes through. The value is the word that plans and reports use."""

    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4 as published"
    FP8_BLOCK = "fp8-block"

    @property
    def view_format(self) -> str:
        """What `TensorView.format` says of the codes."""
        return _VIEW_FORMATS[self]


_VIEW_FORMATS = {
    PackedFormat.MXFP4: "mxfp4-e2m1-ue8m0-k32", PackedFormat.NVFP4: "nvfp4-e2m1-e4m3-k16",
    PackedFormat.FP8_BLOCK: "fp8-e4m3-f32-b128x128",
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One quantized weight.

    Attributes:
        name: what the weight would be called if it were plain: it ends in `.weight`.
        kind: its format.
        shape: logical, [rows, cols].
        parts: checkpoint tensors, the codes first, then scales; kept in this order.
    """

    name: str
    kind: PackedFormat
    shape: tuple[int, ...]
    parts: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def entry(self) -> TensorEntry:
        """The weight as one entry, under its logical name and shape, with the format in place of a dtype."""
        codes = self.parts[0]
        return TensorEntry(self.name, self.kind.value, self.shape, codes.shard, codes.offset, self.nbytes)


def group_packed(
    tensors: Mapping[str, TensorEntry],
) -> tuple[Mapping[str, TensorEntry], Mapping[str, PackedWeight]]:
    """Bring the tensors of every quantized weight together.

    Returns:
        Entry by name, each quantized weight being one entry under its `.weight` name where its codes were; and the
        quantized weights by that name. Without any, `tensors` itself and nothing.
    Raises:
        CheckpointError: PACKED_UNKNOWN when codes and companions are not of a format that is read.
    """
    stems = dict.fromkeys(stem for name in tensors if (stem := _stem(name, tensors[name])) is not None)
    if not stems:
        return tensors, {}
    packed: dict[str, PackedWeight] = {}
    taken: dict[str, str] = {}
    for stem in stems:
        codes, companions = _members(stem, tensors)
        if codes is None:
            continue  # companions of nothing: matching names them
        weight = _recognised(stem, codes, companions)
        packed[weight.name] = weight
        taken |= {part.name: weight.name for part in weight.parts}
    logical: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        whole = taken.get(name)
        if whole is None:
            logical[name] = entry
        elif name == packed[whole].parts[0].name:
            logical[whole] = packed[whole].entry
    return logical, packed


def _stem(name: str, entry: TensorEntry) -> str | None:
    """The name without its suffix, for a tensor that can only belong to a quantized weight."""
    if name.endswith(WEIGHT):
        return name[: -len(WEIGHT)] if entry.dtype == "F8_E4M3" else None
    for suffix in (".weight_packed", ".qweight", ".weight_scale", ".weight_scale_inv"):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return None


def _members(stem: str, tensors: Mapping[str, TensorEntry]) -> tuple[TensorEntry | None, list[TensorEntry]]:
    codes = next((tensors[stem + suffix] for suffix in _CODES if stem + suffix in tensors), None)
    companions = [tensors[stem + suffix] for suffix in _COMPANIONS if stem + suffix in tensors]
    return codes, companions


def _recognised(stem: str, codes: TensorEntry, companions: Sequence[TensorEntry]) -> PackedWeight:
    by_suffix = {entry.name[len(stem):]: entry for entry in companions}
    for kind, shape, scales in _readings(codes, by_suffix):
        if set(by_suffix) == set(scales):
            return PackedWeight(stem + WEIGHT, kind, shape, (codes, *(by_suffix[suffix] for suffix in scales)))
    got = ", ".join(f"{entry.name[len(stem):]} {entry.dtype} {list(entry.shape)}" for entry in (codes, *companions))
    raise CheckpointError(
        "PACKED_UNKNOWN", "weight is quantized in a format that is not read", where=f"{stem} in {codes.shard}",
        expected=_READ, got=got, hint="take the checkpoint in BF16, or in one of these formats",
    )


def _readings(
    codes: TensorEntry, companions: Mapping[str, TensorEntry]
) -> Iterator[tuple[PackedFormat, tuple[int, ...], tuple[str, ...]]]:
    """Every format whose dtypes and shapes fit, with the logical shape and the suffixes that it takes."""
    if len(codes.shape) != 2:
        return
    rows, cols = codes.shape
    scale = companions.get(".weight_scale") or companions.get(".weight_scale_inv")
    if scale is None:
        return
    found = (codes.dtype, scale.dtype, scale.shape)
    name = ".weight_scale" if ".weight_scale" in companions else ".weight_scale_inv"
    if found == ("U8", "U8", (rows, cols // 16)) and cols % 16 == 0:
        yield PackedFormat.MXFP4, (rows, 2 * cols), (name,)
    if found == ("U8", "F8_E4M3", (rows, cols // 8)) and cols % 8 == 0:
        for globals_ in ((".weight_scale_2",), (".weight_global_scale",)):
            for inputs in ((), (".input_scale",), (".input_global_scale",)):
                if all(_is_scalar(companions.get(suffix)) for suffix in (*globals_, *inputs)):
                    yield PackedFormat.NVFP4, (rows, 2 * cols), (name, *globals_, *inputs)
    blocks = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    if codes.dtype == "F8_E4M3" and scale.dtype in _PLAIN and scale.shape == blocks:
        yield PackedFormat.FP8_BLOCK, (rows, cols), (name,)


def _is_scalar(entry: TensorEntry | None) -> bool:
    return entry is not None and entry.dtype == "F32" and entry.shape in ((), (1,))
