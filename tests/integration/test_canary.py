"""The demo pair's canary notices a draft that was recorded wrongly, though the text it gives stays right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dflash_core.errors import QualityError

import exporter.export as pipeline
from exporter.canary_run import prompt_set
from exporter.export import ExportRequest
from exporter.models import dflash2
from runtime import LoadedCore, canary
from runtime.check import CheckedCore
from runtime.instantiate import instantiate
from runtime.mapping import MappedCore
from tests.integration.conftest import DRAFT
from tests.integration.cores import DEMO_PRECISION

PROMPTS, NEW_TOKENS = 2, 16


@pytest.fixture(scope="module")
def recorded(demo_bf16: LoadedCore) -> canary.Canary:
    """A short canary of the pair as it should be."""
    return canary.record(demo_bf16, prompt_set(demo_bf16)[1:1 + PROMPTS], NEW_TOKENS)


def misread(**changes: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """The exporter takes these fields of the draft's config for something else."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        read = pipeline.read_draft_config
        patch.setattr(pipeline, "read_draft_config", lambda *args: (
            lambda draft: replace(draft, **{name: change(draft) for name, change in changes.items()}))(read(*args)))

    return mutate


def swapped_sides(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dflash2, "PREPARE", 1)
    patch.setattr(dflash2, "FINISH", 0)


MUTATIONS = [
    pytest.param(swapped_sides, id="convolution sides swapped"),
    pytest.param(misread(target_layer_ids=lambda d: tuple(t - 1 for t in d.target_layer_ids)), id="taps a layer early"),
    pytest.param(misread(target_layer_ids=lambda d: d.target_layer_ids[::-1]), id="taps reordered"),
    pytest.param(misread(mask_token_id=lambda d: d.mask_token_id + 1), id="mask id wrong"),
]


def recorded_anew(core: LoadedCore, target: Path) -> LoadedCore:
    """The pair's graphs recorded by the exporter as it now is, over the weights that are in memory already."""
    request = ExportRequest(target=target, draft=DRAFT, out=Path("unwritten"), settings=DEMO_PRECISION, batches=(1, 4),
                            max_context=1024)
    from exporter.progress import Silent

    models = pipeline.open_models(request, Silent())
    plan = pipeline.plan_models(models, request.settings)
    shape = pipeline.serving_shape(models, plan, request)
    layout = pipeline.layout_weights(pipeline.weight_specs(models, plan, shape))
    graphs = tuple(pipeline.record(models, plan, layout, shape, request).graphs)
    checked: CheckedCore = core._mapped.checked
    return instantiate(MappedCore(replace(checked, graphs=graphs), core.memory))


def test_replay_of_the_same_graphs_holds_exactly(
    demo_bf16: LoadedCore, demo_target: Path, recorded: canary.Canary
) -> None:
    result = canary.replay(recorded_anew(demo_bf16, demo_target), recorded)

    assert result.agreement == 1.0
    assert result.accepted_per_step == canary.mean_accepted(recorded.prompts)
    assert result.accepted_per_step > 1.0


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_wrongly_recorded_draft_is_refused_for_its_proposals(
    mutate: Callable[[pytest.MonkeyPatch], None], demo_bf16: LoadedCore, demo_target: Path, recorded: canary.Canary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    core = recorded_anew(demo_bf16, demo_target)

    with pytest.raises(QualityError) as refused:
        canary.replay(core, recorded)

    assert refused.value.code == "CANARY_PROPOSALS"
    assert refused.value.exit_code == 7
