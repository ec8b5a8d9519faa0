"""The event stream: incidents as server-sent events, resumable by `Last-Event-ID`.

A reader who comes back asks for everything after the last event it saw; what it missed comes from the
store, what happens from then on from the hub. A reader too slow for its queue is disconnected: it comes
back by itself and loses nothing. Many events at once are nobody's slowness: readers then take them from the store.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from stagewatch.monitor.store import Event, Store

QUEUE_EVENTS: Final = 256
HEARTBEAT_S: Final = 15.0
RETRY_MS: Final = 1000
BURST_EVENTS: Final = QUEUE_EVENTS // 4
"""More events at once than this do not go through the queues."""
_LOOK: Final = (0, b"")
"""In a queue: there is more in the store."""


class Reader:
    """One who listens, to all deployments or to some."""

    def __init__(self, deployments: frozenset[str] | None = None) -> None:
        self.deployments: Final = deployments
        self.queue: Final[asyncio.Queue[tuple[int, bytes] | None]] = asyncio.Queue(QUEUE_EVENTS)

    def may_see(self, body: bytes) -> bool:
        """Whether an event is of a deployment it listens to."""
        return self.deployments is None or _whose.decode(body).incident.deployment in self.deployments


class Hub:
    """Hands new events to everyone who listens."""

    def __init__(self) -> None:
        self.dropped_readers = 0
        """Readers disconnected because they were too slow."""
        self._readers: set[Reader] = set()
        self._closed = False

    @property
    def readers(self) -> int:
        """How many listen now."""
        return len(self._readers)

    def publish(self, events: list[Event]) -> None:
        """Hand on events that are in the store, in order. Never waits."""
        items = [_LOOK] if len(events) > BURST_EVENTS else [(event.number, event.body) for event in events]
        for reader in list(self._readers):
            try:
                for item in items:
                    reader.queue.put_nowait(item)
            except asyncio.QueueFull:
                self.dropped_readers += 1
                self.dismiss(reader)

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        for reader in list(self._readers):
            self.dismiss(reader)

    async def stream(
        self,
        store: Store,
        after: int | None,
        heartbeat_s: float = HEARTBEAT_S,
        reader: Reader | None = None,
    ) -> AsyncIterator[bytes]:
        """Server-sent events after event ``after``, until ``reader`` is dismissed; only new ones if it is None."""
        reader = reader or Reader()
        queue = reader.queue
        # Listening begins before the store is read, so nothing falls between; what comes twice is dropped.
        if self._closed:
            return
        self._readers.add(reader)
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            last = await asyncio.to_thread(store.last_event)
            if after is None:
                after = last
            # A number this store has not reached is another store's, and nothing of this one was seen.
            seen = after if after <= last else 0
            behind = True
            while True:
                if behind and reader in self._readers:
                    # Whatever is in the queue is in the store by now, so the queue cannot fill while we catch up.
                    while not queue.empty():
                        queue.get_nowait()
                    missed = await asyncio.to_thread(store.events_after, seen)
                    for number, body in missed:
                        if reader not in self._readers:
                            return  # dismissed while it was still taking what it missed
                        if reader.may_see(body):
                            yield _frame(number, body)
                        seen = number
                    behind = bool(missed)
                    continue
                try:
                    item = await asyncio.wait_for(queue.get(), heartbeat_s)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if item is None:
                    return
                behind = item is _LOOK
                if item[0] > seen:
                    if reader.may_see(item[1]):
                        yield _frame(*item)
                    seen = item[0]
        finally:
            self._readers.discard(reader)

    def dismiss(self, reader: Reader) -> None:
        """End a reader's stream."""
        self._readers.discard(reader)
        while not reader.queue.empty():
            reader.queue.get_nowait()
        reader.queue.put_nowait(None)


class _OfDeployment(msgspec.Struct):
    deployment: str


class _Whose(msgspec.Struct):
    """Of an event, whose it is."""

    incident: _OfDeployment


_whose: Final = msgspec.json.Decoder(_Whose)


def _frame(number: int, body: bytes) -> bytes:
    return b"id: %d\nevent: incident\ndata: %s\n\n" % (number, body)
