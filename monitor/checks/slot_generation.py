"""I8: a deferred update must not reach its slot's next owner. The whole fix of PR 54436 leans on this."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from stagewatch.agents.evidence import I64, PayloadBlock
from stagewatch.agents.record import U64
from stagewatch.monitor.binds import Binds
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
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
        self._owners: dict[int, _Owners] = {}
        """Per rank index, the owner of every slot as of the newest bind."""

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

    def _owners_of(self, index: int) -> "_Owners":
        return self._owners.setdefault(index, _Owners())

    def _stale(
        self, group: Group, index: int, consumed: PayloadBlock, row: int, at: int, history: History
    ) -> Finding:
        slot, now = int(consumed.slot[row]), int(consumed.generation_now[row])
        step = int(consumed.at[at])
        holder = history.holder(index, slot, now, step)
        ran = 0 if holder is None else int(holder.window.blocks[index].request[holder.row])
        owner, generation = self._owners_of(index).at(slot)
        if generation != now:
            owner = ran  # the owner's bind is among lost records
        harmed = owner != 0
        request = owner if harmed else int(consumed.request[row])
        if harmed and holder is not None and ran == owner:
            # Not its newest life: preempted since, it may begin another one at this very step.
            life: int | None = life_of(holder.reference, holder.row)
        else:
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
        if first >= end:
            return
        part = binds.part(first, end)
        for place in self._owners_of(index).bind(part):
            step, slot = int(part.step[place]), int(part.slot[place])
            generation, request, t_ns = (
                int(part.generation[place]),
                int(part.request[place]),
                int(part.t_ns[place]),
            )
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


class _Owners:
    """Who has each of a rank's slots: request key and generation, by slot."""

    def __init__(self) -> None:
        self._request: U64 = np.zeros(0, np.uint64)
        self._generation: I64 = np.zeros(0, np.int64)

    def at(self, slot: int) -> tuple[int, int]:
        """(request key, generation) of a slot's owner; (0, 0) for a slot never bound."""
        if slot >= len(self._request):
            return 0, 0
        return int(self._request[slot]), int(self._generation[slot])

    def bind(self, binds: Binds) -> list[int]:
        """Take binds; return the places of those that did not raise their slot's generation."""
        missing = int(binds.slot.max()) + 1 - len(self._request)
        if missing > 0:
            self._request = np.concatenate([self._request, np.zeros(missing, np.uint64)])
            self._generation = np.concatenate([self._generation, np.zeros(missing, np.int64)])
        # Binds of one slot side by side, in their order: each one's owner before is its neighbour's, or the table's.
        order = np.argsort(binds.slot, kind="stable")
        slot, request, generation = (
            column[order] for column in (binds.slot, binds.request, binds.generation)
        )
        owner, owned = self._request[slot], self._generation[slot]
        again = 1 + np.flatnonzero(slot[1:] == slot[:-1])
        owner[again], owned[again] = request[again - 1], generation[again - 1]
        last = np.append(slot[1:] != slot[:-1], True)
        self._request[slot[last]], self._generation[slot[last]] = request[last], generation[last]
        same = (owner != 0) & (owned == generation) & (owner != request)
        found: list[int] = np.sort(order[same]).tolist()
        return found


def _stale_rows(consumed: PayloadBlock) -> list[tuple[int, int, int]]:
    """(step before which it was written, row, index of the payload) of rows written for a former owner."""
    rows = np.flatnonzero((consumed.applied != 0) & (consumed.generation != consumed.generation_now))
    if not len(rows):
        return []
    places = np.searchsorted(np.cumsum(consumed.rows), rows, side="right")
    return [*zip(consumed.at[places].tolist(), rows.tolist(), places.tolist(), strict=True)]
