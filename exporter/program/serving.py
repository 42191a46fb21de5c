"""The buffers through which the host drives a core, and their names in the serving contract.

A *slot* holds one sequence: its length, limit, anchor, page table and sampling settings. A *lane* is a place in a
batch; `slots` says which slot each lane serves (-1: none), so sequences join and leave without moving.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dflash_core.v1 import graph_pb2, manifest_pb2

from exporter.models.dflash2 import ProposalBuffers
from exporter.program.builder import Program, Tensor
from runtime.ops import DType


@dataclass(frozen=True, slots=True)
class ServingShape:
    """Sizes that the host and the graphs agree on."""

    max_batch: int
    max_context: int
    page_tokens: int
    chunk_tokens: int
    depth: int          # proposals per step; 0 without a draft
    candidates: int     # ids per proposal over which the draft's distribution is kept; 0 without a draft
    vocab: int          # rows of the verification head

    @property
    def max_pages(self) -> int:
        return -(-self.max_context // self.page_tokens)

    @property
    def block_rows(self) -> int:
        return 1 + self.depth


@dataclass(frozen=True, slots=True)
class ServingBuffers:
    """One tensor per contract binding; the field name is the binding's name."""

    slots: Tensor            # i32 [max_batch], host in
    limit: Tensor            # i32 [max_slots], host in: most tokens the sequence may hold
    page_table: Tensor       # i32 [max_slots, max_pages], host in
    temperature: Tensor      # f32 [max_slots], host in; 0: greedy
    top_p: Tensor            # f32 [max_slots], host in
    top_k: Tensor            # i32 [max_slots], host in; 0: off
    seed: Tensor             # u64 [max_slots], host in
    chunk_tokens: Tensor     # i32 [chunk_tokens], host in
    chunk_count: Tensor      # i32 [1], host in
    length: Tensor           # i32 [max_slots], state: tokens whose K/V are stored
    anchor: Tensor           # i32 [max_slots], state: the last committed token, not yet stored
    sampled: Tensor          # i32 [max_batch], out: the token of a prefill or decode step
    emitted: Tensor          # i32 [max_batch, block_rows], out: the tokens of a verify step
    produced: Tensor         # i32 [max_batch], out
    accepted: Tensor         # i32 [max_batch], out
    logits: Tensor           # f32 [max_batch * block_rows, vocab], out
    proposals: Tensor | None = None       # i32 [max_batch, depth], out
    proposal_ids: Tensor | None = None    # i32 [max_batch, depth, candidates], out
    proposal_probs: Tensor | None = None  # f32 [max_batch, depth, candidates], out
    snapshot: Tensor | None = None        # i32 [1], host in: the place of a saved state; absent without states

    def sampling(self) -> dict[str, Tensor]:
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed}

    def proposal_rows(self, batch: int) -> ProposalBuffers:
        """The proposal buffers of the first `batch` lanes."""
        assert self.proposals and self.proposal_ids and self.proposal_probs
        return ProposalBuffers(self.proposals.rows(0, batch), self.proposal_ids.rows(0, batch),
                               self.proposal_probs.rows(0, batch))


HOST_INPUTS = ("slots", "limit", "page_table", "temperature", "top_p", "top_k", "seed", "chunk_tokens", "chunk_count",
               "snapshot")
STATE = ("length", "anchor")


def serving_buffers(program: Program, shape: ServingShape, *, has_state: bool = False) -> ServingBuffers:
    """Add the serving buffers to the program.

    Args:
        has_state: the target has recurrent states, of which snapshots are taken.
    """
    slots, rows = shape.max_batch, shape.max_batch * shape.block_rows
    i32, f32 = DType.I32, DType.F32
    io = program.io
    made = {
        "slots": io("slots", i32, (shape.max_batch,)),
        "limit": io("limit", i32, (slots,)),
        "page_table": io("page_table", i32, (slots, shape.max_pages)),
        "temperature": io("temperature", f32, (slots,)),
        "top_p": io("top_p", f32, (slots,)),
        "top_k": io("top_k", i32, (slots,)),
        "seed": io("seed", DType.U64, (slots,)),
        "chunk_tokens": io("chunk_tokens", i32, (shape.chunk_tokens,)),
        "chunk_count": io("chunk_count", i32, (1,)),
        "length": program.state("length", i32, (slots,)),
        "anchor": program.state("anchor", i32, (slots,)),
        "sampled": io("sampled", i32, (shape.max_batch,), host_mapped=True),
        "emitted": io("emitted", i32, (shape.max_batch, shape.block_rows), host_mapped=True),
        "produced": io("produced", i32, (shape.max_batch,), host_mapped=True),
        "accepted": io("accepted", i32, (shape.max_batch,), host_mapped=True),
        "logits": io("logits", f32, (rows, shape.vocab)),
    }
    if shape.depth:
        drafted = (shape.max_batch, shape.depth)
        made["proposals"] = io("proposals", i32, drafted)
        made["proposal_ids"] = io("proposal_ids", i32, (*drafted, shape.candidates))
        made["proposal_probs"] = io("proposal_probs", f32, (*drafted, shape.candidates))
    if has_state:
        made["snapshot"] = io("snapshot", i32, (1,))
    return ServingBuffers(**made)


def bindings(buffers: ServingBuffers) -> list[manifest_pb2.IoBinding]:
    """The contract's bindings; `output` marks what the host reads."""
    result = []
    for field in fields(buffers):
        tensor: Tensor | None = getattr(buffers, field.name)
        if tensor is not None:
            result.append(manifest_pb2.IoBinding(
                name=field.name, buffer_id=tensor.buffer_id, offset=tensor.offset, dtype=tensor.dtype.view_name,
                shape=tensor.shape, output=field.name not in HOST_INPUTS))
    return result


def inputs(graph: graph_pb2.Graph, buffers: ServingBuffers) -> list[Tensor]:
    """The serving buffers that the recorded nodes read and the host or another graph writes."""
    return _touching(graph, buffers, (*HOST_INPUTS, *STATE, "proposals", "proposal_ids", "proposal_probs"), write=False)


def outputs(graph: graph_pb2.Graph, buffers: ServingBuffers) -> list[Tensor]:
    """The serving buffers that the recorded nodes write."""
    return _touching(graph, buffers, tuple(f.name for f in fields(buffers)), write=True)


def _touching(graph: graph_pb2.Graph, buffers: ServingBuffers, names: tuple[str, ...], *, write: bool) -> list[Tensor]:
    touched = {a.buffer_id for node in graph.nodes for a in node.accesses if a.write == write}
    tensors = [getattr(buffers, name) for name in names]
    return [t for t in tensors if t is not None and t.buffer_id in touched]
