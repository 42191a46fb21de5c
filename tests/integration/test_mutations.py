"""Mistakes that change nothing but acceptance: each makes some block differ from z-lab's, while the text stays right.

No comparison of texts can find these, since verification repairs whatever a draft proposes. So every row applies one
mistake to the export (or to the op that it records), and requires that the comparison of blocks notices it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import exporter.export
from exporter.draft_config import DraftConfig
from exporter.models import dflash2
from exporter.models.context import Forward, PagedCache
from exporter.program.builder import Tensor
from exporter.rope import RopeParameters
from runtime.ops import Args, DType, Step
from runtime.ops.registry import OPS
from tests.integration.cores import Signer, make_core
from tests.integration.pairs import generate
from tests.oracles.zlab_pair import (
    OUTPUT_MULTIPLIER,
    SOFTCAP,
    Pair,
    PairSpec,
    Trace,
    greedy,
    make_pair,
    speculate,
)

NEW_TOKENS = 40
Mutate = Callable[[pytest.MonkeyPatch], None]


def config(**changes: Callable[[DraftConfig], Any]) -> Mutate:
    """The exporter reads these fields of the draft's config as they should not be."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        read = exporter.export.read_draft_config

        def misread(*args: Any) -> DraftConfig:
            draft = read(*args)
            return replace(draft, **{name: change(draft) for name, change in changes.items()})

        patch.setattr(exporter.export, "read_draft_config", misread)

    return mutate


def default_theta(draft: DraftConfig) -> RopeParameters:
    return replace(draft.rope, theta=10000.0)


def swapped_sides(patch: pytest.MonkeyPatch) -> None:
    """Convolve a sublayer's input with side 1 and its output with side 0."""
    patch.setattr(dflash2, "PREPARE", 1)
    patch.setattr(dflash2, "FINISH", 0)


def convolved_context(patch: pytest.MonkeyPatch) -> None:
    """Let the context features pass the attention convolution, as a block's rows do."""
    record_context, linear = dflash2.record_context, Forward.linear

    def record(fwd: Forward, draft: DraftConfig, *rest: Any) -> None:
        def convolve_first(self: Forward, x: Tensor, name: str, out: str | Tensor, **options: Any) -> Tensor:
            if name.endswith(".qkv"):
                x, _ = dflash2._convolve_in(self, draft, x, name.replace(".qkv", ".attention_conv"))
            return linear(self, x, name, out, **options)

        with patch.context() as inner:
            inner.setattr(Forward, "linear", convolve_first)
            record_context(fwd, draft, *rest)

    patch.setattr(dflash2, "record_context", record)


def kept_block(patch: pytest.MonkeyPatch) -> None:
    """Leave the block's own K and V in the cache, where those of the verified features belong."""
    attention, record_context = dflash2._attention, dflash2.record_context

    def attention_that_stores(fwd: Forward, draft: DraftConfig, cache: PagedCache, x: Tensor, layer_idx: int) -> Tensor:
        result = attention(fwd, draft, cache, x, layer_idx)
        here, kv_rows = f"draft.layers.{layer_idx}", draft.num_kv_heads * draft.head_dim
        kv = fwd.linear(x, f"{here}.qkv", "draft_kv_rows", part=(draft.num_heads * draft.head_dim, 2 * kv_rows))
        k_weight = fwd.plain(f"{here}.k_norm")
        fwd.graph.call(
            "dflash.norm_rope_context/1",
            {"kv_rows": kv, "k_weight": k_weight, "rope_table": fwd.plain("draft.rope_table"),
             "positions": fwd.rows.positions, "slots": fwd.rows.slots, "page_table": cache.page_table,
             "kv": cache.layer(layer_idx)},
            rows=fwd.rows.count, block_rows=fwd.rows.block_rows, kv_heads=draft.num_kv_heads, eps=draft.rms_norm_eps,
            w=k_weight.dtype, **dflash2._rotation(fwd, draft), **cache.scalars())
        return result

    def context_of_the_prompt(fwd: Forward, *rest: Any) -> None:
        if fwd.graph.graph.role == "prefill":
            record_context(fwd, *rest)

    patch.setattr(dflash2, "_attention", attention_that_stores)
    patch.setattr(dflash2, "record_context", context_of_the_prompt)


def mask_as_anchor(patch: pytest.MonkeyPatch) -> None:
    """Start the selector's walk at the mask token instead of the anchor."""
    record_proposals = dflash2.record_proposals

    def record(fwd: Forward, draft: DraftConfig, hidden: Tensor, head: str, tokens: Tensor, *rest: Any) -> None:
        rows = fwd.rows.block_rows
        masks = fwd.graph.program.scratch("masks", DType.I32, (2 * rows,))
        fwd.graph.call("dflash.block_tokens/1", {"slots": fwd.rows.slots, "anchor": tokens.rows(0, 1), "tokens": masks},
                       groups=1, block_rows=2 * rows, mask_token_id=draft.mask_token_id, max_slots=1)
        record_proposals(fwd, draft, hidden, head, masks.rows(rows, rows), *rest)

    patch.setattr(dflash2, "record_proposals", record)


def op_instead(name: str, bind: Callable[[Args], Step]) -> Mutate:
    """The runtime computes this op by another function."""
    return lambda patch: patch.setitem(OPS, name, replace(OPS[name], bind=bind))


def coefficient_of_the_shifted_row(a: Args) -> Step:
    """out[i] = sum over taps of kernel[i - t] * x[i - t]: the coefficient moves along with the value."""
    rows, hidden, size, taps = a.int("rows"), a.int("hidden"), a.int("group_size"), a.int("taps")
    x, delta, base = a.array("x"), a.array("delta").reshape(rows, 2, taps, hidden // size), a.array("base")
    side, out = a.int("side"), a.array("out")

    def run() -> None:
        out[...] = 0
        for t in range(taps):
            terms = (base[side, t] + np.repeat(delta[:, side, t], size, axis=1)) * x
            out[t:] += terms[:rows - t]

    return run


def selector_before_the_scalars(a: Args) -> Step:
    """Choose by softcap(multiplier * (logit + link)): the scalars act on the sum instead of on the logit."""
    ids, raw, projected = a.array("candidate_ids"), a.array("candidate_scores"), a.array("projected")
    predecessor, successor, tokens = a.array("predecessor"), a.array("successor"), a.array("tokens")
    positions = a.array("positions")

    def run() -> None:
        previous = int(tokens[0])
        for i in range(a.int("depth")):
            if positions[i + 1] < 0:
                continue
            link = successor[ids[i + 1]] @ (predecessor[previous] * projected[i + 1])
            score = SOFTCAP * np.tanh(OUTPUT_MULTIPLIER * (raw[i + 1] + link) / SOFTCAP)
            previous = int(ids[i + 1][score.argmax()])
            a.array("proposals")[0, i] = previous
            a.array("proposal_ids")[0, i] = ids[i + 1]

    return run


def scalars_after_the_selector(patch: pytest.MonkeyPatch) -> None:
    config(output_multiplier=lambda d: 1.0, final_logit_softcapping=lambda d: None)(patch)
    op_instead("dflash.selector_walk/1", selector_before_the_scalars)(patch)


FITTED, SCALARS = PairSpec(), PairSpec(block_size=5, scalars=True)
CAUSAL, THETA = PairSpec(causal=True, window=6), PairSpec(rope_theta=100.0, window=None)


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake, and a pair where it matters."""

    spec: PairSpec
    mutate: Mutate


MUTATIONS = [
    pytest.param(Mutation(FITTED, convolved_context), id="context passes the convolution"),
    pytest.param(Mutation(FITTED, swapped_sides), id="convolution sides swapped"),
    pytest.param(Mutation(FITTED, op_instead("dflash.grouped_conv/1", coefficient_of_the_shifted_row)),
                 id="coefficient of the shifted row"),
    pytest.param(Mutation(FITTED, mask_as_anchor), id="selector starts at the mask"),
    pytest.param(Mutation(SCALARS, config(output_multiplier=lambda d: 1.0)), id="output multiplier dropped"),
    pytest.param(Mutation(SCALARS, config(final_logit_softcapping=lambda d: None)), id="softcap dropped"),
    pytest.param(Mutation(SCALARS, scalars_after_the_selector), id="scalars after the selector"),
    pytest.param(Mutation(SCALARS, config(input_embedding_scale=lambda d: 1.0)), id="embedding scale skipped"),
    pytest.param(Mutation(FITTED, config(target_layer_ids=lambda d: tuple(t + 1 for t in d.target_layer_ids))),
                 id="taps one layer late"),
    pytest.param(Mutation(FITTED, config(target_layer_ids=lambda d: tuple(t - 1 for t in d.target_layer_ids))),
                 id="taps one layer early"),
    pytest.param(Mutation(FITTED, config(target_layer_ids=lambda d: d.target_layer_ids[::-1])), id="taps reordered"),
    pytest.param(Mutation(CAUSAL, config(layers=lambda d: tuple(replace(x, causal=False) for x in d.layers))),
                 id="is_causal ignored"),
    pytest.param(Mutation(FITTED, config(layers=lambda d: tuple(replace(x, causal=True) for x in d.layers))),
                 id="is_causal false ignored"),
    pytest.param(Mutation(CAUSAL, config(layers=lambda d: tuple(replace(x, window=None) for x in d.layers))),
                 id="window ignored"),
    pytest.param(Mutation(CAUSAL, config(layers=lambda d: tuple(replace(x, window=7) for x in d.layers))),
                 id="window one too wide"),
    pytest.param(Mutation(THETA, config(rope=default_theta)), id="rope theta is the default"),
    pytest.param(Mutation(FITTED, kept_block), id="block stays in the cache"),
    pytest.param(Mutation(FITTED, config(mask_token_id=lambda d: 0)), id="mask id wrong"),
]


@dataclass(frozen=True, slots=True)
class Expected:
    """A pair, and what z-lab's loop and the target alone make of its prompt."""

    pair: Pair
    trace: Trace
    greedy: tuple[int, ...]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PairSpec], Expected]:
    """The pair of a spec, each made once."""

    @cache
    def make(spec: PairSpec) -> Expected:
        pair = make_pair(tmp_path_factory.mktemp("pair"), spec)
        return Expected(pair, speculate(pair, NEW_TOKENS), greedy(pair, NEW_TOKENS))

    return make


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mistake_in_the_draft_shows_in_its_blocks_alone(
    mutation: Mutation, expected: Callable[[PairSpec], Expected], signer: Signer, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = expected(mutation.spec)
    mutation.mutate(monkeypatch)
    with make_core(signer, tmp_path / "core", right.pair.target_path, right.pair.draft_path) as core:
        got = generate(core, right.pair, NEW_TOKENS)
    assert got.blocks != right.trace.blocks
    assert got.tokens == right.greedy


@pytest.mark.parametrize("spec", [FITTED, SCALARS, CAUSAL, THETA], ids=["fitted", "scalars", "causal", "theta"])
def test_without_a_mistake_every_block_is_the_references(
    spec: PairSpec, expected: Callable[[PairSpec], Expected], signer: Signer, tmp_path: Path
) -> None:
    right = expected(spec)
    with make_core(signer, tmp_path / "core", right.pair.target_path, right.pair.draft_path) as core:
        assert generate(core, right.pair, NEW_TOKENS) == right.trace
