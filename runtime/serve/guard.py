"""What every request passes before a route sees it: the Host it names, and the key it brings.

A server without a key trusts whoever can reach its port. A page of a foreign site can reach a loopback port through
the user's browser, so requests that name another host are refused, and no answer allows another origin to read it.
"""

from __future__ import annotations

import hmac
import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.serve.errors import ApiError

OPEN_PATHS = ("/", "/health", "/startupz", "/metrics")
_LOCAL_NAMES = ("localhost",)


class Guard:
    """ASGI middleware around the routes.

    Args:
        local_only: the server listens on loopback; only requests that name a loopback host pass.
        api_key: None: nobody needs one.
    """

    def __init__(self, app: ASGIApp, *, local_only: bool, api_key: str | None) -> None:
        self._app, self._local_only = app, local_only
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if self._local_only and not is_local_host(headers.get(b"host", b"").decode("latin-1")):
            return ApiError(421, "this server answers to loopback names only", code="misdirected_request")
        if self._api_key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._api_key):
                return ApiError(401, "the API key is missing or wrong", kind="authentication_error",
                                code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can only be reached from this machine."""
    if host in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_host(header: str) -> bool:
    """Whether a Host header names this machine."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
    return is_loopback(name.removeprefix("[").removesuffix("]").lower())
