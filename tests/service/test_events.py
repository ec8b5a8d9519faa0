"""The event stream: what was missed, then what comes; and nobody slow holds up the others."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from test_store import incident

from stagewatch.monitor.events import QUEUE_EVENTS, Hub, Reader
from stagewatch.monitor.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "incidents.sqlite3")


async def number(stream: AsyncIterator[bytes]) -> int:
    """Number of the next event."""
    async for chunk in stream:
        if chunk.startswith(b"id: "):
            return int(chunk.split(b"\n")[0][4:])
    raise AssertionError("the stream ended")


async def opened(hub: Hub, store: Store, after: int | None) -> AsyncIterator[bytes]:
    stream = hub.stream(store, after)
    assert (await anext(stream)).startswith(b"retry: ")
    return stream


def test_a_reader_gets_what_it_missed_and_then_what_comes_each_once(store: Store) -> None:
    async def body() -> None:
        hub = Hub()
        store.apply([incident(1), incident(2)])
        stream = await opened(hub, store, after=1)
        # published while the store is still being read: in the store, and in the queue
        hub.publish(store.apply([incident(3)]))
        assert [await number(stream), await number(stream)] == [2, 3]
        hub.publish(store.apply([incident(4)]))
        assert await number(stream) == 4

    asyncio.run(body())


def test_a_reader_without_a_past_gets_only_what_comes(store: Store) -> None:
    async def body() -> None:
        hub = Hub()
        store.apply([incident(1)])
        stream = await opened(hub, store, after=None)
        coming = asyncio.create_task(number(stream))
        last = 6
        while not coming.done():
            hub.publish(await asyncio.to_thread(store.apply, [incident(1, last=last)]))
            last += 1
        assert await coming > 1

    asyncio.run(body())


def test_silence_is_filled_with_comments(store: Store) -> None:
    async def body() -> None:
        stream = Hub().stream(store, 0, heartbeat_s=0.01)
        assert (await anext(stream)).startswith(b"retry: ")
        assert (await anext(stream)).startswith(b": ")

    asyncio.run(body())


def test_a_slow_reader_is_disconnected_and_counted_and_the_others_are_not(store: Store) -> None:
    async def body() -> None:
        hub = Hub()
        slow, quick = await opened(hub, store, after=0), await opened(hub, store, after=0)
        # both stand in their queues; only one of them ever takes anything
        coming = asyncio.create_task(number(quick))
        for count in range(QUEUE_EVENTS + 1):
            hub.publish(store.apply([incident(1, last=10 + count)]))
            if count == 0:
                assert await coming == 1
            elif count < QUEUE_EVENTS:
                assert await number(quick) == count + 1
        assert (hub.dropped_readers, hub.readers) == (1, 1)
        assert [chunk async for chunk in slow if not chunk.startswith(b"id: ")] == []
        assert await number(quick) == QUEUE_EVENTS + 1

    asyncio.run(body())


def test_who_is_dismissed_gets_nothing_more_of_what_it_missed(store: Store) -> None:
    """A token that is taken away, say, while its reader is still catching up."""

    async def body() -> None:
        hub, reader = Hub(), Reader()
        store.apply([incident(1), incident(2), incident(3)])
        stream = hub.stream(store, 0, reader=reader)
        assert await number(stream) == 1
        hub.dismiss(reader)
        assert await _drained(stream) == []

    asyncio.run(body())


def test_closing_ends_every_stream(store: Store) -> None:
    async def body() -> None:
        hub = Hub()
        stream = await opened(hub, store, after=0)
        rest = asyncio.create_task(_drained(stream))
        while not hub.readers:
            await asyncio.sleep(0)
        hub.close()
        assert await rest == []

    asyncio.run(body())


async def _drained(stream: AsyncIterator[bytes]) -> list[bytes]:
    return [chunk async for chunk in stream]


def test_a_burst_longer_than_the_queue_dismisses_nobody(store: Store) -> None:
    """GIVEN a reader that is up to date WHEN thousands of incidents open at once THEN it gets each, once, in order."""

    async def body() -> None:
        hub = Hub()
        stream = await opened(hub, store, after=0)
        count = 5 * QUEUE_EVENTS
        store_all = [incident(n) for n in range(1, count + 1)]
        hub.publish(store.apply(store_all[:1]))
        assert await number(stream) == 1
        hub.publish(store.apply(store_all[1:]))
        assert [await number(stream) for _ in range(2, count + 1)] == list(range(2, count + 1))
        assert hub.dropped_readers == 0

    asyncio.run(body())


def test_a_reader_of_another_store_starts_over(store: Store) -> None:
    """A page left open while the data directory was replaced asks for what comes after a number of the old one."""

    async def body() -> None:
        hub = Hub()
        store.apply([incident(1)])
        assert await number(await opened(hub, store, after=1000)) == 1

    asyncio.run(body())
