"""I8: a deferred update must not reach its slot's next owner. The whole fix of PR 54436 leans on this."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from stagewatch.agents.evidence import EventBlock, PayloadBlock
from stagewatch.agents.record import Kind
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group


class SlotGeneration:
    """A payload is written only while its slot still belongs to the request it was sampled for."""

    NAME: ClassVar = "slot-generation"
    COMPARES: ClassVar = "a slot's generation and owner when a payload was received and when it was written"
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
        """Look at what was consumed, and at slots that were bound again."""
        for index, events in chunk.events:
            yield from self._rebound(group, index, events)
        if chunk.consumed is None:
            return
        for index, block in zip(chunk.consumed.indices, chunk.consumed.blocks, strict=True):
            yield from self._stale(group, index, block)

    def _stale(self, group: Group, index: int, consumed: PayloadBlock) -> Iterator[Finding]:
        ends = np.cumsum(consumed.rows)
        for row in np.flatnonzero((consumed.applied != 0) & (consumed.generation != consumed.generation_now)):
            at = int(np.searchsorted(ends, row, side="right"))
            slot, now = int(consumed.slot[row]), int(consumed.generation_now[row])
            bound = self._owner.get((index, slot))
            rank = group.number(index)
            yield Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=int(consumed.at[at]),
                phase=Phase.CONSUMED,
                text=f"rank {rank} wrote the payload of step {int(consumed.step[at])} into slot {slot}, whose owner "
                f"had changed (generation {int(consumed.generation[row])} when sent, {now} when written)",
                remedy=self.REMEDY,
                # The harmed one is the slot's next owner; where no bind is on record, the payload's own request.
                request=bound[1] if bound and bound[0] == now else int(consumed.request[row]),
                generation=now,
                row=int(row),
                ranks=(rank,),
                blamed=(rank,),
                fields=("req_idx_gen",),
                values=(
                    Value(rank, "req_idx_gen received", str(int(consumed.generation[row]))),
                    Value(rank, "req_idx_gen consumed", str(now)),
                ),
                t_ns=int(consumed.t_ns[at]),
            )

    def _rebound(self, group: Group, index: int, events: EventBlock) -> Iterator[Finding]:
        """Slots that got a new owner without a new generation: the next stale update will not be noticed."""
        for i in np.flatnonzero(events.kind == Kind.BIND):
            slot, generation, request = int(events.slot[i]), int(events.generation[i]), int(events.request[i])
            before = self._owner.get((index, slot))
            self._owner[index, slot] = (generation, request)
            if before is None or before[0] != generation or before[1] == request:
                continue
            rank = group.number(index)
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=int(events.step[i]),
                phase=Phase.CONSUMED,
                text=f"rank {rank} gave slot {slot} to another request without raising its generation ({generation})",
                remedy=self.REMEDY,
                request=request,
                generation=generation,
                row=int(i),
                ranks=(rank,),
                blamed=(rank,),
                fields=("req_idx_gen",),
                t_ns=int(events.t_ns[i]),
            )
