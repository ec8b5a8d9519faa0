"""Proxies on loopback between sidecar and collector that do to the stream what networks do, by a seed.

`ByteProxy` knows only bytes: it delays, cuts in the middle of anything, and drops the end of what it was given before
it cuts. `FrameProxy` speaks WebSocket on both sides: it sends frames twice, swaps neighbours and delays, up and down.
Both run on a thread of their own, and do nothing any more once `calm` is set.
"""

import asyncio
import contextlib
import random
import threading
from collections.abc import Coroutine
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidHandshake

CHUNK_BYTES = 1 << 14


class Proxy:
    """Listens on a port of loopback; `target` is where it connects to, and may change."""

    def __init__(self, seed: int, target: int) -> None:
        self.target = target
        self.calm = threading.Event()
        self.pranks = 0
        self.port = 0
        self._draw = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def close(self) -> None:
        """Drop every connection and end the thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        await self._serve()

    async def _serve(self) -> None:
        raise NotImplementedError

    def _strikes(self, chance: float) -> bool:
        struck = not self.calm.is_set() and self._draw.random() < chance
        self.pranks += struck
        return struck


async def _until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ByteProxy(Proxy):
    """At the level of TCP."""

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", self.target)
            writers.append(onward)
            await _until_one_ends(self._pass(reader, onward), self._pass(there, writer))
        except OSError:
            pass
        finally:
            for each in writers:
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self._strikes(0.02):
                    await asyncio.sleep(self._draw.uniform(0.01, 0.2))
                if self._strikes(0.005):
                    writer.write(data[: self._draw.randrange(len(data))])
                    await writer.drain()
                    return
                writer.write(data)
                await writer.drain()


class FrameProxy(Proxy):
    """At the level of WebSocket frames."""

    async def _serve(self) -> None:
        async with serve(self._connected, "127.0.0.1", 0, compression=None, max_size=None) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            self._ready.set()
            await self._stop.wait()

    async def _connected(self, near: ServerConnection) -> None:
        assert near.request is not None
        header = {"Authorization": near.request.headers.get("Authorization", "")}
        url = f"ws://127.0.0.1:{self.target}{near.request.path}"
        with contextlib.suppress(OSError, ConnectionClosed, InvalidHandshake, TimeoutError):
            async with connect(url, additional_headers=header, compression=None, max_size=None) as far:
                await _until_one_ends(self._pass(near, far), self._pass(far, near))

    async def _pass(
        self, source: ClientConnection | ServerConnection, sink: ClientConnection | ServerConnection
    ) -> None:
        held: str | bytes | None = None
        with contextlib.suppress(ConnectionClosed):
            async for message in source:
                if held is None and self._strikes(0.02):
                    held = message  # and let the next one by
                    continue
                if self._strikes(0.02):
                    await asyncio.sleep(self._draw.uniform(0.01, 0.1))
                await sink.send(message)
                if self._strikes(0.05):
                    await sink.send(message)
                if held is not None:
                    await sink.send(held)
                    held = None
