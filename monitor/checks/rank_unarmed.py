"""Ranks that do not record: never armed, or disarmed since."""

from collections.abc import Iterable
from typing import ClassVar, Final

from stagewatch.monitor.checks.base import Finding, Phase
from stagewatch.monitor.checks.liveness import Progress
from stagewatch.monitor.incidents import Severity

GRACE_NS: Final = 60 * 10**9
"""Time between the first and the last rank of an engine to arm."""


class RankUnarmed:
    """Every rank of an engine must report that it records; nothing is compared without all of them."""

    NAME: ClassVar = "rank-unarmed"
    INVARIANT: ClassVar = "I17"
    COMPARES: ClassVar = "ranks heard of with the engine's parallel sizes, and each one's own word"
    SEVERITY: ClassVar = "warning"
    EXCEPTIONS: ClassVar = "the first minute after an engine's first rank was heard of"
    REMEDY: ClassVar = (
        "Set STAGEWATCH_RING_DIR for every worker and run a sidecar on every node; `stagewatch-agent doctor` says why "
        "a worker does not arm. A probe that disarmed itself comes back with the engine's next start."
    )

    def look(self, progress: Progress) -> Iterable[Finding]:
        """Disarmed ranks at once, missing ones after the grace."""
        late = progress.now_ns - progress.first_heard_ns > GRACE_NS
        for rank in progress.ranks:
            number = progress.group.number(rank.index)
            if rank.identity is not None and not rank.armed:
                text = f"rank {number} disarmed: {rank.reason or 'it does not say why'}"
            elif rank.identity is None and late:
                text = f"rank {number} was never heard of"
            else:
                continue
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=progress.newest_step,
                phase=Phase.INPUTS,
                text=text,
                remedy=self.REMEDY,
                of_step=False,
                row=rank.index,
                ranks=(number,),
                fields=("armed",),
                t_ns=progress.first_heard_ns,
            )
