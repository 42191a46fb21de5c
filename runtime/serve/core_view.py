"""What the page and /server_info show of the core: identity, precisions, and the nodes of each graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.compat import SNAPSHOTS
from dflash_core.effective import effective_precision
from dflash_core.errors import VerificationError
from dflash_core.v1.graph_pb2 import KERNEL, Graph, GraphNode, GraphTemplate, NodeKind
from dflash_core.v1.manifest_pb2 import RebuildManifest

from runtime.canary import Canary, carried_canaries
from runtime.core import Core
from runtime.trust import Signer, TrustPolicy
from runtime.verify import verify


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """What a server says of its core, read once from verified bytes."""

    manifest: RebuildManifest
    signers: tuple[Signer, ...]
    graphs: tuple[Graph, ...]
    templates: Mapping[int, GraphTemplate]
    canaries: tuple[Canary, ...]


def read_facts(path: Path, trust: TrustPolicy, core_digest: str, device: str) -> CoreFacts:
    """Read what a server shows of a core that is loaded.

    Raises:
        PolicyError, VerificationError, FormatError: as `verify`; CORE_CHANGED, it is another core by now.
    """
    with verify(path, trust) as verified:
        if verified.core_digest != core_digest:
            raise VerificationError("CORE_CHANGED", "the core was replaced while it was loaded", where=str(path),
                                    expected=core_digest, got=verified.core_digest, hint="start again")
        manifest = verified.manifest
        on_cpu = {target.target_id for target in manifest.device_targets if target.name == "cpu"}
        files = [f for f in manifest.graph_files if (f.target_id in on_cpu) == (device == "cpu")]
        graph_set = verified.graph_set(files[0])
        return CoreFacts(manifest, verified.signers, tuple(graph_set.graphs),
                         {t.template_id: t for t in graph_set.templates}, carried_canaries(verified))


def identity_document(core: Core, facts: CoreFacts) -> dict[str, Any]:
    """Who the core is and what it can hold."""
    manifest = core.manifest
    contract, speculation = manifest.contract, manifest.speculation
    return {
        "core_name": manifest.core_name, "release": manifest.release, "core_digest": core.core_digest,
        "signers": [{"keyid": s.keyid, "owner": s.owner, "roles": list(s.roles)} for s in facts.signers],
        "exporter_version": manifest.provenance.exporter_version,
        "target": manifest.target.architecture,
        "draft": speculation.draft.architecture if speculation.HasField("draft") else None,
        "method": speculation.method or None, "depth": speculation.draft_depth,
        "precision": precision_document(manifest), "max_context": contract.max_context,
        "max_batch": contract.max_batch, "vocab_size": contract.vocab_size, "kv_pages": core.symbols["kv_pages"],
        "page_tokens": contract.page_tokens, "snapshot_slots": core.symbols.get(SNAPSHOTS, 0),
        "graphs": [{"name": g.name, "role": g.role, "batch": g.bucket.batch} for g in facts.graphs]}


def precision_document(manifest: RebuildManifest) -> list[dict[str, Any]]:
    """Requested and effective precision of every role, and what decided it."""
    return [{"role": item.role.value, "recorded": item.recorded, "effective": item.text, "origin": item.origin.value}
            for item in effective_precision(manifest)]


def graph_document(facts: CoreFacts, name: str) -> dict[str, Any] | None:
    """The node table of one graph, as the page draws it: nodes by kernel name, and the edges between them."""
    graph = next((g for g in facts.graphs if g.name == name), None)
    if graph is None:
        return None
    kernels = {kernel.kernel_id: kernel.name for kernel in facts.manifest.kernels}
    template = facts.templates[graph.template_id] if graph.HasField("template_id") else graph
    replaced = {o.node_id: o.kernel_id for o in graph.overrides if o.HasField("kernel_id")}
    nodes = [{"id": node.node_id, "name": _name(node, kernels, replaced), "label": node.debug_name}
             for node in template.nodes]
    edges = [[getattr(edge, "from"), edge.to] for edge in template.edges]
    return {"name": graph.name, "role": graph.role, "batch": graph.bucket.batch,
            "query_tokens": graph.bucket.query_tokens, "nodes": nodes, "edges": edges}


def _name(node: GraphNode, kernels: dict[int, str], replaced: dict[int, int]) -> str:
    if node.kind == KERNEL:
        return kernels[replaced.get(node.node_id, node.kernel_id)]
    return NodeKind.Name(node.kind).lower()
