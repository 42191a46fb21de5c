"""A core on a GPU as the engine sees it: what a step costs, what is sent up when, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
from dflash_core.errors import CompatibilityError, DriverError, FormatError, QualityError

import runtime
from runtime.engine import Engine, FinishReason, Request
from tests.runtime.gpu.fake_driver import FakeDriver, Result
from tests.runtime.gpu.toy import DEPTH, IDS, PAGES, TOKENIZER, fake_kernel, fake_kernels, make_gpu_core, next_tokens


@pytest.mark.parametrize(
    ("prompt", "speculation", "accepted"),
    [
        ([4], True, [0, 1, 1, 1, 0]),
        ([1, 2, 3, 4], True, [0, 1, 1, 1, 0]),
        ([9, 9, 1, 2, 3, 4], True, [0, 1, 1, 1, 0]),
        ([1, 2, 3, 4], False, [0] * 8),
    ],
    ids=["one token", "one chunk", "two chunks", "plain"],
)
def test_engine_continues_a_prompt(load: Any, prompt: list[int], speculation: bool, accepted: list[int]) -> None:
    completion = Engine(load()).generate(prompt, Request(max_tokens=8, speculation=speculation))

    assert completion.tokens == tuple(next_tokens(4, 8))
    assert completion.finish_reason is FinishReason.LENGTH
    assert [s.accepted for s in completion.steps] == accepted


def calls_of_a_step(core: Any, fake: FakeDriver, *, record_candidates: bool, speculation: bool = True) -> list[str]:
    """Driver calls of a step in the middle of a sequence, without making the context current."""
    engine = Engine(core, record_candidates=record_candidates)
    sequence = engine.add([1], Request(max_tokens=30, speculation=speculation))
    engine.step()
    engine.step()
    start = len(fake.calls)
    engine.step()
    calls = [name for name in fake.calls[start:] if name != "cuCtxSetCurrent"]
    engine.abort(sequence)
    return calls


def test_step_is_two_launches_and_one_wait(load: Any, fake: FakeDriver) -> None:
    core = load()
    core.graph("decode", 2)

    assert calls_of_a_step(core, fake, record_candidates=False) == [
        "cuGraphLaunch", "cuGraphLaunch", "cuStreamSynchronize"]
    assert fake.launched[-2:] == [["MEMSET", "toy_draft"], ["MEMSET", "toy_verify"]]


def test_plain_step_is_one_launch_and_one_wait(load: Any, fake: FakeDriver) -> None:
    core = load()
    core.graph("decode", 2)

    assert calls_of_a_step(core, fake, record_candidates=False, speculation=False) == [
        "cuGraphLaunch", "cuStreamSynchronize"]


def test_recorded_candidates_are_fetched_after_the_one_wait(load: Any, fake: FakeDriver) -> None:
    core = load()
    core.graph("decode", 2)

    calls = calls_of_a_step(core, fake, record_candidates=True)

    assert calls[:3] == ["cuGraphLaunch", "cuGraphLaunch", "cuStreamSynchronize"]
    assert set(calls[3:]) == {"cuMemcpyDtoHAsync", "cuStreamSynchronize"}


def test_records_hold_candidates_only_when_they_are_wanted(load: Any) -> None:
    core = load()
    request = Request(max_tokens=6)

    with_them, without = (Engine(core, record_candidates=wanted).generate([4], request) for wanted in (True, False))

    assert with_them.tokens == without.tokens
    assert [s.proposals for s in with_them.steps] == [(), (14, 20), (24, 30), (34,)]
    assert [s.candidates for s in with_them.steps] == [(), ((14,), (20,)), ((24,), (30,)), ((34,),)]
    assert {(s.proposals, s.candidates) for s in without.steps} == {((), ())}


@pytest.mark.parametrize(("speculation", "symbol"), [(True, "toy_verify"), (False, "toy_decode")])
def test_lane_marked_not_finite_is_a_quality_error(
    load: Any, fake: FakeDriver, speculation: bool, symbol: str
) -> None:
    fake.kernels = fake_kernels(**{symbol: fake_kernel(symbol, lambda a: a.__setitem__(("produced", 0), -1))})

    with pytest.raises(QualityError) as refused:
        Engine(load()).generate([1], Request(max_tokens=4, speculation=speculation))

    assert (refused.value.code, refused.value.where) == ("LOGITS_NOT_FINITE", "request slot 0")


def uploads(fake: FakeDriver, act: Any) -> int:
    start = len(fake.calls)
    act()
    return fake.calls[start:].count("cuMemcpyHtoDAsync")


def test_inputs_go_up_in_one_copy_with_the_next_launch_and_only_when_they_change(load: Any, fake: FakeDriver) -> None:
    core = load()
    graph = core.graph("prefill", 1)

    def put() -> None:
        core.put("slots", 0, [0, -1])
        core.put("limit", 0, [30])
        core.put("seed", 1, [2**64 - 1])
        core.put("temperature", 0, [0.5, 0])
        core.put("chunk_tokens", 0, [5])
        core.put("chunk_count", 0, [1])

    assert uploads(fake, put) == 0
    assert uploads(fake, graph.run) == 1
    core.synchronize()
    assert uploads(fake, put) == uploads(fake, graph.run) == 0
    assert (core.get("seed", 0, 2), core.get("temperature", 0, 2)) == ([0, 2**64 - 1], [0.5, 0.0])
    assert fake.read(core._memory.buffers[IDS["seed"]], 16) == bytes(8) + b"\xff" * 8


def test_launch_in_flight_keeps_the_inputs_it_was_given(load: Any, fake: FakeDriver) -> None:
    """The fake reads the mirror when it is waited for: without a wait before the change, both chunks would be 8."""
    core = load()
    graph = core.graph("prefill", 1)
    for token in (3, 8):
        core.put("chunk_tokens", 0, [token])
        core.put("chunk_count", 0, [1])
        graph.run()

    core.synchronize()

    assert core.get("length", 0, 1) == [2]
    assert core.get("sampled", 0, 1) == [13]


def test_state_is_written_and_read_by_copies(load: Any) -> None:
    core = load()

    core.put("length", 1, [41])

    assert core.get("length", 0, 2) == [0, 41]
    assert core.get("anchor", 0, 2) == [0, 7]


def test_kernels_see_symbols_and_bindings_have_shapes(load: Any) -> None:
    core = load()
    Engine(core).generate([1], Request(max_tokens=1))

    assert core.get("pages_seen", 0, 1) == [PAGES]
    assert core.symbols == {"kv_pages": PAGES}
    assert core.shape("emitted") == (2, 1 + DEPTH)
    assert core.manifest.core_name == "toy-gpu"
    with pytest.raises(KeyError):
        core.shape("nothing")


@pytest.mark.parametrize(("offset", "count"), [(1, 2), (-1, 1), (3, 0), (0, 3)])
@pytest.mark.parametrize("name", ["slots", "length", "sampled"])
def test_elements_outside_a_binding_are_refused(load: Any, name: str, offset: int, count: int) -> None:
    core = load()

    with pytest.raises(IndexError):
        core.put(name, offset, [0] * count)
    with pytest.raises(IndexError):
        core.get(name, offset, count)


def test_core_carries_its_model_files(load: Any) -> None:
    core = load()

    assert (core.file("tokenizer.json"), core.file("config.json")) == (TOKENIZER, None)


def test_refuses_a_batch_that_no_graph_serves(load: Any) -> None:
    with pytest.raises(CompatibilityError) as refused:
        load().graph("decode", 3)

    assert (refused.value.code, refused.value.expected, refused.value.got) == ("NO_GRAPH", "at most 2", "3")


def test_refuses_a_binding_that_the_host_cannot_read(tmp_path: Any, load: Any, fake: FakeDriver) -> None:
    def edit(manifest: Any, graphs: Any) -> None:
        manifest.contract.io[0].dtype = "f16"

    with pytest.raises(FormatError) as refused:
        load(path=make_gpu_core(tmp_path / "other", edit=edit).path)

    assert (refused.value.code, refused.value.where, refused.value.got) == ("BINDING_DTYPE", "binding slots", "f16")
    assert fake.held == {}


def test_bf16_is_read_as_the_numbers_it_means(tmp_path: Any, load: Any) -> None:
    """The halves of fp32 1.5 and -2.25, low half first: each upper half is the same number in bf16."""
    def edit(manifest: Any, graphs: Any) -> None:
        halves = manifest.contract.io.add()
        halves.CopyFrom(next(b for b in manifest.contract.io if b.name == "temperature"))
        halves.name, halves.dtype, halves.shape[:] = "halves", "bf16", [4]

    core = load(path=make_gpu_core(tmp_path / "other", edit=edit).path)
    core.put("temperature", 0, [1.5, -2.25])

    assert core.get("halves", 0, 4) == [0.0, 1.5, 0.0, -2.25]
    assert core.get("halves", 3, 1) == [-2.25]


def test_launch_that_fails_is_typed_and_the_process_loads_the_next_core(load: Any, fake: FakeDriver) -> None:
    core = load()
    fake.fail("cuGraphLaunch", Result.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(DriverError) as refused:
        Engine(core).generate([1], Request(max_tokens=4))
    fake.fails.clear()
    core.close()

    assert (refused.value.code, refused.value.where) == ("CUDA_ERROR_OUT_OF_MEMORY", "cuGraphLaunch graph prefill.c4")
    assert fake.held == {}
    assert Engine(load()).generate([1], Request(max_tokens=4)).tokens == tuple(next_tokens(1, 4))


def test_kernel_that_faults_is_typed_closing_still_works_and_the_cpu_remains(
    toy: Any, trust: Any, fake: FakeDriver, caplog: Any
) -> None:
    """After a fault the driver refuses every call of the process, as a real one does; close must not raise."""
    def fault(args: Any) -> None:
        args.fake.read(0xDEAD_0000, 4)

    fake.kernels = fake_kernels(toy_prefill=fake_kernel("toy_prefill", fault))
    with pytest.raises(DriverError) as refused, runtime.load(toy.path, trust=trust, device="cuda") as core:
        Engine(core).generate([1], Request(max_tokens=4))
    with pytest.raises(DriverError) as again:
        runtime.load(toy.path, trust=trust, device="cuda")

    assert refused.value.code == again.value.code == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert again.value.hint.startswith("the GPU is lost to this process: start it again")
    assert "the device did not take everything back" in caplog.text


def test_closing_twice_gives_back_once(load: Any, fake: FakeDriver) -> None:
    core = load()
    core.close()
    core.close()

    assert fake.held == {}
    assert fake.calls.count("cuMemFree") == 1
