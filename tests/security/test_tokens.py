"""Tokens: what each is good for, and that it is good for nothing more, whichever way it is tried."""

import asyncio
import contextlib
import json
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from test_health import FakeWatch, state
from test_ingest import settings
from test_store import incident

from stagewatch.agents.errors import SettingsError
from stagewatch.monitor.access import REQUESTS_MAX
from stagewatch.monitor.app import create_app
from stagewatch.monitor.auth import Authenticator
from stagewatch.monitor.collector import Collector
from stagewatch.monitor.commands.token import with_grant
from stagewatch.monitor.events import Reader
from stagewatch.monitor.headers import SECURITY_HEADERS
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.states import EngineState
from stagewatch.monitor.tokens import EVERYTHING, Grant, Scope, digest_of, line_of, read_grants

READ = frozenset({Scope.READ})
SECRETS = {name: f"secret-of-{name}-0123456789" for name in ("a", "b", "all", "ingest", "admin")}


def grant(name: str, scopes: frozenset[Scope] = READ, deployments: frozenset[str] | None = None) -> Grant:
    return Grant(name, scopes, deployments, digest_of(SECRETS[name]))


def token_file(directory: Path, *grants: Grant) -> Path:
    path = directory / "tokens"
    path.touch(0o600)
    path.write_text("# people and machines\n" + "".join(line_of(each) + "\n" for each in grants))
    return path


EVERY_GRANT = (
    grant("a", READ, frozenset({"a"})),
    grant("b", READ, frozenset({"b"})),
    grant("all"),
    grant("ingest", frozenset({Scope.INGEST})),
    grant("admin", frozenset({Scope.ADMIN})),
)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[name]}"}


def of_deployment(name: str, number: int) -> Incident:
    return msgspec.structs.replace(incident(number), deployment=name, id=f"{number:016x}")


def heard(engine: EngineState) -> EngineState:
    """The same engine, heard of now: of those long silent there are no metrics."""
    return replace(engine, heard_ns=time.time_ns())


@contextlib.asynccontextmanager
async def served(directory: Path, **changes: Any) -> AsyncIterator[tuple[Collector, httpx.AsyncClient]]:
    """A collector that knows an engine and an incident of each of two deployments, and a client without a token."""
    path = token_file(directory, *EVERY_GRANT)
    states = [
        heard(replace(state(f"life-{name}"), deployment=name, wedged=f"stuck for {name}")) for name in "ab"
    ]
    collector = Collector(settings(directory / "data", token=path, **changes), FakeWatch(*states))
    await collector.start()
    try:
        while collector.not_ready:
            await asyncio.sleep(0)
        collector.store.apply([of_deployment("a", 1), of_deployment("b", 2)])
        transport = httpx.ASGITransport(create_app(collector))
        async with httpx.AsyncClient(transport=transport, base_url="http://collector") as client:
            yield collector, client
    finally:
        await collector.stop()


class TestOneDeploymentsToken:
    def test_sees_nothing_of_another_s(self, tmp_path: Path) -> None:
        """GIVEN two deployments WHEN the token of one asks in every way there is THEN it sees its own and no other."""

        async def body() -> None:
            async with served(tmp_path) as (_, client):

                async def get(path: str, name: str = "a") -> httpx.Response:
                    return await client.get(path, headers=bearer(name))

                def ids(answer: httpx.Response) -> list[str]:
                    return [found["deployment"] for found in answer.json()["incidents"]]

                assert ids(await get("/v1/incidents", "all")) == ["b", "a"]
                assert ids(await get("/v1/incidents")) == ["a"]
                assert ids(await get("/v1/incidents?instance=life-1&severity=notice&before=99")) == ["a"]
                assert (await get("/v1/incidents?deployment=b")).status_code == 403
                assert ids(await get("/v1/incidents?deployment=a")) == ["a"]
                # a permalink, an id that was guessed, and one that never was answer alike
                there = await get(f"/v1/incidents/{2:016x}", "b")
                assert there.json()["deployment"] == "b"
                foreign, none = await get(f"/v1/incidents/{2:016x}"), await get(f"/v1/incidents/{9:016x}")
                assert (
                    (foreign.status_code, foreign.content)
                    == (none.status_code, none.content)
                    == (404, none.content)
                )
                engines = (await get("/v1/engines")).json()["engines"]
                assert [engine["instance"] for engine in engines] == ["life-a"]
                assert (await get("/v1/engines/life-b")).status_code == 404
                assert (await get("/v1/engines/life-b/healthz")).status_code == 404
                assert (await get("/v1/engines/life-b/picture")).status_code == 404
                assert (await get("/v1/engines/life-a/healthz")).json() == {
                    "detail": "replica 0: stuck for a"
                }
                assert (await get("/v1/engines/life-a/../life-b")).status_code == 404
                assert (await get("/v1/status")).json()["reason"] == ""

        asyncio.run(body())

    def test_metrics_are_those_of_its_deployment_and_none_of_the_collector_s(self, tmp_path: Path) -> None:
        async def body() -> None:
            async with served(tmp_path) as (_, client):
                own = (await client.get("/metrics", headers=bearer("a"))).text
                whole = (await client.get("/metrics", headers=bearer("all"))).text
                assert 'deployment="a"' in own
                assert 'deployment="b"' in whole
                assert "stagewatch_journal_size_bytes" in whole
                series = [line for line in own.splitlines() if not line.startswith("#")]
                assert [line for line in series if 'deployment="a"' not in line] == []

        asyncio.run(body())

    def test_the_event_stream_is_its_own_past_and_to_come(self, tmp_path: Path) -> None:
        async def body() -> None:
            async with served(tmp_path) as (collector, _):
                stream = collector.hub.stream(collector.store, 0, reader=Reader(frozenset({"a"})))
                found: list[str] = []

                async def read() -> None:
                    async for chunk in stream:
                        if chunk.startswith(b"id:"):
                            data = chunk.decode().split("data: ")[1]
                            found.append(json.loads(data)["incident"]["deployment"])
                        if len(found) == 2:
                            return

                reading = asyncio.create_task(read())
                while not found:
                    await asyncio.sleep(0)
                collector.hub.publish(collector.store.apply([of_deployment("b", 3), of_deployment("a", 4)]))
                await asyncio.wait_for(reading, 30)
                assert found == ["a", "a"]

        asyncio.run(body())


class TestScopes:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [("a", [200, 200, 403, 403]), ("ingest", [403, 403, 403, 404]), ("admin", [403, 403, 200, 403])],
    )
    def test_each_opens_its_own_doors(self, tmp_path: Path, name: str, expected: list[int]) -> None:
        async def body() -> None:
            async with served(tmp_path) as (_, client):
                paths = ("/v1/incidents", "/metrics", "/v1/tokens", "/v1/ingest")
                found = [(await client.get(path, headers=bearer(name))).status_code for path in paths]
                assert found == expected

        asyncio.run(body())

    def test_who_holds_tokens_is_shown_without_a_trace_of_them(self, tmp_path: Path) -> None:
        async def body() -> None:
            async with served(tmp_path) as (_, client):
                answer = await client.get("/v1/tokens", headers=bearer("admin"))
                assert answer.json()["tokens"][0] == {
                    "name": "a",
                    "scopes": ["read"],
                    "deployments": ["a"],
                    "open": 0,
                }
                for secret in SECRETS.values():
                    assert secret not in answer.text
                    assert digest_of(secret).hex() not in answer.text

        asyncio.run(body())


class TestStrangers:
    @pytest.mark.parametrize(
        "headers",
        [
            [],
            [("Authorization", "Bearer ")],
            [("Authorization", SECRETS["all"])],
            [("Authorization", f"Basic {SECRETS['all']}")],
            [("Authorization", f"Bearer {SECRETS['all']}x")],
            [("Authorization", f"Bearer {SECRETS['all']} ")],
            [("Authorization", "Bearer " + "x" * 4000)],
            [("Authorization", f"Bearer sha256:{digest_of(SECRETS['all']).hex()}")],
            [("Authorization", f"Bearer {digest_of(SECRETS['all']).hex()}")],
            [("Authorization", f"Bearer {SECRETS['all']}"), ("Authorization", "Bearer " + "y" * 20)],
            [("Cookie", f"token={SECRETS['all']}"), ("X-Forwarded-For", "127.0.0.1")],
        ],
    )
    def test_get_401(self, tmp_path: Path, headers: list[tuple[str, str]]) -> None:
        async def body() -> None:
            async with served(tmp_path) as (_, client):
                for path in (
                    "/v1/incidents",
                    "/metrics",
                    "/v1/events",
                    "/openapi.json",
                    "/nothing",
                    "/v1/ingest",
                ):
                    answer = await client.get(path, headers=headers)
                    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                token = SECRETS["all"]
                answer = await client.get(
                    f"/v1/incidents?token={token}&access_token={token}", headers=headers
                )
                assert answer.status_code == 401
                assert token not in answer.text

        asyncio.run(body())

    @pytest.mark.parametrize(
        ("opened", "client", "headers", "expected"),
        [
            ("", "127.0.0.1", {}, 401),
            ("loopback", "127.0.0.1", {}, 200),
            ("loopback", "::1", {}, 200),
            ("loopback", "10.0.0.7", {}, 401),
            ("loopback", "10.0.0.7", {"X-Forwarded-For": "127.0.0.1"}, 401),
            ("loopback", "127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}, 401),
            ("loopback", "127.0.0.1", {"Forwarded": "for=10.0.0.7"}, 401),
            ("everyone", "10.0.0.7", {}, 200),
        ],
    )
    def test_metrics_are_open_to_whom_the_setting_says(
        self, tmp_path: Path, opened: str, client: str, headers: dict[str, str], expected: int
    ) -> None:
        async def body() -> None:
            async with served(tmp_path, open_metrics=opened) as (collector, _):
                transport = httpx.ASGITransport(create_app(collector), client=(client, 1))
                async with httpx.AsyncClient(transport=transport, base_url="http://collector") as asking:
                    assert (await asking.get("/metrics", headers=headers)).status_code == expected
                    assert (await asking.get("/v1/incidents", headers=headers)).status_code == 401

        asyncio.run(body())


class TestHeaders:
    def test_every_answer_has_them_whatever_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def body() -> None:
            async with served(tmp_path) as (collector, _):
                transport = httpx.ASGITransport(create_app(collector), raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://collector") as client:
                    seen = set()
                    monkeypatch.setattr(collector, "engines", lambda: 1 / 0)
                    for path in (
                        "/",
                        "/healthz",
                        "/v1/incidents",
                        "/v1/incidents?limit=x",
                        "/no",
                        "/v1/engines",
                    ):
                        answer = await client.get(path, headers=bearer("all"))
                        seen.add(answer.status_code)
                        for name, value in SECURITY_HEADERS.items():
                            assert answer.headers[name] == value, (path, name)
                    answer = await client.get("/v1/incidents")
                    assert answer.headers["Content-Security-Policy"].count("script-src 'self';") == 1
                    assert seen == {200, 404, 422, 500}

        asyncio.run(body())


class TestLimits:
    def test_one_token_has_so_many_requests_at_once_and_another_is_not_held_up(self, tmp_path: Path) -> None:
        async def body() -> None:
            async with served(tmp_path) as (collector, _):
                app = create_app(collector)
                go = asyncio.Event()
                entered: list[int] = []

                @app.get("/v1/slow")
                async def slow() -> str:
                    entered.append(1)
                    await go.wait()
                    return "done"

                transport = httpx.ASGITransport(app)
                async with httpx.AsyncClient(transport=transport, base_url="http://collector") as client:
                    waiting = [
                        asyncio.create_task(client.get("/v1/slow", headers=bearer("a")))
                        for _ in range(REQUESTS_MAX)
                    ]
                    while len(entered) < REQUESTS_MAX:
                        await asyncio.sleep(0)
                    refused = await client.get("/v1/incidents", headers=bearer("a"))
                    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
                    assert (await client.get("/v1/incidents", headers=bearer("b"))).status_code == 200
                    go.set()
                    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
                    assert (await client.get("/v1/incidents", headers=bearer("a"))).status_code == 200

        asyncio.run(body())


class TestFile:
    def test_what_is_written_is_what_is_read(self, tmp_path: Path) -> None:
        assert read_grants(token_file(tmp_path, *EVERY_GRANT)) == EVERY_GRANT

    def test_one_word_is_a_token_for_everything(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.touch(0o600)
        path.write_text(SECRETS["all"] + "\n")
        (found,) = read_grants(path)
        assert (found.scopes, found.deployments) == (EVERYTHING, None)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("a read *", ", line 1: 3 words, a token has 4: name, scopes, deployments, hash"),
            (
                "a read * plain-secret-in-clear",
                ", line 1: the fourth word is no hash: make the line with `stage",
            ),
            ("a rad * sha256:" + "0" * 64, ", line 1: scopes are some of ingest, read, admin"),
            ("a read a,, sha256:" + "0" * 64, ", line 1: deployments are * or names separated by commas"),
            ("ä read * sha256:" + "0" * 64, " is not ASCII text"),
            (2 * ("a read * sha256:" + "0" * 64 + "\n"), " names a twice: give each token a name of its own"),
            (" \n", " is empty: put a token there"),
        ],
    )
    def test_what_makes_no_sense_is_told_without_showing_it(
        self, tmp_path: Path, text: str, said: str
    ) -> None:
        path = tmp_path / "tokens"
        path.touch(0o600)
        path.write_text(text)
        with pytest.raises(SettingsError) as caught:
            read_grants(path)
        assert str(caught.value).startswith(f"token file {path}{said}")
        assert "plain-secret-in-clear" not in str(caught.value)
        assert "0" * 64 not in str(caught.value)

    @pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o644])
    def test_a_file_that_others_can_open_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = token_file(tmp_path, *EVERY_GRANT)
        path.chmod(mode)
        with pytest.raises(SettingsError, match="by others: chmod 600 it"):
            read_grants(path)

    def test_a_namesake_is_replaced_only_if_asked_to(self, tmp_path: Path) -> None:
        content = token_file(tmp_path, *EVERY_GRANT).read_text()
        again = grant("a", EVERYTHING)
        with pytest.raises(SettingsError, match="give another name, or --replace"):
            with_grant(content, again, tmp_path, replace=False)
        replaced = with_grant(content, again, tmp_path, replace=True)
        assert len(replaced.splitlines()) == len(content.splitlines())
        assert line_of(again) in replaced

    def test_a_change_is_taken_up_and_one_that_makes_no_sense_is_not(self, tmp_path: Path) -> None:
        path = token_file(tmp_path, *EVERY_GRANT)
        authenticator = Authenticator(path)
        whole = path.read_text()
        for broken in ("", whole[:-10]):
            path.write_text(broken)
            assert authenticator.grant_of(bearer("admin")["Authorization"]) == EVERY_GRANT[-1]
        path.write_text("# nobody\n")
        assert authenticator.grant_of(bearer("admin")["Authorization"]) is None
        path.write_text(whole)
        assert authenticator.grant_of(bearer("admin")["Authorization"]) == EVERY_GRANT[-1]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
