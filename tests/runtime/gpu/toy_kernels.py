"""Triton kernels of a toy model: the token after t is (t + step) % vocab, with `step` read from the weights.

One program each, lane 0 alone. The draft's first proposal is right and its second is wrong, so that a step of
speculation commits two tokens.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def toy_prefill(slots, chunk_tokens, chunk_count, length, anchor, weights, sampled, produced, pages_seen, vocab, pages):
    slot = tl.load(slots)
    count = tl.load(chunk_count)
    token = (tl.load(chunk_tokens + count - 1) + tl.load(weights)) % vocab
    tl.store(length + slot, tl.load(length + slot) + count)
    tl.store(anchor + slot, token)
    tl.store(sampled, token)
    tl.store(produced, 1)
    tl.store(pages_seen, pages)


@triton.jit
def toy_draft(slots, anchor, weights, proposals, proposal_ids, vocab):
    token = tl.load(anchor + tl.load(slots))
    step = tl.load(weights)
    tl.store(proposals, (token + step) % vocab)
    tl.store(proposals + 1, (token + 2 * step + 1) % vocab)
    tl.store(proposal_ids, (token + step) % vocab)
    tl.store(proposal_ids + 1, (token + 2 * step + 1) % vocab)


@triton.jit
def toy_verify(slots, limit, length, anchor, weights, proposals, emitted, produced, accepted, vocab):
    slot = tl.load(slots)
    token = tl.load(anchor + slot)
    stored = tl.load(length + slot)
    step = tl.load(weights)
    agreed = tl.where(tl.load(proposals) == (token + step) % vocab, 1, 0)
    count = tl.minimum(agreed + 1, tl.load(limit + slot) - stored - 1)
    tl.store(emitted, (token + step) % vocab)
    tl.store(emitted + 1, (token + 2 * step) % vocab)
    tl.store(produced, count)
    tl.store(accepted, count - 1)
    tl.store(length + slot, stored + count)
    tl.store(anchor + slot, (token + count * step) % vocab)


@triton.jit
def toy_decode(slots, length, anchor, weights, sampled, produced, vocab):
    slot = tl.load(slots)
    token = (tl.load(anchor + slot) + tl.load(weights)) % vocab
    tl.store(length + slot, tl.load(length + slot) + 1)
    tl.store(anchor + slot, token)
    tl.store(sampled, token)
    tl.store(produced, 1)


@triton.jit
def toy_fault(slots, length, anchor, weights, sampled, produced, vocab):
    """Writes where nothing is; `vocab` is only there to give it the parameters of toy_decode."""
    tl.store(sampled + (tl.load(slots) + vocab).to(tl.int64) * 1_000_000_000_000, 1)


KERNELS = {k.__name__: k for k in (toy_prefill, toy_draft, toy_verify, toy_decode, toy_fault)}
SCALARS = ("vocab", "pages")


def compile_kernel(name: str, capability: int = 90) -> Any:
    """A compiled kernel, for a GPU that need not be there; `.asm["cubin"]` is its module."""
    function = KERNELS[name]
    signature = {arg: "i32" if arg in SCALARS else "*i32" for arg in function.arg_names}
    source = ASTSource(function, signature, {}, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
