"""The collector's HTTP face: ingestion, incidents, engines, events, metrics, health.

Every route runs behind `stagewatch.monitor.access`, and shows a token only what its deployments hold.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import msgspec
from fastapi import FastAPI, Header, Path, Query, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stagewatch.monitor import store
from stagewatch.monitor.access import INCIDENT_ID, Access, answer, error, grant_of, may_see, too_many
from stagewatch.monitor.auth import Lease, Leases
from stagewatch.monitor.collector import Collector
from stagewatch.monitor.events import Reader
from stagewatch.monitor.evidence import add_evidence
from stagewatch.monitor.headers import with_headers
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.openapi import complete, documented, failing, text_of
from stagewatch.monitor.pages import PICTURE_SCHEMAS, add_page, add_pictures
from stagewatch.monitor.schema import StoreError
from stagewatch.monitor.sessions import FrameRefusedError, Session
from stagewatch.monitor.states import EngineState
from stagewatch.monitor.store import Shown
from stagewatch.monitor.tokens import Grant

log = logging.getLogger("stagewatch.collector")

REVOKED_LOOK_S: Final = 1.0
"""How often tokens are looked at for the sake of what they opened."""
_BROKEN_OFF: Final = {1003: "malformed", 1009: "frame_too_long"}
"""Why a connection was broken off below us, by its close code; the close frame told the peer."""
_SEVERITIES: Final = {severity.word: severity for severity in Severity}


class IncidentPage(msgspec.Struct, frozen=True):
    """A page of incidents, newest first."""

    incidents: list[Shown]
    next: int | None
    """Give it as `before` for the next page; null on the last."""


class Holder(msgspec.Struct, frozen=True):
    """A token as the API shows it."""

    name: str
    scopes: list[str]
    deployments: list[str] | None
    """Null for all."""
    open: int
    """Sidecars and event streams that it holds open now."""


class _App(FastAPI):
    """Answers with `stagewatch.monitor.headers`, also where the answer is that we failed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, with_headers(send))


def create_app(collector: Collector) -> FastAPI:
    """The application around ``collector``; starting and stopping it is part of its life."""
    leases = Leases(collector.authenticator)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await collector.start()
        looking = asyncio.create_task(_end_revoked(leases))
        yield
        looking.cancel()
        await collector.stop()

    app = _App(
        title="stagewatch collector",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(
        Access,
        authenticator=collector.authenticator,
        metrics=collector.metrics,
        opened=collector.settings.open_metrics,
    )

    @app.exception_handler(StoreError)
    async def store_failed(request: Request, failure: StoreError) -> Response:
        # Its text names a path of ours.
        return error(503, "the incident store cannot be used at present", {"Retry-After": "1"})

    _add_health(app, collector)
    _add_incidents(app, collector)
    add_evidence(app, collector)
    _add_events(app, collector, leases)
    _add_engines(app, collector)
    _add_tokens(app, collector, leases)
    add_pictures(app, collector)
    add_page(app)
    _add_ingest(app, collector, leases)
    complete(app, [Shown, IncidentPage, Holder, *PICTURE_SCHEMAS])
    return app


async def _end_revoked(leases: Leases) -> None:
    while True:
        try:
            leases.end_revoked()
        except Exception:  # if this ended unseen, what a token opened would outlive it
            log.exception("tokens cannot be looked at: please report this")
        await asyncio.sleep(REVOKED_LOOK_S)


def _add_health(app: FastAPI, collector: Collector) -> None:
    # Load balancers may ask by HEAD.
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    async def healthz() -> Response:
        """The process answers."""
        return answer({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", responses=failing(503))
    async def readyz() -> Response:
        """The collector can take frames and keep them. The reason it cannot is for those with a token."""
        return (
            answer({"status": "ready"})
            if not collector.not_ready
            else error(503, "not ready", {"Retry-After": "1"})
        )

    @app.get("/v1/status")
    async def status(request: Request) -> Response:
        """Why the collector is not ready, if it is not; the reason is for tokens of all deployments."""
        reason = collector.not_ready if _deployments(request) is None else ""
        return answer({"ready": not collector.not_ready, "reason": reason})

    @app.get("/metrics", response_class=Response, responses=text_of("text/plain"))
    async def prometheus(request: Request) -> Response:
        """Metrics as Prometheus reads them; a token for some deployments sees only those' series."""
        collector.engines()
        # Tens of thousands of series take a while to write down, and evidence must not wait for it.
        text, kind = await asyncio.to_thread(
            collector.metrics.scrape, request.headers.get("accept", ""), _deployments(request)
        )
        return Response(text, media_type=kind)


def _add_incidents(app: FastAPI, collector: Collector) -> None:
    @app.get("/v1/incidents", responses=documented(IncidentPage) | failing(503))
    def incidents(
        request: Request,
        deployment: Annotated[str, Query(max_length=64)] = "",
        instance: Annotated[str, Query(max_length=128)] = "",
        check: Annotated[str, Query(max_length=64)] = "",
        request_id: Annotated[str, Query(alias="request", max_length=1024)] = "",
        severity: Annotated[str, Query(pattern="^(notice|warning|critical)$")] = "notice",
        before: Annotated[int, Query(ge=0, lt=2**63)] = 0,
        limit: Annotated[int, Query(ge=1, le=store.PAGE_MAX)] = 50,
    ) -> Response:
        """Incidents of at least `severity`, newest first, of the deployments that the token is good for."""
        if not may_see(grant_of(request), deployment) and deployment:
            return error(403, "this token is not good for that deployment")
        query = store.Query(
            deployment,
            instance,
            check,
            request_id,
            _SEVERITIES[severity],
            before,
            limit + 1,
            _deployments(request),
        )
        found = collector.store.find(query)
        more = found[limit - 1].number if len(found) > limit else None
        return answer(IncidentPage(found[:limit], more))

    @app.get("/v1/incidents/{incident_id}", responses=documented(Shown) | failing(404, 503))
    def incident(request: Request, incident_id: Annotated[str, Path(pattern=INCIDENT_ID)]) -> Response:
        """One incident."""
        found = collector.store.get(incident_id, _deployments(request))
        return answer(found) if found else error(404, "there is no such incident")


def _add_events(app: FastAPI, collector: Collector, leases: Leases) -> None:
    @app.get(
        "/v1/events",
        response_class=StreamingResponse,
        responses=text_of("text/event-stream") | failing(429),
    )
    async def events(
        request: Request, last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None
    ) -> Response:
        """Server-sent events: each `data` is a kind and an incident; resumes after `Last-Event-ID`."""
        grant = _holder(request)
        limit = collector.settings.readers_max
        # Half of them at most for one token, so that none keeps the others out.
        if collector.hub.readers >= limit or leases.count(grant) >= max(limit // 2, 1):
            collector.metrics.count("stagewatch.ingest.refused", reason="too_many")
            return too_many("too many event streams are open: raise --readers-max", 10)
        return StreamingResponse(
            _events(collector, leases, grant, last_event_id),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )


async def _events(
    collector: Collector, leases: Leases, grant: Grant, last_event_id: int | None
) -> AsyncIterator[bytes]:
    reader = Reader(grant.deployments)
    with leases.held(grant, lambda: collector.hub.dismiss(reader)):
        async for chunk in collector.hub.stream(collector.store, last_event_id, reader=reader):
            yield chunk


def _add_engines(app: FastAPI, collector: Collector) -> None:
    @app.get("/v1/engines")
    async def engines(request: Request) -> Response:
        """Every engine known, newest last."""
        return answer({"engines": [_engine(state) for state in _seen(collector, request)]})

    @app.get("/v1/engines/{instance}", responses=failing(404))
    async def engine(request: Request, instance: Annotated[str, Path(max_length=128)]) -> Response:
        """The replicas of one life of an engine."""
        found = [_engine(state) for state in _seen(collector, request) if state.instance == instance]
        return answer({"engines": found}) if found else error(404, "there is no such engine")

    @app.head("/v1/engines/{instance}/healthz", include_in_schema=False)
    @app.get("/v1/engines/{instance}/healthz", responses=failing(404, 503))
    async def engine_health(
        request: Request,
        instance: Annotated[str, Path(max_length=128)],
        dp: Annotated[int | None, Query(ge=0, le=4096)] = None,
    ) -> Response:
        """200 while the engine is well, 503 while it, or its replica `dp`, is stuck: for load balancers.

        With `--open-metrics` no token is needed; the reason, which may name requests, is for those who have it.
        While the collector reads its journal back it answers 200: not knowing must not take engines out of rotation.
        """
        if not collector.admits:
            return answer({"status": "unknown"})
        found = [e for e in _seen(collector, request) if e.instance == instance and dp in (None, e.dp)]
        if not found:
            return error(404, "there is no such engine")
        reasons = [f"replica {state.dp}: {state.wedged}" for state in found if state.wedged]
        if not reasons:
            return answer({"status": "ok"})
        return error(503, "; ".join(reasons) if grant_of(request) else "wedged")


def _add_tokens(app: FastAPI, collector: Collector, leases: Leases) -> None:
    @app.get("/v1/tokens", responses=documented(Holder, listed_as="tokens"))
    async def tokens() -> Response:
        """Who holds tokens, and what they have open: nothing, before a token is taken away."""
        return answer(
            {
                "tokens": [
                    Holder(
                        grant.name,
                        sorted(grant.scopes),
                        None if grant.deployments is None else sorted(grant.deployments),
                        leases.count(grant),
                    )
                    for grant in collector.authenticator.grants
                ]
            }
        )


def _add_ingest(app: FastAPI, collector: Collector, leases: Leases) -> None:
    @app.websocket("/v1/ingest")
    async def ingest(socket: WebSocket) -> None:
        """Frames of `stagewatch.agents.wire`, both ways."""
        refusal = _door(collector)
        if refusal is not None:
            await socket.send_denial_response(refusal)
            return
        await socket.accept()
        grant = _holder(socket)
        session = Session(grant.deployments)
        collector.sessions.add(session)
        tasks = [asyncio.create_task(_write(socket, session))]

        def end() -> None:
            tasks.append(asyncio.create_task(_close(socket, "the token is good no more")))

        try:
            with leases.held(grant, end) as lease:
                await _read(collector, socket, session, lease)
        finally:
            for task in tasks:
                task.cancel()
            collector.sessions.discard(session)
            collector.intake.leave(session)


def _door(collector: Collector) -> Response | None:
    if not collector.admits:
        return error(503, "not ready", {"Retry-After": "1"})
    if len(collector.sessions) >= collector.settings.ranks_max:
        collector.metrics.count("stagewatch.ingest.refused", reason="too_many")
        return too_many("too many sidecars are connected: raise --ranks-max", 10)
    return None


async def _read(collector: Collector, socket: WebSocket, session: Session, lease: Lease) -> None:
    while True:
        await collector.intake.room()
        try:
            message = await socket.receive()
        except (WebSocketDisconnect, RuntimeError):
            return
        if message["type"] == "websocket.disconnect":
            if reason := _BROKEN_OFF.get(message.get("code", 0)):
                collector.metrics.count("stagewatch.ingest.refused", reason=reason)
            return
        if lease.revoked:
            return
        try:
            collector.take(message.get("bytes") or b"", session)
        except FrameRefusedError as refused:
            collector.metrics.count("stagewatch.ingest.refused", reason=refused.code)
            if session.refuse(refused, collector.settings.ranks_max):
                with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                    for frame in session.pending():
                        await socket.send_bytes(frame)
                await _close(socket, "too many bad frames")
                return


async def _close(socket: WebSocket, reason: str) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await socket.close(1008, reason)


async def _write(socket: WebSocket, session: Session) -> None:
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while True:
            for frame in await session.outgoing():
                await socket.send_bytes(frame)


def _deployments(request: Request) -> frozenset[str] | None:
    """What a request may see; None for everything."""
    grant = grant_of(request)
    return grant.deployments if grant else None


def _seen(collector: Collector, request: Request) -> list[EngineState]:
    """The engines that a request may see."""
    grant = grant_of(request)
    return [state for state in collector.engines() if may_see(grant, state.deployment)]


def _holder(connection: Request | WebSocket) -> Grant:
    """Whose request this is, on a path that lets nobody in without a token."""
    grant = grant_of(connection)
    if grant is None:
        raise RuntimeError("a path that needs a token was reached without one")
    return grant


def _engine(state: EngineState) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(state)
    shown["worst"] = state.worst.word if state.worst else None
    shown["ended"] = state.ended
    return shown
