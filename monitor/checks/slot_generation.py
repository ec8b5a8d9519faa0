"""I8: a deferred update must not reach its slot's next owner. The whole fix of PR 54436 leans on this."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from stagewatch.agents.evidence import EventBlock, InputsBlock, PayloadBlock
from stagewatch.agents.record import Kind
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group

_SLOT_BITS = 20
"""Slots are below 2**20, as the probe enforces."""


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
        by_index = (
            {} if chunk.inputs is None else dict(zip(chunk.inputs.indices, chunk.inputs.blocks, strict=True))
        )
        for index, block in zip(chunk.consumed.indices, chunk.consumed.blocks, strict=True):
            yield from self._stale(group, index, block, by_index.get(index))

    def _stale(
        self, group: Group, index: int, consumed: PayloadBlock, inputs: InputsBlock | None
    ) -> Iterator[Finding]:
        owner = _owners_at(consumed, inputs)
        changed = (consumed.generation != consumed.generation_now) | (
            (owner != 0) & (owner != consumed.request)
        )
        ends = np.cumsum(consumed.rows)
        for row in np.flatnonzero((consumed.applied != 0) & changed):
            at = int(np.searchsorted(ends, row, side="right"))
            slot, now = int(consumed.slot[row]), int(consumed.generation_now[row])
            bound = self._owner.get((index, slot))
            next_owner = int(owner[row]) or (
                bound[1] if bound and bound[0] == now else int(consumed.request[row])
            )
            rank = group.number(index)
            yield Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=int(consumed.at[at]),
                phase=Phase.CONSUMED,
                text=f"rank {rank} wrote the payload of step {int(consumed.step[at])} into slot {slot}, whose owner "
                f"had changed (generation {int(consumed.generation[row])} when sent, {now} when written)",
                remedy=self.REMEDY,
                request=next_owner,
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


def _owners_at(
    consumed: PayloadBlock, inputs: InputsBlock | None
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Request that holds each consumed row's slot in the batch it was consumed before; 0 if not in that batch."""
    owners = np.zeros(len(consumed.request), np.uint64)
    if inputs is None or not len(inputs.request):
        return owners
    held = np.repeat(inputs.step, inputs.rows) << _SLOT_BITS | inputs.slot
    order = np.argsort(held, kind="stable")
    wanted = np.repeat(consumed.at, consumed.rows) << _SLOT_BITS | np.maximum(consumed.slot, 0)
    place = np.minimum(np.searchsorted(held, wanted, sorter=order), len(held) - 1)
    found = (held[order[place]] == wanted) & (consumed.slot >= 0)
    owners[found] = inputs.request[order[place[found]]]
    return owners
