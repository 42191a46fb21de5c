"""How a server listens, and the limits that keep it alive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_BODY_BYTES = 1 << 20
MAX_IMAGE_BODY_BYTES = 8 << 20  # of a core that sees: images come in base64, four bytes for three
MAX_JSON_DEPTH = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How a server listens and what it allows.

    Attributes:
        port: 0 takes any free one.
        api_key: what clients must send as a bearer token; None: nothing.
        max_waiting: requests that may wait for a slot; further ones are told to come back later.
        canary: replay the core's acceptance canary before the first request.
        record: folder that keeps every step of every request; None: nothing is kept.
        header_timeout_s, body_timeout_s: how long a client may take to send a request's head and body.
        drain_s: how long running requests may go on after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_waiting: int = 64
    canary: bool = True
    record: Path | None = None
    device: str = "cpu"
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    drain_s: float = 30.0
