"""Drive a headless Chromium over its DevTools protocol: just what the page's test needs.

    with Chromium.launch() as browser, browser.page(width=360) as page:
        page.open("http://127.0.0.1:8000/")
        page.wait("document.querySelector('h1')")
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, "")}


def find_chromium() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass(slots=True)
class Page:
    """One tab. `requests` are the addresses it asked for, `messages` what its console said."""

    socket: ClientConnection
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its result, noting events that come before it."""
        number = next(self._ids)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=30))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.messages.append(f"{params['entry']['level']}: {params['entry']['text']}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 30.0) -> None:
        """Wait until an expression is truthy."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"!!({condition})"):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, name: str) -> None:
        key, code, text = KEYS[name]
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                         clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        path.write_bytes(base64.b64decode(shot["data"]))


class Chromium:
    """A browser process with a profile of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process, self._port = process, port

    @classmethod
    @contextmanager
    def launch(cls) -> Iterator[Self]:
        path = find_chromium()
        assert path is not None, "no Chromium is installed"
        with tempfile.TemporaryDirectory() as profile, subprocess.Popen(
            [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
             f"--user-data-dir={profile}", "about:blank"],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        ) as process:
            try:
                for line in process.stderr:
                    found = re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line)
                    if found:
                        break
                else:
                    raise AssertionError("Chromium did not start")
                yield cls(process, int(found[1]))
            finally:
                process.terminate()
                process.wait(10)

    @contextmanager
    def page(self, *, width: int, height: int = 800, dark: bool = False) -> Iterator[Page]:
        """A new tab of this size."""
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=10) as answer:
            target = json.loads(answer.read())
        with connect(target["webSocketDebuggerUrl"], max_size=1 << 26) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                      mobile=width < 600)
            if dark:
                page.call("Emulation.setEmulatedMedia",
                          features=[{"name": "prefers-color-scheme", "value": "dark"}])
            yield page
