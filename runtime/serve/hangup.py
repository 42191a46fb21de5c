"""Stop working for a client that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.requests import Request
from starlette.responses import Response


async def until_hangup(request: Request, work: Coroutine[None, None, Response]) -> Response:
    """The response that `work` gives; when the client hangs up first, `work` is cancelled and nobody reads the answer.

    The body must have been read, so that all that can still arrive is the news of the end.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return Response(status_code=499)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
