"""What stands before every route: who asks, may they, and how much at once. Behind it, routes know a `Grant`.

Plain ASGI, because Starlette's own base class for middleware stands between a stream and its end.
"""

import re
from collections import Counter
from ipaddress import ip_address
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope
from starlette.websockets import WebSocket

from stagewatch.monitor.auth import Authenticator
from stagewatch.monitor.metrics import Metrics
from stagewatch.monitor.settings import OpenTo
from stagewatch.monitor.tokens import Grant, Scope

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
"""Tell nothing but that we are there, and need no token."""
REQUESTS_MAX: Final = 32
"""Requests of one token that are answered at the same time; streams have a limit of their own."""
INCIDENT_ID: Final = r"^[0-9a-f]{16}$"
STREAMS: Final = frozenset({"/v1/events", "/v1/ingest"})
_SCOPES: Final = {"/v1/ingest": Scope.INGEST, "/v1/tokens": Scope.ADMIN}
"""What a path needs, where that is not `Scope.READ`."""
_ENGINE_HEALTH: Final = re.compile(r"/v1/engines/[^/]+/healthz")
_RELAYED: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""What a proxy adds. Whoever comes through one is not of this machine, wherever the proxy runs."""


class Access:
    """Lets a request through with a token that may do what it asks, or to where no token is needed."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, metrics: Metrics, opened: OpenTo) -> None:
        self._app = app
        self._authenticator = authenticator
        self._metrics = metrics
        self._opened = opened
        self._running: Counter[bytes] = Counter()
        """Requests being answered, by token."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer 401, 403 or 429, or hand the request on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        grant = self._authenticator.grant_of(_authorization(scope))
        scope.setdefault("state", {})["grant"] = grant
        refusal = self._refusal(scope, grant)
        if refusal is not None:
            await _answer(refusal, scope, receive, send)
        elif grant is None or scope["path"] in STREAMS:
            await self._app(scope, receive, send)
        else:
            await self._counted(grant, scope, receive, send)

    def _refusal(self, scope: AsgiScope, grant: Grant | None) -> Response | None:
        path = scope["path"]
        if path in OPEN_PATHS or path == "/" or path.startswith("/page/"):
            return None
        if grant is None:
            if self._is_opened(scope):
                return None
            self._metrics.count("stagewatch.ingest.refused", reason="unauthenticated")
            return error(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
        needed = _SCOPES.get(path, Scope.READ)
        if needed not in grant.scopes:
            self._metrics.count("stagewatch.ingest.refused", reason="forbidden")
            return error(403, f"this token may not do that: it needs scope {needed}")
        return None

    def _is_opened(self, scope: AsgiScope) -> bool:
        path = scope["path"]
        if not self._opened or not (path == "/metrics" or _ENGINE_HEALTH.fullmatch(path)):
            return False
        return self._opened == "everyone" or _is_of_this_machine(scope)

    async def _counted(self, grant: Grant, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if self._running[grant.digest] >= REQUESTS_MAX:
            self._metrics.count("stagewatch.ingest.refused", reason="too_many")
            await _answer(too_many("too many requests at once with this token"), scope, receive, send)
            return
        self._running[grant.digest] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[grant.digest] -= 1
            if not self._running[grant.digest]:
                del self._running[grant.digest]


def grant_of(connection: HTTPConnection) -> Grant | None:
    """Whose request this is; None where it needed no token and brought none."""
    found: Grant | None = connection.state.grant
    return found


def may_see(grant: Grant | None, deployment: str) -> bool:
    """Whether a deployment is to be shown. Where no token was needed, everything is."""
    return grant is None or grant.covers(deployment)


def answer(value: Any) -> Response:
    """A value as JSON; structures of msgspec, too."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An answer that says why in `detail`."""
    return JSONResponse({"detail": message}, status, headers)


def too_many(message: str, retry_s: int = 1) -> Response:
    """429, and when to try again."""
    return error(429, message, {"Retry-After": str(retry_s)})


def _authorization(scope: AsgiScope) -> str | None:
    """The header, if there is one; two might be read in two ways by a proxy and by us."""
    given = Headers(scope=scope).getlist("authorization")
    return given[0] if len(given) == 1 else None


def _is_of_this_machine(scope: AsgiScope) -> bool:
    headers = Headers(scope=scope)
    if any(name in headers for name in _RELAYED) or not scope.get("client"):
        return False
    try:
        return ip_address(scope["client"][0]).is_loopback
    except ValueError:
        return False


async def _answer(response: Response, scope: AsgiScope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await response(scope, receive, send)
        return
    socket = WebSocket(scope, receive, send)
    await socket.receive()
    await socket.send_denial_response(response)
