"""How cores with different largest batches share their buffers: the larger shape wins.

| buffer | rows | what happens to it |
|---|---|---|
| per slot: `limit`, `page_table`, `temperature`, `top_p`, `top_k`, `seed`, `length`, `anchor` | max_batch | grows |
| recurrent state, `slot_state.<layer>` and `slot_window.<layer>`, bound to no name | max_batch | grows |
| per lane: `slots`, `sampled`, `emitted`, `produced`, `accepted`, `logits`, `proposals`… | k × max_batch | grows |
| any other binding | fixed | must be equal |

Rows are outermost, so a row keeps its address when rows are added behind it, and a graph that serves lanes 0 to b - 1
serves them unchanged. What does change is how many slots an op may be told of: a node's `max_slots` becomes that of the
combined core, and the accesses that follow from it are declared anew. Row length must be equal, so `--max-context` of
all cores covers the same number of pages. A graph for a GPU has its sizes compiled in and is not changed: the cores
then need one largest batch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dflash_core.errors import CompatibilityError
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.manifest_pb2 import IoBinding

from exporter.combine_inputs import Input
from runtime.ops import DTYPE_BY_NAME, Operand, Scalar, find_op

PER_SLOT = frozenset({"limit", "page_table", "temperature", "top_p", "top_k", "seed", "length", "anchor"})
PER_LANE = frozenset({"slots", "sampled", "emitted", "produced", "accepted", "logits", "proposals", "proposal_ids",
                      "proposal_probs"})
SLOT_STATE = ("slot_state.", "slot_window.")
MAX_SLOTS = "max_slots"


@dataclass(frozen=True, slots=True)
class MergedBindings:
    """The bindings of the combined core, and the size in bytes of every buffer that grew, by its name.

    `bindings` still hold the buffer ids of the first input.
    """

    bindings: tuple[IoBinding, ...]
    nbytes: Mapping[str, int]


def merge_bindings(inputs: Sequence[Input]) -> MergedBindings:
    """Bindings by name; all cores have the same ones.

    Raises:
        CompatibilityError: COMBINE_BINDING, a binding that one core lacks, or that differs in more than its rows;
            COMBINE_BATCH, a buffer that would grow and is more than its binding.
    """
    first, slots = inputs[0], max(item.manifest.contract.max_batch for item in inputs)
    merged = []
    nbytes: dict[str, int] = {}
    tables = [{binding.name: binding for binding in item.manifest.contract.io} for item in inputs]
    for item, table in zip(inputs, tables, strict=True):
        for name in sorted(table.keys() ^ tables[0].keys()):
            raise _refused("a core lacks a binding", first, item, name,
                           *("present" if name in side else "absent" for side in (tables[0], table)),
                           "export both with a draft of the same depth, or both without")
    for binding in first.manifest.contract.io:
        shared = [table[binding.name] for table in tables]
        for item, other in zip(inputs, shared, strict=True):
            _check_same(first, binding, item, other)
        result = IoBinding()
        result.CopyFrom(binding)
        if len({tuple(other.shape) for other in shared}) > 1:
            result.shape[0] = binding.shape[0] // first.manifest.contract.max_batch * slots
            for item, other in zip(inputs, shared, strict=True):
                buffer = next(b for b in item.manifest.buffers if b.buffer_id == other.buffer_id)
                _check_whole(item, other, buffer)
                nbytes[buffer.name] = _nbytes(result)
        merged.append(result)
    for item in inputs:
        nbytes |= {b.name: _state_nbytes(item, b, slots) for b in item.manifest.buffers
                   if b.buffer_class == g.STATE and b.name.startswith(SLOT_STATE)}
    return MergedBindings(tuple(merged), nbytes)


def _check_same(first: Input, binding: IoBinding, item: Input, other: IoBinding) -> None:
    """Equal in all but rows, and in rows as well unless they follow the batch."""
    name = binding.name
    for field in ("dtype", "output", "offset"):
        if getattr(binding, field) != getattr(other, field):
            raise _refused("a binding differs", first, item, f"{name}, {field}",
                           getattr(binding, field), getattr(other, field), "export both with the same release")
    left, right = list(binding.shape), list(other.shape)
    if left == right:
        return
    batches = first.manifest.contract.max_batch, item.manifest.contract.max_batch
    follows = name in PER_SLOT | PER_LANE and left[1:] == right[1:] and all(batches) and len(left) == len(right)
    if not follows or left[0] * batches[1] != right[0] * batches[0] or left[0] % batches[0]:
        raise _refused("a binding has another shape", first, item, name, left, right,
                       "export both with the same --depth and --max-context")


def _state_nbytes(item: Input, buffer: g.Buffer, slots: int) -> int:
    """Size of a recurrent state with a row for every slot of the combined core."""
    own = item.manifest.contract.max_batch
    if not own or buffer.fixed_bytes % own or buffer.size_terms:
        raise CompatibilityError(
            "COMBINE_BATCH", "the cores do not combine: a recurrent state has no row per slot",
            where=f"{item.label}: buffer {buffer.name}", expected=f"a multiple of {own} bytes", got=buffer.fixed_bytes,
            hint="export the core again")
    return buffer.fixed_bytes // own * slots


def _check_whole(item: Input, binding: IoBinding, buffer: g.Buffer) -> None:
    if binding.offset or buffer.fixed_bytes != _nbytes(binding) or buffer.size_terms:
        raise CompatibilityError(
            "COMBINE_BATCH", "the cores do not combine: a buffer that follows the batch is more than its binding",
            where=f"{item.label}: buffer {buffer.name}", expected=f"{_nbytes(binding)} bytes at 0",
            got=f"{buffer.fixed_bytes} bytes, bound at {binding.offset}",
            hint="export every core with the same largest --batch")


def _nbytes(binding: IoBinding) -> int:
    return prod(binding.shape) * DTYPE_BY_NAME[binding.dtype].bits // 8


def check_fixed(item: Input, target: g.DeviceTarget, slots: int) -> None:
    """Refuse to change the number of slots of graphs that were compiled for it.

    Raises:
        CompatibilityError: COMBINE_BATCH.
    """
    if target.name != "cpu" and item.manifest.contract.max_batch != slots:
        raise CompatibilityError(
            "COMBINE_BATCH", f"the cores do not combine: graphs for {target.name} are compiled for their largest batch",
            where=item.label, expected=slots, got=item.manifest.contract.max_batch,
            hint=f"export every core with --batch {slots} as its largest")


def widen_node(node: g.GraphNode, variant: g.KernelVariant, symbols: Mapping[int, g.Symbol], slots: tuple[int, int],
               where: str) -> None:
    """Tell a CPU node of more slots: patch its `max_slots`, and declare its accesses anew.

    Args:
        node: a kernel node; changed in place. Its relocations name buffers and symbols of the combined core.
        variant: the CPU variant that it launches.
        symbols: the combined core's, by id.
        slots: how many the core was exported for, and how many the combined core has.
        where: the node's place, for messages.
    Raises:
        CompatibilityError: COMBINE_BATCH, the node was recorded for a number of slots that is not its core's.
        FormatError: OP_UNKNOWN.
    """
    names = [slot.name for slot in variant.params]
    if MAX_SLOTS not in names:
        return
    op = find_op(variant.symbol)
    start = sum(slot.size for slot in variant.params[:names.index(MAX_SLOTS)])
    block = bytearray(node.param_block)
    recorded = struct.unpack_from("<I", block, start)[0]
    if recorded != slots[0]:
        raise CompatibilityError("COMBINE_BATCH", "the cores do not combine: a node counts slots in another way",
                                 where=where, expected=slots[0], got=recorded,
                                 hint="export both with the same largest --batch")
    struct.pack_into("<I", block, start, slots[1])
    node.param_block = bytes(block)
    scalars: dict[str, int | float] = {}
    at, relocations = 0, {r.param_index: r for r in node.relocations}
    for index, param in enumerate(op.params):
        if isinstance(param, Scalar):
            scalars[param.name] = struct.unpack_from(param.type.value, block, at)[0]
            if index in relocations:
                scalars[param.name] = symbols[relocations[index].symbol_id].minimum + relocations[index].addend
        at += variant.params[index].size
    del node.accesses[:]
    for index, param in enumerate(op.params):
        if isinstance(param, Operand):
            place = relocations[index]
            for write in [False] * param.read + [True] * param.write:
                node.accesses.add(buffer_id=place.buffer_id, offset=place.addend, bytes=param.nbytes(scalars),
                                  write=write)


def _refused(what: str, left: Input, right: Input, where: str, expected: object, got: object,
             hint: str) -> CompatibilityError:
    return CompatibilityError("COMBINE_BINDING", f"the cores do not combine: {what}",
                              where=f"{left.label} and {right.label}: {where}", expected=expected, got=got, hint=hint)
