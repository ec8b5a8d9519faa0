"""I17: an engine that stopped in the middle of a step. Names who did not come, not who waits.

A rank waits in the call it entered last, unless everyone else has entered it, too. Whoever is waited for without
waiting itself is where to look. If everybody waits for somebody who waits, the calls are out of order, and the
one that entered a call before what it always entered first is where to look.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from stagewatch.monitor.calls import POINT_TO_POINT, Entry, peers
from stagewatch.monitor.checks.base import Finding, Phase
from stagewatch.monitor.checks.collective_order import ACROSS_REPLICAS
from stagewatch.monitor.checks.liveness import Progress, RankProgress
from stagewatch.monitor.incidents import Severity, Value

STALL_NS: Final = 30 * 10**9
"""No step lasts so long; loading and graph capture happen before the first."""
ALIVE_NS: Final = 15 * 10**9
_RECEIVES: Final = frozenset({"receive", "recv", "irecv"})


@dataclass(frozen=True, slots=True)
class Owed:
    """A call that some ranks wait in and others did not enter."""

    call: Entry
    waiting: tuple[int, ...]
    absent: tuple[int, ...]


class Stall:
    """Ranks that wait for each other and no longer move will not move again."""

    NAME: ClassVar = "stall"
    INVARIANT: ClassVar = "I17"
    COMPARES: ClassVar = "the calls each rank entered, how far it has come in steps, and when it last moved"
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = (
        "an idle engine: nobody waits in a call; ranks not heard of since long before, of which nothing is known; the "
        "first step; "
        "steps of which a rank's record is incomplete"
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
        owed = [*_owed(progress, heard, fallen)]
        if not owed and len({rank.newest_step for rank in heard}) < 2:
            return
        yield self._finding(progress, heard, owed)

    def _finding(self, progress: Progress, heard: Sequence[RankProgress], owed: list[Owed]) -> Finding:
        group = progress.group
        culprits, call = _culprits(progress, owed)
        whole = len(heard) == len(progress.ranks) and not any(rank.lossy for rank in heard)
        blamed = culprits if whole else ()  # who waits for whom must be known of everybody
        behind = min(rank.newest_step for rank in heard)
        missing = culprits or tuple(
            sorted({i for each in owed for i in each.absent})
            or [rank.index for rank in heard if rank.newest_step == behind]
        )
        what = f"stands at step {behind}"
        if call is not None:
            what = (
                _what(call)
                if culprits or any(each.absent for each in owed)
                else f"wait in unequal calls: {call.size}"
            )
        joined = (
            f"; joined the batch: {', '.join(progress.newest_requests)}" if progress.newest_requests else ""
        )
        waiting = sorted({group.number(i) for each in owed for i in each.waiting} - {*group.numbers(missing)})
        others = f" while {_named(waiting)} wait" if waiting else ""
        return Finding(
            check=self.NAME,
            severity=Severity.CRITICAL,
            step=progress.newest_step,
            phase=Phase.CALLS,
            text=f"{_named(group.numbers(missing))} {what}{others}{joined}",
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


def _where(progress: Progress, rank: RankProgress, call: Entry | None, owed: Sequence[Owed]) -> str:
    """What a rank entered for the call that is owed, or where it stands if it has no part in that."""
    last = rank.calls[-1].size if rank.calls else "none"
    if call is None or call.op in POINT_TO_POINT:
        return last
    waits = progress.ranks[next(each.waiting[0] for each in owed if each.call == call)]
    if rank.index not in (waits.index, *_members(progress, waits, call)):
        return last
    own = [each for each in rank.calls if each.step == call.step and _kind(each) == _kind(call)]
    place = _place(waits, call)
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


def _owed(
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
        members = _members(progress, rank, call)
        place = _place(rank, call)
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


def _members(progress: Progress, rank: RankProgress, call: Entry) -> tuple[int, ...]:
    """Whom a rank needs for its call to end."""
    sizes = progress.group.sizes
    if call.op in POINT_TO_POINT:
        other = rank.index + (-sizes.tp if call.op in _RECEIVES else sizes.tp)
        return (other,) if 0 <= other < sizes.pp * sizes.tp else ()
    for indices in peers(progress.group, call.group):
        if rank.index in indices:
            return tuple(i for i in indices if i != rank.index)
    return ()


def _kind(call: Entry) -> tuple[str, str]:
    return call.group, ("p2p" if call.op in POINT_TO_POINT else "")


def _place(rank: RankProgress, call: Entry) -> int:
    """How many calls of its kind the rank entered in the call's step."""
    if call.op in POINT_TO_POINT:
        return 1
    return sum(each.step == call.step and _kind(each) == _kind(call) for each in rank.calls)


def _entered(rank: RankProgress, call: Entry, place: int) -> bool:
    if call.op in POINT_TO_POINT:
        receives = call.op not in _RECEIVES
        return any(
            each.step == call.step and each.op in POINT_TO_POINT and (each.op in _RECEIVES) == receives
            for each in rank.calls
        )
    return _place(rank, call) >= place


def _apart(rank: RankProgress, call: Entry, place: int) -> bool:
    """Whether a rank entered something else, or something of another size, where ``call`` was due: neither ends."""
    if call.op in POINT_TO_POINT:
        return False
    own = [each for each in rank.calls if each.step == call.step and _kind(each) == _kind(call)]
    return len(own) >= place and (own[place - 1].what, own[place - 1].numel) != (call.what, call.numel)


def _culprits(progress: Progress, owed: list[Owed]) -> tuple[tuple[int, ...], Entry | None]:
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
    return (), owed[0].call


def _unusual(rank: RankProgress) -> bool:
    """Whether a rank entered a call before one that always came first in its earlier steps."""
    newest = rank.calls[-1].step
    entered = [(call.group, call.op) for call in rank.calls if call.step == newest]
    return any(
        earlier not in entered[:place]
        for place, kind in enumerate(entered)
        for earlier in rank.always_before(kind)
    )
