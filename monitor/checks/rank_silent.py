"""A rank that was heard of and fell silent while others go on."""

from collections.abc import Iterable
from typing import ClassVar, Final

from stagewatch.monitor.checks.base import Finding, Phase
from stagewatch.monitor.checks.liveness import Progress
from stagewatch.monitor.incidents import Severity

SILENT_NS: Final = 30 * 10**9


class RankSilent:
    """As long as one rank of an engine is heard of, all must be: by a heartbeat at least."""

    NAME: ClassVar = "rank-silent"
    INVARIANT: ClassVar = "I17"
    COMPARES: ClassVar = "when each rank was last heard of with when any was"
    SEVERITY: ClassVar = "warning"
    EXCEPTIONS: ClassVar = (
        "an engine all of whose ranks are silent: it was stopped, or its sidecars cannot reach us"
    )
    REMEDY: ClassVar = (
        "Its sidecar is down or cannot reach the collector, or the worker is stopped or dead. Nothing is compared "
        "until it is heard of again: look at the worker, then at `stagewatch-agent ship` on its node."
    )

    def look(self, progress: Progress) -> Iterable[Finding]:
        """One finding per silent rank."""
        heard = [rank for rank in progress.ranks if rank.identity is not None]
        newest = max((rank.heard_ns for rank in heard), default=0)
        for rank in heard:
            # Against the others, not against the clock: an engine's ranks do not end at the same instant.
            if newest - rank.heard_ns <= SILENT_NS:
                continue
            number = progress.group.number(rank.index)
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=progress.newest_step,
                phase=Phase.INPUTS,
                text=f"rank {number} is silent since step {rank.newest_step}",
                remedy=self.REMEDY,
                of_step=False,
                row=rank.index,
                ranks=(number,),
                fields=("heard",),
                t_ns=rank.heard_ns,
            )
