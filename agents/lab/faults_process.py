"""Faults of processes: ranks, the sidecars that read their rings, the collector. The engine's semantics stay sound.

Each is a script of signals and pauses. `stagewatch.agents.lab.player` plays it on the lab's processes by the clock,
`stagewatch.agents.lab.delivery` for a simulated run by a virtual one. What must be told of it is part of the fault:
which checks, of the ranks that were struck alone, and for which reasons rows go without a verdict. Anything else is an
error of the watch.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.lab.fault import Fault, Where


class Part(StrEnum):
    """What kind of process is struck."""

    RANK = "rank"
    SIDECAR = "sidecar"
    """The one of the struck rank's node, which holds its stage."""
    COLLECTOR = "collector"


class Verb(StrEnum):
    """What is done to it."""

    KILL = "kill"
    STOP = "stop"
    """SIGSTOP."""
    CONTINUE = "continue"
    """SIGCONT."""
    START = "start"
    """Start it again after a kill."""
    SLOW = "slow"
    """Let every step of a rank take longer."""
    OUTRUN = "outrun"
    """Let ranks write until their rings have overwritten what a dead sidecar did not ship."""


@dataclass(frozen=True, slots=True)
class Act:
    """One thing done to one part."""

    verb: Verb
    part: Part


@dataclass(frozen=True, slots=True)
class Pause:
    """Let time pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that may be told of a fault."""

    checks: tuple[str, ...] = ()
    """Each is one incident that names all struck ranks, and blames none: nobody saw what they did last."""
    reasons: tuple[str, ...] = ()
    """Reasons for which rows are INDETERMINATE; none: every row is CONSISTENT."""


Script = tuple[Act | Pause, ...]


class ProcessFault(Fault):
    """Strikes processes at the step the plan names."""

    INVARIANTS: ClassVar[tuple[str, ...]] = ("I17",)
    WHERE = Where.MIDDLE
    LEAST = Sizes(1, 2, 1)
    SCRIPT: ClassVar[Script] = ()
    OUTCOME: ClassVar = Outcome()

    @classmethod
    def part(cls) -> Part:
        """What is struck first."""
        return next(act.part for act in cls.SCRIPT if isinstance(act, Act))

    @classmethod
    def parts(cls) -> frozenset[Part]:
        """Everything that is struck."""
        return frozenset(act.part for act in cls.SCRIPT if isinstance(act, Act))

    def struck(self, sizes: Sizes) -> tuple[Rank, ...]:
        """Ranks that are struck, or whose records are; all of them where the collector is."""
        one = self.plan.rank or Rank(0, sizes.pp // 2, sizes.tp - 1)
        match self.part():
            case Part.RANK:
                return (one,)
            case Part.SIDECAR:
                return tuple(Rank(one.dp, one.pp, tp) for tp in range(sizes.tp))
            case Part.COLLECTOR:
                return tuple(
                    Rank(dp, pp, tp)
                    for dp in range(sizes.dp)
                    for pp in range(sizes.pp)
                    for tp in range(sizes.tp)
                )


class RankKilled(ProcessFault):
    """The others wait for it for ever; its ring stays."""

    NAME = "rank-killed"
    DESCRIPTION = "one rank's process is killed in the middle of the run"
    WEDGES = True
    SCRIPT = (Act(Verb.KILL, Part.RANK), Pause(45))
    OUTCOME = Outcome(("rank-silent", "stall"), ("rank_missing", "not_consumed"))


class RankStopped(ProcessFault):
    """A debugger, a frozen container, a swapping host: shorter than anybody's patience."""

    NAME = "rank-stopped"
    INVARIANTS = ()
    DESCRIPTION = "one rank's process is stopped for ten seconds and continued"
    SCRIPT = (Act(Verb.STOP, Part.RANK), Pause(10), Act(Verb.CONTINUE, Part.RANK))


class RankHung(ProcessFault):
    """The same, for longer than the others can be thought to be busy."""

    NAME = "rank-hung"
    DESCRIPTION = "one rank's process is stopped for a minute and continued"
    SCRIPT = (Act(Verb.STOP, Part.RANK), Pause(60), Act(Verb.CONTINUE, Part.RANK))
    OUTCOME = Outcome(("rank-silent", "stall"), ("rank_missing",))


class RankSlow(ProcessFault):
    """Skew is no divergence."""

    NAME = "rank-slow"
    INVARIANTS = ()
    DESCRIPTION = "one rank takes longer over every step, and its records come later than the others'"
    SCRIPT = (Act(Verb.SLOW, Part.RANK),)


class SidecarRestarted(ProcessFault):
    """The rings bridge the gap."""

    NAME = "sidecar-restarted"
    INVARIANTS = ()
    DESCRIPTION = "a node's sidecar is killed and started again ten seconds later"
    SCRIPT = (Act(Verb.KILL, Part.SIDECAR), Pause(10), Act(Verb.START, Part.SIDECAR))


class SidecarDead(ProcessFault):
    """Its ranks go on and are heard of no more; once it is back, they are compared again."""

    NAME = "sidecar-dead"
    DESCRIPTION = "a node's sidecar is killed and started again a minute later"
    SCRIPT = (Act(Verb.KILL, Part.SIDECAR), Pause(60), Act(Verb.START, Part.SIDECAR))
    OUTCOME = Outcome(("rank-silent",), ("rank_missing",))


class RingOverrun(ProcessFault):
    """What was overwritten cannot be compared, and accuses nobody."""

    NAME = "ring-overrun"
    INVARIANTS = ()
    DESCRIPTION = "a node's rings overwrite records before its sidecar has shipped them"
    SCRIPT = (
        Act(Verb.KILL, Part.SIDECAR),
        Pause(10),
        Act(Verb.OUTRUN, Part.SIDECAR),
        Act(Verb.START, Part.SIDECAR),
    )
    OUTCOME = Outcome((), ("gap",))


class CollectorRestarted(ProcessFault):
    """The journal has what was acknowledged; sidecars send the rest again."""

    NAME = "collector-restarted"
    INVARIANTS = ()
    DESCRIPTION = "the collector is killed and started again five seconds later"
    SCRIPT = (Act(Verb.KILL, Part.COLLECTOR), Pause(5), Act(Verb.START, Part.COLLECTOR))


FAULTS: Final[tuple[type[ProcessFault], ...]] = (
    RankKilled,
    RankStopped,
    RankHung,
    RankSlow,
    SidecarRestarted,
    SidecarDead,
    RingOverrun,
    CollectorRestarted,
)

PROCESS_REGISTRY: Final[dict[str, type[ProcessFault]]] = {fault.NAME: fault for fault in FAULTS}
"""By name. Apart from the faults of the engine, which a rank carries out itself."""
