"""Read a request's body under limits, as JSON that nothing odd hides in."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

from runtime.serve.errors import ApiError
from runtime.serve.settings import MAX_JSON_DEPTH

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


async def read_json(request: Request, timeout_s: float, max_bytes: int) -> Any:
    """The body as JSON.

    Raises:
        ApiError: 415, not declared as JSON (a page of another origin cannot declare it without asking); 413, larger
            than max_bytes; 408, it does not arrive in time; 400, not UTF-8, not JSON, or nested too deeply.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be declared as application/json", code="unsupported_media_type")
    try:
        data = await asyncio.wait_for(_read(request, max_bytes), timeout_s)
    except TimeoutError as e:
        raise ApiError(408, "the body did not arrive in time", code="request_timeout") from e
    except ClientDisconnect as e:
        raise ApiError(400, "the client went away", code="client_disconnected") from e
    return parse_json(data)


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large",
                         headers={"connection": "close"})
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)


def parse_json(data: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN or infinity, at most MAX_JSON_DEPTH levels. Raises ApiError: 400."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ApiError.bad_request("the body is not UTF-8", code="invalid_utf8") from e
    if _depth(text) > MAX_JSON_DEPTH:
        raise ApiError.bad_request(f"the body is nested deeper than {MAX_JSON_DEPTH} levels", code="json_too_deep")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as e:
        raise ApiError.bad_request(f"the body is not JSON: {e}", code="invalid_json") from e


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _depth(text: str) -> int:
    """How deep brackets nest, those inside strings left out."""
    deepest = level = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        level += 1 if bracket in "[{" else -1
        deepest = max(deepest, level)
    return deepest
