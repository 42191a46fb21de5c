"""What a step emits: sampling from the target, accepting proposals exactly, and committing the result.

Speculation is lossless here: at temperature 0 a step emits what greedy decoding would, above 0 it emits tokens of the
target's own distribution, whatever the draft proposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dflash_core.errors import FormatError, QualityError

from runtime.ops.distribution import inverse_cdf, target_distribution
from runtime.ops.philox import Purpose, draw
from runtime.ops.registry import U32, Args, Array, DType, F32Array, Scalar, Step, op, reads, updates, writes

_SAMPLING = (
    reads("temperature", DType.F32, "max_slots"),
    reads("top_p", DType.F32, "max_slots"),
    reads("top_k", DType.I32, "max_slots"),
    reads("seed", DType.U64, "max_slots"),
)


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one request draws: its settings, read from the slot arrays at the start of a step."""

    slot: int
    temperature: float
    top_p: float
    top_k: int
    seed: int

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0

    def best(self, row: F32Array) -> int:
        """The id of the highest logit, the lowest of equals.

        Raises:
            QualityError: LOGITS_NOT_FINITE; the highest logit is a NaN or an infinity.
        """
        token = int(row.argmax())
        if not np.isfinite(row[token]):
            raise QualityError("LOGITS_NOT_FINITE", "the target's highest logit is not finite",
                               where=f"request slot {self.slot}", got=row[token],
                               hint="compare the core's precision with its checkpoint: an activation overflowed")
        return token

    def distribution(self, row: F32Array) -> F32Array:
        """The target's distribution of one row of logits; raises as `best` does."""
        self.best(row)
        return target_distribution(row, self.temperature, self.top_k, self.top_p)

    def draw(self, position: int, purpose: Purpose) -> np.float32:
        return draw(self.seed, position, purpose)


def accepts(u: np.float32, q: np.float32, p: np.float32) -> bool:
    """Whether a proposal drawn with probability q is kept, where the target gives it p: u * q < p, product in fp32."""
    return bool(u * q < p)


def residual(p: F32Array, ids: Array, q: F32Array) -> F32Array:
    """What is drawn from after a rejection: max(p - q, 0), not scaled to sum to 1; p itself where nothing is left.

    Args:
        p: [n], the target's distribution.
        ids: [K], distinct; q: [K], what each of them was proposed with.
    """
    left = p.copy()
    left[ids] = np.maximum(p[ids] - q, np.float32(0))
    return left if left.any() else p


def _samplers(a: Args) -> tuple[Array, Array, Array, Array]:
    return a.array("temperature"), a.array("top_p"), a.array("top_k"), a.array("seed")


def _sampler(slot: int, settings: tuple[Array, Array, Array, Array]) -> Sampler:
    temperature, top_p, top_k, seed = settings
    return Sampler(slot, float(temperature[slot]), float(top_p[slot]), int(top_k[slot]), int(seed[slot]))


@op(
    "dflash.sample/1",
    Scalar("groups", U32), Scalar("vocab", U32), Scalar("live_vocab", U32), Scalar("max_slots", U32),
    reads("logits", DType.F32, "groups", "vocab"),
    reads("positions", DType.I32, "groups"),
    reads("slots", DType.I32, "groups"),
    *_SAMPLING,
    writes("emitted", DType.I32, "groups", 1),
    writes("produced", DType.I32, "groups"),
)
def sample(a: Args) -> Step:
    """Emit one token per live lane: the one at position positions[g] + 1, from the target's logits of positions[g].

    At temperature 0 the highest logit below live_vocab, the lowest id of equals; above 0 the inverse CDF of the
    target's distribution at the TARGET draw of the token's position. A dead lane (position or slot < 0) produces 0.

    Rounding: as `target_distribution`, fp32; logits are never rounded to the activation's dtype.

    Shapes: logits [groups, vocab]; emitted [groups, 1]; produced [groups].
    Raises:
        FormatError: OP_SCALAR; not 1 <= live_vocab <= vocab.
        QualityError: LOGITS_NOT_FINITE; the highest logit of a live lane is not finite.
    """
    rows = _live_rows(a, a.int("groups"))
    positions, slots, settings = a.array("positions"), a.array("slots"), _samplers(a)
    emitted, produced = a.array("emitted"), a.array("produced")

    def run() -> None:
        emitted[...] = 0
        produced[...] = 0
        for g, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
            if position < 0 or slot < 0:
                continue
            emitted[g, 0] = _target_token(_sampler(slot, settings), rows[g], position + 1)
            produced[g] = 1

    return run


@op(
    "dflash.accept/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("depth", U32), Scalar("candidates", U32),
    Scalar("vocab", U32), Scalar("live_vocab", U32), Scalar("max_slots", U32),
    reads("logits", DType.F32, "groups*block_rows", "vocab"),
    reads("tokens", DType.I32, "groups*block_rows"),
    reads("positions", DType.I32, "groups*block_rows"),
    reads("slots", DType.I32, "groups"),
    reads("limit", DType.I32, "max_slots"),
    reads("proposal_ids", DType.I32, "groups", "depth", "candidates"),
    reads("proposal_probs", DType.F32, "groups", "depth", "candidates"),
    *_SAMPLING,
    writes("emitted", DType.I32, "groups", "block_rows"),
    writes("produced", DType.I32, "groups"),
    writes("accepted", DType.I32, "groups"),
)
def accept(a: Args) -> Step:
    """Keep the longest run of proposals that the target agrees with, and add one token of the target's own.

    A block is tokens (anchor, d_1 .. d_depth) at positions start, start + 1, ...; row i of the logits predicts
    position start + i + 1. Only rows with a position take part: b such rows carry b - 1 proposals.

    - Temperature 0: d_(i+1) is kept while it is the argmax of row i; then the argmax of the row that ended the run.
    - Above 0: d_(i+1) is kept while u * q(d) < p_i(d), u the ACCEPT draw of its position. After a rejection a token is
      drawn from max(p_i - q, 0) (RESIDUAL draw; from p_i where nothing is left), with none from p_(b-1) (TARGET draw).

    accepted is the length a of the run; produced = min(a + 1, limit[slot] - start - 1), and never below 0: positions
    at the limit are not emitted. emitted[:produced] is d_1 .. d_a and that token; the rest is 0. A dead lane (slot or
    first position < 0) produces and accepts 0.

    Rounding: p as `target_distribution`; u * q and p - q are rounded to fp32 once. Logits and q are never rounded to
    the activation's dtype.

    Shapes: logits [groups * block_rows, vocab]; proposal_ids, proposal_probs [groups, depth, candidates];
    emitted [groups, block_rows]; produced, accepted [groups].
    Raises:
        FormatError: OP_SCALAR; block_rows is not depth + 1, or not 1 <= live_vocab <= vocab.
        QualityError: LOGITS_NOT_FINITE; the highest logit of a row that is read is not finite.
    Source: rejection sampling of Leviathan et al. (2023) and Chen et al. (2023), as z-lab's dflash runs it.
    """
    groups, block_rows = a.int("groups"), a.int("block_rows")
    if block_rows != a.int("depth") + 1:
        raise FormatError("OP_SCALAR", "a block is the anchor and one row per proposal", where=a.op_name,
                          expected=a.int("depth") + 1, got=block_rows)
    rows = _live_rows(a, groups * block_rows)
    tokens = a.array("tokens").reshape(groups, block_rows)
    positions = a.array("positions").reshape(groups, block_rows)
    slots, limit, settings = a.array("slots"), a.array("limit"), _samplers(a)
    ids, probs = a.array("proposal_ids"), a.array("proposal_probs")
    emitted, produced, accepted = a.array("emitted"), a.array("produced"), a.array("accepted")

    def run() -> None:
        emitted[...] = 0
        produced[...] = 0
        accepted[...] = 0
        for g, slot in enumerate(slots.tolist()):
            start = int(positions[g, 0])
            if slot < 0 or start < 0:
                continue
            drafts = tokens[g, 1 : np.count_nonzero(positions[g] >= 0)].tolist()
            block, sampler = rows[g * block_rows : (g + 1) * block_rows], _sampler(slot, settings)
            if sampler.greedy:
                kept, bonus = _accept_greedy(sampler, block, drafts)
            else:
                kept, bonus = _accept_sampled(sampler, block, drafts, start, ids[g], probs[g])
            count = max(0, min(kept + 1, int(limit[slot]) - start - 1))
            emitted[g, :count] = [*drafts[:kept], bonus][:count]
            produced[g] = count
            accepted[g] = kept

    return run


def _accept_greedy(sampler: Sampler, block: list[F32Array], drafts: list[int]) -> tuple[int, int]:
    for i, draft in enumerate(drafts):
        token = sampler.best(block[i])
        if token != draft:
            return i, token
    return len(drafts), sampler.best(block[len(drafts)])


def _accept_sampled(
    sampler: Sampler, block: list[F32Array], drafts: list[int], start: int, ids: Array, probs: Array
) -> tuple[int, int]:
    for i, draft in enumerate(drafts):
        position = start + i + 1
        p, q = sampler.distribution(block[i]), probs[i]
        if not accepts(sampler.draw(position, Purpose.ACCEPT), q[ids[i] == draft].sum(), p[draft]):
            return i, inverse_cdf(residual(p, ids[i], q), sampler.draw(position, Purpose.RESIDUAL))
    return len(drafts), _target_token(sampler, block[len(drafts)], start + len(drafts) + 1)


def _target_token(sampler: Sampler, row: F32Array, position: int) -> int:
    if sampler.greedy:
        return sampler.best(row)
    return inverse_cdf(sampler.distribution(row), sampler.draw(position, Purpose.TARGET))


def _live_rows(a: Args, count: int) -> list[F32Array]:
    vocab, live_vocab, logits = a.int("vocab"), a.int("live_vocab"), a.array("logits")
    if not 1 <= live_vocab <= vocab:
        raise FormatError("OP_SCALAR", "live ids are not part of the vocabulary", where=a.op_name,
                          expected=f"1 to {vocab}", got=live_vocab)
    return [logits[r, :live_vocab] for r in range(count)]


@op(
    "dflash.accepted_positions/1",
    Scalar("groups", U32), Scalar("block_rows", U32),
    reads("positions", DType.I32, "groups*block_rows"),
    reads("produced", DType.I32, "groups"),
    writes("context_positions", DType.I32, "groups*block_rows"),
)
def accepted_positions(a: Args) -> Step:
    """The positions of the rows that a step commits: row i of group g where i < produced[g], -1 elsewhere.

    These rows' target features become draft context: the anchor's and the kept proposals', never the last token's.

    Rounding: none, integers.
    """
    groups, block_rows = a.int("groups"), a.int("block_rows")
    positions = a.array("positions").reshape(groups, block_rows)
    produced = a.array("produced").reshape(groups, 1)
    context = a.array("context_positions").reshape(groups, block_rows)
    row = np.arange(block_rows)

    def run() -> None:
        context[...] = np.where(row < produced, positions, -1)

    return run


@op(
    "dflash.commit/1",
    Scalar("groups", U32), Scalar("block_rows", U32), Scalar("max_slots", U32),
    reads("slots", DType.I32, "groups"),
    reads("produced", DType.I32, "groups"),
    reads("emitted", DType.I32, "groups", "block_rows"),
    updates("length", DType.I32, "max_slots"),
    updates("anchor", DType.I32, "max_slots"),
)
def commit(a: Args) -> Step:
    """Advance each slot by what its lane produced, and make the last token its anchor.

    length[slot] += produced[g]; anchor[slot] = emitted[g, produced[g] - 1]. An empty lane, or one that produced
    nothing, leaves every slot as it is.

    Rounding: none, integers.
    """
    slots, produced, emitted = a.array("slots"), a.array("produced"), a.array("emitted")
    length, anchor = a.array("length"), a.array("anchor")

    def run() -> None:
        for g, (slot, count) in enumerate(zip(slots.tolist(), produced.tolist(), strict=True)):
            if slot >= 0 and count > 0:
                length[slot] += count
                anchor[slot] = emitted[g, count - 1]

    return run


@op(
    "dflash.commit_chunk/1",
    Scalar("max_slots", U32),
    reads("slots", DType.I32, 1),
    reads("count", DType.I32, 1),
    reads("emitted", DType.I32, 1, 1),
    updates("length", DType.I32, "max_slots"),
    updates("anchor", DType.I32, "max_slots"),
)
def commit_chunk(a: Args) -> Step:
    """Advance one slot by a prefilled chunk of `count` prompt tokens; the token after the chunk becomes its anchor.

    An empty lane (slot < 0) leaves every slot as it is.

    Rounding: none, integers.
    """
    slots, chunk, emitted = a.array("slots"), a.array("count"), a.array("emitted")
    length, anchor = a.array("length"), a.array("anchor")

    def run() -> None:
        slot = int(slots[0])
        if slot >= 0:
            length[slot] += chunk[0]
            anchor[slot] = emitted[0, 0]

    return run
