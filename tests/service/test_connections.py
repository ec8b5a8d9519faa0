"""Connections that never finish their request, or do not read, are given up; those that wait for an answer are not.

With either of the two parsers that uvicorn may find.
"""

import asyncio
import select
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stagewatch.monitor import connections
from stagewatch.monitor.connections import HEAD_BYTES_MAX, FrugalWebSocket, Impatient
from stagewatch.monitor.headers import SECURITY_HEADERS

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
UPGRADE = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
KEY = b"Sec-WebSocket-Key: " + b"A" * 22 + b"==\r\n"
CHUNK = bytes(1 << 16)
Body = Callable[[int, asyncio.Event], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]


class WithH11(Impatient, H11Protocol):
    pass


class WithHttptools(Impatient, HttpToolsProtocol):
    pass


@pytest.fixture(params=[WithHttptools, WithH11], ids=["httptools", "h11"], autouse=True)
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ImpatientProtocol", request.param)


def serve(body: Body, app: App | None = None) -> None:
    """Run ``body`` with the port of a server: of ``app``, or of one whose answers wait for the event."""

    async def run() -> None:
        answer = asyncio.Event()

        async def waiting(scope: Any, receive: Any, send: Any) -> None:
            await answer.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        config = uvicorn.Config(
            app or waiting,
            "127.0.0.1",
            0,
            http=connections.ImpatientProtocol,
            ws=FrugalWebSocket,
            lifespan="off",
            log_level="critical",
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


class TestWhoDoesNotRead:
    def test_an_answer_without_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An event stream, say: what waits for its reader is bounded, and so is for how long."""
        monkeypatch.setattr(connections, "STALLED_S", 0.05)
        gone = asyncio.Event()

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            async def write() -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while True:
                    await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                    await asyncio.sleep(0)

            writing = asyncio.create_task(write())
            while (await receive())["type"] != "http.disconnect":
                pass
            writing.cancel()
            gone.set()

        async def body(port: int, answer: asyncio.Event) -> None:
            # GIVEN a peer that asks, and never reads
            with asking(port) as peer:
                # THEN it is hung up on, whatever is left unsent
                await gone.wait()
                await hung_up(peer)

        serve(body, endless)

    def test_the_end_of_an_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody waits for ever for what is left of one that is complete."""
        monkeypatch.setattr(connections, "STALLED_S", 0.05)
        monkeypatch.setattr(connections, "REQUEST_S", 0.05)

        async def long(scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"connection", b"close")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": bytes(32 << 20)})

        async def body(port: int, answer: asyncio.Event) -> None:
            with asking(port) as peer:
                await hung_up(peer)

        serve(body, long)

    def test_who_reads_on_is_not_taken_for_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "STALLED_S", 0.02)

        async def run() -> None:
            slow, dead = Peer(), Peer()
            slow.protocol.pause_writing()
            slow.protocol.resume_writing()
            dead.protocol.pause_writing()
            await dead.gone.wait()
            assert not slow.gone.is_set()

        asyncio.run(run())

    def test_pings_without_end_whose_answers_nobody_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each ping is to be answered; what waits to be sent is bounded all the same, and so is for how long."""
        monkeypatch.setattr(connections, "STALLED_S", 0.05)
        gone = asyncio.Event()

        async def accepting(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            while (await receive())["type"] != "websocket.disconnect":
                pass
            gone.set()

        ping = b"\x89\xfd" + bytes(4 + 125)

        async def body(port: int, answer: asyncio.Event) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(UPGRADE + KEY + b"\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"101"
            # THEN it is hung up on long before all of them are answered
            with pytest.raises(ConnectionError):
                for _ in range(200):  # 100 MiB of them
                    writer.write(ping * 4096)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(writer.drain(), 0.02)
            await gone.wait()

        serve(body, accepting)


@contextmanager
def asking(port: int) -> Iterator[socket.socket]:
    """A connection that asked for something; who has it may read or not."""
    with socket.create_connection(("127.0.0.1", port)) as made:
        made.sendall(GET + b"\r\n")
        yield made


async def hung_up(peer: socket.socket) -> None:
    """Wait until the other end is gone, whatever is left to read."""
    poll = select.poll()
    poll.register(peer, 0)  # errors and ends are always told
    while not poll.poll(0):
        await asyncio.sleep(0.01)


class Peer:
    """A protocol, and whether its connection was cut."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        config = uvicorn.Config(lambda: None, lifespan="off", ws="none")
        server = uvicorn.Server(config)
        config.load()
        self.protocol = connections.ImpatientProtocol(config, server.server_state, {})
        self.protocol.connection_made(self)  # type: ignore[arg-type]

    def abort(self) -> None:
        self.gone.set()

    def get_write_buffer_size(self) -> int:
        return 1 << 16

    def get_extra_info(self, name: str) -> None:
        return None


class TestWhatIsNoRequest:
    def answer(self, request: bytes) -> bytes:
        found = b""

        async def body(port: int, answer: asyncio.Event) -> None:
            nonlocal found
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            found = await reader.read()

        async def nothing(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.close"})

        serve(body, nothing)
        return found

    @pytest.mark.parametrize(
        ("request_", "status"),
        [
            (b"\x16\x03\x01 what\r\n\r\n", b"400"),
            (UPGRADE + b"\r\n", b"400"),
            (UPGRADE.replace(b"13", b"7") + KEY + b"\r\n", b"400"),
            (UPGRADE + KEY + b"\r\n", b"403"),
        ],
        ids=["no http", "no key", "another version", "no such path"],
    )
    def test_is_refused_with_the_headers_of_every_answer(self, request_: bytes, status: bytes) -> None:
        head = self.answer(request_).split(b"\r\n\r\n")[0].lower() + b"\r\n"
        assert head.split()[1] == status
        missing = [
            name
            for name, value in SECURITY_HEADERS.items()
            if f"{name}: {value}\r\n".lower().encode() not in head
        ]
        assert missing == []

    def test_in_the_middle_of_an_answer_ends_it_without_a_word(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With httptools; h11 does not look at what comes before it has answered."""
        monkeypatch.setattr(connections, "ImpatientProtocol", WithHttptools)

        async def body(port: int, answer: asyncio.Event) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET + b"\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.write(b"\x16\x03\x01 what\r\n\r\n")
            with suppress(ConnectionError):
                assert b"HTTP/1.1" not in await reader.read()

        async def streaming(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass

        serve(body, streaming)
