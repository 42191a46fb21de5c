"""What model code records with: a graph, its rows, the weights, and the paged cache, under short names.

Model code says `fwd.linear(x, "target.layers.0.qkv", "qkv")`; which op that is follows from the weight's format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dflash_core.errors import CaptureError
from dflash_core.formats import Format

from exporter.program.builder import GraphRecorder, Program, Symbol, Tensor
from exporter.weights import Raw
from runtime.ops import DType

# Rows that one GEMM computes at a time: one fixed shape in every graph, so that a row has the same bits in each.
TILE_ROWS = 8


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of the core: where its parts lie, and in which format."""

    format: Format | Raw
    codes: Tensor
    block_scale: Tensor | None = None
    global_scale: Tensor | None = None

    def rows(self, first: int, count: int) -> StoredWeight:
        scale = self.block_scale.rows(first, count) if self.block_scale else None
        return StoredWeight(self.format, self.codes.rows(first, count), scale, self.global_scale)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """One model's K/V arena, and the tables that lead to a sequence's pages."""

    arena: Tensor
    kv_pages: Symbol
    page_table: Tensor
    page_tokens: int
    page_bytes: int
    layer_bytes: int

    def layer(self, layer_idx: int) -> Tensor:
        """The arena from this layer's K on."""
        name = f"{self.arena.name}[{layer_idx}]"
        return Tensor(self.arena.buffer_id, layer_idx * self.layer_bytes, DType.U8, (0,), name)

    def scalars(self) -> dict[str, int | Symbol]:
        max_slots, max_pages = self.page_table.shape
        return {"page_tokens": self.page_tokens, "page_bytes": self.page_bytes, "kv_pages": self.kv_pages,
                "max_slots": max_slots, "max_pages": max_pages}


@dataclass(frozen=True, slots=True)
class StateSlots:
    """One recurrent layer's state: a row per slot, so that a combined core can have more slots.

    Attributes:
        window: [max_slots, history, channels], activation type: the last inputs of the short convolution.
        state: f32 [max_slots, heads, head_dim, head_dim].
    """

    window: Tensor
    state: Tensor

    @property
    def bytes_per_slot(self) -> int:
        return (self.window.nbytes + self.state.nbytes) // self.state.shape[0]


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Places for the states of one slot each, and how many there are."""

    arena: Tensor
    count: Symbol


@dataclass(frozen=True, slots=True)
class TargetMemory:
    """What a target keeps between steps: its cache, the state of each recurrent layer by its number, and snapshots."""

    cache: PagedCache
    states: Mapping[int, StateSlots]
    snapshots: Snapshots | None = None

    @classmethod
    def of(cls, program: Program, cache: PagedCache, states: Mapping[int, StateSlots], snapshots: int) -> TargetMemory:
        """Add an arena of snapshots, this many unless a loader decides otherwise, where there are states."""
        memory = cls(cache, states)
        if not states:
            return memory
        count = program.symbol("snapshots", minimum=1, maximum=2**20, default=snapshots)
        return replace(memory, snapshots=Snapshots(program.arena("snapshots", count, memory.state_bytes_per_slot),
                                                   count))

    @property
    def state_bytes_per_slot(self) -> int:
        return sum(slots.bytes_per_slot for slots in self.states.values())


@dataclass(frozen=True, slots=True)
class StateRecord:
    """What a recurrent layer's rows would do to its state: the buffers that a commit replays."""

    layer_idx: int
    inputs: Tensor      # rows of the short convolution's input
    keys: Tensor
    changes: Tensor
    log_decay: Tensor


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """What the final norm reads, the tap features if any were asked for, and the states that are still to commit."""

    residual: Tensor
    features: Tensor | None
    pending: tuple[StateRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a graph: `groups` sequences, `block_rows` rows each."""

    groups: int
    block_rows: int
    positions: Tensor
    slots: Tensor

    @property
    def count(self) -> int:
        return self.groups * self.block_rows


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of a vision graph: one per patch of its bucket; `grid`, i32 [2], says which of them are the image."""

    count: int
    grid: Tensor


@dataclass(frozen=True, slots=True)
class ImageSources:
    """Where a prompt's rows are an image's: i32 [rows], 0 or 1 + the row of `embeddings` that stands in its place."""

    sources: Tensor
    embeddings: Tensor


@dataclass(frozen=True, slots=True)
class Forward:
    """Records ops for one set of rows."""

    graph: GraphRecorder
    weights: Mapping[str, StoredWeight]
    act: DType
    rows: StepRows | ImageRows
    images: ImageSources | None = None

    def scratch(self, name: str, cols: int, *, dtype: DType | None = None, rows: int | None = None) -> Tensor:
        return self.graph.program.scratch(name, dtype or self.act, (rows or self.rows.count, cols))

    def weight(self, name: str) -> StoredWeight:
        try:
            return self.weights[name]
        except KeyError as e:
            raise CaptureError("WEIGHT_NAME", "model code names a weight that was not laid out", where=name) from e

    def plain(self, name: str) -> Tensor:
        """A weight that is never quantized: a norm, a table, a codebook."""
        stored = self.weight(name)
        if stored.format not in (Format.BF16, Format.F32):
            raise CaptureError("WEIGHT_FORMAT", "this weight is read as it is and cannot be quantized", where=name,
                               expected="bf16 or f32", got=stored.format.value)
        return stored.codes

    def linear(self, x: Tensor, name: str, out: str | Tensor, *, result: DType | None = None,
               part: tuple[int, int] | None = None) -> Tensor:
        """Record out = x @ weight.T, by the op of the weight's format.

        Args:
            x: [rows, in_features].
            name: logical weight name.
            out: where the result goes: a tensor, or the name of a scratch buffer.
            result: element type of a scratch result; None: the activation type.
            part: (first, count) rows of the weight to use; None: all.
        Returns:
            [rows, out_features].
        """
        stored = self.weight(name)
        if part is not None:
            stored = stored.rows(*part)
        out_features, in_features = stored.codes.shape
        rows = x.shape[0]
        y = out if isinstance(out, Tensor) else self.scratch(out, out_features, dtype=result, rows=rows)
        scalars: dict[str, int] = {
            "rows": rows, "in_features": in_features, "out_features": out_features,
            "tile_rows": TILE_ROWS, "act": self.act, "result": y.dtype}
        operands = {"x": x, "weight": stored.codes, "out": y}
        if stored.format in (Format.BF16, Format.F32):
            self.graph.call("dflash.linear/1", operands, label=name, w=stored.codes.dtype, **scalars)
            return y
        assert stored.block_scale is not None
        operands["block_scale"] = stored.block_scale
        if stored.format is Format.MXFP8:
            self.graph.call("dflash.linear_mxfp8/1", operands, label=name, **scalars)
            return y
        assert stored.global_scale is not None
        operands["global_scale"] = stored.global_scale
        self.graph.call("dflash.linear_nvfp4/1", operands, label=name, **scalars)
        return y

    def rms_norm(self, x: Tensor, name: str, eps: float, out: str) -> Tensor:
        weight = self.plain(name)
        rows, cols = x.shape
        y = self.scratch(out, cols, rows=rows)
        self.graph.call("dflash.rms_norm/1", {"x": x, "weight": weight, "out": y}, label=name, rows=rows, cols=cols,
                        eps=eps, act=self.act, w=weight.dtype)
        return y

    def add_rms_norm(self, residual: Tensor, delta: Tensor, name: str, eps: float, out: str) -> Tensor:
        """residual += delta, in place; returns the normalized sum."""
        weight = self.plain(name)
        rows, cols = residual.shape
        y = self.scratch(out, cols, rows=rows)
        self.graph.call("dflash.add_rms_norm/1", {"residual": residual, "delta": delta, "weight": weight, "out": y},
                        label=name, rows=rows, cols=cols, eps=eps, act=self.act, w=weight.dtype)
        return y

    def add(self, residual: Tensor, delta: Tensor, label: str) -> None:
        """residual += delta, in place."""
        rows, cols = residual.shape
        self.graph.call("dflash.add/1", {"residual": residual, "delta": delta}, label=label, rows=rows, cols=cols,
                        act=self.act)

    def tap(self, x: Tensor, features: Tensor | None, taps: Sequence[int], layer_idx: int) -> None:
        """Copy what leaves `layer_idx` into its columns of the features, wherever the draft asked for it."""
        for index, wanted in enumerate(taps):
            if wanted == layer_idx:
                assert features is not None
                self.graph.call("dflash.tap/1", {"x": x, "features": features}, label=f"target.layers.{layer_idx}",
                                rows=self.rows.count, cols=x.shape[1], taps=len(taps), index=index, act=self.act)

    def embedding(self, tokens: Tensor, name: str, out: str | Tensor, *, scale: float = 1.0) -> Tensor:
        table = self.plain(name)
        vocab, cols = table.shape
        y = out if isinstance(out, Tensor) else self.scratch(out, cols)
        self.graph.call("dflash.embedding/1", {"tokens": tokens, "table": table, "out": y}, label=name,
                        rows=self.rows.count, vocab=vocab, cols=cols, scale=scale, act=self.act, w=table.dtype)
        if self.images is not None:
            self.graph.call("dflash.splice_embedding/1",
                            {"sources": self.images.sources, "embeddings": self.images.embeddings, "x": y}, label=name,
                            rows=self.rows.count, cols=cols, capacity=self.images.embeddings.shape[0], act=self.act)
        return y

    def gated_mlp(self, x: Tensor, prefix: str) -> Tensor:
        """down(silu(gate x) * up x), gate and up fused into one matrix."""
        gate_up = self.linear(x, f"{prefix}.gate_up", "gate_up")
        cols = gate_up.shape[1] // 2
        gated = self.scratch("gated", cols)
        self.graph.call("dflash.silu_mul/1", {"gate_up": gate_up, "out": gated}, label=prefix, rows=self.rows.count,
                        cols=cols, act=self.act)
        return self.linear(gated, f"{prefix}.down", "delta")
