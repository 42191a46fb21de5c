"""A graph as Graphviz text: a row for each layer, dashed programmatic edges, and labels that cannot break out."""

from __future__ import annotations

from pathlib import Path

import pytest
from dflash_core.v1 import graph_pb2 as g
from dflash_core.v1.manifest_pb2 import RebuildManifest
from typer.testing import CliRunner

from runtime.cli import app
from runtime.graph_dot import graph_dot
from tests.toy_core import make_toy_core

LABELS = ["target.embedding [0 1]", "target.layers.0.qkv [2]", "target.layers.0 [3 4]", "target.layers.1.qkv [5]"]


def chain(labels: list[str], *, programmatic: bool) -> g.Graph:
    graph = g.Graph(name="decode.b1", bucket=g.Bucket(batch=1, query_tokens=1))
    for index, label in enumerate(labels):
        graph.nodes.add(node_id=index, kind=g.KERNEL, kernel_id=index % 2, debug_name=label)
        if index:
            graph.edges.add(to=index, type=int(programmatic), from_port=int(programmatic), **{"from": index - 1})
    return graph


def manifest() -> RebuildManifest:
    return RebuildManifest(core_name="demo", kernels=[g.Kernel(kernel_id=0, name="linear_whole.7"),
                                                      g.Kernel(kernel_id=1, name="paged_attention.8")])


def test_layers_are_rows_in_order() -> None:
    text = graph_dot(chain(LABELS, programmatic=False), {}, manifest(), "sm_90a")

    rows = [line.split('label="')[1].split('"')[0] for line in text.splitlines() if "rank=same" in line]
    assert rows == ["step", "target.layers.0", "target.layers.1"]
    assert 'n1 [label="1  paged_attention\\nqkv"' in text
    assert "demo: decode.b1 on sm_90a, batch 1, 1 tokens, 4 nodes, 3 edges" in text
    assert "n1 -> n2;" in text and "n2 -> n3 [constraint=false];" in text
    assert "dashed" not in text


def test_programmatic_edges_are_dashed() -> None:
    text = graph_dot(chain(LABELS, programmatic=True), {}, manifest(), "sm_90a")

    assert "n1 -> n2 [style=dashed];" in text and "n2 -> n3 [style=dashed, constraint=false];" in text


def test_a_label_stays_inside_its_quotes() -> None:
    text = graph_dot(chain(['x"]; evil [label="\\', "b\x1b[31m"], programmatic=False), {}, manifest(), "cpu")

    assert '\\"]; evil [label=\\"\\\\' in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("name", "exit_code"), [("decode_1", 0), ("decode_9", 2)])
def test_command_prints_the_text_or_says_which_graphs_there_are(tmp_path: Path, name: str, exit_code: int) -> None:
    core = make_toy_core(tmp_path / "core").path

    done = CliRunner().invoke(app, ["inspect", str(core), "--dot", name])

    assert done.exit_code == exit_code, done.output
    assert done.stdout.startswith("digraph {") if exit_code == 0 else "decode_1" in done.stderr
