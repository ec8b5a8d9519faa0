"""From the collector to the push: incidents as they are stored, and a moment later the steps around them."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.observers import Snapshot
from stagewatch.monitor.otlp.push import WAITING_MAX, Dropped, Push
from stagewatch.monitor.otlp.story import Told
from stagewatch.monitor.states import EngineState, StepSeen
from stagewatch.monitor.store import Event

AROUND_STEPS: Final = 8
"""Steps told before and after the first bad one."""
AFTER_NS: Final = 10**9
"""A trace waits for so long for the steps that follow the first bad one."""


class Steps(Protocol):
    """One engine's memory of its steps."""

    def moments(self, first: int, last: int) -> Iterable[StepSeen]:
        """What each rank recorded of steps ``first`` to ``last``, as far as it is remembered."""
        ...


class Telling:
    """Hands incidents to a push. On the event loop only, but for `Push`'s own threads; never waits."""

    def __init__(self, push: Push, steps_of: Callable[[str, int], Steps | None]) -> None:
        self._push = push
        self._steps_of = steps_of
        self._dropped: Dropped = lambda place, reason, amount: None
        self._due: deque[tuple[int, Told]] = deque()

    def start(self, now: Callable[[], Snapshot], dropped: Dropped) -> None:
        """Begin to push."""
        self._dropped = dropped
        self._push.start(now, dropped)

    def tell(self, events: Iterable[Event], engines: Iterable[EngineState], now_ns: int) -> None:
        """Incidents were stored: each that opened or rose is an event, and from warning on a trace."""
        names = {(e.instance, e.dp): e.ranks[0].identity.engine for e in engines if e.ranks}
        for event in events:
            if event.kind == "updated":
                continue
            incident = event.incident
            told = Told(incident, names.get((incident.instance, incident.dp), ""))
            self._push.event(told)
            if incident.severity > Severity.NOTICE and self._push.traces:
                if len(self._due) < WAITING_MAX:
                    self._due.append((now_ns + AFTER_NS, told))
                else:
                    self._dropped("otlp", "queue_full", 1)

    def tick(self, now_ns: int) -> None:
        """Push the traces whose time has come."""
        while self._due and self._due[0][0] <= now_ns:
            self._push.trace(self._with_steps(self._due.popleft()[1]))

    def close(self) -> None:
        """Push what waits. Takes `push.CLOSE_S` at most."""
        while self._due:
            self._push.trace(self._with_steps(self._due.popleft()[1]))
        self._push.close()

    def _with_steps(self, told: Told) -> Told:
        incident: Incident = told.incident
        steps = self._steps_of(incident.instance, incident.dp)
        if steps is None:
            return told
        first = incident.first_bad_step
        return Told(incident, told.engine, tuple(steps.moments(first - AROUND_STEPS, first + AROUND_STEPS)))
