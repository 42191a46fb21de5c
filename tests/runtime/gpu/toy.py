"""A signed core for a GPU that the engine can drive: graphs of the toy model, and the same kernels in Python.

    core = make_gpu_core(tmp_path / "core")                    # module bytes that only the fake driver accepts
    core = make_gpu_core(tmp_path / "core", modules=cubins)    # real ones, by symbol
    fake = FakeDriver(kernels=fake_kernels())
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1 import weights_pb2 as w
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import IoBinding, ModelIdentity, RebuildManifest, ServingContract, SourceFile

from tests.runtime.gpu.fake_driver import FakeDriver, FakeKernel
from tests.runtime.test_kernel_image import cubin
from tests.toy_core import CHUNK, ToyCore

VOCAB, STEP, DEPTH, PAGES, CONTEXT, SLOTS, CHUNK_TOKENS = 97, 5, 2, 6, 64, 2, 4
WEIGHT_BYTES = 2 * CHUNK + 1024
TOKENIZER = b'{"version": "1.0"}'

# Parameters of each kernel by name, in order; those of SYMBOLS and SCALARS are i32 values, the others pointers.
PARAMS = {
    "toy_prefill": ("slots", "chunk_tokens", "chunk_count", "length", "anchor", "weights", "sampled", "produced",
                    "pages_seen", "vocab", "pages"),
    "toy_draft": ("slots", "anchor", "weights", "proposals", "proposal_ids", "vocab"),
    "toy_verify": ("slots", "limit", "length", "anchor", "weights", "proposals", "emitted", "produced", "accepted",
                   "vocab"),
    "toy_decode": ("slots", "length", "anchor", "weights", "sampled", "produced", "vocab"),
}
SCALARS, SYMBOLS = {"vocab": VOCAB}, ("pages",)
HIDDEN = ("scratch", "scratch")

# name, shape, class, host mapped, output (None: no binding)
BUFFERS = (
    ("weights", (WEIGHT_BYTES // 4,), g.WEIGHTS, False, None),
    ("slots", (SLOTS,), g.IO, False, False),
    ("limit", (SLOTS,), g.IO, False, False),
    ("page_table", (SLOTS, 8), g.IO, False, False),
    ("temperature", (SLOTS,), g.IO, False, False),
    ("top_p", (SLOTS,), g.IO, False, False),
    ("top_k", (SLOTS,), g.IO, False, False),
    ("seed", (SLOTS,), g.IO, False, False),
    ("chunk_tokens", (CHUNK_TOKENS,), g.IO, False, False),
    ("chunk_count", (1,), g.IO, False, False),
    ("length", (SLOTS,), g.STATE, False, True),
    ("anchor", (SLOTS,), g.STATE, False, True),
    ("sampled", (SLOTS,), g.IO, True, True),
    ("emitted", (SLOTS, 1 + DEPTH), g.IO, True, True),
    ("produced", (SLOTS,), g.IO, True, True),
    ("accepted", (SLOTS,), g.IO, True, True),
    ("proposals", (SLOTS, DEPTH), g.IO, False, True),
    ("proposal_ids", (SLOTS, DEPTH, 1), g.IO, False, True),
    ("pages_seen", (1,), g.IO, False, True),
    ("scratch", (64,), g.SCRATCH, False, None),
    ("kv", (), g.KV_ARENA, False, None),
    ("table", (4,), g.POINTER_TABLE, False, None),
)
IDS = {row[0]: index for index, row in enumerate(BUFFERS)}
DTYPES = {"temperature": "f32", "top_p": "f32", "seed": "u64"}


def next_tokens(token: int, count: int) -> list[int]:
    """What the toy model says after a token."""
    return [(token + (i + 1) * STEP) % VOCAB for i in range(count)]


def make_gpu_core(
    directory: Path, *, modules: Mapping[str, bytes] | None = None, weights: bytes | None = None,
    tokenizer: bytes = TOKENIZER, edit: Callable[[RebuildManifest, GraphSet], object] | None = None,
) -> ToyCore:
    """Write and sign a core for sm_90a.

    Args:
        modules: module bytes by kernel symbol; without, an ELF file without code.
        tokenizer: what tokenizer.json holds.
        weights: bytes of the weights; the first four are the toy's step.
        edit: changes manifest and graphs before they are written.
    """
    directory.mkdir(parents=True)
    modules = modules or dict.fromkeys(PARAMS, cubin(names=tuple(PARAMS)))
    files: dict[str, w.FileEntry] = {}
    blob = _put(directory, files, "weights", ".bin", weights or struct.pack("<i", STEP) + bytes(WEIGHT_BYTES - 4))
    state = _put(directory, files, "state", ".bin", struct.pack("<2i", 0, 7))
    config = _put(directory, files, "config", "", tokenizer)
    images = {symbol: _put(directory, files, "modules", ".cubin", data) for symbol, data in modules.items()}
    module_ids = {symbol: index for index, symbol in enumerate(modules)}
    manifest = RebuildManifest(
        format_version=1, core_name="toy-gpu", release=1,
        target=ModelIdentity(repository="toy/toy", revision="0" * 40, architecture="Toy", files=[
            SourceFile(path="tokenizer.json", size_bytes=len(tokenizer), sha256=hashlib.sha256(tokenizer).digest())]),
        weight_blobs=[w.WeightBlob(blob_id=0, file=blob.ref, alignment=256)],
        tensor_views=[w.TensorView(name="step", blob_id=0, size_bytes=blob.ref.size_bytes, dtype="i32",
                                   shape=[blob.ref.size_bytes // 4], sha256=bytes(32))],
        symbols=[g.Symbol(symbol_id=0, name="kv_pages", width=4, minimum=2, maximum=99, default_value=PAGES)],
        buffers=[_buffer(name, shape, kind, mapped) for name, shape, kind, mapped, _ in BUFFERS],
        modules=[g.KernelModule(module_id=module_ids[s], kind=g.CUBIN, target="sm_90a", file=images[s].ref,
                                min_driver=12040) for s in modules],
        kernels=[g.Kernel(kernel_id=index, name=symbol, variants=[
            _variant(symbol, module_ids.get(symbol, 0))])
            for index, symbol in enumerate(PARAMS)],
        device_targets=[g.DeviceTarget(target_id=0, name="sm_90a", module_ids=list(range(len(modules))))],
        contract=ServingContract(
            max_batch=1, max_query_tokens=4, max_context=CONTEXT, vocab_size=VOCAB, page_tokens=8,
            io=[IoBinding(name=name, buffer_id=IDS[name], dtype=DTYPES.get(name, "i32"), shape=shape, output=output)
                for name, shape, _, _, output in BUFFERS if output is not None]))
    manifest.buffers[IDS["anchor"]].initial.CopyFrom(state.ref)
    graphs = GraphSet(format_version=1, graphs=_graphs())
    if edit is not None:
        edit(manifest, graphs)
    graph_file = _put(directory, files, "graphs", ".pb", graphs.SerializeToString(deterministic=True))
    manifest.graph_files.add(target_id=0, file=graph_file.ref, graph_names=[graph.name for graph in graphs.graphs])
    manifest.files.extend(files[path] for path in sorted(files))
    (directory / "manifest.pb").write_bytes(manifest.SerializeToString(deterministic=True))
    core = ToyCore(directory, blob.path, blob.path, config.path, graph_file.path, state.path)
    core.sign()
    return core


_ROLES = {"modules": "module", "graphs": "graph"}


def _put(directory: Path, files: dict[str, w.FileEntry], folder: str, suffix: str, data: bytes) -> w.FileEntry:
    digest = hashlib.sha256(data)
    path = f"{folder}/{digest.hexdigest()}{suffix}"
    (directory / folder).mkdir(exist_ok=True)
    (directory / path).write_bytes(data)
    entry = w.FileEntry(path=path, role=_ROLES.get(folder, folder),
                        ref=w.FileRef(algorithm=w.SHA256, digest=digest.digest(), size_bytes=len(data)))
    if len(data) > CHUNK:
        entry.chunk_bytes = CHUNK
        entry.chunk_digests = b"".join(
            hashlib.sha256(data[at:at + CHUNK]).digest() for at in range(0, len(data), CHUNK))
    return files.setdefault(path, entry)


def _buffer(name: str, shape: Sequence[int], kind: int, mapped: bool) -> g.Buffer:
    buffer = g.Buffer(buffer_id=IDS[name], name=name, buffer_class=kind, alignment=256)
    if kind == g.WEIGHTS:
        buffer.blob_id = 0
    elif kind == g.KV_ARENA:
        buffer.size_terms.add(symbol_id=0, bytes=512)
    else:
        buffer.fixed_bytes = prod(shape) * (8 if name in ("seed", "table") else 4)
    if mapped:
        buffer.host_mapped = True
    if kind == g.POINTER_TABLE:
        buffer.data_relocations.add(offset=8, buffer_id=IDS["kv"], addend=512)
    return buffer


def _variant(symbol: str, module_id: int) -> g.KernelVariant:
    slots = [g.ParamSlot(size=4, type=g.SCALAR, name=name) if name in (*SCALARS, *SYMBOLS)
             else g.ParamSlot(size=8, type=g.POINTER, name=name) for name in (*PARAMS[symbol], *HIDDEN)]
    return g.KernelVariant(module_id=module_id, symbol=symbol, params=slots, block=g.Dim3(x=32, y=1, z=1))


def kernel_node(node_id: int, symbol: str) -> g.GraphNode:
    """One block of a kernel, with every pointer relocated to the buffer of its name."""
    node = g.GraphNode(node_id=node_id, kind=g.KERNEL, kernel_id=list(PARAMS).index(symbol),
                       grid=g.Dim3(x=1, y=1, z=1), debug_name=symbol)
    block = b""
    for index, name in enumerate((*PARAMS[symbol], *HIDDEN)):
        if name in SCALARS:
            block += struct.pack("<i", SCALARS[name])
        elif name in SYMBOLS:
            block += bytes(4)
            node.relocations.add(kind=g.SYMBOL_VALUE, param_index=index, symbol_id=0, width=4)
        else:
            block += bytes(8)
            node.relocations.add(kind=g.BUFFER_ADDRESS, param_index=index, buffer_id=IDS[name])
    node.param_block = block
    return node


def _graph(name: str, role: str, batch: int, rows: int, symbol: str, priority: int) -> g.Graph:
    """Mark what is produced with -1, then let the kernel say it; the edge between them matters."""
    fill = g.GraphNode(node_id=0, kind=g.FILL, fill=g.FillParams(
        destination=g.Relocation(kind=g.BUFFER_ADDRESS, buffer_id=IDS["produced"]), value=0xFFFF_FFFF, element_bytes=4,
        count=SLOTS))
    return g.Graph(name=name, role=role, bucket=g.Bucket(batch=batch, query_tokens=rows), load_priority=priority,
                   nodes=[fill, kernel_node(1, symbol)], edges=[g.GraphEdge(**{"from": 0, "to": 1})])


def _graphs() -> list[g.Graph]:
    """The graphs of a text core; decode.b2 is built in the background, from a template."""
    prefill = _graph("prefill.c4", "prefill", 1, CHUNK_TOKENS, "toy_prefill", 0)
    draft = _graph("draft.b1", "draft", 1, 1 + DEPTH, "toy_draft", 1)
    verify = _graph("verify.b1", "verify", 1, 1 + DEPTH, "toy_verify", 2)
    decode = _graph("decode.b1", "decode", 1, 1, "toy_decode", 3)
    larger = _graph("decode.b2", "decode", 2, 1, "toy_decode", 4)
    copy = g.GraphNode(node_id=2, kind=g.COPY, copy=g.CopyParams(
        source=g.Relocation(kind=g.BUFFER_ADDRESS, buffer_id=IDS["anchor"]),
        destination=g.Relocation(kind=g.BUFFER_ADDRESS, buffer_id=IDS["pages_seen"]), bytes=4))
    decode.nodes.extend([copy, g.GraphNode(node_id=3, kind=g.EMPTY)])
    decode.edges.extend([g.GraphEdge(**{"from": 1, "to": 2}), g.GraphEdge(**{"from": 2, "to": 3})])
    return [larger, prefill, draft, verify, decode]


@dataclass(frozen=True)
class Args:
    """A launch's parameters by name: `args["length", slot]` reads an i32, and assigning writes it."""

    fake: FakeDriver
    values: Mapping[str, int]

    def __getitem__(self, at: tuple[str, int]) -> int:
        return int(struct.unpack("<i", self.fake.read(self.values[at[0]] + 4 * at[1], 4))[0])

    def __setitem__(self, at: tuple[str, int], value: int) -> None:
        self.fake.write(self.values[at[0]] + 4 * at[1], struct.pack("<i", value))


def _prefill(a: Args) -> None:
    slot, count = a["slots", 0], a["chunk_count", 0]
    token = (a["chunk_tokens", count - 1] + a["weights", 0]) % a.values["vocab"]
    a["length", slot] = a["length", slot] + count
    a["anchor", slot] = a["sampled", 0] = token
    a["produced", 0] = 1
    a["pages_seen", 0] = a.values["pages"]


def _draft(a: Args) -> None:
    token, step = a["anchor", a["slots", 0]], a["weights", 0]
    for name in ("proposals", "proposal_ids"):
        a[name, 0] = (token + step) % a.values["vocab"]
        a[name, 1] = (token + 2 * step + 1) % a.values["vocab"]


def _verify(a: Args) -> None:
    slot, vocab, step = a["slots", 0], a.values["vocab"], a["weights", 0]
    token, stored = a["anchor", slot], a["length", slot]
    agreed = int(a["proposals", 0] == (token + step) % vocab)
    count = min(agreed + 1, a["limit", slot] - stored - 1)
    a["emitted", 0], a["emitted", 1] = (token + step) % vocab, (token + 2 * step) % vocab
    a["produced", 0], a["accepted", 0] = count, count - 1
    a["length", slot], a["anchor", slot] = stored + count, (token + count * step) % vocab


def _decode(a: Args) -> None:
    slot = a["slots", 0]
    a["length", slot] = a["length", slot] + 1
    a["anchor", slot] = a["sampled", 0] = (a["anchor", slot] + a["weights", 0]) % a.values["vocab"]
    a["produced", 0] = 1


RUNS = {"toy_prefill": _prefill, "toy_draft": _draft, "toy_verify": _verify, "toy_decode": _decode}


def fake_kernels(**changed: FakeKernel) -> list[FakeKernel]:
    """The toy's kernels in Python; `changed` replaces some by symbol."""
    return [changed.get(symbol, fake_kernel(symbol, RUNS[symbol])) for symbol in PARAMS]


def fake_kernel(symbol: str, function: Callable[[Args], None]) -> FakeKernel:
    names = (*PARAMS[symbol], *HIDDEN)

    def run(fake: FakeDriver, values: tuple[bytes, ...]) -> None:
        function(Args(fake, {name: int.from_bytes(v, "little") for name, v in zip(names, values, strict=True)}))

    return FakeKernel(symbol, tuple(4 if n in (*SCALARS, *SYMBOLS) else 8 for n in names), run)
