"""Since when and until when what is wrong, by kind: the figures that alerts and dashboards go by.

Incidents never close: what a request said stays wrong. An alert must end when nothing goes wrong any more, so it
goes by when something was last seen bad.
"""

from typing import Final

from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.states import Trouble
from stagewatch.monitor.windows import Group

NOBODY: Final = -1


class Troubles:
    """First and last bad moments of one group's incidents, by check, severity and stage. Bounded by those three."""

    def __init__(self, group: Group) -> None:
        self._group: Final = group
        self._known: dict[tuple[str, Severity, int], Trouble] = {}

    def note(self, incident: Incident | None, now_ns: int) -> None:
        """An incident opened, or something of it was seen again."""
        if incident is None:
            return
        began = incident.first_bad_ns or now_ns
        for stage in self._stages(incident):
            key = (incident.check, incident.severity, stage)
            known = self._known.get(key)
            first = began if known is None else min(known.first_ns, began)
            self._known[key] = Trouble(*key, first, now_ns)

    @property
    def worst(self) -> Severity | None:
        """The highest severity that any incident reached."""
        return max((severity for _, severity, _ in self._known), default=None)

    def known(self) -> tuple[Trouble, ...]:
        """All of them, in no order."""
        return tuple(self._known.values())

    def _stages(self, incident: Incident) -> set[int]:
        sizes = self._group.sizes
        return {(rank // sizes.tp) % sizes.pp for rank in incident.blamed} or {NOBODY}
