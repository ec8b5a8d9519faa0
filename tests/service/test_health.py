"""What load balancers and probes ask, over a watch whose answers the test decides."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_records import identity
from test_ingest import settings
from test_store import incident

from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.app import create_app
from stagewatch.monitor.collector import Collector
from stagewatch.monitor.engine import Engine
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.states import Change, EngineState, RankState
from stagewatch.monitor.store import PAGE_MAX, Event, Query

TOKEN = {"Authorization": "Bearer " + "t" * 20}
WHY = "rank 0 waits in recv; joined the batch: customer-4711"


class FakeWatch:
    """Says of engines what it is told to."""

    def __init__(self, *states: EngineState) -> None:
        self.told = list(states)

    def hello(self, identity: Identity, now_ns: int = 0) -> None: ...
    def take(
        self, instance: str, rank: Rank, evidence: Evidence, margin_s: float, now_ns: int
    ) -> list[Change]:
        raise AssertionError(instance)

    def tick(self, now_ns: int) -> list[Change]:
        return []

    def states(self) -> list[EngineState]:
        return self.told

    def keys(self) -> list[tuple[str, int]]:
        return []

    def engine(self, key: tuple[str, int]) -> Engine | None:
        return None

    def put_back(self, engine: Engine) -> None: ...


def state(instance: str = "life-1", dp: int = 0, wedged: str = "") -> EngineState:
    ranks = tuple(RankState(identity(stage), True, "", 10 - stage, 1, 2.5, 3) for stage in (0, 1))
    made = EngineState("prod", instance, dp, ranks, (), 9, {"CONSISTENT": 40}, None, "")
    return replace(made, wedged=wedged)


@asynccontextmanager
async def served(directory: Path, *states: EngineState, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A ready collector's application over a fake watch, and a client of it without the token."""
    collector = Collector(settings(directory, **changes), FakeWatch(*states))
    await collector.start()
    try:
        while collector.not_ready:
            await asyncio.sleep(0)
        transport = httpx.ASGITransport(create_app(collector))
        async with httpx.AsyncClient(transport=transport, base_url="http://collector") as client:
            yield client
    finally:
        await collector.stop()


Body = Callable[[httpx.AsyncClient], Awaitable[None]]


def serve(directory: Path, body: Body, *states: EngineState, **changes: Any) -> None:
    async def run() -> None:
        async with served(directory, *states, **changes) as client:
            await body(client)

    asyncio.run(run())


def test_an_engine_is_well_until_it_is_wedged(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        well = await client.get("/v1/engines/life-1/healthz", headers=TOKEN)
        assert (well.status_code, well.json()) == (200, {"status": "ok"})
        wedged = await client.get("/v1/engines/life-2/healthz", headers=TOKEN)
        assert (wedged.status_code, wedged.json()) == (503, {"detail": f"replica 0: {WHY}"})
        assert (await client.get("/v1/engines/none/healthz", headers=TOKEN)).status_code == 404
        assert (await client.head("/v1/engines/life-2/healthz", headers=TOKEN)).status_code == 503

    serve(tmp_path, body, state(), state("life-2", wedged=WHY))


def test_one_replica_can_be_asked_for(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        async def status(query: str) -> int:
            return (await client.get(f"/v1/engines/life-1/healthz{query}", headers=TOKEN)).status_code

        assert [await status(q) for q in ("", "?dp=0", "?dp=1", "?dp=2")] == [503, 200, 503, 404]

    serve(tmp_path, body, state(), state(dp=1, wedged=WHY))


@pytest.mark.parametrize(("open_metrics", "expected"), [("", 401), ("everyone", 503)])
def test_without_the_token_only_where_metrics_are_open_and_without_the_reason(
    tmp_path: Path, open_metrics: str, expected: int
) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await client.get("/v1/engines/life-1/healthz")
        assert answer.status_code == expected
        assert "customer-4711" not in answer.text
        assert (await client.get("/v1/engines/life-1")).status_code == 401
        assert (await client.get("/v1/engines/life-1/healthz/")).status_code != 200

    serve(tmp_path, body, state(wedged=WHY), open_metrics=open_metrics)


def test_a_collector_that_does_not_know_yet_takes_no_engine_out_of_rotation(tmp_path: Path) -> None:
    async def run() -> None:
        collector = Collector(settings(tmp_path), FakeWatch(state(wedged=WHY)))
        transport = httpx.ASGITransport(create_app(collector))
        async with httpx.AsyncClient(transport=transport, base_url="http://collector") as client:
            answer = await client.get("/v1/engines/life-1/healthz", headers=TOKEN)
            assert (answer.status_code, answer.json()) == (200, {"status": "unknown"})
        await collector.stop()

    asyncio.run(run())


def test_probes_may_use_head(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        for path in ("/healthz", "/readyz"):
            assert (await client.head(path)).status_code == 200

    serve(tmp_path, body)


def test_a_collector_that_cannot_go_on_says_so_and_ends(tmp_path: Path) -> None:
    """GIVEN a journal whose newest segment cannot be read WHEN it starts THEN it does not wait for ever."""

    async def run() -> None:
        collector = Collector(settings(tmp_path), FakeWatch())
        ended = asyncio.Event()
        collector.on_crash = ended.set

        def unreadable(start: object) -> None:
            raise OSError(5, "Input/output error")

        collector.intake.journal.recover = unreadable  # type: ignore[method-assign, assignment]  # a dying disk
        await collector.start()
        await asyncio.wait_for(ended.wait(), 30)
        assert "Input/output error" in collector.not_ready
        assert isinstance(collector.crash, OSError)
        await collector.stop()

    asyncio.run(run())


def test_an_error_of_the_watch_is_counted_each_time_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        collector = Collector(settings(tmp_path), FakeWatch())

        def fails() -> list[Change]:
            raise ZeroDivisionError

        for _ in range(100):
            assert collector._guarded(fails) == []
        assert b'stagewatch_internal_errors_total{place="watch"} 100.0' in collector.metrics.render()
        await collector.stop()

    asyncio.run(run())
    assert len([r for r in caplog.records if r.exc_info]) == 1


def test_the_openapi_document_refers_to_nothing_it_lacks(tmp_path: Path) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json", headers=TOKEN)).json()
        text = str(document)
        wanted = {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}
        assert {"Shown", "IncidentPage"} <= wanted
        assert wanted <= document["components"]["schemas"].keys()
        for path, operations in document["paths"].items():
            is_open = path in ("/healthz", "/readyz")
            assert ("security" in operations["get"]) != is_open, path
            for status in ("401", "403", "429"):
                assert (status in operations["get"]["responses"]) != is_open, path

    serve(tmp_path, body)


def test_every_incident_is_on_some_page(tmp_path: Path) -> None:
    async def run() -> None:
        collector = Collector(settings(tmp_path), FakeWatch())
        collector.store.apply([incident(number) for number in range(1, PAGE_MAX + 3)])
        transport = httpx.ASGITransport(create_app(collector))
        async with httpx.AsyncClient(transport=transport, base_url="http://collector") as client:
            seen: list[int] = []
            before: int | None = 0
            while before is not None:
                query = f"/v1/incidents?limit={PAGE_MAX}&before={before}"
                page = (await client.get(query, headers=TOKEN)).json()
                seen += [found["number"] for found in page["incidents"]]
                before = page["next"]
            assert seen == list(range(PAGE_MAX + 2, 0, -1))
        await collector.stop()

    asyncio.run(run())


def test_an_incident_that_cannot_be_stored_keeps_no_other_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        collector = Collector(settings(tmp_path), FakeWatch())
        store = collector.store.apply

        def apply(found: Iterable[Incident]) -> list[Event]:
            group = list(found)
            if any(each.id == incident(2).id for each in group):
                raise TypeError("an incident that no encoder takes")
            return store(group)

        monkeypatch.setattr(collector.store, "apply", apply)
        collector._note_changes([Change("opened", incident(number)) for number in (1, 2, 3)])
        assert await collector._store_once()
        assert [found.request for found in collector.store.find(Query())] == ["request-3", "request-1"]
        assert b'stagewatch_internal_errors_total{place="store"} 1.0' in collector.metrics.render()
        await collector.stop()

    asyncio.run(run())
