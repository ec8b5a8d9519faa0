"""The evidence of an incident over the API: for whom it is, what is in it, and how much of it at once."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from service_records import DRAFTS, KEY, records
from service_records import identity as rank_identity
from test_tokens import SECRETS, bearer, grant, of_deployment, served, token_file

from stagewatch.agents import wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Identity
from stagewatch.agents.wire import Limits
from stagewatch.monitor import evidence as evidence_api
from stagewatch.monitor.journal import EntryKind, Header, SegmentReader, head_of
from stagewatch.monitor.slicing import CUT, RAW_LEFT_OUT
from stagewatch.monitor.tokens import Scope


def of(name: str, instance: str = "life-1") -> Identity:
    return msgspec.structs.replace(rank_identity(instance=instance), deployment=name)


def segment(*told: tuple[Identity, bool]) -> bytes:
    """A segment in which engines say hello and ten steps each, with token values or without."""
    header = Header(2, 0, 1)
    content = header.encode()
    for who, raw in told:
        found = digest_records(records(0, 10), who, Digester(KEY), raw=raw)
        hello = wire.encode_frame(wire.Hello(wire.PROTOCOL, who))
        batch = wire.encode_frame(wire.batch_of(who, found, -1.0))
        for kind, payload in ((EntryKind.HELLO, hello), (EntryKind.BATCH, batch)):
            content += head_of(kind, 1, payload, header.seed) + payload
    return content


def batches(content: bytes, directory: Path) -> list[wire.Batch]:
    path = directory / f"{1:016d}.journal"
    path.write_bytes(content)
    frames = [wire.decode_upward(entry.payload, Limits()) for entry in SegmentReader(path)]
    return [frame for frame in frames if isinstance(frame, wire.Batch)]


def has_raw(frame: wire.Batch) -> bool:
    inputs = wire.evidence_of(frame, Limits()).inputs
    return inputs is not None and bool(len(inputs.raw_ids))


async def asked(
    directory: Path, content: bytes, path: str, name: str = "a", **headers: str
) -> httpx.Response:
    """An answer of a collector whose journal holds ``content`` and that knows an incident of deployment a and b."""
    directory.mkdir(exist_ok=True)
    async with served(directory) as (collector, client):
        (collector.settings.data_dir / "journal" / f"{999:016d}.journal").write_bytes(content)
        return await client.get(path, headers=bearer(name))


OWN, OTHERS = f"/v1/incidents/{1:016x}/evidence", f"/v1/incidents/{2:016x}/evidence"
"""Incidents of deployments a and b, both of instance life-1."""


def test_who_may_see_the_incident_gets_what_its_engine_said(tmp_path: Path) -> None:
    answer = asyncio.run(asked(tmp_path, segment((of("a"), False), (of("a", "another"), False)), OWN))
    assert (answer.status_code, answer.headers[CUT], answer.headers[RAW_LEFT_OUT]) == (200, "0", "0")
    assert [frame.instance for frame in batches(answer.content, tmp_path)] == ["life-1"]


def test_another_deployment_s_does_not_exist(tmp_path: Path) -> None:
    content = segment((of("b"), False))
    foreign = asyncio.run(asked(tmp_path / "1", content, OTHERS))
    none = asyncio.run(asked(tmp_path / "2", content, OTHERS.replace("2", "9")))
    assert (foreign.status_code, foreign.content) == (none.status_code, none.content) == (404, none.content)


def test_what_another_deployment_said_under_the_same_name_is_not_in_it(tmp_path: Path) -> None:
    """An engine that was forgotten does not keep its name from others."""
    answer = asyncio.run(asked(tmp_path, segment((of("a"), False), (of("b"), False)), OWN))
    assert len(batches(answer.content, tmp_path)) == 1
    assert b'"b"' not in answer.content
    only_b = asyncio.run(asked(tmp_path / "other", segment((of("b"), False)), OWN))
    assert batches(only_b.content, tmp_path) == []


@pytest.mark.parametrize(("name", "status"), [("ingest", 403), ("admin", 403), ("b", 404), ("all", 200)])
def test_it_needs_scope_read(tmp_path: Path, name: str, status: int) -> None:
    answer = asyncio.run(asked(tmp_path, segment((of("a"), False)), OWN, name))
    assert answer.status_code == status


class TestTokenValues:
    def test_are_left_out_and_that_is_said(self, tmp_path: Path) -> None:
        answer = asyncio.run(asked(tmp_path, segment((of("a"), True)), OWN))
        (frame,) = batches(answer.content, tmp_path)
        assert (has_raw(frame), answer.headers[RAW_LEFT_OUT]) == (False, "1")

    def test_are_refused_to_who_may_only_read(self, tmp_path: Path) -> None:
        answer = asyncio.run(asked(tmp_path, segment((of("a"), True)), OWN + "?raw=true"))
        assert (answer.status_code, answer.json()["detail"]) == (
            403,
            "token values are for tokens of scope admin",
        )

    def test_are_given_to_an_admin_who_may_read_the_deployment(self, tmp_path: Path) -> None:
        async def body() -> httpx.Response:
            async with served(tmp_path) as (collector, client):
                (collector.settings.data_dir / "journal" / f"{999:016d}.journal").write_bytes(
                    segment((of("a"), True))
                )
                both = grant("a", frozenset({Scope.READ, Scope.ADMIN}), frozenset({"a"}))
                token_file(tmp_path, both)
                while collector.authenticator.grant_of(f"Bearer {SECRETS['a']}") != both:
                    await asyncio.sleep(0.05)
                return await client.get(OWN + "?raw=true", headers=bearer("a"))

        answer = asyncio.run(asyncio.wait_for(body(), 60))
        (frame,) = batches(answer.content, tmp_path)
        assert (has_raw(frame), answer.headers[RAW_LEFT_OUT]) == (True, "0")


def test_steps_that_were_not_asked_for_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    answer = asyncio.run(asked(tmp_path, segment((of("a"), False)), OWN + "?first=11&last=20"))
    assert (answer.headers[CUT], batches(answer.content, tmp_path)) == ("1", [])
    inside = asyncio.run(asked(tmp_path / "1", segment((of("a"), False)), OWN + "?first=10&last=20"))
    (frame,) = batches(inside.content, tmp_path)
    found = wire.evidence_of(frame, Limits()).inputs
    assert found is not None
    assert np.array_equal(found.step, np.arange(1, 11))
    assert found.spec_tokens[0] == DRAFTS


def test_more_than_a_bundle_holds_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_api, "EVIDENCE_BYTES_MAX", 1000)
    answer = asyncio.run(asked(tmp_path, segment((of("a"), False)), OWN))
    assert (answer.status_code, "ask for fewer steps" in answer.json()["detail"]) == (413, True)


def test_few_are_read_at_once_and_the_next_may_come_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    going, go = threading.Semaphore(0), threading.Event()
    slow = evidence_api._spooled

    def waiting(*args: object) -> object:
        going.release()
        go.wait(30)
        return slow(*args)  # type: ignore[arg-type]  # handed on as they came

    monkeypatch.setattr(evidence_api, "_spooled", waiting)

    async def body() -> None:
        async with served(tmp_path) as (collector, client):
            (collector.settings.data_dir / "journal" / f"{999:016d}.journal").write_bytes(
                segment((of("a"), False))
            )
            first = [
                asyncio.create_task(client.get(OWN, headers=bearer("a"))) for _ in range(evidence_api.AT_ONCE)
            ]
            for _ in first:
                await asyncio.to_thread(going.acquire)
            refused = await client.get(OWN, headers=bearer("all"))
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "5")
            go.set()
            assert [(await each).status_code for each in first] == [200] * len(first)
            assert (await client.get(OWN, headers=bearer("all"))).status_code == 200

    asyncio.run(asyncio.wait_for(body(), 60))


def test_the_incidents_of_these_tests_are_what_they_say() -> None:
    assert [of_deployment(name, 1).instance for name in "ab"] == ["life-1", "life-1"]
