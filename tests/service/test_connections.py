"""Connections that never finish their request are given up; those that wait for an answer are not."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from stagewatch.monitor import connections
from stagewatch.monitor.connections import HEAD_BYTES_MAX, ImpatientProtocol

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
Body = Callable[[int, asyncio.Event], Awaitable[None]]


def serve(body: Body) -> None:
    """Run ``body`` with the port of a server whose answers wait for an event."""

    async def run() -> None:
        answer = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await answer.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        config = uvicorn.Config(
            app, "127.0.0.1", 0, http=ImpatientProtocol, lifespan="off", log_level="critical"
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        try:
            await asyncio.wait_for(body(server.servers[0].sockets[0].getsockname()[1], answer), 30)
        finally:
            server.should_exit = True
            await serving

    asyncio.run(run())


async def is_given_up(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def test_a_request_that_never_ends_is_given_up_and_one_being_answered_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "REQUEST_S", 0.02)

    async def body(port: int, answer: asyncio.Event) -> None:
        patient, patiently = await asyncio.open_connection("127.0.0.1", port)
        patiently.write(GET + b"\r\n")
        for head in (b"", GET):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            assert await is_given_up(reader)
        answer.set()
        assert (await patient.readline()).startswith(b"HTTP/1.1 204")
        # a second request on the same connection is held to the same
        patiently.write(GET)
        await patient.readuntil(b"\r\n\r\n")
        assert await is_given_up(patient)

    serve(body)


def test_a_head_without_end_is_not_kept() -> None:
    async def body(port: int, answer: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"A: " + b"x" * 2 * HEAD_BYTES_MAX)
        assert await is_given_up(reader)

    serve(body)


def test_many_requests_on_one_connection_are_no_long_head() -> None:
    async def body(port: int, answer: asyncio.Event) -> None:
        answer.set()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(20):
            writer.write(GET + b"A: " + b"x" * 8000 + b"\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")

    serve(body)
