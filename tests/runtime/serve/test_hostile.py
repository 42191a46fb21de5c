"""Whatever a client sends, it gets a typed 4xx or a closed connection, and the next client is served."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.serve.body import parse_json
from runtime.serve.errors import ApiError
from runtime.serve.guard import is_local_host
from tests.served_core import Server

JSON = {"content-type": "application/json"}
GOOD = {"model": "tiny", "prompt": [1], "max_tokens": 1}


@pytest.fixture(autouse=True)
def server_lives(server: Server) -> Iterator[None]:
    yield
    with server.http() as http:
        assert http.post("/v1/completions", json=GOOD).status_code == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"", JSON, 400, "invalid_json"), (b"{", JSON, 400, "invalid_json"), (b"\xff\xfe", JSON, 400, "invalid_utf8"),
        (b'{"model":"\xc3("}', JSON, 400, "invalid_utf8"), (b"[" * 100_000, JSON, 400, "json_too_deep"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, JSON, 400, "json_too_deep"), (b"[]", JSON, 400, None),
        (b'{"model":"tiny","prompt":[1],"temperature":NaN}', JSON, 400, "invalid_json"),
        (b'{"model":"tiny","prompt":[1],"seed":' + b"9" * 5000 + b"}", JSON, 400, "invalid_json"),
        (b'{"model":"tiny","prompt":"' + b"a" * (1 << 20) + b'"}', JSON, 413, "body_too_large"),
        (json.dumps(GOOD).encode(), {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (json.dumps(GOOD).encode(), {}, 415, "unsupported_media_type"),
        (json.dumps({**GOOD, "prompt": "\ud800"}).encode(), JSON, 400, None),
        (json.dumps({**GOOD, "prompt": "t1 " * 300_000}).encode(), JSON, 400, "context_length_exceeded"),
    ],
    ids=["empty", "cut short", "not UTF-8", "bad sequence", "100,000 deep", "65 deep", "a list", "NaN", "a huge number",
         "over 1 MiB", "as text", "undeclared", "a lone surrogate", "900 kB of prompt"],
)
def test_bad_bodies_are_refused_by_name(server: Server, body, headers, status, code) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", content=body, headers=headers)

    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    if code is not None:
        assert answer.json()["error"]["code"] == code


def test_chunked_body_is_limited_too(server: Server) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    with server.http() as http:
        answer = http.post("/v1/completions", content=pieces(), headers=JSON)

    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/v1/models/x", 404),
     ("GET", "/../../etc/passwd", 404), ("GET", "/dflash/graphs/none", 404), ("GET", "/page.html", 404)],
)
def test_other_paths_are_refused_in_the_same_form(server: Server, method: str, path: str, status: int) -> None:
    with server.http() as http:
        answer = http.request(method, path)

    assert answer.status_code == status
    assert "message" in answer.json()["error"]


def raw(server: Server, data: bytes, wait_s: float = 5.0) -> bytes:
    """What the server answers to these bytes, until it closes or a while passes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as client:
        client.sendall(data)
        answer = b""
        try:
            while piece := client.recv(65536):
                answer += piece
        except TimeoutError:
            answer += b"<open>"
        except ConnectionResetError:
            answer += b"<reset>"
        return answer


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n",
     b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
     b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
     b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
     b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n"],
    ids=["TLS", "no HTTP", "20,000 headers", "a huge header", "negative length", "a huge path"],
)
def test_malformed_http_is_refused(server: Server, data: bytes) -> None:
    answer = raw(server, data)

    assert answer.startswith((b"HTTP/1.1 4", b"<reset>"))
    assert not answer.endswith(b"<open>")


def test_client_that_never_ends_its_head_is_cut_off(start: Callable[..., Any]) -> None:
    with start(header_timeout_s=0.3, canary=False) as server:
        began = time.monotonic()

        answer = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")

        assert answer == b""
        assert time.monotonic() - began < 4


def test_client_that_never_ends_its_body_is_told_so(start: Callable[..., Any]) -> None:
    with start(body_timeout_s=0.3, canary=False) as server:
        answer = raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                             b"Content-Length: 50\r\n\r\n{", wait_s=3)

    assert answer.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("header", "local"),
    [("localhost", True), ("localhost:8000", True), ("127.0.0.1:8000", True), ("127.0.0.1", True), ("[::1]:80", True),
     ("::1", False), ("LOCALHOST:1", True), ("", False), ("attacker.example", False), ("attacker.example:8000", False),
     ("localhost.attacker.example", False), ("10.0.0.1:8000", False)],
)
def test_host_header_must_name_this_machine(header: str, local: bool) -> None:
    assert is_local_host(header) is local


def test_page_of_another_site_cannot_use_the_server(server: Server) -> None:
    with server.http() as http:
        rebound = http.get("/v1/models", headers={"host": "attacker.example"})
        preflight = http.options("/v1/completions", headers={
            "origin": "https://attacker.example", "access-control-request-method": "POST"})
        simple = http.post("/v1/completions", content=json.dumps(GOOD), headers={"content-type": "text/plain"})

    assert (rebound.status_code, preflight.status_code, simple.status_code) == (421, 405, 415)
    assert not any(name.startswith("access-control") for r in (rebound, preflight, simple) for name in r.headers)


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [("/v1/models", None, 401), ("/v1/models", "Bearer wrong", 401), ("/v1/models", "Basic secret", 401),
     ("/v1/models", "Bearer secret", 200), ("/server_info", None, 401), ("/openapi.json", None, 401),
     ("/health", None, 200), ("/startupz", None, 200), ("/metrics", None, 200), ("/", None, 200)],
)
def test_api_key_opens_what_it_must(keyed: Server, path: str, header: str | None, status: int) -> None:
    with keyed.http() as http:
        answer = http.get(path, headers={} if header is None else {"authorization": header})

    assert answer.status_code == status


@pytest.fixture(scope="module")
def keyed(start: Callable[..., Any]) -> Iterator[Server]:
    with start(api_key="secret", canary=False) as server:
        yield server


@pytest.mark.parametrize(("text", "value"), [(b'{"a": "[[{"}', {"a": "[[{"}), (rb'"\"["', '"['), (b"[[1]]", [[1]])])
def test_brackets_inside_strings_are_no_levels(text: bytes, value: Any) -> None:
    assert parse_json(text) == value


def test_nesting_is_allowed_up_to_its_limit() -> None:
    assert parse_json(b"[" * 64 + b"]" * 64)
    with pytest.raises(ApiError):
        parse_json(b"[" * 65 + b"]" * 65)


class Touched:
    """What this process, which serves too, opens and connects to, as the interpreter tells it."""

    def __init__(self) -> None:
        self.files: list[Any] = []
        self.ports: list[Any] = []
        self.listens = True
        sys.addaudithook(self._hear)

    def _hear(self, event: str, details: tuple[Any, ...]) -> None:
        if self.listens and event == "open":
            self.files.append(details[0])
        elif self.listens and event == "socket.connect" and isinstance(details[1], tuple):
            self.ports.append(details[1][1])


def test_no_file_or_address_is_read_on_a_clients_word(server: Server, tmp_path: Path) -> None:
    """Images are refused before anything looks at where they lie."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"")
    with server.http() as http, socket.create_server(("127.0.0.1", 0)) as trap:
        port, touched = trap.getsockname()[1], Touched()
        for url in (f"file://{secret}", f"http://127.0.0.1:{port}/x.png", "data:image/png;base64,AAAA"):
            answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        before = [str(secret) in map(str, touched.files), port in touched.ports]
        secret.read_bytes()
        socket.create_connection(("127.0.0.1", port)).close()
        touched.listens = False

    assert before == [False, False]
    assert [str(secret) in map(str, touched.files), port in touched.ports] == [True, True], "the ear is deaf"
