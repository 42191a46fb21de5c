"""`--record DIR`: every step of every request, one JSON object a line; and `replay-requests`, which runs them again.

    report = replay_requests(Path("records"), core)
    report.divergence          # None, or where the first difference is
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from dflash_core.errors import ResourceError, UsageError

from runtime.core import Core
from runtime.engine import Engine, Request, StepKind, StepRecord
from runtime.serve.worker import Job

FORMAT = "dflash-requests/1"


class Recorder:
    """Observes the engine worker and writes one file per server start.

    Raises:
        ResourceError: RECORD; the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / f"requests-{time.time_ns()}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = path.open("x", encoding="utf-8")
        except OSError as e:
            raise ResourceError("RECORD", f"cannot record requests: {(e.strerror or str(e)).lower()}", where=str(path),
                                hint="give --record a folder that you can write to") from e

    def begin(self, core_digest: str) -> None:
        self._write({"format": FORMAT, "core_digest": core_digest})

    def close(self) -> None:
        self._file.close()

    def submitted(self, job: Job) -> None:
        self._write({"id": job.request_id, "prompt": job.prompt, "request": asdict(job.request),
                     "images": 0 if job.images is None else len(job.images.images)})

    def stepped(self, job: Job, record: StepRecord, now: float) -> None:
        self._write({"id": job.request_id, "kind": record.kind.value, "tokens": record.tokens,
                     "proposed": record.proposed, "accepted": record.accepted})

    def ended(self, job: Job, reason: str, now: float) -> None:
        self._write({"id": job.request_id, "end": reason})
        self._file.flush()

    def engine_stepped(self, engine: Engine) -> None:
        """Nothing: steps are kept by request."""

    def _write(self, document: dict[str, Any]) -> None:
        self._file.write(json.dumps(document, separators=(",", ":")) + "\n")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step as it was served."""

    kind: str
    tokens: tuple[int, ...]
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request and the steps it was served with.

    Attributes:
        images: how many its prompt had; what they showed is not recorded.
        end: None when the server was killed meanwhile.
    """

    request_id: str
    core_digest: str
    prompt: tuple[int, ...]
    request: Request
    steps: tuple[RecordedStep, ...]
    images: int
    end: str | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step whose tokens are not the recorded ones."""

    request_id: str
    step: int
    recorded: tuple[int, ...]
    replayed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of a replay; acceptance is kept proposals per verify step, over the steps that both made.

    Attributes:
        requests: that were run again.
        with_images: that were not, since their images are not recorded.
    """

    requests: int
    with_images: int
    steps: int
    same_core: bool
    divergence: Divergence | None
    accepted_before: float
    accepted_now: float


def read_requests(folder: Path) -> list[RecordedRequest]:
    """Every recorded request of a folder, in order.

    Raises:
        UsageError: RECORDING; the folder holds no recording, or a line of one is malformed.
    """
    paths = sorted(folder.glob("requests-*.jsonl"))
    found = [request for path in paths for request in _read_file(path)]
    if not found:
        raise UsageError("RECORDING", "no recorded request is here", where=str(folder),
                         expected="requests-*.jsonl, as debug-serve --record writes them")
    return found


def replay_requests(requests: list[RecordedRequest], core: Core) -> ReplayReport:
    """Run recorded requests again, each alone, and compare tokens. A request that was cut short is compared as far as
    it went; one that had images is left out."""
    with_images = sum(recorded.images > 0 for recorded in requests)
    requests = [recorded for recorded in requests if not recorded.images]
    engine = Engine(core, record_candidates=False)
    steps, before, now = 0, [], []
    divergence = None
    for recorded in requests:
        replayed = engine.generate(recorded.prompt, recorded.request).steps
        kept_before = [s.accepted for s in recorded.steps if s.kind == StepKind.VERIFY.value]
        kept_now = [s.accepted for s in replayed if s.kind is StepKind.VERIFY]
        if recorded.end not in ("stop", "length"):
            kept_now = kept_now[:len(kept_before)]
        steps += len(recorded.steps)
        before += kept_before
        now += kept_now
        if divergence is None:
            divergence = _first_difference(recorded, replayed)
    same_core = {r.core_digest for r in requests} <= {core.core_digest}
    return ReplayReport(len(requests), with_images, steps, same_core, divergence, _mean(before), _mean(now))


def _first_difference(recorded: RecordedRequest, replayed: tuple[StepRecord, ...]) -> Divergence | None:
    """The first recorded step whose tokens are not at the same place of the replayed text."""
    text = [token for step in replayed for token in step.tokens]
    at = 0
    for index, step in enumerate(recorded.steps):
        found = tuple(text[at:at + len(step.tokens)])
        if found != step.tokens:
            return Divergence(recorded.request_id, index, step.tokens, found)
        at += len(step.tokens)
    return None


def _read_file(path: Path) -> Iterator[RecordedRequest]:
    digest = ""
    heads: dict[str, dict[str, Any]] = {}
    steps: dict[str, list[RecordedStep]] = {}
    ends: dict[str, str] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            if "format" in entry:
                digest = str(entry["core_digest"])
            elif "prompt" in entry:
                heads[entry["id"]], steps[entry["id"]] = entry, []
            elif "end" in entry:
                ends[entry["id"]] = entry["end"]
            else:
                steps[entry["id"]].append(RecordedStep(entry["kind"], tuple(entry["tokens"]), entry["proposed"],
                                                       entry["accepted"]))
        except (ValueError, KeyError, TypeError) as e:
            raise UsageError("RECORDING", "a line of the recording is malformed", where=f"{path}:{number}",
                             got=f"{type(e).__name__}: {e}", hint="remove the line") from e
    for request_id, head in heads.items():
        settings = {**head["request"], "stop_token_ids": tuple(head["request"]["stop_token_ids"])}
        yield RecordedRequest(request_id, digest, tuple(head["prompt"]), Request(**settings), tuple(steps[request_id]),
                              int(head.get("images", 0)), ends.get(request_id))


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
