"""Finds a rank that counted its batches otherwise than the others: its ordinal k is their k + 1, say.

Ordinals align ranks only as long as all ranks count alike. A recorder that misses a batch, or a rank that executes one
more or less, shifts all that follows, and every row would be compared with a row of another step. Batches tell, however
alike they look: a request that decodes alone has the same scheduled and draft counts in every step, but each time it
has come further.

So where two ranks' batches of one ordinal have no row in common, the ordinals are wrong or the ranks really ran
something else. Ordinals are wrong if the one's batches are the other's at a constant distance, several times in a row,
and at no other distance. What is decided depends on the batches alone and on how many follow, not on when they came.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import InputsBlock
from stagewatch.monitor.blocks import select

SHIFT_MAX: Final = 64
"""Batches by which a rank's count may be off and be found so."""
MATCHES: Final = 3
"""Batches in a row that must be the same at a distance."""
LOOKAHEAD: Final = SHIFT_MAX + MATCHES
"""Steps after a doubtful one that decide it at the latest."""

_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)


class Verdict(enum.Enum):
    """What becomes of a step whose batches have no row in common."""

    OTHER_BATCH = enum.auto()
    """The ordinals are right: the ranks ran different batches, or hold different state of the same one."""
    UNCLEAR = enum.auto()
    """Batches are found again at other ordinals, but at no constant distance: nothing can be compared."""
    WAIT = enum.auto()
    """More batches must follow."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one batch, by how far their requests have come."""

    rows: int
    device: frozenset[int]
    """By the device's counts, which rise with every step of a request."""
    host: frozenset[int]
    """By the host's mirror, which may stand still where many drafts are taken off."""
    both: frozenset[int]

    def may_be(self, other: "Batch") -> bool:
        """Whether it may be the batch that another rank has, with state that differs: one of the counts is the same."""
        most = max(self.rows, other.rows)
        return not self.device.isdisjoint(other.device) or 2 * len(self.host & other.host) > most

    def is_again(self, other: "Batch") -> bool:
        """Whether it is another rank's batch: both counts are the same, on half of the rows at least."""
        return 2 * len(self.both & other.both) >= max(self.rows, other.rows)


class Batches:
    """One rank's batches by ordinal."""

    def __init__(self, block: InputsBlock) -> None:
        """Of a block's steps."""
        self._place: Final = {step: place for place, step in enumerate(block.step.tolist())}
        self._ends: Final = np.cumsum(block.rows)
        self._rows: Final = block.rows
        device, host = (count.astype(np.uint64) + np.uint64(1) for count in (block.computed, block.mirror))
        both = device * (_FACTOR >> np.uint64(17)) + host
        self._keys: Final = [block.request ^ (count * _FACTOR) for count in (device, host, both)]
        self._known: Final[dict[int, Batch]] = {}

    def at(self, step: int) -> Batch | None:
        """The batch of a step; None if it is empty or not on record."""
        known = self._known.get(step)
        place = self._place.get(step) if known is None else None
        if place is None:
            return known
        rows, end = int(self._rows[place]), int(self._ends[place])
        if not rows:
            return None
        found = self._known[step] = Batch(
            rows, *(frozenset(keys[end - rows : end].tolist()) for keys in self._keys)
        )
        return found

    def is_again(self, step: int, other: "Batches", other_step: int) -> bool | None:
        """Whether two steps are one batch; None where either is empty or not on record."""
        mine, theirs = self.at(step), other.at(other_step)
        return None if mine is None or theirs is None else mine.is_again(theirs)

    def may_be(self, other: "Batches", step: int) -> bool:
        """Whether two ranks' batches of a step may be one; so they may where neither has rows."""
        mine, theirs = self.at(step), other.at(step)
        if mine is None or theirs is None:
            return mine is theirs
        return mine.may_be(theirs)

    def at_one(self, other: "Batches", step: int) -> bool:
        """Whether two ranks' batches of a step surely are one."""
        mine, theirs = self.at(step), other.at(step)
        return mine is not None and theirs is not None and not mine.device.isdisjoint(theirs.device)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A distance, and after how many further steps the batches spoke of it; -1: they did not."""

    distance: int
    """How many batches more than the other the rank would have counted."""
    matched: int
    """The first batch was there again."""
    confirmed: int
    refuted: int

    def stands(self, ahead: int) -> bool:
        """Whether batches within ``ahead`` steps speak for it and none against."""
        return 0 <= self.matched <= ahead and not 0 <= self.refuted <= ahead


def doubtful(blocks: Sequence[InputsBlock], agree: NDArray[np.bool_]) -> list[int]:
    """Places of steps at which two ranks' batches may have no row in common. Blocks have equal ``step`` columns.

    ``agree`` says at which steps requests, scheduled and draft counts are the same on all ranks.
    """
    found = ~agree
    first = blocks[0]
    for block in blocks[1:]:
        if np.array_equal(first.rows, block.rows):
            found |= _apart(first, block)
            continue
        alike = first.rows == block.rows  # the other steps do not agree as it is
        found[alike] |= _apart(select(first, alike), select(block, alike))
    return [int(place) for place in np.flatnonzero(found)]


def _apart(one: InputsBlock, other: InputsBlock) -> NDArray[np.bool_]:
    """Steps at which no row's device count is the same: bool [steps]. Both have equal ``step`` and ``rows`` columns."""
    equal = one.computed == other.computed
    if equal.all():
        return np.zeros(len(one.rows), np.bool_)
    sums = np.concatenate([[0], np.cumsum(equal)])
    ends = np.cumsum(one.rows)
    apart: NDArray[np.bool_] = (sums[ends] == sums[ends - one.rows]) & (one.rows > 0)
    return apart


def reference(batches: Sequence[Batches], step: int) -> tuple[int, tuple[int, ...]]:
    """(a rank of the largest set that may have the same batch at ``step``, the ranks that are not of that set).

    Of sets of one size, the one with the last rank is taken.
    """
    sets: list[list[int]] = []
    for index, own in enumerate(batches):
        for known in sets:
            if own.may_be(batches[known[0]], step):
                known.append(index)
                break
        else:
            sets.append([index])
    largest = max(sets, key=lambda known: (len(known), known[-1]))
    return largest[-1], tuple(i for i in range(len(batches)) if i not in largest)


def judge(own: Batches, other: Batches, step: int, ahead: int, *, patient: bool) -> int | Verdict:
    """How many batches more than the other a rank counted as of ``step``, fewer where negative; or why it is not known.

    ``ahead`` further steps are on record. Unless ``patient``, these must do.
    """
    again = next((n for n in range(1, min(ahead, LOOKAHEAD) + 1) if own.at_one(other, step + n)), 0)
    if again:
        # The ranks are at one again: no constant distance reaches further.
        ahead, patient = again - 1, False
    candidates = [
        _candidate(own, other, step, distance, ahead)
        for n in range(1, min(ahead, SHIFT_MAX) + 1)
        for distance in (n, -n)
    ]
    found = _confirmed(candidates, ahead)
    if found is not None:
        return found
    if patient and ahead < LOOKAHEAD:
        return Verdict.WAIT
    seen = {candidate.distance > 0 for candidate in candidates if candidate.matched >= 0}
    # Found again in both directions: the ranks ran the same batches in another order.
    return Verdict.UNCLEAR if len(seen) == 1 else Verdict.OTHER_BATCH


def _candidate(own: Batches, other: Batches, step: int, distance: int, ahead: int) -> _Candidate:
    matches, matched = 0, -1
    mine, theirs = step + max(distance, 0), step + max(-distance, 0)
    for seen in range(abs(distance), ahead + 1):
        place = seen - abs(distance)
        same = own.is_again(mine + place, other, theirs + place)
        if same is False:
            return _Candidate(distance, matched, -1, seen)
        if same:
            matched, matches = (matched if matches else seen), matches + 1
            if matches == MATCHES:
                return _Candidate(distance, matched, seen, -1)
    return _Candidate(distance, matched, -1, -1)


def _confirmed(candidates: Sequence[_Candidate], ahead: int) -> int | None:
    """The one distance that batches speak for, as soon as they speak for it alone, however many more are on record."""
    spoken = [candidate for candidate in candidates if candidate.confirmed >= 0]
    if not spoken:
        return None
    best = min(spoken, key=lambda candidate: candidate.confirmed)
    for seen in range(best.confirmed, ahead + 1):
        if not any(rival.stands(seen) for rival in candidates if rival is not best):
            return best.distance
    return None
