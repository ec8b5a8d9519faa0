"""Windows that sidecars freeze: who is asked for one, and where they lie.

When an incident turns critical every rank of its engine is asked, once, to keep what its ring holds around it. A
request waits until the rank's sidecar has answered, and is said again at each of its connections: a sidecar that has
done so already says where. Everything here runs on the event loop, but for what says otherwise.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from stagewatch.agents.wire import Freeze, Frozen
from stagewatch.monitor.incidents import Incident, Severity, Window
from stagewatch.monitor.schema import StoreError
from stagewatch.monitor.sessions import Session, StreamKey
from stagewatch.monitor.store import Store
from stagewatch.monitor.streams import Stream, Streams

log = logging.getLogger("stagewatch.collector")

ASKED_MAX: Final = 4096
"""Incidents of which it is remembered that they were asked for."""
WAITING_MAX: Final = 64
"""Requests that may wait for one rank; the oldest goes, and is counted."""
RECENT_NS: Final = 600 * 10**9
"""After a restart, windows are asked for incidents that are no older than this: rings hold little more."""
_TEXT_MAX: Final = 1024


class Preserver:
    """What was asked of whom. ``on_drop`` is called when a request is given up."""

    def __init__(self, streams: Streams, store: Store, on_drop: Callable[[], None]) -> None:
        self._streams = streams
        self._store = store
        self._on_drop = on_drop
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[StreamKey, OrderedDict[str, Freeze]] = {}
        self._tasks: Final[set[asyncio.Task[None]]] = set()

    def note(self, incident: Incident) -> None:
        """An incident was opened or grew: the first time that it is critical, ask its engine's ranks."""
        if incident.severity is not Severity.CRITICAL or incident.id in self._asked:
            return
        self._asked[incident.id] = None
        if len(self._asked) > ASKED_MAX:
            self._asked.popitem(last=False)
        for gone in self._waiting.keys() - self._streams.by_key.keys():
            del self._waiting[gone]
        for key, stream in self._streams.by_key.items():
            if key[0] != incident.instance or key[1].dp != incident.dp:
                continue
            first = max(incident.first_bad_step, 1)
            through = max(first + incident.latency_steps, incident.last_bad_step)
            self._ask(stream, Freeze(*key, incident.id, first, through))

    def _ask(self, stream: Stream, freeze: Freeze) -> None:
        waiting = self._waiting.setdefault(stream.key, OrderedDict())
        waiting[freeze.incident] = freeze
        if len(waiting) > WAITING_MAX:
            waiting.popitem(last=False)
            self._on_drop()
        for session in stream.sessions:
            if session.freezes:
                session.freeze(freeze)

    def recall(self, incidents: Sequence[Incident]) -> None:
        """After a restart: ask again about recent critical incidents, which come newest first.

        Who has answered says the same once more.
        """
        for incident in reversed(incidents):
            self.note(incident)

    def greeted(self, stream: Stream, session: Session) -> None:
        """A rank's sidecar said hello: ask again for what it did not answer."""
        if session.freezes:
            for freeze in self._waiting.get(stream.key, {}).values():
                session.freeze(freeze)

    def took(self, frozen: Frozen, stream: Stream) -> None:
        """A sidecar answered. What nobody asked for is not kept."""
        waiting = self._waiting.get(stream.key, OrderedDict())
        if frozen.incident not in waiting:
            return
        window = Window(
            str(frozen.rank),
            stream.identity.host,
            _told(frozen.path),
            frozen.first_step,
            frozen.last_step,
            _told(frozen.failure),
        )
        task = asyncio.create_task(self._keep(frozen.incident, window, waiting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, incident: str, window: Window, waiting: OrderedDict[str, Freeze]) -> None:
        try:
            await asyncio.to_thread(self._store.add_window, incident, window)
        except StoreError as error:
            log.warning("%s: it will be asked for again", error)
            return
        waiting.pop(incident, None)
        if window.failure:
            log.warning("incident %s: no window of %s was frozen: %s", incident, window.rank, window.failure)


def _told(text: str) -> str:
    """A sidecar's words, so that they are one line of bounded length."""
    return (text if text.isprintable() else ascii(text))[:_TEXT_MAX]
