"""What each rank's calls tell of its progress, for the checks that look at engines that no longer move."""

from typing import Final

import numpy as np

from stagewatch.monitor.calls import Calls, Entry, Names, join_calls
from stagewatch.monitor.checks.collective_order import ACROSS_REPLICAS
from stagewatch.monitor.ordinals import Shift

STEPS_KEPT: Final = 4
"""Steps of calls kept per rank."""
KINDS_MAX: Final = 64
ORDERS_MAX: Final = 256

Kind = tuple[str, str]


class CallBook:
    """One rank's newest calls, and the order it has kept so far."""

    def __init__(self, names: Names) -> None:
        self.shared = 0
        """Calls entered that data-parallel replicas share."""
        self._names: Final = names
        self._recent: list[Calls] = []
        self._before: dict[int, frozenset[int]] = {}
        self._orders: set[bytes] = set()
        """Orders of calls noted already."""
        self._learnt_to = 0
        self._last_shared: Entry | None = None

    def add(self, calls: Calls) -> None:
        """Take calls in the order they were entered."""
        if not len(calls):
            return
        shared = self._shared_codes()
        if len(shared):
            at = np.flatnonzero(np.isin(calls.code, shared))
            self.shared += len(at)
            if len(at):
                self._last_shared = next(calls.where(np.arange(len(calls)) == at[-1]).entries(self._names))
        self._recent.append(calls)
        recent = join_calls(self._recent)
        newest = int(recent.step.max())
        self._learn(recent, newest)
        self._recent = [recent.where(recent.step > newest - STEPS_KEPT)]

    def renumber(self, shift: Shift) -> None:
        """The rank's steps turned out to be others than it said."""
        self._recent = [calls.at(shift.of(calls.step)) for calls in self._recent]
        self._learnt_to = shift.of_step(self._learnt_to)

    @property
    def calls(self) -> tuple[Entry, ...]:
        """Calls of the newest steps, in order."""
        return tuple(join_calls(self._recent).entries(self._names))

    @property
    def last_shared(self) -> Entry | None:
        """The newest call that replicas share."""
        return self._last_shared

    @property
    def before(self) -> dict[Kind, frozenset[Kind]]:
        """For each (group, operation): those that came before it in every step so far but the newest."""

        def kind(code: int) -> Kind:
            group, _, rest = self._names.text(code).partition(" ")
            return group, rest.partition(" ")[0]

        return {kind(code): frozenset(map(kind, found)) for code, found in self._before.items()}

    def _shared_codes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        texts = enumerate(self._names.texts)
        return np.array([code for code, text in texts if text.startswith(ACROSS_REPLICAS)], np.int64)

    def _learn(self, recent: Calls, newest: int) -> None:
        """Note the order of every step that is finished, each once: however calls are batched, the same is usual."""
        first, end = np.searchsorted(recent.step, [self._learnt_to + 1, newest])
        if first >= end:
            return
        self._learnt_to = newest - 1
        steps, codes = recent.step[first:end], recent.code[first:end]
        for part in np.split(codes, np.flatnonzero(np.diff(steps)) + 1):
            order = part.tobytes()
            if order in self._orders:
                continue  # of nearly all steps
            if len(self._orders) < ORDERS_MAX:
                self._orders.add(order)
            self._note(part.tolist())

    def _note(self, codes: list[int]) -> None:
        for place, code in enumerate(codes):
            if code in codes[:place]:
                continue
            earlier = frozenset(codes[:place])
            known = self._before.get(code)
            if known is not None:
                self._before[code] = known & earlier
            elif len(self._before) < KINDS_MAX:
                self._before[code] = earlier
