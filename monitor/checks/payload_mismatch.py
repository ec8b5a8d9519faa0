"""I15: what the last stage sent, what a rank received, and what it consumed pp_size steps later."""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, PayloadBlock, join, slice_steps
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import STEPS_KEPT, History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, PayloadWindow

FIELDS: Final = (
    ("num_sampled", "num_sampled"),
    ("num_rejected", "num_rejected"),
    ("sampled_token_ids", "tokens_digest"),
    ("draft_tokens", "draft_digest"),
)


class PayloadMismatch:
    """A broadcast must arrive as it was sent and be consumed as it arrived."""

    NAME: ClassVar = "payload-mismatch"
    COMPARES: ClassVar = (
        "counts, defined tokens and draft blocks of a broadcast when sent, received and consumed"
    )
    EXCEPTIONS: ClassVar = (
        "token columns beyond num_sampled, which are uninitialised memory; rows outside the mask; rows whose slot "
        "was freed before consumption"
    )
    REMEDY: ClassVar = (
        "The buffer changed on the blamed rank after the broadcast: memory reused before the deferred consumer read "
        "it, or a copy without its event. Restart the engine; look for a buffer freed or rewritten between the steps."
    )

    def __init__(self) -> None:
        self._received: dict[int, PayloadBlock] = {}

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Sent against received, then received against consumed."""
        if chunk.sent is not None and chunk.received is not None:
            yield from self._received_differs(chunk.sent, chunk.received)
        if chunk.received is not None:
            for index, block in zip(chunk.received.indices, chunk.received.blocks, strict=True):
                self._received[index] = _recent(self._received.get(index), block)
        if chunk.consumed is not None:
            for index, block in zip(chunk.consumed.indices, chunk.consumed.blocks, strict=True):
                if index in self._received:
                    yield from self._differs(
                        group, index, self._received[index], block, "received", "consumed", Phase.CONSUMED
                    )

    def _received_differs(self, sent: PayloadWindow, received: PayloadWindow) -> Iterator[Finding]:
        tp = sent.group.sizes.tp
        for index, block in zip(received.indices, received.blocks, strict=True):
            peer = sent.blocks[index % tp]
            yield from self._differs(sent.group, index, peer, block, "sent", "received", Phase.RECEIVED)

    def _differs(
        self,
        group: Group,
        index: int,
        before: PayloadBlock,
        after: PayloadBlock,
        was: str,
        now: str,
        phase: Phase,
    ) -> Iterator[Finding]:
        before, after = _same_rows(before, after)
        if not len(after.request):
            return
        unequal = {name: (getattr(before, column) != getattr(after, column)) for name, column in FIELDS}
        relayed = np.repeat((before.drafts > 0) & (before.drafts == after.drafts), after.rows)
        unequal["draft_tokens"] &= relayed
        bad = np.logical_or.reduce([*unequal.values()]) & (before.applied != 0) & (after.applied != 0)
        ends = np.cumsum(after.rows)
        for row in np.flatnonzero(bad):
            at = int(np.searchsorted(ends, row, side="right"))
            names = tuple(name for name, _ in FIELDS if unequal[name][row])
            rank = group.number(index)
            yield Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=int(after.at[at]) if phase is Phase.CONSUMED else int(after.step[at]),
                phase=phase,
                text=f"rank {rank} {now} something else than it {'received' if was == 'received' else 'was sent'} "
                f"at step {int(after.step[at])}",
                remedy=self.REMEDY,
                request=int(after.request[row]),
                generation=int(after.generation[row]),
                row=int(row),
                ranks=(rank,),
                blamed=(rank,),
                fields=names,
                values=tuple(
                    Value(rank, f"{name} {when}", _shown(block, int(row), column))
                    for name, column in FIELDS
                    if name in names
                    for when, block in ((was, before), (now, after))
                ),
                t_ns=int(after.t_ns[at]),
            )


def _recent(known: PayloadBlock | None, block: PayloadBlock) -> PayloadBlock:
    """``block`` after what is known already, without what no consumer can be waiting for any more."""
    joined = block if known is None else join([known, block])
    surplus = len(joined.step) - max(STEPS_KEPT, len(block.step))
    return slice_steps(joined, surplus, len(joined.step)) if surplus > STEPS_KEPT else joined


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


def _shown(block: PayloadBlock, row: int, column: str) -> str:
    value = int(getattr(block, column)[row])
    return f"{value:016x}" if column.endswith("digest") else str(value)
