"""Faults: what can be put into the lab's engine, and the hooks by which each one bends its semantics.

`Fault` is the sound engine: every hook hands back what it was given. A fault overrides the one or two hooks where
the engine it was seen in went wrong, and writes down every injection it made, which is what a test may expect
to be found. `faults` lists them all by name.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import numpy as np

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.identity import Fingerprint, Rank, Sizes

if TYPE_CHECKING:
    from stagewatch.agents.lab.batch import InputBatch
    from stagewatch.agents.lab.messages import I32, Bool, NewRequest
    from stagewatch.agents.lab.scheduler import Scheduler
    from stagewatch.agents.lab.stage import Block, Pending, Sampled


class FaultError(StagewatchError):
    """A fault was asked for that does not exist or cannot happen in this pipeline."""


class Where(StrEnum):
    """Ranks a fault strikes unless told otherwise."""

    FIRST = "first stage"
    EARLIER = "every stage but the last"
    LAST = "last stage"
    LAST_TP = "last stage, last tensor-parallel rank"
    MIDDLE = "middle stage, last tensor-parallel rank"
    ALL = "every rank"
    SCHEDULER = "the scheduler, hence every rank alike"
    REPLICA = "last data-parallel replica"


class Call(NamedTuple):
    """One collective or point-to-point call that a rank is about to make."""

    group: str
    op: str
    dtype: str
    numel: int
    group_size: int

    @property
    def what(self) -> str:
        """As it is recorded."""
        return f"{self.group} {self.op} {self.dtype}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which fault, on which rank, when."""

    name: str
    rank: Rank | None = None
    """None: wherever the fault strikes of itself."""
    from_step: int = 1
    """Ordinal of the first step that may be struck; for a scheduler's fault, the first iteration."""
    times: int | None = None
    """Steps struck at most; None: every one that can be."""


@dataclass(frozen=True, slots=True)
class Injection:
    """One thing a fault did: ground truth for tests."""

    step: int
    """Ordinal of the step struck: the one being run, or the next one where an update is consumed wrongly. Of a
    scheduler's fault: the iteration, as the scheduler counts no steps."""
    rank: Rank | None
    """None: the scheduler."""
    request_id: str
    """Empty where the whole step was struck."""


class Fault:
    """The sound engine. Hooks are called in the order of an iteration; arrays have the block's leading rank axis."""

    NAME: ClassVar = "none"
    CASES: ClassVar[tuple[int, ...]] = ()
    """Numbers of the public cases in which it was seen."""
    INVARIANTS: ClassVar[tuple[str, ...]] = ()
    """Invariants it breaks, the first one first; none: the ranks go on agreeing."""
    DESCRIPTION: ClassVar = "nothing wrong"
    UNSEEN: ClassVar[str] = ""
    """Why nothing that is recorded shows it, where it breaks no invariant that ranks could be compared by."""
    WHERE: ClassVar = Where.ALL
    WEDGES: ClassVar = False
    """Whether it ends in ranks that wait for each other for ever."""
    LEAST: ClassVar = Sizes(1, 1, 1)
    """Smallest pipeline in which it can happen."""
    LEAST_SPEC_TOKENS: ClassVar = 0
    SIMULATOR_ONLY: ClassVar = False
    """Whether it bends a group of ranks in a way that only one process for all of them can stage."""
    NEEDS: ClassVar[tuple[str, ...]] = ()
    """Fields of `SimConfig` or its workload that must be above zero for an opportunity to arise."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan: Final = plan or Plan("none")
        self.injections: list[Injection] = []
        self._steps_struck: set[int] = set()
        self._ranks: tuple[Block, Bool] | None = None

    def strikes(self, block: "Block", step: int) -> "Bool | None":
        """The block's ranks that are struck at ``step``, bool [ranks]; None if there are none."""
        plan = self.plan
        if step < plan.from_step or self._spent(step):
            return None
        if self._ranks is None or self._ranks[0] is not block:
            chosen = [
                plan.rank == rank if plan.rank else self._of_itself(rank, block) for rank in block.ranks
            ]
            self._ranks = block, np.array(chosen, np.bool_)
        chosen_ranks = self._ranks[1]
        return chosen_ranks if chosen_ranks.any() else None

    def _spent(self, step: int) -> bool:
        times = self.plan.times
        return times is not None and len(self._steps_struck) >= times and step not in self._steps_struck

    def _of_itself(self, rank: Rank, block: "Block") -> bool:
        sizes = block.config.sizes
        last = sizes.pp - 1
        match self.WHERE:
            case Where.ALL:
                return True
            case Where.SCHEDULER:
                return False
            case Where.REPLICA:
                return rank.dp == sizes.dp - 1
            case Where.FIRST:
                return rank.dp == 0 and rank.pp == 0
            case Where.EARLIER:
                return rank.dp == 0 and rank.pp < last
            case Where.LAST:
                return rank.dp == 0 and rank.pp == last
            case Where.LAST_TP:
                return rank.dp == 0 and rank.pp == last and rank.tp == sizes.tp - 1
            case Where.MIDDLE:
                return rank.dp == 0 and rank.pp == sizes.pp // 2 and rank.tp == sizes.tp - 1

    def did(self, step: int, rank: Rank | None, request_id: str = "") -> None:
        """Write down an injection."""
        self._steps_struck.add(step)
        self.injections.append(Injection(step, rank, request_id))

    def did_rows(
        self, block: "Block", step: int, handles: "I32", struck: "Bool", ranks: "list[Rank]"
    ) -> None:
        """Write down the rows ``struck`` [ranks, rows] of a batch or payload."""
        for rank, row in zip(*np.nonzero(struck), strict=True):
            self.did(step, ranks[rank], block.request_ids[handles[row]])

    # ---- hooks of the scheduler

    def spacing(self, tick: int, pp: int) -> int:
        """Iterations between two decode steps of a request."""
        return pp

    def remember(self, scheduler: "Scheduler", handles: "I32") -> tuple[str, ...]:
        """Ids to keep beside a step in flight, for `redirect`."""
        return ()

    def redirect(self, scheduler: "Scheduler", handles: "I32", alive: "Bool", ids: tuple[str, ...]) -> "I32":
        """Handles to which a returning step's rows belong; -1 for those whose request has left its seat."""
        return np.where(alive, handles, -1).astype(np.int32)

    # ---- hooks of a stage, before the model

    def consuming(self, block: "Block", pending: "Pending", applied: "Bool") -> "Bool":
        """An update is about to be consumed; may change it, and which rows are written."""
        return applied

    def rejections(self, block: "Block", applied: "Bool", num_rejected: "I32") -> "I32":
        """Rejected drafts that earlier stages take off their device count, [earlier ranks, rows]."""
        return num_rejected

    def last_tokens(self, block: "Block", applied: "Bool", sampled: "Sampled", last: "I32") -> "I32":
        """Last sampled tokens to write, one per applied row of the earlier stages, row-major."""
        return last

    def adding(self, block: "Block") -> None:
        """Requests are about to be given slots."""

    def added(self, block: "Block", request: "NewRequest", slots: "I32") -> None:
        """``request`` has been written to ``slots`` [ranks]."""

    def mirror(self, block: "Block", handles: "I32", mirror: "I32") -> "I32":
        """The host's optimistic counts as each rank holds them, [ranks, rows]."""
        return mirror

    def rows(self, block: "Block", slots: "I32") -> "I32":
        """Slots of the batch's rows as each rank orders them, [ranks, rows]."""
        return slots

    def mask(self, block: "Block", batch: "InputBatch", cap: "I32", mask: "Bool") -> "Bool":
        """The broadcast mask, [ranks, rows]."""
        return mask

    def path(self, block: "Block", spec_tokens: "I32") -> "I32":
        """Draft tokens that each rank plans to propose, [ranks]."""
        return spec_tokens

    # ---- hooks of a stage, after the model

    def targets(self, block: "Block", batch: "InputBatch", targets: "I32") -> "I32":
        """Sampled tokens of the last stage's ranks, [last ranks, tokens]."""
        return targets

    def proposed(self, block: "Block", batch: "InputBatch", sampled: "Sampled") -> None:
        """The last stage has proposed; may change ``sampled`` before it is kept or sent."""

    def rejections_kept(self, block: "Block", num_rejected: "I32") -> "I32":
        """Rejected drafts that the last stage takes off its own device count."""
        return num_rejected

    def relays(self, block: "Block") -> bool:
        """Whether the current step's draft block is broadcast at all."""
        return True

    def received(self, block: "Block", pending: "Pending") -> None:
        """Earlier stages hold ``pending``; may change it before it is recorded."""

    def calls(self, block: "Block", rank: int, calls: list[Call]) -> list[Call]:
        """Calls the block's rank number ``rank`` is about to make. A change leaves the group waiting."""
        return calls

    def skips_dummy(self, block: "Block") -> bool:
        """Whether an idle data-parallel replica leaves out the batch that keeps the others company."""
        return False

    # ---- configuration

    def fingerprints(
        self, rank: Rank, found: tuple[Fingerprint, ...], sizes: Sizes
    ) -> tuple[Fingerprint, ...]:
        """Configuration fingerprints a rank reports when it is armed."""
        return found
