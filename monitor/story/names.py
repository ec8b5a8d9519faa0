"""Which requests ran: their ids by key, as a tap over what is replayed."""

from collections import OrderedDict
from typing import Final

import numpy as np

from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity
from stagewatch.agents.record import Kind
from stagewatch.monitor.story.errors import NotFoundError, told_in_line

NAMES_MAX: Final = 200_000
"""Ids remembered; the oldest go first."""


class Names:
    """A tap that remembers request ids."""

    def __init__(self) -> None:
        self._ids: OrderedDict[int, str] = OrderedDict()

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """Note the requests that were given slots."""
        events = evidence.events
        if events is None:
            return
        for at in np.flatnonzero(events.kind == Kind.BIND).tolist():
            self._ids[int(events.request[at])] = events.text[at]
            if len(self._ids) > NAMES_MAX:
                self._ids.popitem(last=False)

    def name(self, key: int) -> str:
        """A request's id, or its key where it is not known."""
        return self._ids.get(key) or f"request {key:016x}"

    def known(self, key: int) -> str | None:
        """A request's id; None where it is not known."""
        return self._ids.get(key)

    def resolve(self, text: str) -> tuple[int, str]:
        """(key, id) of the request that ``text`` names or begins. Raises NotFoundError."""
        exact = next((key for key, name in self._ids.items() if name == text), None)
        if exact is not None:
            return exact, text
        found = {key: name for key, name in self._ids.items() if name.startswith(text)}
        if len(found) == 1:
            return next(iter(found.items()))
        if found:
            raise NotFoundError(
                f"request {told_in_line([text])} begins {len(found)} ids: {told_in_line(sorted(found.values()))}: "
                "give more of it"
            )
        held = f"they hold {told_in_line([*self._ids.values()])}" if self._ids else "they hold none"
        raise NotFoundError(f"no request {told_in_line([text])} in the recordings: {held}")
