"""I15: what the last stage sent, what a rank received, and what it consumed pp_size steps later."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, PayloadBlock, join, slice_steps
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.checks.fields import PAYLOAD_FIELDS, digest_or_count
from stagewatch.monitor.history import STEPS_KEPT, History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, life_of


class PayloadMismatch:
    """A broadcast must arrive as it was sent and be consumed as it arrived."""

    NAME: ClassVar = "payload-mismatch"
    INVARIANT: ClassVar = "I15"
    COMPARES: ClassVar = (
        "counts, defined tokens and draft blocks of a broadcast when sent, received and consumed"
    )
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = (
        "token columns beyond num_sampled, which are uninitialised memory; rows outside the mask; rows whose slot "
        "was freed before consumption"
    )
    REMEDY: ClassVar = (
        "The buffer changed on the blamed rank after the broadcast: memory reused before the deferred consumer read "
        "it, or a copy without its event. Restart the engine; look for a buffer freed or rewritten between the steps."
    )

    def __init__(self) -> None:
        self._received: dict[int, deque[PayloadBlock]] = {}
        """Per rank, what was received in recent steps."""

    def __getstate__(self) -> dict[str, Any]:
        """For saving: each rank's payloads as one block."""
        return {"_received": {index: deque([join(list(found))]) for index, found in self._received.items()}}

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Sent against received, then received against consumed."""
        for index, block in chunk.received:
            self._received.setdefault(index, deque()).append(block)
            if chunk.sent is not None:
                peer = chunk.sent.blocks[index % group.sizes.tp]
                yield from self._differs(
                    group, index, peer, block, "sent", "received", Phase.RECEIVED, history
                )
        for index, block in chunk.consumed:
            before = self._waiting(index, block)
            if before is not None:
                yield from self._differs(
                    group, index, before, block, "received", "consumed", Phase.CONSUMED, history
                )
        for waiting in self._received.values():
            # What nobody consumed by now, nobody will: some adapters do not see consumption.
            while len(waiting) > 1 and waiting[0].step[-1] <= waiting[-1].step[-1] - STEPS_KEPT:
                waiting.popleft()

    def _waiting(self, index: int, consumed: PayloadBlock) -> PayloadBlock | None:
        """What the rank received of the steps consumed now."""
        waiting = self._received.get(index)
        if not waiting:
            return None
        first, last = int(consumed.step[0]), int(consumed.step[-1])
        parts: list[PayloadBlock] = []
        for block in reversed(waiting):
            if block.step[-1] < first:
                break
            a, b = (int(place) for place in np.searchsorted(block.step, [first, last + 1]))
            if a < b:
                parts.append(slice_steps(block, a, b))
        parts.reverse()
        return join(parts) if parts else None

    def _differs(
        self,
        group: Group,
        index: int,
        before: PayloadBlock,
        after: PayloadBlock,
        was: str,
        now: str,
        phase: Phase,
        history: History,
    ) -> Iterator[Finding]:
        before, after = _same_rows(before, after)
        if not len(after.request):
            return
        unequal = {
            name: (getattr(before, column) != getattr(after, column)) for name, column in PAYLOAD_FIELDS
        }
        relayed = np.repeat((before.drafts > 0) & (before.drafts == after.drafts), after.rows)
        unequal["draft_tokens"] &= relayed
        bad = np.logical_or.reduce([*unequal.values()]) & (before.applied != 0) & (after.applied != 0)
        if not bad.any():
            return
        ends = np.cumsum(after.rows)
        for row in np.flatnonzero(bad):
            at = int(np.searchsorted(ends, row, side="right"))
            names = tuple(name for name, _ in PAYLOAD_FIELDS if unequal[name][row])
            rank, request, step = group.number(index), int(after.request[row]), int(after.step[at])
            life = history.life(request, step)
            yield Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=int(after.at[at]) if phase is Phase.CONSUMED else step,
                phase=phase,
                text=f"rank {rank} {now} something else than it {'received' if was == 'received' else 'was sent'} "
                f"at step {step}",
                remedy=self.REMEDY,
                request=request,
                life=life_of(after, int(row)) if life is None else life,
                row=int(row - ends[at] + after.rows[at]),
                ranks=(rank,),
                blamed=(rank,),
                fields=names,
                values=tuple(
                    Value(rank, f"{name} {when}", digest_or_count(block, int(row), column))
                    for name, column in PAYLOAD_FIELDS
                    if name in names
                    for when, block in ((was, before), (now, after))
                ),
                t_ns=int(after.t_ns[at]),
            )


def _same_rows(before: PayloadBlock, after: PayloadBlock) -> tuple[PayloadBlock, PayloadBlock]:
    """Both blocks reduced to the steps at which they carry the same rows."""
    if np.array_equal(before.step, after.step) and np.array_equal(before.request, after.request):
        return before, after
    _, first, second = np.intersect1d(before.step, after.step, return_indices=True)
    keep = before.rows[first] == after.rows[second]
    before, after = _pick(before, first[keep]), _pick(after, second[keep])
    if not np.array_equal(before.request, after.request):
        differs = before.request != after.request
        steps = np.unique(np.repeat(np.arange(len(after.step)), after.rows)[differs])
        kept = np.setdiff1d(np.arange(len(after.step)), steps)
        return _pick(before, kept), _pick(after, kept)
    return before, after


def _pick(block: PayloadBlock, places: NDArray[np.integer] | I64) -> PayloadBlock:
    if not len(places):
        return slice_steps(block, 0, 0)
    if places[-1] - places[0] + 1 == len(places):
        return slice_steps(block, int(places[0]), int(places[-1]) + 1)
    return join([slice_steps(block, int(place), int(place) + 1) for place in places])
