"""I17: an engine that stopped in the middle of a step. Names who did not come, not who waits."""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

from stagewatch.monitor.calls import POINT_TO_POINT, Entry
from stagewatch.monitor.checks.base import Finding, Phase
from stagewatch.monitor.checks.liveness import Progress, RankProgress
from stagewatch.monitor.checks.waits import Owed, culprits_of, kind_of, members_of, owed_calls, place_of
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group

STALL_NS: Final = 30 * 10**9
"""No step lasts so long; loading and graph capture happen before the first."""
ALIVE_NS: Final = 15 * 10**9


class Stall:
    """Ranks that wait for each other and no longer move will not move again."""

    NAME: ClassVar = "stall"
    INVARIANT: ClassVar = "I17"
    COMPARES: ClassVar = "the calls each rank entered, how far it has come in steps, and when it last moved"
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = (
        "an idle engine: nobody waits in a call; ranks not heard of since long before, of which nothing is known; the "
        "first step; steps of which a rank's record is incomplete"
    )
    REMEDY: ClassVar = (
        "The engine is wedged and will not answer: take it out of rotation and restart it. The rank that did not "
        "enter is where to look; the others only wait for it."
    )

    def look(self, progress: Progress) -> Iterable[Finding]:
        """One finding as long as the engine stands still out of step."""
        if not stands_still([progress]):
            return
        heard = [rank for rank in progress.ranks if _alive(rank, progress.now_ns)]
        fallen = [rank for rank in progress.ranks if _fell_silent_here(rank, progress)]
        if not heard or len(heard) + len(fallen) < 2 or progress.newest_step < 2:
            return
        owed = [*owed_calls(progress, heard, fallen)]
        if not owed and len({rank.newest_step for rank in heard}) < 2:
            return
        yield self._finding(progress, heard, owed)

    def _finding(self, progress: Progress, heard: Sequence[RankProgress], owed: list[Owed]) -> Finding:
        group = progress.group
        culprits, call = culprits_of(progress, owed)
        whole = len(heard) == len(progress.ranks) and not any(rank.lossy for rank in heard)
        blamed = culprits if whole else ()  # who waits for whom must be known of everybody
        behind = min(rank.newest_step for rank in heard)
        missing = culprits or tuple(
            sorted({i for each in owed for i in each.absent})
            or [rank.index for rank in heard if rank.newest_step == behind]
        )
        names = progress.newest_requests
        joined = f"; joined the batch: {', '.join(names)}" if names else ""
        return Finding(
            check=self.NAME,
            severity=Severity.CRITICAL,
            step=progress.newest_step,
            phase=Phase.CALLS,
            text=_told(group, owed, call, missing, behind) + joined,
            remedy=self.REMEDY,
            ranks=group.numbers(missing),
            blamed=group.numbers(blamed),
            fields=("progress",),
            values=tuple(
                Value(group.number(rank.index), "collective", _where(progress, rank, call, owed))
                for rank in heard
            ),
            t_ns=max(rank.moved_ns for rank in heard),
        )


def _told(group: Group, owed: Sequence[Owed], call: Entry | None, missing: Sequence[int], behind: int) -> str:
    """What happened, in words: who did not enter ``call``, or where each waits if nobody is known to be the cause."""
    who = _named(group.numbers(missing))
    if not owed:
        return f"{who} stands at step {behind}"
    if call is not None:
        waiting = sorted({i for each in owed for i in each.waiting} - {*missing})
        return f"{who} {_what(call)}" + (f" while {_named(group.numbers(waiting))} wait" if waiting else "")
    if not any(each.absent for each in owed):
        return f"{who} wait in unequal calls: {owed[0].call.size}"
    places: dict[str, list[int]] = {}
    for each in owed:
        places.setdefault(f"{each.call.size} of step {each.call.step}", []).extend(each.waiting)
    where = (
        f"{_named(group.numbers(sorted(waiting)))} {'waits' if len(waiting) == 1 else 'wait'} in {place}"
        for place, waiting in places.items()
    )
    return f"{', '.join(where)}: each for another that waits"


def _where(progress: Progress, rank: RankProgress, call: Entry | None, owed: Sequence[Owed]) -> str:
    """What a rank entered for the call that is owed, or where it stands if it has no part in that."""
    last = rank.calls[-1].size if rank.calls else "none"
    if call is None or call.op in POINT_TO_POINT:
        return last
    waits = progress.ranks[next(each.waiting[0] for each in owed if each.call == call)]
    if rank.index not in (waits.index, *members_of(progress, waits, call)):
        return last
    own = [each for each in rank.calls if each.step == call.step and kind_of(each) == kind_of(call)]
    place = place_of(waits, call)
    return own[place - 1].size if len(own) >= place else "not entered"


def stands_still(replicas: Sequence[Progress]) -> bool:
    """Whether every rank of some replicas is known to have stopped, though the processes are alive."""
    ranks = [rank for replica in replicas for rank in replica.ranks if rank.identity is not None]
    if not ranks:
        return False
    now = replicas[0].now_ns
    moved, heard = max(rank.moved_ns for rank in ranks), max(rank.heard_ns for rank in ranks)
    return now - moved >= STALL_NS and now - heard <= ALIVE_NS


def across_replicas(replicas: Sequence[Progress]) -> Iterator[tuple[int, Finding]]:
    """(place of the replica that owes, finding) where replicas stopped at different counts of their shared calls."""
    if len(replicas) < 2 or not stands_still(replicas):
        return
    if any(rank.identity is None for replica in replicas for rank in replica.ranks):
        return
    counts = [tuple(rank.shared_calls for rank in replica.ranks) for replica in replicas]
    # Of ranks that some replica's counterpart cannot be counted of, nothing is known.
    most = tuple(max(column) if min(column) >= 0 else -1 for column in zip(*counts, strict=True))
    for place, (replica, own) in enumerate(zip(replicas, counts, strict=True)):
        indices = [i for i, (mine, all_) in enumerate(zip(own, most, strict=True)) if mine < all_]
        if not indices:
            continue
        ahead = next(
            other
            for other, theirs in zip(replicas, counts, strict=True)
            if theirs[indices[0]] == most[indices[0]]
        )
        call = ahead.ranks[indices[0]].last_shared
        requests = [name for other in replicas for name in other.newest_requests]
        joined = f"; joined a batch: {', '.join(requests)}" if requests else ""
        numbers = replica.group.numbers(indices)
        yield (
            place,
            Finding(
                check=Stall.NAME,
                severity=Severity.CRITICAL,
                step=replica.newest_step + 1,
                phase=Phase.CALLS,
                text=f"{_named(numbers)} of replica {replica.group.dp} did not enter "
                f"{call.size if call else 'a shared call'}, where replica {ahead.group.dp} waits{joined}",
                remedy=Stall.REMEDY,
                ranks=numbers,
                blamed=numbers,
                fields=("progress",),
                values=tuple(
                    Value(other.group.number(rank.index), "shared calls", str(rank.shared_calls))
                    for other in replicas
                    for rank in other.ranks
                ),
                t_ns=max(rank.moved_ns for rank in replica.ranks),
            ),
        )


def _named(numbers: Sequence[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _what(call: Entry) -> str:
    if call.op in POINT_TO_POINT:
        return f"did not come to the other end of {call.size} of step {call.step}"
    return f"did not enter {call.size} of step {call.step}"


def _alive(rank: RankProgress, now_ns: int) -> bool:
    return rank.identity is not None and now_ns - rank.heard_ns <= STALL_NS


def _fell_silent_here(rank: RankProgress, progress: Progress) -> bool:
    """Whether a rank went silent where the others stand, so that they may be waiting for it.

    Ranks that went on for longer than ranks can be apart do not wait for one of which only the sidecar is dead.
    """
    apart_max = progress.group.sizes.pp + 1
    known = rank.identity is not None and not _alive(rank, progress.now_ns)
    return known and progress.newest_step - rank.newest_step <= apart_max
