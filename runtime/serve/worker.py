"""The one thread that drives the engine: it loads the core, checks its canary, then steps while there is work.

    worker = EngineWorker(load, start_checks, max_waiting=64, observers=(metrics,))
    worker.start()
    job = worker.submit(prompt, request)        # from the event loop
    async for event in job.events(): ...

Everything that touches the core happens on this thread, so a GPU's context is never shared; the event loop only puts
jobs into a queue and is told of their steps.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dflash_core.errors import DflashError, DriverError

from runtime.core import Core
from runtime.engine import Engine, FinishReason, Request, Sequence, StepRecord, StepTimes

if TYPE_CHECKING:
    from runtime.vision.rows import PromptImages

_log = logging.getLogger(__name__)
MAX_RETRY_AFTER_S = 30


class QueueFullError(Exception):
    """No more requests may wait; `retry_after_s` is about how long a request now takes, its own waiting included."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One step of a job; `finish_reason` is set with the last one."""

    record: StepRecord
    times: StepTimes
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """The engine gave the job up."""

    error: DflashError


Event = StepEvent | FailedEvent


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the engine; clock readings are of `time.perf_counter`, 0 until they are known."""

    request_id: str
    prompt: tuple[int, ...]
    request: Request
    loop: asyncio.AbstractEventLoop
    images: PromptImages | None = None
    queue: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    sequence: Sequence | None = None
    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def tell(self, event: Event) -> None:
        """From the engine's thread: hand an event to the loop that waits for it."""
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, event)
        except RuntimeError:
            _log.info("request %s: its event loop is gone", self.request_id)

    async def events(self) -> AsyncIterator[Event]:
        """Every event up to the last one."""
        while True:
            event = await self.queue.get()
            yield event
            if isinstance(event, FailedEvent) or event.finish_reason is not None:
                return


class Observer(Protocol):
    """Is told, on the engine's thread, what happens to jobs."""

    def submitted(self, job: Job) -> None: ...

    def stepped(self, job: Job, record: StepRecord, now: float) -> None: ...

    def ended(self, job: Job, reason: str, now: float) -> None: ...

    def engine_stepped(self, engine: Engine) -> None: ...


@dataclass(frozen=True, slots=True)
class Phase:
    """Where a start-up stands; `name` is "ready" at its end and "failed" if it went wrong."""

    name: str
    done: int = 0
    total: int = 0


class EngineWorker:
    """Owns a core and its engine. `submit`, `cancel`, `stop` and the properties may be used from any thread.

    Args:
        load: makes the core; told where to report bytes.
        prepare: runs once with the core before requests are taken; told where to report its phase.
        max_waiting: jobs beyond the core's batch that may be unfinished.
        observers: told of every job and step.
    """

    def __init__(self, load: Callable[[EngineWorker], Core], prepare: Callable[[EngineWorker, Core], None], *,
                 max_waiting: int, observers: SequenceOf[Observer] = ()) -> None:
        self._load, self._prepare = load, prepare
        self._max_waiting, self._observers = max_waiting, tuple(observers)
        self._commands: queue.SimpleQueue[tuple[str, Job | None, str]] = queue.SimpleQueue()
        self._jobs: dict[Sequence, Job] = {}
        self._lock = threading.Lock()
        self._unfinished = 0
        self._stopped = False
        self._mean_s = 1.0
        self._phase = Phase("starting")
        self._thread = threading.Thread(target=self._run, name="dflash-engine", daemon=True)
        self.core: Core | None = None
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.startup_s: dict[str, float] = {}
        self.on_failure: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def ready(self) -> bool:
        return self._phase.name == "ready"

    @property
    def unfinished(self) -> int:
        """Jobs that are running or waiting."""
        return self._unfinished

    def enter(self, name: str, done: int = 0, total: int = 0) -> None:
        """Say where the start-up stands."""
        self._phase = Phase(name, done, total)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give up what runs and end the thread; returns when the core is closed."""
        self._commands.put(("stop", None, ""))
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request_id: str, prompt: SequenceOf[int], request: Request,
               images: PromptImages | None = None) -> Job:
        """Queue a request; from an event loop, which will be told of its steps.

        Raises:
            QueueFullError: as many requests wait as may.
            UsageError, CompatibilityError: as `Engine.check`.
            DflashError: ENGINE_STOPPED.
        """
        engine = self.engine
        assert engine is not None
        engine.check(prompt, request)
        job = Job(request_id, tuple(prompt), request, asyncio.get_running_loop(), images=images,
                  arrived=time.perf_counter())
        with self._lock:
            if self._stopped:
                raise self._stop_error()
            if self._unfinished >= engine.max_batch + self._max_waiting:
                raise QueueFullError(min(MAX_RETRY_AFTER_S, max(1, round(self._mean_s))))
            self._unfinished += 1
            self._commands.put(("add", job, ""))
        return job

    def cancel(self, job: Job, reason: str = "abort") -> None:
        """Nobody waits for this job any longer; what it holds is freed before the next step. May be repeated.

        Args:
            reason: how metrics count its end: "abort" for a client that left, "stop" after a stop string.
        """
        self._commands.put(("cancel", job, reason))

    def _run(self) -> None:
        try:
            self._start_up()
            while self._take_commands():
                self._step()
        except BaseException as e:  # whatever it is, the main thread reports it and ends the process
            self.failure = e
            self._phase = Phase("failed")
            self.on_failure()
        finally:
            self._give_up_all()
            if self.core is not None:
                self.core.close()

    def _give_up_all(self) -> None:
        """Tell every job that is running, waiting or only asked for; after this none is taken."""
        with self._lock:
            self._stopped = True
        asked = []
        while not self._commands.empty():
            command, job, _ = self._commands.get()
            asked += [job] if command == "add" and job is not None else []
        for job in (*self._jobs.values(), *asked):
            self._end(job, "abort")
            job.tell(FailedEvent(self._stop_error()))

    def _stop_error(self) -> DflashError:
        """Why no job runs any longer: what broke the engine where that is typed."""
        if isinstance(self.failure, DflashError):
            return self.failure
        return DflashError("ENGINE_STOPPED", "the engine has stopped")

    def _start_up(self) -> None:
        started = time.perf_counter()
        self.core = self._load(self)
        self.startup_s["load"] = time.perf_counter() - started
        self._prepare(self, self.core)
        engine = Engine(self.core, record_candidates=False)
        if engine.sees:
            _ = engine.encoder  # made on this thread, so that no request has to
        self.engine = engine
        self.startup_s["total"] = time.perf_counter() - started
        self._phase = Phase("ready")
        self.on_ready()

    def _take_commands(self) -> bool:
        """Do what was asked for; waits for a command when there is nothing to step. False: stop."""
        assert self.engine is not None
        while True:
            try:
                command, job, reason = self._commands.get(block=self.engine.idle)
            except queue.Empty:
                return True
            if command == "stop":
                return False
            assert job is not None
            if command == "add":
                job.sequence = self.engine.add(job.prompt, job.request, job.images)
                self._jobs[job.sequence] = job
                for observer in self._observers:
                    observer.submitted(job)
            elif job.sequence is not None and job.sequence in self._jobs:
                self.engine.abort(job.sequence)
                self._end(job, reason)

    def _step(self) -> None:
        engine = self.engine
        assert engine is not None
        try:
            outputs = engine.step()
        except DriverError:  # a GPU whose kernel faulted is lost to this process: no later request could be served
            raise
        except DflashError as e:
            _log.exception("a step failed; its requests are given up")
            for sequence, job in list(self._jobs.items()):
                engine.abort(sequence)
                self._end(job, "error")
                job.tell(FailedEvent(e))
            return
        now = time.perf_counter()
        for job in self._jobs.values():
            if not job.admitted and job.sequence is not None and (job.sequence.slot >= 0 or job.sequence.tokens):
                job.admitted = now - engine.times.total_s
        for output in outputs:
            job = self._jobs[output.sequence]
            for observer in self._observers:
                observer.stepped(job, output.record, now)
            job.first_token = job.first_token or now
            job.last_token = now
            reason = output.sequence.finish_reason
            if reason is not None:
                self._end(job, reason.value)
            job.tell(StepEvent(output.record, engine.times, reason))
        for observer in self._observers:
            observer.engine_stepped(engine)

    def _end(self, job: Job, reason: str) -> None:
        now = time.perf_counter()
        if job.sequence is not None:
            self._jobs.pop(job.sequence, None)
        with self._lock:
            self._unfinished -= 1
            self._mean_s = 0.8 * self._mean_s + 0.2 * (now - job.arrived)
        for observer in self._observers:
            observer.ended(job, reason, now)
