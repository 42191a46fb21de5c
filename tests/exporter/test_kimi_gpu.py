"""GPU targets of tiny Kimi cores, on a machine without one: every op is computed once, and the core is sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dflash_core.v1 import graph_pb2

from exporter.capture.record import record_gpu
from exporter.capture.witness import Launched, Witness
from exporter.export import ExportRequest, export, open_models, plan_models, record, serving_shape, weight_specs
from exporter.kernels.lower import lower_graph
from exporter.plan import PrecisionSettings
from exporter.program.graphs import RecordedProgram
from exporter.progress import Silent
from exporter.weights import layout_weights
from runtime import TrustPolicy, load
from runtime.engine import Engine, Request
from runtime.inspect import inspect_core
from runtime.keys import generate_key, load_private_key
from tests.oracles.kimi_pair import K3, KIMI_LINEAR, TAPS, write_target
from tests.oracles.mla_draft_numpy import write_draft

HEADLINE = PrecisionSettings(online_mxfp8_scope="kda-input", draft_body="mxfp8", draft_head="nvfp4")
BF16 = torch.bfloat16
TARGETS = [pytest.param(KIMI_LINEAR, "plain", (), id="linear"), pytest.param(K3, "plain", (16, 256), id="k3, seeing"),
           pytest.param(K3, "mxfp4", (), id="k3, mxfp4 experts"),
           pytest.param(KIMI_LINEAR, "nvfp4-modelopt", (), id="linear, nvfp4 experts")]


def recorded_pair(folder: Path, config: dict[str, object], experts: str, patches: tuple[int, ...]) -> RecordedProgram:
    """A target and a draft with latent attention, in the headline precision, recorded for batches of 1 and 4."""
    write_target(folder / "target", config, dtype=BF16, experts=experts)
    write_draft(folder / "draft", TAPS, window=12, dtype=BF16)
    request = ExportRequest(target=folder / "target", draft=folder / "draft", out=folder / "core", settings=HEADLINE,
                            batches=(1, 4), max_context=256, capability=90, image_patches=patches)
    models = open_models(request, Silent())
    plan = plan_models(models, request.settings)
    shape = serving_shape(models, plan, request)
    return record(models, plan, layout_weights(weight_specs(models, plan, shape)), shape, request)


@pytest.mark.parametrize(("config", "experts", "patches"), TARGETS)
def test_every_op_of_every_graph_is_computed_by_one_launch(tmp_path: Path, config: dict[str, object], experts: str,
                                                           patches: tuple[int, ...]) -> None:
    """By more where an op takes several steps, which then follow each other."""
    recorded = recorded_pair(tmp_path, config, experts, patches)

    for graph, calls in zip(recorded.graphs, recorded.calls, strict=True):
        launches = lower_graph(calls, recorded.program)
        computed = [node for launch in launches for node in launch.nodes]
        assert set(computed) == {call.node_id for call in calls}, graph.name
        for node in set(computed):
            places = [i for i, launch in enumerate(launches) if node in launch.nodes]
            assert places == list(range(places[0], places[-1] + 1)), (graph.name, node)
    roles = {graph.role for graph in recorded.graphs}
    assert roles == {"prefill", "save", "restore", "draft", "verify", "decode"} | ({"vision"} if patches else set())


def test_a_gpu_core_is_signed_verified_and_runs_on_a_cpu_too(tmp_path: Path) -> None:
    write_target(tmp_path / "target", K3, dtype=BF16)
    generate_key(tmp_path / "keys")
    trust = TrustPolicy.load(tmp_path / "keys" / "trust.json")
    for out, capability in (("both", 90), ("cpu", None)):
        export(ExportRequest(target=tmp_path / "target", out=tmp_path / out, max_context=128, capability=capability),
               load_private_key(tmp_path / "keys" / "key.pem"))

    report = inspect_core(tmp_path / "both", trust)
    assert {graph.target for graph in report.graphs} == {"cpu", "sm_90a"}
    tokens = []
    for name in ("both", "cpu"):
        with load(tmp_path / name, trust=trust) as core:
            tokens.append(Engine(core).generate([1, 2, 3], Request(max_tokens=8)).tokens)
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "experts", "patches"), TARGETS)
def test_every_graph_is_captured_as_it_is_recorded(tmp_path: Path, config: dict[str, object], experts: str,
                                                   patches: tuple[int, ...]) -> None:
    recorded, seen = recorded_pair(tmp_path, config, experts, patches), []
    with Witness.open(recorded.program) as witness:
        def check(graph: graph_pb2.Graph, launched: Launched) -> None:
            witness.check(graph, launched)
            seen.append(graph.name)

        record_gpu(recorded.program, zip(recorded.graphs, recorded.calls, strict=True), 90, first_module_id=1,
                   witness=check)

    assert seen == [graph.name for graph in recorded.graphs]
