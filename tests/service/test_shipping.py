"""The stream to the collector, against a collector that the test plays."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from service_records import append_steps, identity
from test_tail import PRIVACY
from websockets.asyncio.server import ServerConnection, serve

from stagewatch.agents import wire
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.shipping import RETRY_S_MIN, Destination, Shipper, TailKey
from stagewatch.agents.tail import Tail
from stagewatch.agents.wire import Ack, Batch, Hello, Refusal, Welcome

KEY: TailKey = ("life-1", identity().rank)


class Shipped:
    """A ring, its tail, and a shipper of it."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o700)
        self.ring = RingWriter(directory, identity(), 1 << 18)
        self.tails = {KEY: Tail(self.ring.path, PRIVACY)}
        self.shipper: Shipper


Play = Callable[[ServerConnection, Shipped], Awaitable[bool]]


def played(directory: Path, play: Play) -> Shipped:
    """Let ``play`` be the collector of each connection, until it returns true from one."""

    async def run() -> Shipped:
        shipped, over = Shipped(directory), asyncio.Event()

        async def handle(connection: ServerConnection) -> None:
            if await play(connection, shipped):
                over.set()

        async with serve(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            shipped.shipper = Shipper(Destination(f"ws://127.0.0.1:{port}", "t" * 20), shipped.tails)
            shipping = asyncio.create_task(shipped.shipper.run())
            try:
                await asyncio.wait_for(over.wait(), 30)
            finally:
                shipping.cancel()
                await asyncio.gather(shipping, return_exceptions=True)
        return shipped

    return asyncio.run(run())


async def heard(connection: ServerConnection) -> wire.Upward:
    message = await connection.recv()
    assert isinstance(message, bytes)
    return wire.decode_upward(message, wire.Limits())


def test_a_rank_that_may_come_back_says_hello_again_on_the_same_connection(tmp_path: Path) -> None:
    """The connection may last for weeks: a refusal for want of room must not."""

    async def play(connection: ServerConnection, shipped: Shipped) -> bool:
        assert isinstance(await heard(connection), Hello)
        await connection.send(wire.encode_frame(Refusal("no room", 0.0, *KEY)))
        assert isinstance(await heard(connection), Hello)
        await connection.send(wire.encode_frame(Welcome(*KEY, 0)))
        return True

    played(tmp_path, play)


def test_a_ring_that_took_the_place_of_another_says_hello_too(tmp_path: Path) -> None:
    async def play(connection: ServerConnection, shipped: Shipped) -> bool:
        first = await heard(connection)
        assert isinstance(first, Hello)
        shipped.ring.path.unlink()
        again = RingWriter(tmp_path, msgspec.structs.replace(identity(), started_ns=2), 1 << 18)
        shipped.tails[KEY] = Tail(again.path, PRIVACY)
        shipped.shipper.wake()
        second = await heard(connection)
        assert isinstance(second, Hello)
        assert (first.identity.started_ns, second.identity.started_ns) == (1, 2)
        return True

    played(tmp_path, play)


def test_being_out_of_step_again_and_again_makes_it_wait_for_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two sidecars on one ring push each other aside: they must not do so ten times a second."""
    times = 0

    async def play(connection: ServerConnection, shipped: Shipped) -> bool:
        nonlocal times
        assert isinstance(await heard(connection), Hello)
        append_steps(shipped.ring, 1, times + 1)
        await connection.send(wire.encode_frame(Welcome(*KEY, 0)))
        while shipped.tails[KEY].read(1 << 20):
            pass
        shipped.shipper.wake()
        assert isinstance(await heard(connection), Batch)
        times += 1
        if times < 4:
            await connection.send(wire.encode_frame(Refusal(f"expected {times}", 0.0, *KEY)))
            await connection.wait_closed()
            return False
        await connection.send(wire.encode_frame(Ack(*KEY, 1)))
        return True

    shipped = played(tmp_path, play)
    assert shipped.shipper._retry_s == RETRY_S_MIN * 2**3
    assert caplog.text.count("does another sidecar read the same rings?") == 1
