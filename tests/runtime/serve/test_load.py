"""Many requests at once: company changes no byte, clients that leave free what they held, and the queue has an end."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest

from tests.served_core import Server

ABORTED = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.01)


def idle(server: Server) -> bool:
    return server.state.worker.unfinished == 0


def pages_free(server: Server) -> int:
    return server.state.worker.engine.pages.available


def ask(server: Server, body: dict[str, Any]) -> tuple[str, Any]:
    answer = server.client().completions.create(model="tiny", logprobs=2, **body)
    return answer.choices[0].text, answer.choices[0].logprobs.model_dump()


def test_company_in_the_batch_changes_neither_text_nor_logprobs(server: Server) -> None:
    rng = random.Random(5)
    bodies = [
        {"prompt": [rng.randrange(128) for _ in range(rng.randrange(1, 90))], "max_tokens": rng.randrange(1, 24),
         "temperature": rng.choice([0, 0, 1.2]), "seed": rng.randrange(100),
         "extra_body": {"speculation": rng.random() < 0.8}}
        for _ in range(24)]
    alone = [ask(server, body) for body in bodies]

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: ask(server, body), bodies))

    assert together == alone


def test_client_that_hangs_up_in_a_stream_frees_its_slot_and_pages(server: Server) -> None:
    wait_until(lambda: idle(server))
    free, aborted = pages_free(server), counted(server, ABORTED)
    stream = server.client(strict=False).completions.create(
        model="tiny", prompt=[1], max_tokens=250, temperature=0, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    held = pages_free(server)

    stream.close()

    wait_until(lambda: idle(server))
    assert held < free
    assert pages_free(server) == free
    assert server.state.worker.engine.idle
    assert counted(server, ABORTED) == aborted + 1


def test_client_that_hangs_up_before_the_answer_frees_its_slot(server: Server) -> None:
    wait_until(lambda: idle(server))
    body = json.dumps({"model": "tiny", "prompt": [1], "max_tokens": 250, "temperature": 0,
                       "ignore_eos": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    aborted = counted(server, ABORTED)

    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: not idle(server))

    wait_until(lambda: idle(server))
    assert counted(server, ABORTED) == aborted + 1


def counted(server: Server, series: str) -> float:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} ")), 0.0)


def test_requests_beyond_the_queue_are_told_when_to_come_back(start: Callable[..., Any]) -> None:
    with start(max_waiting=1, canary=False) as server:
        body = {"model": "tiny", "prompt": [1], "max_tokens": 250, "temperature": 0, "stream": True,
                "ignore_eos": True}
        gate = threading.Barrier(13)

        def send(_: int) -> tuple[int, str | None, Any]:
            gate.wait()
            with httpx2.Client(base_url=server.url, timeout=60) as http:
                answer = http.post("/v1/completions", json=body)
                return answer.status_code, answer.headers.get("retry-after"), answer.text

        with ThreadPoolExecutor(12) as pool:
            sent = [pool.submit(send, i) for i in range(12)]
            gate.wait()
            answers = [future.result() for future in sent]

        refused = [answer for answer in answers if answer[0] == 429]
        served = [answer for answer in answers if answer[0] == 200]
        assert len(refused) + len(served) == 12
        assert 1 <= len(refused) <= 7
        assert all(1 <= int(after) <= 30 for _, after, _ in refused)
        assert json.loads(refused[0][2])["error"]["code"] == "queue_full"
        assert all(text.endswith("data: [DONE]\n\n") for _, _, text in served)


def test_eight_requests_share_four_slots_and_are_all_served(server: Server) -> None:
    def send(seed: int) -> int:
        return server.client().completions.create(model="tiny", prompt=[seed], max_tokens=200, temperature=0,
                                                  extra_body={"ignore_eos": True}).usage.completion_tokens

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(send, range(8)))

    assert counts == [200] * 8
    assert pages_free(server) == server.state.worker.core.symbols["kv_pages"]


def test_a_failed_step_is_told_to_its_requests_and_the_server_lives(server: Server, monkeypatch) -> None:
    from dflash_core.errors import QualityError
    engine = server.state.worker.engine

    def fail() -> None:
        raise QualityError("LOGITS_NOT_FINITE", "the target's highest logit is not finite")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", fail)
        with pytest.raises(openai.InternalServerError) as refused:
            server.client().completions.create(model="tiny", prompt=[1], max_tokens=4)

    assert refused.value.code == "logits_not_finite"
    assert idle(server)
    assert server.client().completions.create(model="tiny", prompt=[1], max_tokens=4).usage.completion_tokens == 4


def test_an_engine_that_breaks_ends_the_server_and_tells_its_requests(start: Callable[..., Any], monkeypatch) -> None:
    with start(canary=False) as server:
        monkeypatch.setattr(server.state.worker.engine, "step", lambda: 1 / 0)

        with pytest.raises(openai.InternalServerError) as refused:
            server.client().completions.create(model="tiny", prompt=[1], max_tokens=4)
        server.thread.join(20)

    assert refused.value.code == "engine_stopped"
    assert not server.thread.is_alive()
    assert [type(error) for error in server.failure] == [ZeroDivisionError]


def test_a_device_that_fails_ends_the_server_and_its_requests_say_why(start: Callable[..., Any], monkeypatch) -> None:
    """A GPU whose kernel faulted refuses every later call of the process: a server that went on would only fail."""
    from dflash_core.errors import DriverError

    def fault() -> None:
        raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered", where="verify.b1")

    with start(canary=False) as server:
        monkeypatch.setattr(server.state.worker.engine, "step", fault)

        with pytest.raises(openai.InternalServerError) as refused:
            server.client().completions.create(model="tiny", prompt=[1], max_tokens=4)
        server.thread.join(20)

    assert refused.value.code == "cuda_error_illegal_address"
    assert not server.thread.is_alive()
    assert [getattr(error, "code", None) for error in server.failure] == ["CUDA_ERROR_ILLEGAL_ADDRESS"]


def test_requests_that_the_engine_never_took_up_are_told_that_it_stopped(start: Callable[..., Any],
                                                                         monkeypatch) -> None:
    broken, asked = threading.Event(), threading.Event()

    def stall() -> None:
        broken.set()
        assert asked.wait(20)
        raise ZeroDivisionError

    with start(canary=False) as server, ThreadPoolExecutor(3) as pool:
        worker = server.state.worker
        monkeypatch.setattr(worker.engine, "step", stall)

        def send(_: int) -> str | None:
            with pytest.raises(openai.InternalServerError) as refused:
                server.client().completions.create(model="tiny", prompt=[1], max_tokens=4)
            return refused.value.code

        sent = [pool.submit(send, 0)]
        assert broken.wait(20)
        sent += [pool.submit(send, i) for i in (1, 2)]
        wait_until(lambda: worker.unfinished == 3)
        asked.set()
        codes = [future.result() for future in sent]

    assert codes == ["engine_stopped"] * 3
    assert worker.unfinished == 0
