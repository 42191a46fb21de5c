#!/usr/bin/env python
"""How fast a core verifies: a 2 GiB core from the page cache, the largest legal graph, one signature. JSON on stdout.

    scripts/bench_verify.py                 # 2 GiB below build/, two threads, median of three
    scripts/bench_verify.py --gib 0.25

The reference command (model_signing verify) runs on the same core in the same run. Both sides find the core in the page
cache: it was written, signed and read once before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1 import weights_pb2 as w
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.keys import generate_key, load_private_key
from runtime.sign import file_entry, sign_core
from runtime.structure import check_graph_bytes, check_graph_set
from runtime.structure_rules import MAX_EDGES, MAX_NODES
from runtime.trust import TrustPolicy
from runtime.verify import verify

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 4 << 20
FILES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the core")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    work = ROOT / "build" / "bench-verify"
    shutil.rmtree(work, ignore_errors=True)
    try:
        key = generate_key(work / "keys")
        core = write_core(work / "core", int(options.gib * (1 << 30)) // FILES // CHUNK * CHUNK)
        signature_ms = sign(core, key.private_path)
        nbytes = sum(path.stat().st_size for path in core.rglob("*") if path.is_file())
        signature = core / "signatures" / f"{key.keyid}.sig"
        reference = [sys.executable, "-m", "model_signing", "verify", "key", str(core), "--signature", str(signature),
                     "--public_key", str(key.public_path)]
        ours, theirs = [], []
        for _ in range(options.repeats):
            ours.append(seconds(lambda: load(core, key.trust_path, options.threads)))
            theirs.append(seconds(lambda: subprocess.run(reference, check=True, capture_output=True)))
        print(json.dumps({
            "core_bytes": nbytes, "threads": options.threads, "repeats": options.repeats,
            "verify_and_load": {
                "seconds": round(statistics.median(ours), 3),
                "gb_per_s": round(nbytes / statistics.median(ours) / 1e9, 2),
                "peak_bytes_above_weights": peak_above_weights(core, key.trust_path, options.threads),
            },
            "reference_command": {
                "seconds": round(statistics.median(theirs), 3),
                "gb_per_s": round(nbytes / statistics.median(theirs) / 1e9, 2),
            },
            "times_reference": round(statistics.median(theirs) / statistics.median(ours), 2),
            "largest_graph": largest_graph(),
            "signature_ms": signature_ms,
        }, indent=1))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_core(core: Path, nbytes: int) -> Path:
    """A core of FILES weight files that hold `nbytes` each, and nothing to launch."""
    manifest = RebuildManifest(format_version=1, core_name="bench", release=1)
    (core / "weights").mkdir(parents=True)
    for blob_id in range(FILES):
        path = core / "weights" / f"{blob_id}.bin"
        with path.open("wb") as stream:
            block = os.urandom(CHUNK)
            for index in range(nbytes // CHUNK):
                stream.write(index.to_bytes(8, "little") + block[8:])
        entry = file_entry(path, f"weights/{blob_id}.bin", "weights")
        manifest.files.append(entry)
        manifest.weight_blobs.add(blob_id=blob_id, file=entry.ref, alignment=256)
        manifest.tensor_views.add(name=str(blob_id), blob_id=blob_id, size_bytes=nbytes, dtype="u8", shape=[nbytes])
    (core / "manifest.pb").write_bytes(manifest.SerializeToString(deterministic=True))
    return core


def sign(core: Path, key_path: Path) -> float:
    """Sign the core; milliseconds of one signature of its statement, by itself."""
    private = load_private_key(key_path)
    sign_core(core, private)
    from cryptography.hazmat.primitives.asymmetric import ec

    from runtime.keys import signature_hash

    data = hashlib.sha256(b"statement").digest() * 100
    algorithm = ec.ECDSA(signature_hash(private.public_key()))
    return round(min(seconds(lambda: private.sign(data, algorithm)) for _ in range(20)) * 1000, 3)


def load(core: Path, trust: Path, threads: int) -> None:
    """Verify a core and read all weights through buffers of one chunk a thread, as a loader of device memory does."""
    with verify(core, TrustPolicy.load(trust)) as opened:
        buffers: dict[int, memoryview] = {}
        for entry in opened.manifest.files:
            opened.read_chunks(entry.path, lambda offset, nbytes: staging(buffers, nbytes), ignore, threads=threads)


def staging(buffers: dict[int, memoryview], nbytes: int) -> memoryview:
    import threading

    name = threading.get_ident()
    if name not in buffers:
        buffers[name] = memoryview(bytearray(CHUNK))
    return buffers[name][:nbytes]


def ignore(offset: int, chunk: memoryview) -> None:
    """Where a loader starts the copy to the device."""


def peak_above_weights(core: Path, trust: Path, threads: int) -> int:
    """Growth of resident memory while a core loads through staging buffers, in a process of its own."""
    code = ("import sys; sys.path[:0] = sys.argv[4:6]; from pathlib import Path; from scripts import bench_verify as b;"
            "before = b.resident_peak(); b.load(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]));"
            "print(b.resident_peak() - before)")
    done = subprocess.run([sys.executable, "-c", code, str(core), str(trust), str(threads), str(ROOT),
                           str(ROOT / "proto")], capture_output=True, text=True, check=True, cwd=ROOT)
    return int(done.stdout)


def resident_peak() -> int:
    """Most bytes that this process has had resident."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def largest_graph() -> dict[str, float]:
    """The largest legal graph file, kernels with pointers and all edges: seconds of each check."""
    manifest = RebuildManifest(
        format_version=1,
        buffers=[g.Buffer(buffer_id=0, name="b", buffer_class=g.SCRATCH, alignment=256, fixed_bytes=1 << 20)],
        modules=[g.KernelModule(module_id=0, kind=g.CPU_REGISTRY, target="cpu", registry="r", registry_version=1)],
        kernels=[g.Kernel(kernel_id=0, name="k", variants=[g.KernelVariant(
            module_id=0, symbol="k", params=[g.ParamSlot(size=8, type=g.POINTER)] * 2)])],
        device_targets=[g.DeviceTarget(target_id=0, name="cpu", module_ids=[0])],
        graph_files=[g.GraphFile(target_id=0, file=w.FileRef(algorithm=w.SHA256), graph_names=["g"])],
    )
    node = g.GraphNode(
        kind=g.KERNEL, kernel_id=0, param_block=bytes(16), accesses=[g.Access(buffer_id=0, bytes=64, write=True)],
        relocations=[g.Relocation(kind=g.BUFFER_ADDRESS, param_index=index, addend=256 * index) for index in (0, 1)],
    )
    graph = g.Graph(name="g", role="decode")
    for index in range(MAX_NODES):
        node.node_id = index
        graph.nodes.append(node)
    steps = MAX_EDGES // MAX_NODES
    for index in range(MAX_NODES):
        graph.edges.extend(g.GraphEdge(**{"from": index}, to=index + step)
                           for step in range(1, steps + 1) if index + step < MAX_NODES)
    data = GraphSet(format_version=1, graphs=[graph]).SerializeToString()
    parsed = GraphSet()
    return {
        "nodes": len(graph.nodes), "edges": len(graph.edges), "file_bytes": len(data),
        "count_seconds": round(seconds(lambda: check_graph_bytes(data)), 2),
        "parse_seconds": round(seconds(lambda: parsed.ParseFromString(data)), 2),
        "check_seconds": round(seconds(lambda: check_graph_set(parsed, manifest)), 2),
    }


def seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
