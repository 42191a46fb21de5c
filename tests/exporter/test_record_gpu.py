"""Recording for a GPU, on a machine without one: what lies between the ops of a tiny pair and the nodes of a core."""

from __future__ import annotations

import pytest
from dflash_core.errors import CaptureError, PlanError

from exporter.capture.compile import check_waits
from exporter.capture.record import record_gpu
from exporter.export import ExportRequest, plan_report
from tests.tiny_pair import TinyProgram, write_pair


def recorded(capability):
    pair = TinyProgram.record(batches=(1,), page_tokens=16).recorded
    decode = next((g, c) for g, c in zip(pair.graphs, pair.calls, strict=True) if g.role == "decode")
    return record_gpu(pair.program, [decode], capability, first_module_id=1)


def edges_of(graph):
    return [(getattr(e, "from"), e.to, e.from_port, e.type) for e in graph.edges]


def test_nodes_for_hopper_are_one_programmatic_chain_of_kernels_that_wait():
    target = recorded(90)
    (graph,) = target.graphs

    assert edges_of(graph) == [(i, i + 1, 1, 1) for i in range(len(graph.nodes) - 1)]
    assert all(v.waits_on_dependency and v.triggers_dependents for k in target.kernels for v in k.variants)
    assert (target.name, target.features) == ("sm_90a", ("pdl",))


def test_nodes_for_ampere_have_full_edges_that_follow_from_what_they_touch():
    target = recorded(80)
    (graph,) = target.graphs

    assert {e[2:] for e in edges_of(graph)} == {(0, 0)}
    assert {e[1] for e in edges_of(graph)} == set(range(1, len(graph.nodes)))
    assert not any(v.waits_on_dependency or v.triggers_dependents for k in target.kernels for v in k.variants)
    assert (target.name, target.features) == ("sm_80", ())


LOAD = "ld.global.b32 {%r1}, [%rd1+0];\n"
WAIT = "griddepcontrol.wait; // dummy %r2\n"
STORE = "@%p1 st.global.b32 [%rd2+0], {%r1};\n"
WAITS = [
    pytest.param(STORE, "none", id="never"),
    pytest.param(LOAD + STORE + WAIT, "@%p1 st.global.b32", id="after a store"),
    pytest.param("atom.global.add.u32 %r1, [%rd1], 1;\n" + WAIT, "atom.global", id="after an atomic"),
    pytest.param("@%p2 bra $L__BB0_2;\n" + WAIT + STORE, "@%p2 bra", id="on one branch alone"),
    pytest.param("@%p2 ret;\n" + WAIT + STORE, "@%p2 ret;", id="after some threads returned"),
]


@pytest.mark.parametrize(("ptx", "got"), WAITS)
def test_refuses_a_chained_kernel_that_waits(ptx, got):
    with pytest.raises(CaptureError) as refused:
        check_waits(ptx, "add_rows")

    assert (refused.value.code, refused.value.where) == ("KERNEL_WAIT", "add_rows")
    assert got in refused.value.got
    assert refused.value.hint


def test_a_chained_kernel_may_read_weights_and_use_shared_memory_before_it_waits():
    check_waits(LOAD + "st.shared.b32 [%r3], %r1;\n" + WAIT + STORE, "linear_whole")


def test_refuses_a_kernel_that_no_block_of_the_device_can_hold(monkeypatch):
    monkeypatch.setattr("exporter.capture.compile.SHARED_OPTIN_KIB", {90: 1})

    with pytest.raises(CaptureError) as refused:
        recorded(90)

    assert (refused.value.code, refused.value.expected) == ("KERNEL_SHARED", "at most 1024 bytes")
    assert int(refused.value.got) > 1024 and "sm_90" in refused.value.where and refused.value.hint


def test_the_target_asks_for_the_shared_memory_of_its_largest_kernel():
    target = recorded(90)

    assert target.shared_bytes == max(v.max_dynamic_shared_bytes for k in target.kernels for v in k.variants) > 0


@pytest.mark.parametrize(("batch", "capability", "refused"), [(32, 90, False), (33, 90, True), (33, None, False)])
def test_a_step_has_no_more_rows_than_kernels_compute_alike(tmp_path, batch, capability, refused):
    """Four rows a sequence; above 128, a step would be computed as a prefill is, whose sums round otherwise."""
    write_pair(tmp_path, seed=3, draft_head_dim=32)
    request = ExportRequest(target=tmp_path / "target", draft=tmp_path / "draft", out=tmp_path / "core",
                            batches=(1, batch), capability=capability)
    if not refused:
        assert plan_report(request)
        return

    with pytest.raises(PlanError) as error:
        plan_report(request)

    assert (error.value.code, error.value.where, error.value.got) == (
        "GPU_BATCH", "--batch", "132 rows, 33 sequences of 4")
    assert error.value.expected == "at most 128 rows, 32 sequences"
    assert error.value.hint
