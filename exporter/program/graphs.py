"""Which graphs a text core needs, and what each does.

| role    | bucket          | does                                                                                   |
|---------|-----------------|----------------------------------------------------------------------------------------|
| prefill | chunk of tokens | target forward, K/V writes, the last row's token, taps to draft context                |
| draft   | batch           | block forward over the context, candidates, proposals and their probabilities          |
| verify  | batch x (1 + k) | target forward, accept, next anchor, taps of the accepted rows to draft context        |
| decode  | batch           | target forward of the anchor, next token                                               |
| save, restore | one sequence | its recurrent states, copied to a snapshot or from it; absent without states        |
| vision  | patches         | see exporter.program.vision; a prefill chunk takes the rows of images in a prompt      |

Every graph reads positions and lengths from buffers, so one graph serves every length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dflash_core.v1 import graph_pb2

from exporter.draft_config import DraftConfig
from exporter.models import dflash2
from exporter.models import target as models
from exporter.models.context import Forward, PagedCache, StepRows, StoredWeight, TargetMemory
from exporter.models.target import AnyTarget
from exporter.program.builder import GraphRecorder, OpCall, Program, Tensor
from exporter.program.serving import ServingBuffers, ServingShape, inputs, outputs, serving_buffers
from exporter.program.vision import RecordedVision, Vision, record_vision, vision_buffers
from runtime.ops import DType

SNAPSHOTS_PER_SLOT = 2  # places for states of prompts that were seen, unless a loader decides otherwise


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft's part of a core: its config, and the logical name of the head it proposes with."""

    config: DraftConfig
    proposal_head: str


@dataclass(frozen=True, slots=True)
class RecordedProgram:
    """Everything that was recorded: shared tables, graphs, and the buffers of the serving contract."""

    program: Program
    graphs: tuple[graph_pb2.Graph, ...]
    calls: tuple[tuple[OpCall, ...], ...]  # the op calls of each graph, which a GPU target lowers
    buffers: ServingBuffers
    kv_bytes_per_page: int
    state_bytes_per_slot: int = 0
    vision: RecordedVision | None = None  # its graphs and calls are among those above


def record_program(program: Program, target: AnyTarget, draft: Draft | None, weights: Mapping[str, StoredWeight],
                   shape: ServingShape, batches: Sequence[int], act: DType,
                   vision: Vision | None = None) -> RecordedProgram:
    """Record every graph of a core.

    Args:
        program: holds the weight buffers already, and nothing else.
        weights: logical name to stored weight.
        batches: batch buckets, ascending; the last is shape.max_batch.
        act: activation and cache type, BF16 or F32.
        vision: the image tower whose rows a prompt may hold.
    """
    return _Recorder(program, target, draft, weights, shape, act, vision).record(batches)


class _Recorder:
    def __init__(self, program: Program, target: AnyTarget, draft: Draft | None,
                 weights: Mapping[str, StoredWeight], shape: ServingShape, act: DType, vision: Vision | None) -> None:
        self.program, self.target, self.draft = program, target, draft
        self.weights, self.shape, self.act = weights, shape, act
        self.buffers = serving_buffers(program, shape, has_state=models.has_state(target))
        self.vision = vision
        self.images = vision_buffers(program, vision, shape.chunk_tokens, act) if vision else None
        self.calls: list[tuple[OpCall, ...]] = []
        pages = shape.max_batch * shape.max_pages
        self.kv_pages = program.symbol("kv_pages", minimum=shape.max_pages, maximum=2**31 - 1, default=pages)
        cache = self._cache("target_kv", *models.cache_layer_values(target))
        self.memory = TargetMemory.of(program, cache, models.state_slots(program, target, shape.max_batch, act),
                                      SNAPSHOTS_PER_SLOT * shape.max_batch)
        self.draft_cache = None if draft is None else self._cache(
            "draft_kv", draft.config.num_layers, dflash2.cache_values(draft.config))

    def _cache(self, name: str, layers: int, values: int) -> PagedCache:
        layer_bytes = values * self.shape.page_tokens * self.act.bits // 8
        page_bytes = layers * layer_bytes
        return PagedCache(self.program.arena(name, self.kv_pages, page_bytes), self.kv_pages, self.buffers.page_table,
                          self.shape.page_tokens, page_bytes, layer_bytes)

    def record(self, batches: Sequence[int]) -> RecordedProgram:
        graphs = [self._prefill()]
        if self.memory.states:
            graphs += [self._copy_states("save"), self._copy_states("restore")]
        for batch in batches:
            if self.draft is not None:
                graphs += [self._draft(batch), self._verify(batch)]
            graphs.append(self._decode(batch))
        seen = None
        if self.vision is not None and self.images is not None:
            seen = record_vision(self.program, self.vision, self.weights, self.images, self.act)
            graphs += seen.graphs
            self.calls += seen.calls
        kv_bytes = self.memory.cache.page_bytes + (self.draft_cache.page_bytes if self.draft_cache else 0)
        return RecordedProgram(self.program, tuple(graphs), tuple(self.calls), self.buffers, kv_bytes,
                               self.memory.state_bytes_per_slot, seen)

    def _copy_states(self, role: str) -> graph_pb2.Graph:
        """Copy every state of one slot to a snapshot, or from it."""
        assert self.buffers.snapshot is not None and self.memory.snapshots is not None
        graph = GraphRecorder(self.program, role, role=role, batch=1, query_tokens=1, load_priority=1)
        op, offset = ("dflash.save_slot/1" if role == "save" else "dflash.load_slot/1"), 0
        for layer_idx, slots in self.memory.states.items():
            for rows in (slots.window, slots.state):
                row_bytes = rows.nbytes // self.shape.max_batch
                graph.call(op, {"slots": self.buffers.slots.rows(0, 1), "snapshot": self.buffers.snapshot,
                                "rows": replace(rows, dtype=DType.U8, shape=(self.shape.max_batch, row_bytes)),
                                "places": replace(self.memory.snapshots.arena, offset=offset)},
                           label=f"target.layers.{layer_idx}", max_slots=self.shape.max_batch, row_bytes=row_bytes,
                           snapshot_bytes=self.memory.state_bytes_per_slot, snapshots=self.memory.snapshots.count)
                offset += row_bytes
        return self._finish(graph)

    def _finish(self, graph: GraphRecorder, *given: Tensor) -> graph_pb2.Graph:
        recorded = graph.graph
        self.calls.append(tuple(graph.calls))
        return graph.finish([*inputs(recorded, self.buffers), *given], outputs(recorded, self.buffers))

    def _taps(self) -> tuple[int, ...]:
        return self.draft.config.target_layer_ids if self.draft else ()

    def _step_rows(self, graph: GraphRecorder, batch: int, block_rows: int) -> StepRows:
        """Rows of a step graph, with their positions recorded from the lanes' lengths."""
        buffers = self.buffers
        positions = self.program.scratch("positions", DType.I32, (batch * block_rows,))
        slots = buffers.slots.rows(0, batch)
        graph.call("dflash.block_positions/1",
                   {"slots": slots, "length": buffers.length, "limit": buffers.limit, "positions": positions},
                   groups=batch, block_rows=block_rows, max_slots=self.shape.max_batch)
        return StepRows(batch, block_rows, positions, slots)

    def _logits(self, fwd: Forward, residual: Tensor) -> Tensor:
        hidden = fwd.rms_norm(residual, "target.norm", self.target.rms_norm_eps, "final_hidden")
        logits = self.buffers.logits.rows(0, hidden.shape[0])
        return fwd.linear(hidden, models.head_name(self.target), logits)

    def _sampled(self, graph: GraphRecorder, logits: Tensor, positions: Tensor, slots: Tensor, emitted: Tensor,
                 produced: Tensor) -> None:
        graph.call("dflash.sample/1",
                   {"logits": logits, "positions": positions, "slots": slots, **self.buffers.sampling(),
                    "emitted": emitted, "produced": produced},
                   groups=slots.shape[0], vocab=self.shape.vocab, live_vocab=self.target.vocab_size,
                   max_slots=self.shape.max_batch)

    def _prefill(self) -> graph_pb2.Graph:
        chunk, buffers = self.shape.chunk_tokens, self.buffers
        graph = GraphRecorder(self.program, f"prefill.c{chunk}", role="prefill", batch=1, query_tokens=chunk,
                              load_priority=0)
        positions = self.program.scratch("positions", DType.I32, (chunk,))
        slots = buffers.slots.rows(0, 1)
        graph.call("dflash.chunk_positions/1",
                   {"slots": slots, "count": buffers.chunk_count, "length": buffers.length, "positions": positions},
                   rows=chunk, max_slots=self.shape.max_batch)
        images = self.images.sources() if self.images else None
        fwd = Forward(graph, self.weights, self.act, StepRows(1, chunk, positions, slots), images)
        hidden = models.record_layers(fwd, self.target, self.memory, buffers.chunk_tokens, self._taps())
        if self.draft is not None and hidden.features is not None and self.draft_cache is not None:
            dflash2.record_context(fwd, self.draft.config, self.draft_cache, hidden.features, positions)
        last = fwd.scratch("last_row", self.target.hidden_size, rows=1)
        last_position = self.program.scratch("last_position", DType.I32, (1,))
        graph.call("dflash.last_row/1",
                   {"x": hidden.residual, "positions": positions, "out": last, "last_position": last_position},
                   rows=chunk, cols=self.target.hidden_size, act=self.act)
        logits = self._logits(fwd, last)
        emitted, produced = self._lane_outputs(1)
        self._sampled(graph, logits, last_position, slots, emitted, produced)
        graph.call("dflash.commit_chunk/1",
                   {"slots": slots, "count": buffers.chunk_count, "emitted": emitted, "length": buffers.length,
                    "anchor": buffers.anchor}, max_slots=self.shape.max_batch)
        return self._finish(graph, *((images.sources, images.embeddings) if images else ()))

    def _lane_outputs(self, batch: int) -> tuple[Tensor, Tensor]:
        """One token per lane, [batch, 1], and how many lanes produced one."""
        return self.buffers.sampled.rows(0, batch).reshape(batch, 1), self.buffers.produced.rows(0, batch)

    def _draft(self, batch: int) -> graph_pb2.Graph:
        assert self.draft is not None and self.draft_cache is not None
        block_rows, buffers, config = self.shape.block_rows, self.buffers, self.draft.config
        graph = GraphRecorder(self.program, f"draft.b{batch}", role="draft", batch=batch, query_tokens=block_rows,
                              load_priority=1)
        rows = self._step_rows(graph, batch, block_rows)
        fwd = Forward(graph, self.weights, self.act, rows)
        tokens = self.program.scratch("tokens", DType.I32, (rows.count,))
        graph.call("dflash.block_tokens/1", {"slots": rows.slots, "anchor": buffers.anchor, "tokens": tokens},
                   groups=batch, block_rows=block_rows, mask_token_id=config.mask_token_id,
                   max_slots=self.shape.max_batch)
        hidden = dflash2.record_block(fwd, config, self.draft_cache, tokens)
        dflash2.record_proposals(fwd, config, hidden, self.draft.proposal_head, tokens, buffers.sampling(),
                                 buffers.proposal_rows(batch), self.target.vocab_size)
        return self._finish(graph)

    def _verify(self, batch: int) -> graph_pb2.Graph:
        assert self.draft is not None and self.draft_cache is not None
        block_rows, depth, buffers = self.shape.block_rows, self.shape.depth, self.buffers
        graph = GraphRecorder(self.program, f"verify.b{batch}", role="verify", batch=batch, query_tokens=block_rows,
                              load_priority=2)
        rows = self._step_rows(graph, batch, block_rows)
        fwd = Forward(graph, self.weights, self.act, rows)
        drafted = buffers.proposal_rows(batch)
        tokens = self.program.scratch("tokens", DType.I32, (rows.count,))
        graph.call("dflash.verify_tokens/1",
                   {"slots": rows.slots, "anchor": buffers.anchor, "proposals": drafted.proposals, "tokens": tokens},
                   groups=batch, block_rows=block_rows, depth=depth, max_slots=self.shape.max_batch)
        hidden = models.record_layers(fwd, self.target, self.memory, tokens, self._taps(), undoable=True)
        logits = self._logits(fwd, hidden.residual)
        emitted, produced = buffers.emitted.rows(0, batch), buffers.produced.rows(0, batch)
        graph.call("dflash.accept/1",
                   {"logits": logits, "tokens": tokens, "positions": rows.positions, "slots": rows.slots,
                    "limit": buffers.limit, "proposal_ids": drafted.proposal_ids,
                    "proposal_probs": drafted.proposal_probs, **buffers.sampling(), "emitted": emitted,
                    "produced": produced, "accepted": buffers.accepted.rows(0, batch)},
                   groups=batch, block_rows=block_rows, depth=depth, candidates=self.shape.candidates,
                   vocab=self.shape.vocab, live_vocab=self.target.vocab_size, max_slots=self.shape.max_batch)
        context = self.program.scratch("context_positions", DType.I32, (rows.count,))
        graph.call("dflash.accepted_positions/1",
                   {"positions": rows.positions, "produced": produced, "context_positions": context}, groups=batch,
                   block_rows=block_rows)
        models.record_commit(fwd, self.target, self.memory, hidden, context)
        assert hidden.features is not None
        dflash2.record_context(fwd, self.draft.config, self.draft_cache, hidden.features, context)
        self._commit(graph, rows, emitted, produced)
        return self._finish(graph)

    def _decode(self, batch: int) -> graph_pb2.Graph:
        buffers = self.buffers
        graph = GraphRecorder(self.program, f"decode.b{batch}", role="decode", batch=batch, query_tokens=1,
                              load_priority=3)
        rows = self._step_rows(graph, batch, 1)
        fwd = Forward(graph, self.weights, self.act, rows)
        tokens = self.program.scratch("tokens", DType.I32, (batch,))
        graph.call("dflash.block_tokens/1", {"slots": rows.slots, "anchor": buffers.anchor, "tokens": tokens},
                   groups=batch, block_rows=1, mask_token_id=0, max_slots=self.shape.max_batch)
        hidden = models.record_layers(fwd, self.target, self.memory, tokens, ())
        logits = self._logits(fwd, hidden.residual)
        emitted, produced = self._lane_outputs(batch)
        self._sampled(graph, logits, rows.positions, rows.slots, emitted, produced)
        self._commit(graph, rows, emitted, produced)
        return self._finish(graph)

    def _commit(self, graph: GraphRecorder, rows: StepRows, emitted: Tensor, produced: Tensor) -> None:
        graph.call("dflash.commit/1",
                   {"slots": rows.slots, "produced": produced, "emitted": emitted, "length": self.buffers.length,
                    "anchor": self.buffers.anchor},
                   groups=rows.groups, block_rows=rows.block_rows, max_slots=self.shape.max_batch)

