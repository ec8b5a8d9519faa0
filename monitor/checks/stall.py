"""I17: an engine that stopped in the middle of a step. Names who did not come, not who waits."""

from collections.abc import Iterable
from typing import ClassVar, Final

from stagewatch.monitor.checks.base import Finding, Phase
from stagewatch.monitor.checks.collective_order import POINT_TO_POINT, Entry
from stagewatch.monitor.checks.liveness import Progress, RankProgress
from stagewatch.monitor.incidents import Severity, Value

STALL_NS: Final = 30 * 10**9
"""No step lasts so long; loading and graph capture happen before the first."""
ALIVE_NS: Final = 15 * 10**9


class Stall:
    """Ranks that stand at different places and no longer move will not move again."""

    NAME: ClassVar = "stall"
    COMPARES: ClassVar = "how far each rank has come in steps and collectives, and when it last moved"
    EXCEPTIONS: ClassVar = (
        "an idle engine: its ranks stand at the same place; an engine not heard of; the first step"
    )
    REMEDY: ClassVar = (
        "The engine is wedged and will not answer: take it out of rotation and restart it. The rank that did not "
        "enter is where to look; the others only wait for it."
    )

    def look(self, progress: Progress) -> Iterable[Finding]:
        """One finding as long as the engine stands still out of step."""
        heard = [rank for rank in progress.ranks if rank.identity is not None]
        if len(heard) < 2 or progress.newest_step < 2:
            return
        newest_move = max(rank.moved_ns for rank in heard)
        newest_word = max(rank.heard_ns for rank in heard)
        if progress.now_ns - newest_move < STALL_NS or progress.now_ns - newest_word > ALIVE_NS:
            return
        places = {rank.index: _place(rank) for rank in heard}
        front, back = max(places.values()), min(places.values())
        if front == back:
            return
        group = progress.group
        behind = [rank for rank in heard if places[rank.index] == back]
        ahead = max(heard, key=lambda rank: places[rank.index])
        owed = _owed(ahead, behind[0])
        numbers = group.numbers([rank.index for rank in behind])
        joined = (
            f"; joined the batch: {', '.join(progress.newest_requests)}" if progress.newest_requests else ""
        )
        what = f", and did not enter {owed.size}" if owed else ""
        yield Finding(
            check=self.NAME,
            severity=Severity.CRITICAL,
            step=progress.newest_step,
            phase=Phase.INPUTS,
            text=f"rank {', '.join(map(str, numbers))} stands at step {behind[0].newest_step} while rank "
            f"{group.number(ahead.index)} waits at step {ahead.newest_step}{what}{joined}",
            remedy=self.REMEDY,
            ranks=numbers,
            blamed=numbers,
            fields=("progress",),
            values=tuple(
                Value(group.number(rank.index), "collective", rank.calls[-1].size if rank.calls else "none")
                for rank in heard
            ),
            t_ns=newest_move,
        )


def _place(rank: RankProgress) -> tuple[int, int]:
    """(step, shared calls entered in it). Point-to-point calls differ between stages by nature."""
    step = max(rank.newest_step, rank.calls[-1].step if rank.calls else 0)
    return step, sum(call.step == step and call.op not in POINT_TO_POINT for call in rank.calls)


def _owed(ahead: RankProgress, behind: RankProgress) -> Entry | None:
    """The first call of the waiting rank's newest step that the other one did not enter."""
    if not ahead.calls:
        return None
    entered = len(behind.calls) if behind.calls and behind.calls[-1].step == ahead.calls[-1].step else 0
    return ahead.calls[min(entered, len(ahead.calls) - 1)]
