"""Structure rules of a manifest: checked on verified bytes, before anything is allocated by a number they state.

    check_manifest_structure(manifest, sizes={"weights/3f….bin": 16640, …})
    check_graph_bytes(data)
    check_graph_set(graph_set, manifest, target_id)
    check_module(data, module, symbols=["verify_attention"])

The bytes of a graph file are in `graph_wire`, graphs in `structure_graph`, single nodes in `structure_node`, views in
`structure_views`, kernel images in `kernel_image`.
Source: docs/core-format.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from math import prod

from dflash_core.errors import VerificationError
from dflash_core.v1.graph_pb2 import (
    CPU_REGISTRY,
    IO,
    KV_ARENA,
    POINTER,
    POINTER_TABLE,
    SCRATCH,
    STATE,
    SYMMETRIC,
    TENSOR_MAP,
    WEIGHTS,
    Buffer,
    BufferClass,
    Kernel,
    KernelModule,
    ModuleKind,
    ParamType,
    Symbol,
)
from dflash_core.v1.manifest_pb2 import IoBinding, ModelIdentity, RebuildManifest
from dflash_core.v1.weights_pb2 import FileEntry

from .graph_wire import check_graph_bytes
from .kernel_image import check_module
from .structure_graph import check_graph_set
from .structure_rules import (
    CHUNK_BYTES,
    DTYPE_BITS,
    MAX_FILES,
    MAX_GRAPHS,
    MAX_MODULES,
    MAX_PARAM_BYTES,
    MAX_RANK,
    VIEW_ALIGNMENT,
    BufferRange,
    broken,
    buffer_ranges,
    check_file_ref,
    entry_of,
    inside,
    refuse_unknown_enum,
    refuse_unknown_fields,
    unique,
    unsupported,
)
from .structure_views import check_views

__all__ = ["check_graph_bytes", "check_graph_set", "check_manifest_structure", "check_module"]

_ROLE_FOLDERS = {
    "module": "modules", "graph": "graphs", "weights": "weights", "state": "state", "config": "config",
    "golden": "golden", "component": "components",
}
_GROWING_CLASSES = (KV_ARENA, STATE)
_INITIAL_CLASSES = (STATE, POINTER_TABLE)
_SLOT_BYTES = {POINTER: 8, TENSOR_MAP: 128}
_ADDRESS_BYTES = 8

_Entries = dict[bytes, list[FileEntry]]


def check_manifest_structure(manifest: RebuildManifest, sizes: Mapping[str, int]) -> None:
    """Check everything that a manifest says about files, views, buffers, modules and kernels.

    1. Unknown fields. 2. Files. 3. Blobs and views. 4. Symbols and buffers. 5. Modules and kernels.
    6. Device targets and graph files. 7. What the rest of the manifest refers to.

    Args:
        manifest: parsed from verified bytes.
        sizes: bytes of every file of the core except `manifest.pb` and those in `signatures/`, by path.
    Raises:
        FormatError: MANIFEST_LIMIT, MANIFEST_TABLE, MANIFEST_UNKNOWN, VIEW_RANGE, VIEW_SHAPE, VIEW_OVERLAP, GRAPH_REF,
            GRAPH_LIMIT or RELOC_RANGE.
        VerificationError: FILE_SIZE, a file is not as large as the manifest says.
        CompatibilityError: FEATURE_UNSUPPORTED, something that this runtime does not implement.
    """
    # 1.
    _check_unknown_fields(manifest)
    # 2.
    entries = _check_files(manifest.files, sizes)
    # 3.
    blob_bytes = _check_blobs(manifest, entries)
    check_views(manifest.tensor_views, blob_bytes)
    # 4.
    symbols = _check_symbols(manifest.symbols)
    targets = {target.target_id for target in manifest.device_targets}
    for buffer in manifest.buffers:
        _check_buffer(buffer, blob_bytes, symbols, targets, entries)
    unique((buffer.buffer_id for buffer in manifest.buffers), "GRAPH_REF", "buffer")
    ranges = buffer_ranges(manifest)
    for buffer in manifest.buffers:
        _check_data_relocations(buffer, ranges)
    # 5.
    modules = _check_modules(manifest.modules, entries)
    unique((kernel.kernel_id for kernel in manifest.kernels), "GRAPH_REF", "kernel")
    for kernel in manifest.kernels:
        _check_kernel(kernel, modules)
    # 6.
    _check_targets(manifest, modules)
    _check_graph_files(manifest, targets, entries)
    # 7.
    _check_references(manifest, entries)
    for binding in manifest.contract.io:
        _check_binding(binding, ranges)


def _check_unknown_fields(manifest: RebuildManifest) -> None:
    """Only where bytes, addresses or launches are described: elsewhere `required_features` says what matters."""
    for table in ("files", "weight_blobs", "tensor_views", "buffers", "modules", "kernels"):
        for index, message in enumerate(getattr(manifest, table)):
            refuse_unknown_fields(message, f"{table}[{index}]")


def _check_files(files: Iterable[FileEntry], sizes: Mapping[str, int]) -> _Entries:
    listed = list(files)
    if len(listed) > MAX_FILES:
        raise broken("MANIFEST_LIMIT", "too many files", "files", expected=f"at most {MAX_FILES}", got=len(listed))
    unique((entry.path for entry in listed), "MANIFEST_TABLE", "file")
    absent = sorted(sizes.keys() - {entry.path for entry in listed})
    if absent:
        raise broken("MANIFEST_TABLE", "file is not in the manifest", absent[0])
    entries: _Entries = {}
    for entry in listed:
        _check_file(entry, sizes)
        entries.setdefault(entry.ref.digest, []).append(entry)
    return entries


def _check_file(entry: FileEntry, sizes: Mapping[str, int]) -> None:
    path = entry.path
    if path not in sizes:
        raise broken("MANIFEST_TABLE", "manifest lists a file that the core does not hold", path)
    check_file_ref(entry.ref, path)
    if entry.ref.size_bytes != sizes[path]:
        raise VerificationError(
            "FILE_SIZE", "file is not as large as the manifest says", where=path,
            expected=f"{entry.ref.size_bytes} bytes", got=f"{sizes[path]} bytes", hint="copy the core again",
        )
    folder = _ROLE_FOLDERS.get(entry.role)
    if folder is None or path.partition("/")[0] != folder:
        raise broken("MANIFEST_TABLE", "file does not lie in the folder of its role", path,
                     expected=f"a role of {', '.join(_ROLE_FOLDERS)}" if folder is None else f"{folder}/",
                     got=f"role {entry.role!r}")
    chunked = entry.ref.size_bytes > CHUNK_BYTES
    if entry.HasField("chunk_bytes") != chunked or entry.HasField("chunk_digests") != chunked:
        raise broken("MANIFEST_TABLE", "a chunk list is for files above 4 MiB, and for all of them", path,
                     expected="a chunk list" if chunked else "no chunk list", got=f"{entry.ref.size_bytes} bytes")
    if chunked and entry.chunk_bytes != CHUNK_BYTES:
        raise broken("MANIFEST_TABLE", "unknown chunk size", path, expected=CHUNK_BYTES, got=entry.chunk_bytes)
    needed = 32 * -(-entry.ref.size_bytes // CHUNK_BYTES) if chunked else 0
    if len(entry.chunk_digests) != needed:
        raise broken("MANIFEST_TABLE", "chunk list does not fit the file", path, expected=f"{needed} bytes",
                     got=f"{len(entry.chunk_digests)} bytes")


def _check_blobs(manifest: RebuildManifest, entries: _Entries) -> dict[int, int]:
    unique((blob.blob_id for blob in manifest.weight_blobs), "MANIFEST_TABLE", "blob")
    for blob in manifest.weight_blobs:
        place = f"blob {blob.blob_id}"
        entry_of(blob.file, "weights", entries, place)
        _check_alignment(blob.alignment, place)
    return {blob.blob_id: blob.file.size_bytes for blob in manifest.weight_blobs}


def _check_alignment(alignment: int, place: str) -> None:
    if alignment < VIEW_ALIGNMENT or alignment & (alignment - 1):
        raise broken("MANIFEST_TABLE", "alignment is not usable", place,
                     expected=f"a power of two, at least {VIEW_ALIGNMENT}", got=alignment)


def _check_symbols(symbols: Iterable[Symbol]) -> dict[int, Symbol]:
    listed = list(symbols)
    unique((symbol.symbol_id for symbol in listed), "GRAPH_REF", "symbol")
    for symbol in listed:
        place = f"symbol {symbol.name}"
        if symbol.width not in (4, 8) or not 0 <= symbol.minimum <= symbol.maximum < 1 << (8 * symbol.width - 1):
            raise broken("RELOC_RANGE", "symbol does not fit its width", place,
                         expected="0 <= minimum <= maximum, signed in 4 or 8 bytes",
                         got=f"{symbol.minimum} to {symbol.maximum} in {symbol.width} bytes")
        if symbol.HasField("default_value") and not symbol.minimum <= symbol.default_value <= symbol.maximum:
            raise broken("RELOC_RANGE", "default of a symbol is out of its range", place,
                         expected=f"{symbol.minimum} to {symbol.maximum}", got=symbol.default_value)
    return {symbol.symbol_id: symbol for symbol in listed}


def _check_buffer(
    buffer: Buffer, blobs: Mapping[int, int], symbols: Mapping[int, Symbol], targets: set[int], entries: _Entries
) -> None:
    """Which fields a class may use, and that what they name exists."""
    place = f"buffer {buffer.name}, id {buffer.buffer_id}"
    kind = buffer.buffer_class
    refuse_unknown_enum(BufferClass, kind, place)
    if kind == SYMMETRIC:
        raise unsupported("buffer class SYMMETRIC", place)
    _check_alignment(buffer.alignment, place)
    rules = (
        (buffer.HasField("blob_id"), (WEIGHTS,), "blob_id"),
        (len(buffer.size_terms) > 0, _GROWING_CLASSES, "size_terms"),
        (buffer.HasField("initial"), _INITIAL_CLASSES, "initial"),
        (len(buffer.data_relocations) > 0, (POINTER_TABLE,), "data_relocations"),
        (buffer.HasField("alias_group"), (SCRATCH,), "alias_group"),
        (buffer.HasField("host_mapped"), (IO,), "host_mapped"),
    )
    for used, classes, field in rules:
        if used and kind not in classes:
            raise broken("MANIFEST_TABLE", f"{field} does not belong to this buffer class", place,
                         expected=" or ".join(BufferClass.Name(c) for c in classes), got=BufferClass.Name(kind))
    if kind == WEIGHTS:
        if not buffer.HasField("blob_id") or buffer.blob_id not in blobs:
            raise broken("MANIFEST_TABLE", "buffer maps an unknown blob", place, got=buffer.blob_id)
        if buffer.fixed_bytes not in (0, blobs[buffer.blob_id]):
            raise broken("MANIFEST_TABLE", "buffer is not as large as its blob", place,
                         expected=f"{blobs[buffer.blob_id]} bytes", got=f"{buffer.fixed_bytes} bytes")
    for term in buffer.size_terms:
        if term.symbol_id not in symbols:
            raise broken("GRAPH_REF", "buffer is sized by an unknown symbol", place, got=term.symbol_id)
    if buffer.HasField("device_target") and buffer.device_target not in targets:
        raise broken("GRAPH_REF", "buffer is for an unknown device target", place, got=buffer.device_target)
    if buffer.HasField("initial"):
        entry_of(buffer.initial, "state", entries, place)
        if buffer.initial.size_bytes > buffer.fixed_bytes:
            raise broken("MANIFEST_TABLE", "first contents are larger than the buffer", place,
                         expected=f"at most {buffer.fixed_bytes} bytes", got=f"{buffer.initial.size_bytes} bytes")


def _check_data_relocations(buffer: Buffer, ranges: Mapping[int, BufferRange]) -> None:
    place = f"buffer {buffer.name}, id {buffer.buffer_id}"
    size = ranges[buffer.buffer_id].nbytes
    end = 0
    for relocation in sorted(buffer.data_relocations, key=lambda item: item.offset):
        if not inside(relocation.offset, _ADDRESS_BYTES, size):
            raise broken("RELOC_RANGE", "pointer lies outside its table", place,
                         expected=f"{_ADDRESS_BYTES} bytes within {size}", got=f"offset {relocation.offset}")
        if relocation.offset < end:
            raise broken("RELOC_RANGE", "pointers of a table overlap", place, expected=f"at or after {end}",
                         got=f"offset {relocation.offset}")
        end = relocation.offset + _ADDRESS_BYTES
        if relocation.buffer_id not in ranges:
            raise broken("GRAPH_REF", "pointer to an unknown buffer", place, got=relocation.buffer_id)
        if not inside(relocation.addend, 0, ranges[relocation.buffer_id].nbytes):
            raise broken("RELOC_RANGE", "pointer leaves its buffer", place,
                         expected=f"0 to {ranges[relocation.buffer_id].nbytes}", got=relocation.addend)


def _check_modules(modules: Iterable[KernelModule], entries: _Entries) -> dict[int, KernelModule]:
    listed = list(modules)
    if len(listed) > MAX_MODULES:
        raise broken("MANIFEST_LIMIT", "too many modules", "modules", expected=f"at most {MAX_MODULES}",
                     got=len(listed))
    unique((module.module_id for module in listed), "GRAPH_REF", "module")
    for module in listed:
        place = f"module {module.module_id}"
        refuse_unknown_enum(ModuleKind, module.kind, place)
        if module.kind == CPU_REGISTRY:
            if module.HasField("file") or not module.registry or not module.HasField("registry_version"):
                raise broken("MANIFEST_TABLE", "a CPU registry has a name, a version and no file", place,
                             got=f"registry {module.registry!r}")
        else:
            entry_of(module.file, "module", entries, place)
    return {module.module_id: module for module in listed}


def _check_kernel(kernel: Kernel, modules: Mapping[int, KernelModule]) -> None:
    place = f"kernel {kernel.name}, id {kernel.kernel_id}"
    if not kernel.variants:
        raise broken("GRAPH_REF", "kernel has no variant", place)
    unique((variant.module_id for variant in kernel.variants), "GRAPH_REF", f"variant of {place} in module")
    for variant in kernel.variants:
        if variant.module_id not in modules:
            raise broken("GRAPH_REF", "kernel is in an unknown module", place, got=variant.module_id)
        if not variant.symbol:
            raise broken("GRAPH_REF", "kernel variant names no entry point", place)
        for index, slot in enumerate(variant.params):
            where = f"parameter {index} of {place}"
            refuse_unknown_enum(ParamType, slot.type, where)
            if slot.size != _SLOT_BYTES.get(slot.type, slot.size) or slot.size == 0:
                raise broken("RELOC_RANGE", "parameter has the wrong size for its type", where,
                             expected=f"{_SLOT_BYTES.get(slot.type, 'at least 1')} bytes", got=f"{slot.size} bytes")
        nbytes = sum(slot.size for slot in variant.params)
        if nbytes > MAX_PARAM_BYTES:
            raise broken("GRAPH_LIMIT", "kernel takes too many parameter bytes", place,
                         expected=f"at most {MAX_PARAM_BYTES}", got=nbytes)


def _check_targets(manifest: RebuildManifest, modules: Mapping[int, KernelModule]) -> None:
    unique((target.target_id for target in manifest.device_targets), "GRAPH_REF", "device target")
    for target in manifest.device_targets:
        for module_id in target.module_ids:
            if module_id not in modules:
                raise broken("GRAPH_REF", "device target uses an unknown module", f"device target {target.name}",
                             got=module_id)


def _check_graph_files(manifest: RebuildManifest, targets: set[int], entries: _Entries) -> None:
    names: dict[tuple[int, int], list[str]] = {}
    for index, graph_file in enumerate(manifest.graph_files):
        place = f"graph_files[{index}]"
        entry_of(graph_file.file, "graph", entries, place)
        if graph_file.target_id not in targets:
            raise broken("GRAPH_REF", "graph file is for an unknown device target", place, got=graph_file.target_id)
        names.setdefault((graph_file.target_id, graph_file.rank), []).extend(graph_file.graph_names)
    for group in names.values():
        if len(group) > MAX_GRAPHS:
            raise broken("GRAPH_LIMIT", "too many graphs", "graph_files", expected=f"at most {MAX_GRAPHS}",
                         got=len(group))
        unique(group, "GRAPH_REF", "graph")


def _check_references(manifest: RebuildManifest, entries: _Entries) -> None:
    for owner, identity in _identities(manifest):
        for field in ("config", "tokenizer"):
            if identity.HasField(field):
                entry_of(getattr(identity, field), "config", entries, f"{field} of the {owner}")
    for component in manifest.components:
        place = f"component {component.core_name}"
        for ref in chain([component.manifest], component.signatures):
            entry_of(ref, "component", entries, place)
    for ref in manifest.provenance.parents:
        check_file_ref(ref, "provenance.parents")
    unique((component.component_id for component in manifest.components), "GRAPH_REF", "component")


def _identities(manifest: RebuildManifest) -> Iterable[tuple[str, ModelIdentity]]:
    yield "target", manifest.target
    yield "draft", manifest.speculation.draft
    yield "vision encoder", manifest.vision.encoder


def _check_binding(binding: IoBinding, ranges: Mapping[int, BufferRange]) -> None:
    place = f"binding {binding.name}"
    if binding.buffer_id not in ranges:
        raise broken("GRAPH_REF", "binding to an unknown buffer", place, got=binding.buffer_id)
    bits = DTYPE_BITS.get(binding.dtype)
    if bits is None:
        raise broken("MANIFEST_UNKNOWN", "unknown dtype", place, expected=" ".join(DTYPE_BITS), got=repr(binding.dtype))
    if len(binding.shape) > MAX_RANK:
        raise broken("VIEW_SHAPE", "binding has too many dimensions", place, expected=f"at most {MAX_RANK}",
                     got=len(binding.shape))
    nbytes = -(-prod(binding.shape) * bits // 8)
    size = ranges[binding.buffer_id].nbytes
    if not inside(binding.offset, nbytes, size):
        raise broken("RELOC_RANGE", "binding leaves its buffer", place, expected=f"within {size} bytes",
                     got=f"{nbytes} bytes at {binding.offset}")
