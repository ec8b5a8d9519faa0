"""Who waits for whom in collective calls, as far as ranks' records tell.

A rank waits in the call it entered last, unless everyone else has entered it, too. Whoever is waited for without
waiting itself is where to look. If everybody waits for somebody who waits, the calls are out of order, and the
one that entered a call before what it always entered first is where to look.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from stagewatch.monitor.calls import POINT_TO_POINT, Entry, peers
from stagewatch.monitor.checks.collective_order import ACROSS_REPLICAS
from stagewatch.monitor.checks.liveness import Progress, RankProgress

_RECEIVES: Final = frozenset({"receive", "recv", "irecv"})


@dataclass(frozen=True, slots=True)
class Owed:
    """A call that some ranks wait in and others did not enter."""

    call: Entry
    waiting: tuple[int, ...]
    absent: tuple[int, ...]


def owed_calls(
    progress: Progress, heard: Sequence[RankProgress], fallen: Sequence[RankProgress]
) -> Iterator[Owed]:
    """For every rank heard of that waits in its last call: the call, and who did not enter it."""
    by_index = {rank.index: rank for rank in (*heard, *fallen)}
    found: dict[tuple[str, int, int, tuple[int, ...]], Owed] = {}
    for rank in heard:
        if not rank.calls or rank.lossy:
            continue
        call = rank.calls[-1]
        if call.group.startswith(ACROSS_REPLICAS):
            continue
        members = members_of(progress, rank, call)
        place = place_of(rank, call)
        absent = tuple(i for i in members if i in by_index and not _entered(by_index[i], call, place))
        if any(by_index[i].lossy for i in absent):
            continue
        if not absent and not any(i in by_index and _apart(by_index[i], call, place) for i in members):
            continue
        key = (call.group, call.step, place, absent)
        before = found.get(key)
        waiting = (*(before.waiting if before else ()), rank.index)
        found[key] = Owed(call, waiting, absent)
    yield from found.values()


def members_of(progress: Progress, rank: RankProgress, call: Entry) -> tuple[int, ...]:
    """Whom a rank needs for its call to end."""
    sizes = progress.group.sizes
    if call.op in POINT_TO_POINT:
        other = rank.index + (-sizes.tp if call.op in _RECEIVES else sizes.tp)
        return (other,) if 0 <= other < sizes.pp * sizes.tp else ()
    for indices in peers(progress.group, call.group):
        if rank.index in indices:
            return tuple(i for i in indices if i != rank.index)
    return ()


def kind_of(call: Entry) -> tuple[str, str]:
    """(communicator, "p2p" or ""): calls that are counted together."""
    return call.group, ("p2p" if call.op in POINT_TO_POINT else "")


def place_of(rank: RankProgress, call: Entry) -> int:
    """How many calls of its kind the rank entered in the call's step."""
    if call.op in POINT_TO_POINT:
        return 1
    return sum(each.step == call.step and kind_of(each) == kind_of(call) for each in rank.calls)


def _entered(rank: RankProgress, call: Entry, place: int) -> bool:
    if call.op in POINT_TO_POINT:
        receives = call.op not in _RECEIVES
        return any(
            each.step == call.step and each.op in POINT_TO_POINT and (each.op in _RECEIVES) == receives
            for each in rank.calls
        )
    return place_of(rank, call) >= place


def _apart(rank: RankProgress, call: Entry, place: int) -> bool:
    """Whether a rank entered something else, or something of another size, where ``call`` was due: neither ends."""
    if call.op in POINT_TO_POINT:
        return False
    own = [each for each in rank.calls if each.step == call.step and kind_of(each) == kind_of(call)]
    return len(own) >= place and (own[place - 1].what, own[place - 1].numel) != (call.what, call.numel)


def culprits_of(progress: Progress, owed: list[Owed]) -> tuple[tuple[int, ...], Entry | None]:
    """(indices of who is to blame, the call they owe); nobody where the evidence does not tell."""
    if not owed:
        return (), None
    by_index = {rank.index: rank for rank in progress.ranks}
    absent = Counter(i for each in owed for i in each.absent)
    waiting = {i for each in owed for i in each.waiting}
    # Who went on to a later step will never enter what it left out of this one.
    passed = [i for each in owed for i in each.absent if by_index[i].newest_step > each.call.step]
    idle = [i for i in absent if i not in waiting]
    out_of_order = [i for i in sorted(waiting & {*absent}) if _unusual(by_index[i])]
    for group in (passed, idle, out_of_order):
        if group:
            chosen = tuple(sorted({*group}))
            call = next(each.call for each in owed if {*each.absent} & {*chosen})
            return chosen, call
    return (), None


def _unusual(rank: RankProgress) -> bool:
    """Whether a rank entered a call before one that always came first in its earlier steps."""
    newest = rank.calls[-1].step
    entered = [(call.group, call.op) for call in rank.calls if call.step == newest]
    return any(
        earlier not in entered[:place]
        for place, kind in enumerate(entered)
        for earlier in rank.always_before(kind)
    )
