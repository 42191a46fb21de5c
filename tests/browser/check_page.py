"""The page in headless Chromium: send, stream, stop, error, reload, at desktop and telephone width.

Run by `make test-page`, which needs a Chromium; screenshots go to build/page/.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import Engine, Request, TrustPolicy, load
from tests.browser.chromium import Chromium, Page
from tests.served_core import Server, running, tiny

__all__ = ["tiny"]
SHOTS = Path(__file__).resolve().parents[2] / "build" / "page"
READY = "document.querySelectorAll('#picture rect').length > 0"
DONE = "!state.running && state.turns.length >= 2"
CHAT_IDS = (1, 2, 9, 1, 4)


@pytest.fixture(scope="session")
def served(tiny: Path) -> Iterator[Server]:
    with running(tiny) as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    SHOTS.mkdir(parents=True, exist_ok=True)
    with Chromium.launch() as chromium:
        yield chromium


@pytest.fixture(params=[1280, 360], ids=["desktop", "telephone"])
def page(request: pytest.FixtureRequest, browser: Chromium, served: Server) -> Iterator[Page]:
    with browser.page(width=request.param, dark=request.param == 360) as page:
        page.open(f"{served.url}/")
        page.wait(READY)
        yield page
        name = f"{request.node.name}.png".replace("[", "-").replace("]", "")
        page.screenshot(SHOTS / name)
        assert page.evaluate("document.documentElement.scrollWidth") == request.param
        assert {url.split("/")[2] for url in page.requests if "//" in url} == {served.url.removeprefix("http://")}


def say(page: Page, text: str) -> None:
    page.evaluate("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")


def tokens_shown(page: Page) -> list[dict[str, Any]]:
    return json.loads(page.evaluate(
        "JSON.stringify([...document.querySelectorAll('.turn.assistant .token')].map(t => "
        "({text: t.textContent, style: t.className.split(' ')[1]})))"))


def test_answer_is_shown_token_by_token_by_how_each_came(page: Page, tiny: Path) -> None:
    with load(tiny / "core", trust=TrustPolicy.load(tiny / "keys" / "trust.json")) as core:
        steps = Engine(core).generate(CHAT_IDS, Request(24, stop_token_ids=(2,))).steps
    expected = [(f" t{token}", "plain" if number == 0 else f"d{i + 1}" if i < step.accepted else "bonus")
                for number, step in enumerate(steps) for i, token in enumerate(step.tokens)]
    page.evaluate("document.getElementById('max').value = 24")

    say(page, "t9")
    page.wait(DONE)

    assert [(t["text"], t["style"]) for t in tokens_shown(page)] == expected
    assert page.evaluate("document.getElementById('steps').textContent") == str(len(steps) - 1)
    assert page.evaluate("document.querySelectorAll('#positions .bar').length") == 3
    assert page.evaluate("document.querySelectorAll('#precision tr').length") == 4
    assert page.messages == []


def test_escape_stops_the_answer_and_frees_the_slot(page: Page, served: Server) -> None:
    page.evaluate("document.getElementById('max').value = 230")
    page.evaluate("document.getElementById('temperature').value = 1.9")
    slow = "await new Promise(resolve => setTimeout(resolve, 200))"
    page.evaluate("events = (original => async function* (answer) { for await (const data of original(answer)) { "
                  f"{slow}; yield data; }} }})(events)")

    say(page, "t9")
    page.wait("document.querySelectorAll('.turn.assistant .token').length > 2")
    running = page.evaluate("document.getElementById('stop').disabled")
    page.press("Escape")
    page.wait("!state.running")

    assert running is False
    assert page.evaluate("document.getElementById('send').disabled") is False
    assert 2 < len(tokens_shown(page)) < 230
    assert served.state.worker.engine.idle or served.state.worker.unfinished <= 1


def test_refusal_is_shown_as_an_error_and_the_next_message_works(page: Page) -> None:
    page.evaluate("document.getElementById('max').value = 8000")

    say(page, "t9")
    page.wait("!state.running && document.querySelector('.turn.failed')")
    shown = page.evaluate("document.querySelector('.turn.failed').textContent")
    page.evaluate("document.getElementById('max').value = 4")
    page.evaluate("fetch = (original => (path, options) => { window.sent = options.body; "
                  "return original(path, options); })(fetch)")
    say(page, "t8")
    page.wait("!state.running && document.querySelectorAll('.turn.assistant .token').length > 0")

    assert "exceed the core's context" in shown
    assert json.loads(page.evaluate("window.sent"))["messages"] == [{"role": "user", "content": "t8"}]
    assert len(tokens_shown(page)) <= 4


def test_conversation_is_there_after_a_reload(page: Page, served: Server) -> None:
    page.evaluate("document.getElementById('max').value = 5")
    say(page, "t9")
    page.wait(DONE)
    before = tokens_shown(page)

    page.open(f"{served.url}/")
    page.wait(READY)

    assert tokens_shown(page) == before != []


def test_every_control_is_reached_with_the_tab_key_and_named(page: Page) -> None:
    page.evaluate("document.activeElement.blur()")
    seen = []
    for _ in range(60):
        page.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, textarea, select, button')].filter(e => !e.closest('[hidden]') && "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || (e.labels && e.labels.length))).length")

    assert {"log", "prompt", "send", "clear", "max", "temperature", "speculation", "graph", "picture"} <= set(seen)
    assert unnamed == 0


def test_another_graph_is_drawn_when_it_is_chosen(page: Page) -> None:
    first = page.evaluate("document.getElementById('graph-facts').textContent")

    page.evaluate("document.getElementById('graph').value = 'verify.b4'; document.getElementById('graph').onchange()")
    page.wait(f"document.getElementById('graph-facts').textContent !== {json.dumps(first)}")
    page.evaluate("document.querySelector('#kernels button').click()")

    assert "batch 4" in page.evaluate("document.getElementById('graph-facts').textContent")
    assert page.evaluate("document.querySelectorAll('#picture rect.chosen').length") > 0
