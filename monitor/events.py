"""The event stream: incidents as server-sent events, resumable by `Last-Event-ID`.

A reader who comes back asks for everything after the last event it saw; what it missed comes from the
store, what happens from then on from the hub. A reader too slow for its queue is disconnected: it comes
back by itself and loses nothing. Many events at once are nobody's slowness: readers then take them from the store.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from stagewatch.monitor.store import Event, Store

QUEUE_EVENTS: Final = 256
HEARTBEAT_S: Final = 15.0
RETRY_MS: Final = 1000
BURST_EVENTS: Final = QUEUE_EVENTS // 4
"""More events at once than this do not go through the queues."""
_LOOK: Final = (0, b"")
"""In a queue: there is more in the store."""


class Hub:
    """Hands new events to everyone who listens."""

    def __init__(self) -> None:
        self.dropped_readers = 0
        """Readers disconnected because they were too slow."""
        self._readers: set[asyncio.Queue[tuple[int, bytes] | None]] = set()
        self._closed = False

    @property
    def readers(self) -> int:
        """How many listen now."""
        return len(self._readers)

    def publish(self, events: list[Event]) -> None:
        """Hand on events that are in the store, in order. Never waits."""
        items = [_LOOK] if len(events) > BURST_EVENTS else [(event.number, event.body) for event in events]
        for queue in list(self._readers):
            try:
                for item in items:
                    queue.put_nowait(item)
            except asyncio.QueueFull:
                self.dropped_readers += 1
                self._dismiss(queue)

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        for queue in list(self._readers):
            self._dismiss(queue)

    async def stream(
        self, store: Store, after: int | None, heartbeat_s: float = HEARTBEAT_S
    ) -> AsyncIterator[bytes]:
        """Server-sent events after event ``after``, for ever; only new ones if it is None."""
        queue: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue(QUEUE_EVENTS)
        # Listening begins before the store is read, so nothing falls between; what comes twice is dropped.
        if self._closed:
            return
        self._readers.add(queue)
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            last = await asyncio.to_thread(store.last_event)
            if after is None:
                after = last
            # A number this store has not reached is another store's, and nothing of this one was seen.
            seen = after if after <= last else 0
            behind = True
            while True:
                if behind and queue in self._readers:
                    # Whatever is in the queue is in the store by now, so the queue cannot fill while we catch up.
                    while not queue.empty():
                        queue.get_nowait()
                    missed = await asyncio.to_thread(store.events_after, seen)
                    for number, body in missed:
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
                    yield _frame(*item)
                    seen = item[0]
        finally:
            self._readers.discard(queue)

    def _dismiss(self, queue: asyncio.Queue[tuple[int, bytes] | None]) -> None:
        self._readers.discard(queue)
        while not queue.empty():
            queue.get_nowait()
        queue.put_nowait(None)


def _frame(number: int, body: bytes) -> bytes:
    return b"id: %d\nevent: incident\ndata: %s\n\n" % (number, body)
