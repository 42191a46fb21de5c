"""A tiny signed core with a tokenizer, and servers over it on loopback ports."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from exporter.export import ExportRequest, export
from runtime import TrustPolicy
from runtime.keys import generate_key, load_private_key
from runtime.serve import ServeSettings
from runtime.serve.app import ServerState
from runtime.serve.server import serve
from tests.tiny_pair import VOCAB, write_pair

TEMPLATE = ("{% for m in messages %}t1 {{ m['role'] | replace('user', 't2') | replace('system', 't3') "
            "| replace('assistant', 't4') }} {{ m['content'] }} {% endfor %}"
            "{% if add_generation_prompt %}t1 t4{% endif %}")
START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Server:
    """A server on a thread of this process."""

    url: str
    state: ServerState
    thread: threading.Thread
    failure: list[BaseException] = field(default_factory=list)

    def client(self, *, strict: bool = True, api_key: str = "unused") -> OpenAI:
        """The official client. Its strict mode has no room for the `null` that ends no completion in a stream."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30,
                      _strict_response_validation=strict)

    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30)


def make_tiny(folder: Path, capability: int | None = None) -> Path:
    """Fill a folder with `core`, whose token n is spelled " tn", and `keys`."""
    write_pair(folder, seed=3, draft_head_dim=32 if capability else None)
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("t", " t"), decoders.Fuse()])
    (folder / "target" / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    generate_key(folder / "keys")
    export(ExportRequest(target=folder / "target", draft=folder / "draft", out=folder / "core", batches=(1, 2, 4),
                         canary=True, core_name="tiny", capability=capability),
           load_private_key(folder / "keys" / "key.pem"))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `make_tiny`, for a CPU."""
    return make_tiny(tmp_path_factory.mktemp("serve"))


@contextmanager
def running(tiny: Path, **settings: Any) -> Iterator[Server]:
    """A server that has become ready; ends with the block, and its thread with it."""
    ready: list[tuple[str, ServerState]] = []
    event = threading.Event()
    failure: list[BaseException] = []

    def on_ready(url: str, state: ServerState) -> None:
        ready.append((url, state))
        event.set()

    def run() -> None:
        try:
            serve(tiny / "core", TrustPolicy.load(tiny / "keys" / "trust.json"),
                  ServeSettings(**{"port": 0, **settings}), on_listen=lambda url: None, on_ready=on_ready)
        except BaseException as e:
            failure.append(e)
        finally:
            event.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert event.wait(START_TIMEOUT_S)
    if not ready:
        thread.join()
        raise failure[0]
    url, state = ready[0]
    try:
        yield Server(url, state, thread, failure)
    finally:
        state.shut_down()
        thread.join(START_TIMEOUT_S)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def start(tiny: Path) -> Callable[..., Any]:
    """Starts a server with its own settings: `with start(max_waiting=0) as server`."""
    return lambda **settings: running(tiny, **settings)


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    with running(tiny) as shared:
        yield shared
