"""Merge the tables of several cores: one numbering for symbols, blobs, modules, device targets, kernels and buffers.

    tables = Tables.of(inputs)
    for _, merge in STAGES:
        merge(tables, inputs)
    tables.maps[1].buffer[7]                 # where buffer 7 of the second input is now

Entries merge by name (files by digest) when their content is equal, and are refused by name when it is not. The first
input keeps the order of its ids.
Source: docs/compatibility.md, "Which cores combine".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.manifest_pb2 import IoBinding
from dflash_core.v1.weights_pb2 import TensorView, WeightBlob
from google.protobuf.message import Message

from exporter.combine_batch import merge_bindings
from exporter.combine_inputs import Input
from exporter.weights import FIRST_BLOB_ID

_TELLING = ("dtype", "shape", "format")
_MOST_TEXT = 80
_LOCATION = ("blob_id", "offset_bytes")
_MEANING_OF_ABSENCE = {("TensorView", "owner"): "target"}
_SAME_RELEASE = "export both with the same release"

M = TypeVar("M", bound=Message)
Join = Callable[[M, M, tuple[str, str]], None]


@dataclass(frozen=True, slots=True)
class IdMaps:
    """One input's ids -> ids in the combined core."""

    symbol: dict[int, int] = field(default_factory=dict)
    blob: dict[int, int] = field(default_factory=dict)
    module: dict[int, int] = field(default_factory=dict)
    target: dict[int, int] = field(default_factory=dict)
    kernel: dict[int, int] = field(default_factory=dict)
    buffer: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Tables:
    """The merged tables, filled one stage after another, and where each input's entries went."""

    maps: tuple[IdMaps, ...]
    symbols: list[g.Symbol] = field(default_factory=list)
    blobs: list[WeightBlob] = field(default_factory=list)
    views: list[TensorView] = field(default_factory=list)
    modules: list[g.KernelModule] = field(default_factory=list)
    targets: list[g.DeviceTarget] = field(default_factory=list)
    kernels: list[g.Kernel] = field(default_factory=list)
    buffers: list[g.Buffer] = field(default_factory=list)
    bindings: list[IoBinding] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: Sequence[Input]) -> Tables:
        """Empty tables for these inputs."""
        return cls(tuple(IdMaps() for _ in inputs))


def merge_symbols(tables: Tables, inputs: Sequence[Input]) -> None:
    """By name; the range is what all cores allow, the default the largest.

    Raises:
        CompatibilityError: COMBINE_SYMBOL.
    """
    def join(kept: g.Symbol, other: g.Symbol, cores: tuple[str, str]) -> None:
        if kept.width != other.width:
            raise conflict("COMBINE_SYMBOL", "a symbol has two widths", cores, kept.name, kept.width, other.width,
                           _SAME_RELEASE)
        kept.minimum, kept.maximum = max(kept.minimum, other.minimum), min(kept.maximum, other.maximum)
        if kept.minimum > kept.maximum:
            raise conflict("COMBINE_SYMBOL", "no value of a symbol suits both", cores, kept.name,
                           f"at least {kept.minimum}", f"at most {kept.maximum}", "export both with one --max-context")
        if kept.HasField("default_value") and other.HasField("default_value"):
            kept.default_value = max(kept.default_value, other.default_value)
        else:
            kept.ClearField("default_value")

    _unify(tables, inputs, "symbol", tables.symbols, lambda symbol: symbol.name, join=join)


def merge_blobs(tables: Tables, inputs: Sequence[Input]) -> None:
    """Equal weight files become one."""
    def join(kept: WeightBlob, other: WeightBlob, cores: tuple[str, str]) -> None:
        kept.alignment = max(kept.alignment, other.alignment)

    _unify(tables, inputs, "blob", tables.blobs,
           lambda blob: (blob.file.digest, blob.HasField("rank"), blob.rank), join=join, first_id=FIRST_BLOB_ID,
           entries="weight_blobs")


def merge_views(tables: Tables, inputs: Sequence[Input]) -> None:
    """Tensors of one name merge when content and place are equal; content is compared first, in all of them.

    Raises:
        CompatibilityError: COMBINE_TENSOR, with the first field that differs.
    """
    known: dict[str, tuple[str, TensorView]] = {}
    elsewhere: CompatibilityError | None = None
    for item, maps in zip(inputs, tables.maps, strict=True):
        for view in item.manifest.tensor_views:
            moved = _copy(view)
            moved.blob_id = maps.blob[view.blob_id]
            label, kept = known.setdefault(view.name, (item.label, moved))
            if kept is moved:
                tables.views.append(moved)
                continue
            differs = first_field(kept, moved, first=_TELLING, last=_LOCATION)
            if differs is None:
                continue
            error = conflict(
                "COMBINE_TENSOR", "equal tensors lie elsewhere" if differs in _LOCATION else "a tensor differs",
                (label, item.label), f"{view.name}, {differs}", field_text(kept, differs), field_text(moved, differs),
                "export both from the same checkpoints, with the same precision settings and --max-context")
            if differs not in _LOCATION:
                raise error
            elsewhere = elsewhere or error
    if elsewhere is not None:
        raise elsewhere


def merge_modules(tables: Tables, inputs: Sequence[Input]) -> None:
    """Modules of equal content become one, and so does a CPU registry.

    Raises:
        CompatibilityError: COMBINE_REGISTRY, two versions of one CPU registry.
    """
    def key(module: g.KernelModule) -> Hashable:
        return module.registry if module.kind == g.CPU_REGISTRY else _content(module, "module_id")

    def join(kept: g.KernelModule, other: g.KernelModule, cores: tuple[str, str]) -> None:
        differs = first_field(kept, other, ignore=("module_id",))
        if differs is not None:
            raise conflict("COMBINE_REGISTRY", "the cores name two versions of the CPU ops", cores,
                           f"registry {kept.registry}, {differs}", field_text(kept, differs),
                           field_text(other, differs), _SAME_RELEASE)

    _unify(tables, inputs, "module", tables.modules, key, join=join)


def merge_targets(tables: Tables, inputs: Sequence[Input]) -> None:
    """Device targets by name: all modules, and the stricter of every requirement.

    Raises:
        CompatibilityError: COMBINE_DEVICE, graphs that are sized to different devices.
    """
    def move(maps: IdMaps, target: g.DeviceTarget) -> None:
        target.module_ids[:] = [maps.module[module_id] for module_id in target.module_ids]

    def join(kept: g.DeviceTarget, other: g.DeviceTarget, cores: tuple[str, str]) -> None:
        kept.module_ids[:] = list(dict.fromkeys([*kept.module_ids, *other.module_ids]))
        kept.device_features[:] = sorted({*kept.device_features, *other.device_features})
        exact = {t.exact_sm_count for t in (kept, other) if t.HasField("exact_sm_count")}
        least = max(kept.min_sm_count, other.min_sm_count)
        if len(exact) > 1 or any(count < least for count in exact):
            raise conflict("COMBINE_DEVICE", "graphs are sized to different devices", cores, f"target {kept.name}",
                           _sm_text(kept), _sm_text(other), "export both on the same device")
        for name in ("min_sm_count", "min_shared_optin_bytes"):
            if kept.HasField(name) or other.HasField(name):
                setattr(kept, name, max(getattr(kept, name), getattr(other, name)))
        for count in exact:
            kept.exact_sm_count = count

    _unify(tables, inputs, "target", tables.targets, lambda target: target.name, join=join, move=move,
           entries="device_targets")


def _sm_text(target: g.DeviceTarget) -> str:
    if target.HasField("exact_sm_count"):
        return f"exactly {target.exact_sm_count} processors"
    return f"at least {target.min_sm_count} processors"


def merge_kernels(tables: Tables, inputs: Sequence[Input]) -> None:
    """Kernels merge when everything about them is equal; others of the same name stand beside each other."""
    def move(maps: IdMaps, kernel: g.Kernel) -> None:
        for variant in kernel.variants:
            variant.module_id = maps.module[variant.module_id]

    _unify(tables, inputs, "kernel", tables.kernels, lambda kernel: _content(kernel, "kernel_id"), move=move)


def merge_buffers(tables: Tables, inputs: Sequence[Input]) -> None:
    """Buffers by name. SCRATCH takes the largest size, what follows the batch grows with it (`combine_batch`), WEIGHTS
    of one name stand beside each other when they map different files, and all else is equal.

    `alias_group` allows scratch to share memory. It is dropped: what one core's graphs allow, another's may not.

    Raises:
        CompatibilityError: COMBINE_BUFFER; COMBINE_BINDING or COMBINE_BATCH for the serving contract.
    """
    merged = merge_bindings(inputs)

    def move(maps: IdMaps, buffer: g.Buffer) -> None:
        buffer.ClearField("alias_group")
        for term in buffer.size_terms:
            term.symbol_id = maps.symbol[term.symbol_id]
        if buffer.HasField("blob_id"):
            buffer.blob_id = maps.blob[buffer.blob_id]
        if buffer.HasField("device_target"):
            buffer.device_target = maps.target[buffer.device_target]
        if buffer.buffer_class in (g.IO, g.STATE):
            buffer.fixed_bytes = merged.nbytes.get(buffer.name, buffer.fixed_bytes)

    def key(buffer: g.Buffer) -> Hashable:
        return buffer.name, buffer.HasField("device_target"), buffer.device_target, buffer.blob_id

    def join(kept: g.Buffer, other: g.Buffer, cores: tuple[str, str]) -> None:
        if kept.buffer_class == other.buffer_class == g.SCRATCH:
            kept.fixed_bytes = max(kept.fixed_bytes, other.fixed_bytes)
            kept.alignment = max(kept.alignment, other.alignment)
        differs = first_field(kept, other, ignore=("buffer_id", "data_relocations", *_scratch_sizes(kept)))
        if differs is not None:
            raise conflict("COMBINE_BUFFER", "a buffer differs", cores, f"{kept.name}, {differs}",
                           field_text(kept, differs), field_text(other, differs),
                           "export both from the same checkpoints, with the same settings and release")

    _unify(tables, inputs, "buffer", tables.buffers, key, join=join, move=move)
    _move_pointers(tables, inputs)
    for binding in merged.bindings:
        binding.buffer_id = tables.maps[0].buffer[binding.buffer_id]
        tables.bindings.append(binding)
    bound = {binding.name: binding.buffer_id for binding in tables.bindings}
    for item, maps in zip(inputs, tables.maps, strict=True):
        for other in item.manifest.contract.io:
            if maps.buffer[other.buffer_id] != bound[other.name]:
                raise conflict("COMBINE_BINDING", "a binding names two buffers", (inputs[0].label, item.label),
                               other.name, bound[other.name], maps.buffer[other.buffer_id], _SAME_RELEASE)


def _scratch_sizes(buffer: g.Buffer) -> tuple[str, ...]:
    return ("fixed_bytes", "alignment") if buffer.buffer_class == g.SCRATCH else ()


def _move_pointers(tables: Tables, inputs: Sequence[Input]) -> None:
    """Pointers inside tables can name buffers that come later, so they are renumbered when all buffers have ids."""
    owners: dict[int, str] = {}
    for item, maps in zip(inputs, tables.maps, strict=True):
        for buffer in item.manifest.buffers:
            moved = [g.DataRelocation(offset=r.offset, buffer_id=maps.buffer[r.buffer_id], addend=r.addend)
                     for r in buffer.data_relocations]
            kept = tables.buffers[maps.buffer[buffer.buffer_id]]
            owner = owners.setdefault(kept.buffer_id, item.label)
            if owner == item.label:
                del kept.data_relocations[:]
                kept.data_relocations.extend(moved)
            elif list(kept.data_relocations) != moved:
                raise conflict("COMBINE_BUFFER", "a pointer table differs", (owner, item.label), kept.name,
                               f"{len(kept.data_relocations)} pointers", f"{len(moved)} pointers, not the same",
                               _SAME_RELEASE)


STAGES: tuple[tuple[str, Callable[[Tables, Sequence[Input]], None]], ...] = (
    ("symbols", merge_symbols), ("blobs", merge_blobs), ("views", merge_views), ("modules", merge_modules),
    ("targets", merge_targets), ("kernels", merge_kernels), ("buffers", merge_buffers),
)
"""The merges in the order in which they build on each other, by the name of the table that each fills."""


def conflict(code: str, what: str, cores: Iterable[str], where: str, expected: object, got: object,
             hint: str) -> CompatibilityError:
    """The refusal of two entries that share a name and differ."""
    return CompatibilityError(code, f"the cores do not combine: {what}", where=f"{' and '.join(cores)}: {where}",
                              expected=expected, got=got, hint=hint)


def first_field(left: Message, right: Message, *, ignore: Sequence[str] = (), first: Sequence[str] = (),
                last: Sequence[str] = ()) -> str | None:
    """Name of the first field in which two messages of one kind differ, in schema order; None when they agree.

    Args:
        ignore: fields that do not count.
        first, last: fields that are looked at before and after all others.
    """
    fields = [f.name for f in left.DESCRIPTOR.fields if f.name not in ignore]
    for name in sorted(fields, key=lambda name: (name in last, name not in first)):
        if _value(left, name) != _value(right, name):
            return name
    return None


def field_text(message: Message, name: str) -> str:
    """A field's value for a person, on one line."""
    value = getattr(message, name)
    if isinstance(value, bytes):
        return value.hex()[:16] or "absent"
    if isinstance(value, Message):
        return str(value).replace("\n", " ").strip()[:80] or "absent"
    text = ", ".join(str(part).replace("\n", " ").strip() for part in value) if _repeated(message, name) else str(value)
    return (text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT - 1]}…") or "absent"


def _repeated(message: Message, name: str) -> bool:
    return bool(message.DESCRIPTOR.fields_by_name[name].is_repeated)


def _value(message: Message, name: str) -> Any:
    """A field's value for comparison; a field that is absent equals an absent one, or what its absence means."""
    if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name):
        return _MEANING_OF_ABSENCE.get((message.DESCRIPTOR.name, name))
    value = getattr(message, name)
    return list(value) if _repeated(message, name) else value


def _unify(tables: Tables, inputs: Sequence[Input], kind: str, into: list[M], key: Callable[[M], Hashable], *,
           join: Join[M] | None = None, move: Callable[[IdMaps, M], None] | None = None, first_id: int = 0,
           entries: str = "") -> None:
    """Number the entries of one table. Those of one key become one; two of one key in one core stay two.

    Args:
        kind: the word in the id field (`buffer` in `buffer_id`) and in `IdMaps`.
        into: the combined table, empty.
        key: of an entry whose references were moved.
        join: takes a further entry of a known key into the kept one, or raises; None: they are equal anyway.
        move: leads an entry's references to the combined ids.
        entries: the manifest's field; empty: the plural of `kind`.
    """
    known: dict[Hashable, int] = {}
    owners: list[str] = []
    for item, maps in zip(inputs, tables.maps, strict=True):
        ids, seen = getattr(maps, kind), Counter[Hashable]()
        for entry in getattr(item.manifest, entries or f"{kind}s"):
            moved = _copy(entry)
            if move is not None:
                move(maps, moved)
            own = key(moved)
            index = known.setdefault((own, seen[own]), len(into))
            seen[own] += 1
            if index == len(into):
                setattr(moved, f"{kind}_id", first_id + index)
                into.append(moved)
                owners.append(item.label)
            elif join is not None:
                join(into[index], moved, (owners[index], item.label))
            ids[getattr(entry, f"{kind}_id")] = first_id + index


def _content(message: Message, id_field: str) -> bytes:
    """The bytes of a message without its id."""
    copy = _copy(message)
    copy.ClearField(id_field)
    return copy.SerializeToString(deterministic=True)


def _copy(message: M) -> M:
    result = type(message)()
    result.CopyFrom(message)
    return result
