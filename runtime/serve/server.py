"""Listen, load, serve, drain: the life of one debug server.

    serve(Path("core"), trust, ServeSettings(port=8000), on_ready=lambda url, state: print(url))

The port answers from the first moment: /startupz tells how far the load is, and everything else is 503 until the core
is warm. A core that is refused ends the process with the error that refused it.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from dflash_core.errors import ResourceError
from uvicorn.protocols.http.h11_impl import H11Protocol

import runtime
from runtime.canary import CanaryResult, replay
from runtime.core import Core
from runtime.engine import Engine, Request, StepRecord
from runtime.serve.app import Served, ServerState, make_app
from runtime.serve.core_view import read_facts
from runtime.serve.metrics import Metrics
from runtime.serve.recording import Recorder
from runtime.serve.settings import ServeSettings
from runtime.serve.worker import EngineWorker, Job, Observer
from runtime.text import CoreText
from runtime.trust import TrustPolicy

CANARY_PROMPTS = 2
MAX_CONNECTIONS = 1024
BACKLOG = 1024
KEEP_ALIVE_S = 15

OnReady = Callable[[str, ServerState], None]


def serve(path: Path, trust: TrustPolicy, settings: ServeSettings, *, nbytes: int = 0, on_listen: Callable[[str], None],
          on_ready: OnReady) -> None:
    """Serve a core until SIGTERM or Ctrl-C; then finish what runs, for at most `settings.drain_s`.

    Args:
        nbytes: about how large the core is, for /startupz.
        on_listen: told the server's address as soon as its port answers.
        on_ready: told the address once requests are taken; on the engine's thread.
    Raises:
        DflashError: the core was refused; QualityError for its canary.
        ResourceError: PORT; the address cannot be listened on.
    """
    listener = _listen(settings)
    url = _url(settings.host, listener.getsockname()[1])
    recorder = None if settings.record is None else Recorder(settings.record)
    observers = _Observers(recorder)
    state: ServerState

    def load(worker: EngineWorker) -> Core:
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            worker.enter("load", done, nbytes)

        worker.enter("load", 0, nbytes)
        return runtime.load(path, trust=trust, device=settings.device, on_bytes=on_bytes)

    def prepare(worker: EngineWorker, core: Core) -> None:
        state.served = _prepare(worker, core, path, trust, settings)
        observers.metrics = state.served.metrics
        if recorder is not None:
            recorder.begin(core.core_digest)

    worker = EngineWorker(load, prepare, max_waiting=settings.max_waiting, observers=(observers,))
    state = ServerState(settings, worker, _version())
    server = _Server(uvicorn.Config(
        make_app(state), http=_protocol(settings.header_timeout_s), loop="asyncio", lifespan="off", ws="none",
        log_config=None, access_log=False, server_header=False, date_header=True, timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)), limit_concurrency=MAX_CONNECTIONS, backlog=BACKLOG))
    worker.on_failure = state.shut_down = server.ask_to_exit
    worker.on_ready = lambda: on_ready(url, state)
    on_listen(url)
    worker.start()
    try:
        with _drained_by_sigterm():
            server.run(sockets=[listener])
    finally:
        worker.stop()
        if recorder is not None:
            recorder.close()
        listener.close()
    if worker.failure is not None:
        raise worker.failure


@contextmanager
def _drained_by_sigterm() -> Iterator[None]:
    """The server takes SIGTERM itself and sends it on once it has drained; by then it has been obeyed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Server(uvicorn.Server):
    """Can be told to end from any thread."""

    def ask_to_exit(self) -> None:
        self.should_exit = True


class _Observers:
    """Passes what the worker sees on to metrics, once they exist, and to the recorder."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.metrics: Metrics | None = None
        self._recorder = recorder

    def _all(self) -> list[Observer]:
        return [target for target in (self.metrics, self._recorder) if target is not None]

    def submitted(self, job: Job) -> None:
        for target in self._all():
            target.submitted(job)

    def stepped(self, job: Job, record: StepRecord, now: float) -> None:
        for target in self._all():
            target.stepped(job, record, now)

    def ended(self, job: Job, reason: str, now: float) -> None:
        for target in self._all():
            target.ended(job, reason, now)

    def engine_stepped(self, engine: Engine) -> None:
        for target in self._all():
            target.engine_stepped(engine)


def _prepare(worker: EngineWorker, core: Core, path: Path, trust: TrustPolicy, settings: ServeSettings) -> Served:
    facts = read_facts(path, trust, core.core_digest, settings.device)
    text = CoreText(core)
    manifest = core.manifest
    metrics = Metrics(manifest.core_name, manifest.contract.max_context, manifest.speculation.draft_depth)
    results: list[CanaryResult] = []
    if settings.canary:
        started = time.perf_counter()
        for index, canary in enumerate(facts.canaries):
            worker.enter("canary", index, len(facts.canaries))
            results.append(replay(core, canary, prompts=CANARY_PROMPTS))
        worker.startup_s["canary"] = time.perf_counter() - started
        metrics.compare_with(facts.canaries)
    started = time.perf_counter()
    worker.enter("warm")
    Engine(core, record_candidates=False).generate([0], Request(min(4, int(manifest.contract.max_context) - 1)))
    worker.startup_s["warm"] = time.perf_counter() - started
    for phase, seconds in worker.startup_s.items():
        metrics.startup_seconds.labels(phase=phase).set(seconds)
    metrics.core_info(core_name=manifest.core_name, core_digest=core.core_digest, release=str(manifest.release),
                      device=settings.device)
    summary = None if not results else {
        "prompts": sum(r.prompts for r in results), "agreement": min(r.agreement for r in results),
        "accepted_per_step": results[0].accepted_per_step, "bound": results[0].bound,
        "by_position": list(results[0].by_position)}
    return Served(text, metrics, facts, manifest.core_name, f"dflash-{core.core_digest[:12]}", summary)


def _listen(settings: ServeSettings) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as e:
        raise ResourceError("PORT", f"cannot listen on this address: {(e.strerror or str(e)).lower()}",
                            where=f"{settings.host}:{settings.port}", hint="choose another --port or --host") from e
    return listener


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _version() -> str:
    from importlib.metadata import version

    return version("dflash-cores")


def _protocol(header_timeout_s: float) -> type[H11Protocol]:
    """HTTP/1.1 that hangs up on clients which never finish the head of a request."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: object) -> None:
            super().connection_made(transport)  # type: ignore[arg-type]
            self._await_head()

        def _await_head(self) -> None:
            self._head_timer = self.loop.call_later(header_timeout_s, self._give_up)

        def _give_up(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                logging.getLogger(__name__).info("a client did not finish its request in time")
                self.transport.close()

    return Protocol
