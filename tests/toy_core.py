"""A tiny complete signed core for tests, and the means to break it.

    toy = make_toy_core(tmp_path / "core")
    toy.edit_manifest(lambda manifest: setattr(manifest, "release", 2))    # re-signed with the trusted key
    toy.sign(statement=lambda statement: statement["predicate"]["resources"].pop())

Statements and bundles are written here with `json`, `base64` and `cryptography` alone and share nothing with the code
under test, so that a test can sign what our own signer would refuse.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1 import weights_pb2 as w
from dflash_core.v1.graph_pb2 import GraphSet
from dflash_core.v1.manifest_pb2 import IoBinding, ModelIdentity, RebuildManifest, ServingContract

CHUNK = 4194304
BIG_BYTES = CHUNK + 5120
SMALL_BYTES = 1024
CORE_NAME = "toy"
CURVES = {"p256": ec.SECP256R1(), "p384": ec.SECP384R1(), "p521": ec.SECP521R1()}
HASHES = {"secp256r1": hashes.SHA256(), "secp384r1": hashes.SHA384(), "secp521r1": hashes.SHA512()}
PAYLOAD_TYPE = "application/vnd.in-toto+json"

Edit = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True)
class ToyKey:
    """A signing key of the tests."""

    private: ec.EllipticCurvePrivateKey
    pem: str
    keyid: str

    def private_pem(self) -> bytes:
        return self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


@cache
def toy_key(name: str = "builder", curve: str = "p256") -> ToyKey:
    """A key of this test process; one name always means the same key."""
    private = ec.generate_private_key(CURVES[curve])
    pem = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return ToyKey(private, pem.decode(), hashlib.sha256(pem).hexdigest())


def trust_document(*keys: ToyKey, threshold: int = 1) -> dict[str, Any]:
    """A trust file with one required role that holds `keys` (the builder's key if none are given)."""
    keys = keys or (toy_key(),)
    return {
        "format": "dflash-trust/1",
        "keys": {key.keyid: {"pem": key.pem, "owner": "tests"} for key in keys},
        "roles": {"builder": {"keys": [key.keyid for key in keys], "threshold": threshold}},
        "require": ["builder"], "revoked_keys": [], "revoked_sha256": [], "min_release": {},
    }


def write_trust(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document))
    path.chmod(0o644)
    return path


@dataclass(frozen=True, slots=True)
class ToyCore:
    """A signed core in a directory, with its paths by what they are for."""

    path: Path
    big: str
    small: str
    config: str
    graph: str
    state: str

    @property
    def contents(self) -> list[str]:
        """Every file outside signatures/."""
        names = [path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()]
        return sorted((name for name in names if not name.startswith("signatures/")), key=lambda n: n.split("/"))

    def manifest(self) -> RebuildManifest:
        return RebuildManifest.FromString((self.path / "manifest.pb").read_bytes())

    def signature(self, key: ToyKey | None = None) -> Path:
        return self.path / "signatures" / f"{(key or toy_key()).keyid}.sig"

    def edit_manifest(self, edit: Callable[[RebuildManifest], object], *, sign: bool = True) -> None:
        """Change the manifest, and sign the result with the trusted key."""
        manifest = self.manifest()
        edit(manifest)
        (self.path / "manifest.pb").write_bytes(manifest.SerializeToString(deterministic=True))
        if sign:
            self.sign()

    def replace_graph(self, data: bytes, *, sign: bool = True) -> str:
        """Put other bytes in place of the graph file, and sign that; returns the file's name."""
        digest = hashlib.sha256(data)
        name = f"graphs/{digest.hexdigest()}.pb"
        (self.path / self.graph).unlink()
        (self.path / name).write_bytes(data)
        ref = w.FileRef(algorithm=w.SHA256, digest=digest.digest(), size_bytes=len(data))

        def edit(manifest: RebuildManifest) -> None:
            entry = next(entry for entry in manifest.files if entry.role == "graph")
            entry.path = name
            entry.ref.CopyFrom(ref)
            manifest.graph_files[0].file.CopyFrom(ref)

        self.edit_manifest(edit, sign=sign)
        return name

    def sign(
        self, key: ToyKey | None = None, *, statement: Edit | None = None, bundle: Edit | None = None,
        file_name: str | None = None,
    ) -> Path:
        """Sign what lies there now; `statement` edits what is signed, `bundle` what is written."""
        key = key or toy_key()
        document = self.statement()
        if statement is not None:
            statement(document)
        payload = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        written = signed_bundle(payload, key)
        if bundle is not None:
            bundle(written)
        path = self.path / "signatures" / (file_name or f"{key.keyid}.sig")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(written))
        return path

    def statement(self) -> dict[str, Any]:
        """The statement over what lies there now."""
        resources = [
            {"name": name, "algorithm": "sha256",
             "digest": hashlib.sha256((self.path / name).read_bytes()).hexdigest()}
            for name in self.contents
        ]
        return {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": CORE_NAME, "digest": {"sha256": root_digest(resources)}}],
            "predicateType": "https://model_signing/signature/v1.0",
            "predicate": {
                "serialization": {
                    "method": "files", "hash_type": "sha256", "allow_symlinks": False,
                    "ignore_paths": [".git", ".gitattributes", ".github", ".gitignore", "signatures"],
                },
                "resources": resources,
            },
        }


def root_digest(resources: list[dict[str, str]]) -> str:
    """SHA-256 over the raw digests of the resources, in their order."""
    return hashlib.sha256(b"".join(bytes.fromhex(resource["digest"]) for resource in resources)).hexdigest()


def with_root(edit: Callable[[list[dict[str, Any]]], object]) -> Edit:
    """An edit of a statement's resources that keeps the root digest right."""
    def apply(statement: dict[str, Any]) -> None:
        resources = statement["predicate"]["resources"]
        edit(resources)
        statement["subject"][0]["digest"]["sha256"] = root_digest(resources)
    return apply


def pae(payload: bytes, kind: str = PAYLOAD_TYPE) -> bytes:
    """The bytes that DSSE signs."""
    return b" ".join([b"DSSEv1", str(len(kind)).encode(), kind.encode(), str(len(payload)).encode(), payload])


def signed_bundle(payload: bytes, key: ToyKey) -> dict[str, Any]:
    """A bundle in which `key` signs `payload`."""
    signature = key.private.sign(pae(payload), ec.ECDSA(HASHES[key.private.curve.name]))
    return {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": key.keyid}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }


def make_toy_core(directory: Path, *, signed: bool = True, release: int = 1) -> ToyCore:
    """Write a core of six files: two weights (one of two chunks), a state, a config, a graph file, the manifest.

    Args:
        directory: made; must not exist.
        signed: sign it with `toy_key()`.
    """
    source = random.Random(20240607)
    directory.mkdir(parents=True)
    entries: list[w.FileEntry] = []
    big = _put(directory, entries, "weights", ".bin", source.randbytes(BIG_BYTES))
    small = _put(directory, entries, "weights", ".bin", source.randbytes(SMALL_BYTES))
    state = _put(directory, entries, "state", ".bin", source.randbytes(256))
    config = _put(directory, entries, "config", "", b'{"model_type": "toy"}\n')
    graph = _put(directory, entries, "graph", ".pb", _graph_set().SerializeToString(deterministic=True))
    refs = {entry.path: entry.ref for entry in entries}
    manifest = RebuildManifest(
        format_version=1, core_name=CORE_NAME, release=release, files=entries,
        target=ModelIdentity(repository="toy/toy", revision="0" * 40, architecture="Toy", config=refs[config]),
        weight_blobs=[w.WeightBlob(blob_id=index, file=refs[path], alignment=256)
                      for index, path in enumerate((big, small))],
        tensor_views=[_view("big.weight", 0, BIG_BYTES), _view("small.weight", 1, SMALL_BYTES)],
        buffers=_buffers(refs[state]),
        modules=[g.KernelModule(module_id=0, kind=g.CPU_REGISTRY, target="cpu", registry="dflash.cpu",
                                registry_version=1)],
        kernels=[g.Kernel(kernel_id=0, name="add", op="toy.add/1", variants=[_variant()])],
        device_targets=[g.DeviceTarget(target_id=0, name="cpu", module_ids=[0])],
        graph_files=[g.GraphFile(target_id=0, file=refs[graph], graph_names=["decode_1"])],
        contract=ServingContract(max_batch=1, max_query_tokens=1, max_context=16, vocab_size=8, page_tokens=16,
                                 io=[IoBinding(name="logits", buffer_id=3, dtype="f32", shape=[8], output=True)]),
    )
    (directory / "manifest.pb").write_bytes(manifest.SerializeToString(deterministic=True))
    toy = ToyCore(directory, big, small, config, graph, state)
    if signed:
        toy.sign()
    return toy


_FOLDERS = {"weights": "weights", "state": "state", "config": "config", "graph": "graphs"}


def _put(directory: Path, entries: list[w.FileEntry], role: str, suffix: str, data: bytes) -> str:
    digest = hashlib.sha256(data)
    name = f"{_FOLDERS[role]}/{digest.hexdigest()}{suffix}"
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_bytes(data)
    entry = w.FileEntry(path=name, role=role,
                        ref=w.FileRef(algorithm=w.SHA256, digest=digest.digest(), size_bytes=len(data)))
    if len(data) > CHUNK:
        entry.chunk_bytes = CHUNK
        chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
        entry.chunk_digests = b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)
    entries.append(entry)
    return name


def _view(name: str, blob_id: int, nbytes: int) -> w.TensorView:
    return w.TensorView(name=name, blob_id=blob_id, size_bytes=nbytes, dtype="bf16", shape=[nbytes // 2],
                        sha256=bytes(32))


def _buffers(state: w.FileRef) -> list[g.Buffer]:
    return [
        g.Buffer(buffer_id=0, name="big", buffer_class=g.WEIGHTS, alignment=256, blob_id=0),
        g.Buffer(buffer_id=1, name="small", buffer_class=g.WEIGHTS, alignment=256, blob_id=1),
        g.Buffer(buffer_id=2, name="state", buffer_class=g.STATE, alignment=256, fixed_bytes=256, initial=state),
        g.Buffer(buffer_id=3, name="logits", buffer_class=g.IO, alignment=256, fixed_bytes=256),
    ]


def _variant() -> g.KernelVariant:
    slots = [g.ParamSlot(size=8, type=g.POINTER, name=name) for name in ("source", "out")]
    return g.KernelVariant(module_id=0, symbol="toy.add/1", params=slots, block=g.Dim3(x=1, y=1, z=1))


def _graph_set() -> GraphSet:
    nodes = []
    for node_id, (source, out) in enumerate(((1, 2), (2, 3))):
        nodes.append(g.GraphNode(
            node_id=node_id, kind=g.KERNEL, kernel_id=0, grid=g.Dim3(x=1, y=1, z=1), param_block=bytes(16),
            relocations=[g.Relocation(kind=g.BUFFER_ADDRESS, param_index=index, buffer_id=buffer_id)
                         for index, buffer_id in enumerate((source, out))],
            accesses=[g.Access(buffer_id=source, bytes=32), g.Access(buffer_id=out, bytes=32, write=True)],
        ))
    graph = g.Graph(name="decode_1", role="decode", bucket=g.Bucket(batch=1, query_tokens=1), nodes=nodes,
                    edges=[g.GraphEdge(**{"from": 0, "to": 1})], input_buffers=[2], output_buffers=[3])
    return GraphSet(format_version=1, graphs=[graph])
