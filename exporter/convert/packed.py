"""Weights that a checkpoint ships quantized already: which tensors belong together, in which format.

A published block format spreads one weight over several tensors: codes, block scales, perhaps a global scale. They are
recognised by names, dtypes and shapes that fit each other, never guessed from a config, and kept byte for byte.

NVFP4 is published in two spellings that differ in what its global scale does: compressed-tensors'
(`nvfp4-pack-quantized`) `weight_packed`, `weight_scale` and `weight_global_scale`, which divides; and ModelOpt's
`weight`, `weight_scale` and `weight_scale_2`, which multiplies. Scales of activations are no part of the weight.

    logical, packed = group_packed(checkpoint.tensors)
    packed["layers.1.experts.0.w1.weight"].kind         # PackedFormat.MXFP4
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from dflash_core.errors import CheckpointError
from dflash_core.formats import Format

from exporter.safetensors_header import TensorEntry
from exporter.weights import GlobalScale, Raw, WeightSpec

WEIGHT = ".weight"
# The last parts of the names of a quantized weight's tensors, in the order in which they are stored: codes, the rest.
_CODES = ("weight_packed", "qweight", "weight")
_COMPANIONS = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale",
               "input_global_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "scales", "g_idx")
_MEMBERS = frozenset((*_CODES, *_COMPANIONS))
_SIGNS = frozenset(("weight_packed", "qweight", "weight_scale", "weight_scale_inv", "weight_scale_2",
                    "weight_global_scale"))  # of a quantized weight
# Names of codes, global scale and scale of the activations, and what the global scale does.
_NVFP4_SPELLINGS = (("weight_packed", "weight_global_scale", "input_global_scale", GlobalScale.DIVIDES),
                    ("weight", "weight_scale_2", "input_scale", GlobalScale.MULTIPLIES))
_UNPACKED = frozenset(("BF16", "F16", "F32", "F64"))
_PLAIN = ("BF16", "F32")
_STORED = {"U8": Raw.U8, "F8_E4M3": Raw.F8_E4M3, "F32": Format.F32, "BF16": Format.BF16}
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
        """The format in the manner of `TensorView.format`: elements, scales, block."""
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
        parts: checkpoint tensors in this order: codes, block scales, the global scale where the format has one, a
            scale of the activations where the checkpoint has one.
        global_scale: what the global scale does; None without one.
    """

    name: str
    kind: PackedFormat
    shape: tuple[int, ...]
    parts: tuple[TensorEntry, ...]
    global_scale: GlobalScale | None

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
    if {entry.dtype for entry in tensors.values()} <= _UNPACKED:
        return tensors, {}
    packed: dict[str, PackedWeight] = {}
    taken: dict[str, str] = {}
    readings: dict[_Signature, _Reading | None] = {}
    for stem, members in _groups(tensors).items():
        codes = next((members[last] for last in _CODES if last in members), None)
        if codes is None or not (_SIGNS & members.keys() or codes.dtype == "F8_E4M3"):
            continue  # a plain weight; or companions of nothing, which matching names
        signature = tuple((last, entry.dtype, entry.shape) for last, entry in members.items())
        if signature not in readings:
            readings[signature] = _recognised(members)
        reading = readings[signature]
        if reading is None:
            raise _unknown(stem, codes, members)
        name = stem + WEIGHT
        packed[name] = PackedWeight(name, reading.kind, reading.shape, tuple(members[last] for last in reading.order),
                                    reading.global_scale)
        taken |= {part.name: name for part in packed[name].parts}
    logical: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        whole = taken.get(name)
        if whole is None:
            logical[name] = entry
        elif name == packed[whole].parts[0].name:
            logical[whole] = packed[whole].entry
    return logical, packed


def kept_specs(weight: PackedWeight, name: str, blob: str, owner: str, checkpoint: str) -> list[WeightSpec]:
    """What a core stores of a quantized weight: every part byte for byte, as a plain view.

    Args:
        name: of the stored weight; a part adds its own suffix, as in `name.weight_scale`.
        blob, owner, checkpoint: as in `WeightSpec`.
    Returns:
        The codes first; `recipe` names the format, since no view of a core is in it.
    """
    stem = weight.name.removesuffix(WEIGHT)
    return [WeightSpec(name + part.name.removeprefix(stem), blob, owner, checkpoint, (part.name,),
                       f"keep/1+{weight.kind.view_format}", _STORED[part.dtype], part.shape) for part in weight.parts]


_Signature = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class _Reading:
    """What some tensors are together; `order` gives the last parts of their names as they are stored."""

    kind: PackedFormat
    shape: tuple[int, ...]
    order: tuple[str, ...]
    global_scale: GlobalScale | None = None


def _groups(tensors: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """Tensors that may belong together: by the name without its last part, then by that part."""
    groups: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in _MEMBERS:
            groups.setdefault(stem, {})[last] = entry
    return groups


def _recognised(members: Mapping[str, TensorEntry]) -> _Reading | None:
    """The one format whose dtypes and shapes these tensors have, with nothing missing or left over."""
    codes = next(last for last in _CODES if last in members)
    return next((reading for reading in _readings(codes, members) if set(members) == set(reading.order)), None)


def _readings(name: str, members: Mapping[str, TensorEntry]) -> Iterator[_Reading]:
    """Every format that codes of this name and their block scales fit."""
    codes = members[name]
    scale_name = next((last for last in ("weight_scale", "weight_scale_inv") if last in members), None)
    if len(codes.shape) != 2 or scale_name is None:
        return
    rows, cols = codes.shape
    scale = members[scale_name]
    found = (codes.dtype, scale.dtype, scale.shape)
    if found == ("U8", "U8", (rows, cols // 16)) and cols % 16 == 0:
        yield _Reading(PackedFormat.MXFP4, (rows, 2 * cols), (name, scale_name))
    if found == ("U8", "F8_E4M3", (rows, cols // 8)) and cols % 8 == 0 and scale_name == "weight_scale":
        for spelled, whole, inputs, applied in _NVFP4_SPELLINGS:
            scalars = tuple(last for last in (whole, inputs) if _is_scalar(members.get(last)))
            if name == spelled and whole in scalars:
                yield _Reading(PackedFormat.NVFP4, (rows, 2 * cols), (name, scale_name, *scalars), applied)
    blocks = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    if codes.dtype == "F8_E4M3" and scale.dtype in _PLAIN and scale.shape == blocks:
        yield _Reading(PackedFormat.FP8_BLOCK, (rows, cols), (name, scale_name))


def _is_scalar(entry: TensorEntry | None) -> bool:
    return entry is not None and entry.dtype == "F32" and entry.shape in ((), (1,))


def _unknown(stem: str, codes: TensorEntry, members: Mapping[str, TensorEntry]) -> CheckpointError:
    ordered = sorted(members, key=lambda last: (_CODES + _COMPANIONS).index(last))
    got = ", ".join(f".{last} {members[last].dtype} {list(members[last].shape)}" for last in ordered)
    return CheckpointError(
        "PACKED_UNKNOWN", "weight is quantized in a format that is not read", where=f"{stem} in {codes.shard}",
        expected=_READ, got=got, hint="take the checkpoint in BF16, or in one of these formats",
    )
