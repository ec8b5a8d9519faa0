"""I8: a deferred update must not reach its slot's next owner. The whole fix of PR 54436 leans on this."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from stagewatch.agents.evidence import PayloadBlock
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.lanes import Binds
from stagewatch.monitor.windows import Group, life_of


class SlotGeneration:
    """A payload is written only while its slot still belongs to the request it was sampled for."""

    NAME: ClassVar = "slot-generation"
    INVARIANT: ClassVar = "I8"
    COMPARES: ClassVar = "a slot's generation and owner when a payload was received and when it was written"
    SEVERITY: ClassVar = (
        "critical where the slot has a new owner; warning where it has none, or one of the same generation"
    )
    EXCEPTIONS: ClassVar = (
        "payloads that the generation check dropped; slot numbers that differ between ranks"
    )
    REMEDY: ClassVar = (
        "An update of a finished request was written into its slot's next owner, whose text is wrong from here on. "
        "Restart the engine; the slot's generation counter is not raised on free, or is not checked on consumption."
    )

    def __init__(self) -> None:
        self._owner: dict[tuple[int, int], tuple[int, int]] = {}
        """(rank index, slot) -> (generation, request) of the newest bind."""

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Look at what was consumed and at slots that were bound again, in the order it happened."""
        consumed, binds = dict(chunk.consumed), dict(chunk.binds)
        for index in sorted({*consumed, *binds}):
            yield from self._rank(group, index, consumed.get(index), binds.get(index), history)

    def _rank(
        self,
        group: Group,
        index: int,
        consumed: PayloadBlock | None,
        binds: Binds | None,
        history: History,
    ) -> Iterator[Finding]:
        bound = 0
        for step, row, at in _stale_rows(consumed) if consumed is not None else ():
            if binds is not None:
                # A bind belongs to the step after the one it was recorded in; payloads are consumed before it.
                until = int(np.searchsorted(binds.step, step - 1))
                yield from self._rebound(group, index, binds, bound, until, history)
                bound = max(bound, until)
            if consumed is not None:
                yield self._stale(group, index, consumed, row, at, history)
        if binds is not None:
            yield from self._rebound(group, index, binds, bound, len(binds), history)

    def _stale(
        self, group: Group, index: int, consumed: PayloadBlock, row: int, at: int, history: History
    ) -> Finding:
        slot, now = int(consumed.slot[row]), int(consumed.generation_now[row])
        owner = self._owner.get((index, slot))
        harmed = owner is not None and owner[0] == now
        request = owner[1] if owner is not None and harmed else int(consumed.request[row])
        step = int(consumed.at[at])
        life = history.life(request, step if harmed else int(consumed.step[at]))
        rank = group.number(index)
        return Finding(
            check=self.NAME,
            severity=Severity.CRITICAL if harmed else Severity.WARNING,
            step=step,
            phase=Phase.CONSUMED,
            text=f"rank {rank} wrote the payload of step {int(consumed.step[at])} into slot {slot}, whose owner "
            f"had {'changed' if harmed else 'left'} (generation {int(consumed.generation[row])} when sent, {now} when "
            "written)",
            remedy=self.REMEDY,
            request=request,
            life=life_of(consumed, row) if life is None else life,
            row=row,
            ranks=(rank,),
            blamed=(rank,),
            fields=("req_idx_gen",),
            values=(
                Value(rank, "req_idx_gen received", str(int(consumed.generation[row]))),
                Value(rank, "req_idx_gen consumed", str(now)),
            ),
            t_ns=int(consumed.t_ns[at]),
        )

    def _rebound(
        self, group: Group, index: int, binds: Binds, first: int, end: int, history: History
    ) -> Iterator[Finding]:
        """Slots that got a new owner without a new generation: the next stale update will not be noticed."""
        columns = (binds.step, binds.slot, binds.generation, binds.request, binds.t_ns)
        for place, (step, slot, generation, request, t_ns) in enumerate(
            zip(*(column[first:end].tolist() for column in columns), strict=True)
        ):
            before = self._owner.get((index, slot))
            self._owner[index, slot] = (generation, request)
            if before is None or before[0] != generation or before[1] == request:
                continue
            rank = group.number(index)
            life = history.life(request, step + 1)
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=step + 1,
                phase=Phase.CONSUMED,
                text=f"rank {rank} gave slot {slot} to another request without raising its generation ({generation})",
                remedy=self.REMEDY,
                request=request,
                life=generation if life is None else life,
                row=place,
                ranks=(rank,),
                blamed=(rank,),
                fields=("req_idx_gen",),
                t_ns=t_ns,
            )


def _stale_rows(consumed: PayloadBlock) -> list[tuple[int, int, int]]:
    """(step before which it was written, row, index of the payload) of rows written for a former owner."""
    rows = np.flatnonzero((consumed.applied != 0) & (consumed.generation != consumed.generation_now))
    if not len(rows):
        return []
    places = np.searchsorted(np.cumsum(consumed.rows), rows, side="right")
    return [*zip(consumed.at[places].tolist(), rows.tolist(), places.tolist(), strict=True)]
