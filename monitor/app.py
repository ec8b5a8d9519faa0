"""The collector's HTTP face: ingestion, incidents, engines, events, metrics, health."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from fastapi import FastAPI, Header, Path, Query, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stagewatch.monitor import metrics, store
from stagewatch.monitor.collector import Collector
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.sessions import FrameRefusedError, Session
from stagewatch.monitor.states import EngineState
from stagewatch.monitor.store import Shown, StoreError

INCIDENT_ID: Final = r"^[0-9a-f]{16}$"
_OPEN_PATHS: Final = ("/healthz", "/readyz")
_ENGINE_HEALTH: Final = re.compile(r"/v1/engines/[^/]+/healthz")
_REFERENCE: Final = "#/components/schemas/{name}"
Responses = dict[int | str, dict[str, Any]]
_SEVERITIES: Final = {severity.word: severity for severity in Severity}


class IncidentPage(msgspec.Struct, frozen=True):
    """A page of incidents, newest first."""

    incidents: list[Shown]
    next: int | None
    """Give it as `before` for the next page; null on the last."""


def create_app(collector: Collector) -> FastAPI:
    """The application around ``collector``; starting and stopping it is part of its life."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await collector.start()
        yield
        await collector.stop()

    app = FastAPI(title="stagewatch collector", lifespan=lifespan, docs_url=None, redoc_url=None)

    app.add_middleware(_TokenNeeded, collector=collector)

    @app.exception_handler(StoreError)
    async def store_failed(request: Request, error: StoreError) -> Response:
        return _error(503, str(error), {"Retry-After": "1"})

    _add_health(app, collector)
    _add_incidents(app, collector)
    _add_engines(app, collector)
    _add_ingest(app, collector)
    _complete_openapi(app)
    return app


class _TokenNeeded:
    """Lets a request through only with the token, but for the paths that tell nothing.

    Plain ASGI, because Starlette's own base class for middleware stands between a stream and its end.
    WebSockets pass: they refuse at their own door.
    """

    def __init__(self, app: ASGIApp, collector: Collector) -> None:
        self._app = app
        self._collector = collector

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or hand the request on."""
        if scope["type"] == "http" and not self._is_allowed(scope):
            self._collector.metrics.count("stagewatch.ingest.refused", reason="unauthenticated")
            await _unauthenticated()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in _OPEN_PATHS:
            return True
        if self._collector.settings.open_metrics and (path == "/metrics" or _ENGINE_HEALTH.fullmatch(path)):
            return True
        return self._collector.authenticator.allows(Headers(scope=scope).get("authorization"))


def _add_health(app: FastAPI, collector: Collector) -> None:
    # Load balancers may ask by HEAD.
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    async def healthz() -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses=_failing(503))
    async def readyz() -> Response:
        """The collector can take frames and keep them. The reason it cannot is for those with a token."""
        return (
            _json({"status": "ready"})
            if not collector.not_ready
            else _error(503, "not ready", {"Retry-After": "1"})
        )

    @app.get("/v1/status")
    async def status() -> Response:
        """Why the collector is not ready, if it is not."""
        return _json({"ready": not collector.not_ready, "reason": collector.not_ready})

    @app.get("/metrics", response_class=Response, responses=_text("text/plain"))
    async def prometheus() -> Response:
        """Metrics as Prometheus reads them."""
        collector.engines()
        return Response(collector.metrics.render(), media_type=metrics.CONTENT_TYPE)


def _add_incidents(app: FastAPI, collector: Collector) -> None:
    @app.get("/v1/incidents", responses=_documented(IncidentPage) | _failing(503))
    def incidents(
        deployment: Annotated[str, Query(max_length=64)] = "",
        instance: Annotated[str, Query(max_length=128)] = "",
        check: Annotated[str, Query(max_length=64)] = "",
        request: Annotated[str, Query(max_length=1024)] = "",
        severity: Annotated[str, Query(pattern="^(notice|warning|critical)$")] = "notice",
        before: Annotated[int, Query(ge=0, lt=2**63)] = 0,
        limit: Annotated[int, Query(ge=1, le=store.PAGE_MAX)] = 50,
    ) -> Response:
        """Incidents of at least `severity`, newest first."""
        query = store.Query(deployment, instance, check, request, _SEVERITIES[severity], before, limit + 1)
        found = collector.store.find(query)
        more = found[limit - 1].number if len(found) > limit else None
        return _json(IncidentPage(found[:limit], more))

    @app.get("/v1/incidents/{incident_id}", responses=_documented(Shown) | _failing(404, 503))
    def incident(incident_id: Annotated[str, Path(pattern=INCIDENT_ID)]) -> Response:
        """One incident."""
        found = collector.store.get(incident_id)
        return _json(found) if found else _error(404, "there is no such incident")

    @app.get("/v1/events", response_class=StreamingResponse, responses=_text("text/event-stream"))
    async def events(last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None) -> Response:
        """Server-sent events: each `data` is a kind and an incident; resumes after `Last-Event-ID`."""
        return StreamingResponse(
            collector.hub.stream(collector.store, last_event_id),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )


def _add_engines(app: FastAPI, collector: Collector) -> None:
    @app.get("/v1/engines")
    async def engines() -> Response:
        """Every engine known, newest last."""
        return _json({"engines": [_engine(state) for state in collector.engines()]})

    @app.get("/v1/engines/{instance}", responses=_failing(404))
    async def engine(instance: Annotated[str, Path(max_length=128)]) -> Response:
        """The replicas of one life of an engine."""
        found = [_engine(state) for state in collector.engines() if state.instance == instance]
        return _json({"engines": found}) if found else _error(404, "there is no such engine")

    @app.head("/v1/engines/{instance}/healthz", include_in_schema=False)
    @app.get("/v1/engines/{instance}/healthz", responses=_failing(404, 503))
    async def engine_health(
        instance: Annotated[str, Path(max_length=128)],
        dp: Annotated[int | None, Query(ge=0, le=4096)] = None,
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> Response:
        """200 while the engine is well, 503 while it, or its replica `dp`, is stuck: for load balancers.

        With `--open-metrics` no token is needed; the reason, which may name requests, is for those who have it.
        While the collector reads its journal back it answers 200: not knowing must not take engines out of rotation.
        """
        if not collector.admits:
            return _json({"status": "unknown"})
        found = [e for e in collector.engines() if e.instance == instance and dp in (None, e.dp)]
        if not found:
            return _error(404, "there is no such engine")
        reasons = [f"replica {state.dp}: {state.wedged}" for state in found if state.wedged]
        if not reasons:
            return _json({"status": "ok"})
        is_known = collector.authenticator.allows(authorization)
        return _error(503, "; ".join(reasons) if is_known else "wedged")


def _add_ingest(app: FastAPI, collector: Collector) -> None:
    @app.websocket("/v1/ingest")
    async def ingest(socket: WebSocket) -> None:
        """Frames of `stagewatch.agents.wire`, both ways."""
        refusal = _door(collector, socket)
        if refusal is not None:
            await socket.send_denial_response(refusal)
            return
        await socket.accept()
        session = Session()
        collector.sessions.add(session)
        writer = asyncio.create_task(_write(socket, session))
        try:
            await _read(collector, socket, session)
        finally:
            writer.cancel()
            collector.sessions.discard(session)
            collector.intake.leave(session)


def _door(collector: Collector, socket: WebSocket) -> Response | None:
    if not collector.authenticator.allows(socket.headers.get("authorization")):
        collector.metrics.count("stagewatch.ingest.refused", reason="unauthenticated")
        return _unauthenticated()
    if not collector.admits:
        return _error(503, "not ready", {"Retry-After": "1"})
    if len(collector.sessions) >= collector.settings.ranks_max:
        collector.metrics.count("stagewatch.ingest.refused", reason="too_many")
        return _error(429, "too many sidecars are connected: raise --ranks-max", {"Retry-After": "10"})
    return None


async def _read(collector: Collector, socket: WebSocket, session: Session) -> None:
    while True:
        await collector.intake.room()
        try:
            message = await socket.receive()
        except (WebSocketDisconnect, RuntimeError):
            return
        if message["type"] == "websocket.disconnect":
            return
        try:
            collector.take(message.get("bytes") or b"", session)
        except FrameRefusedError as refused:
            collector.metrics.count("stagewatch.ingest.refused", reason=refused.code)
            if session.refuse(refused, collector.settings.ranks_max):
                with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                    for frame in session.pending():
                        await socket.send_bytes(frame)
                    await socket.close(1008, "too many bad frames")
                return


async def _write(socket: WebSocket, session: Session) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while True:
            for frame in await session.outgoing():
                await socket.send_bytes(frame)


def _unauthenticated() -> Response:
    return _error(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})


def _engine(state: EngineState) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(state)
    shown["worst"] = state.worst.word if state.worst else None
    return shown


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": message}, status, headers)


def _documented(struct: type[msgspec.Struct]) -> Responses:
    """The schema of a response, for the OpenAPI document."""
    schema = {"$ref": _REFERENCE.format(name=struct.__name__)}
    return {200: {"description": "OK", "content": {"application/json": {"schema": schema}}}}


def _text(media_type: str) -> Responses:
    return {200: {"description": "OK", "content": {media_type: {"schema": {"type": "string"}}}}}


def _failing(*statuses: int) -> Responses:
    """Answers that say why in `detail`."""
    schema = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    content = {"application/json": {"schema": schema}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def _complete_openapi(app: FastAPI) -> None:
    """Add what FastAPI cannot know: the structures of msgspec, and that a token is needed."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            _, schemas = msgspec.json.schema_components([Shown, IncidentPage], ref_template=_REFERENCE)
            components = document.setdefault("components", {})
            components.setdefault("schemas", {}).update(schemas)
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    if path not in _OPEN_PATHS:
                        operation["security"] = [{"token": []}]
                        operation["responses"].update({str(k): v for k, v in _failing(401).items()})
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
