"""`dflash-run replay` as a person runs it: every graph of a small real core, a missing edge, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dflash_core.v1 import graph_pb2
from typer.testing import CliRunner

import runtime
from runtime.cli import app
from runtime.replay_cpu import replay_on_cpu
from runtime.replay_inputs import run_until
from tests.served_core import tiny
from tests.tiny_pair import TinyProgram

__all__ = ["tiny"]
GRAPHS = ["prefill.c64", "draft.b1", "verify.b1", "decode.b1", "draft.b2", "verify.b2", "decode.b4"]


def run(tiny: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", str(tiny / "core"), "--trust", str(tiny / "keys" / "trust.json"),
                                    *arguments])


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_node_of_a_graph_is_shown_with_what_it_wrote(tiny: Path, graph: str) -> None:
    done = run(tiny, "--graph", graph, "--json")

    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    with runtime.load(tiny / "core", trust=runtime.TrustPolicy.load(tiny / "keys" / "trust.json")) as core:
        assert len(document["nodes"]) == len(core.graphs[graph].steps)  # type: ignore[attr-defined]
    assert document["unordered"] == []
    assert all(len(n["sha256"]) == 64 and n["nbytes"] > 0 for n in document["nodes"])


def test_inputs_are_those_of_a_real_step(tiny: Path) -> None:
    trust = runtime.TrustPolicy.load(tiny / "keys" / "trust.json")
    core: Any
    with runtime.load(tiny / "core", trust=trust) as core:
        run_until(core, "verify.b2", [[3, 1, 4, 1, 5], [9, 2, 6]])
        assert core.io["length"][:2].tolist() == [6, 3]  # the first took a step while the second was prefilled
        assert core.io["slots"].tolist() == [0, 1, -1, -1]
        proposals = core.io["proposals"][:2].copy()

        core.graphs["verify.b2"].run()

        assert (core.io["produced"][:2] >= 1).all() and proposals.any()


def test_the_last_line_is_for_a_person(tiny: Path) -> None:
    done = run(tiny, "--graph", "decode.b1")

    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1].endswith("every order tried that the edges allow gives the same bytes")
    assert "dflash.attention/1" in done.stdout


def test_a_graph_that_lacks_an_edge_is_found_out() -> None:
    program = TinyProgram.record(batches=(1,))
    graphs = [graph_pb2.Graph.FromString(g.SerializeToString()) for g in program.recorded.graphs]
    decode = next(g for g in graphs if g.name == "decode.b1")
    del decode.edges[:]
    from runtime.instantiate import instantiate

    core = instantiate(program.mapped(program.memory(1), graphs))
    run_until(core, "decode.b1", [[3, 1, 4, 1, 5]])

    assert replay_on_cpu(core, "decode.b1").unordered


@pytest.mark.parametrize(("arguments", "code"), [
    (["--graph", "decode.b3"], "REPLAY_GRAPH"),
    (["--graph", "decode.b1", "--against", "gpu"], "REPLAY_AGAINST"),
])
def test_refusal_says_what_to_do(tiny: Path, arguments: list[str], code: str) -> None:
    done = run(tiny, *arguments, "--json")

    assert done.exit_code == 2, done.output
    error = json.loads(done.stdout)["error"]
    assert error["code"] == code
    assert error["expected"] and error["got"] and error["hint"]
