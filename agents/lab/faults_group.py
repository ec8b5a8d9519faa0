"""Faults between ranks of a group, and of the scheduler above them."""

from typing import Final

import numpy as np

from stagewatch.agents.identity import Fingerprint, Rank, Sizes
from stagewatch.agents.lab.batch import InputBatch
from stagewatch.agents.lab.fault import Call, Fault, Where
from stagewatch.agents.lab.messages import I32, Bool
from stagewatch.agents.lab.scheduler import Scheduler
from stagewatch.agents.lab.stage import Block

_PP2: Final = Sizes(1, 2, 1)
_TP2: Final = Sizes(1, 1, 2)


class CadenceUnguarded(Fault):
    """vLLM with async scheduling off sets no spacing."""

    NAME = "cadence-unguarded"
    CASES = (5, 19)
    INVARIANTS = ("I11", "I3")
    DESCRIPTION = "a request decodes again before earlier stages have consumed its last token"
    WHERE = Where.SCHEDULER
    LEAST = _PP2

    def spacing(self, tick: int, pp: int) -> int:
        if tick < self.plan.from_step or self._spent(tick):
            return pp
        self.did(tick, None)
        return 1


class StaleOutputAfterPreemption(Fault):
    """What returns after a rollback is taken for the resumed request's."""

    NAME = "stale-output-after-preemption"
    CASES = (21,)
    INVARIANTS = ("I5", "I11")
    DESCRIPTION = "a result in flight when its request was preempted is counted after it resumed"
    WHERE = Where.SCHEDULER
    LEAST = _PP2
    NEEDS = ("preempt_probability",)

    def remember(self, scheduler: Scheduler, handles: I32) -> tuple[str, ...]:
        return tuple(scheduler.request_id_of(int(h)) or "" for h in handles)

    def redirect(self, scheduler: Scheduler, handles: I32, alive: Bool, ids: tuple[str, ...]) -> I32:
        found = super().redirect(scheduler, handles, alive, ids)
        step = scheduler.tick
        if step < self.plan.from_step or self._spent(step):
            return found
        running = {name: handle for handle, name in scheduler.running().items()}
        for row in np.flatnonzero(~alive):
            if ids[row] in running:
                found[row] = running[ids[row]]
                self.did(step, None, ids[row])
        return found


class BatchReordered(Fault):
    """Two ranks take the same rows in another order."""

    NAME = "batch-reordered"
    CASES = (33,)
    INVARIANTS = ("I9", "I6")
    DESCRIPTION = "one rank exchanges two rows of the batch"
    WHERE = Where.FIRST
    LEAST = _PP2

    def rows(self, block: Block, slots: I32) -> I32:
        ranks = self.strikes(block, block.step)
        order = block.order
        if ranks is None or slots.shape[1] < 2:
            return slots
        same = (order.scheduled[1:] == order.scheduled[:-1]) & (
            order.draft_count[1:] == order.draft_count[:-1]
        )
        if not same.any():
            return slots
        row = int(np.argmax(same))
        changed = slots.copy()
        for rank in np.flatnonzero(ranks):
            changed[rank, row], changed[rank, row + 1] = slots[rank, row + 1], slots[rank, row]
        struck = np.zeros(slots.shape, np.bool_)
        struck[ranks, row : row + 2] = True
        self.did_rows(block, block.step, order.handles, struck, list(block.ranks))
        return changed


class TpSamplesApart(Fault):
    """Each tensor-parallel rank samples for itself and near-ties fall differently."""

    NAME = "tp-samples-apart"
    CASES = (27, 28)
    INVARIANTS = ("I10", "I3")
    DESCRIPTION = "one tensor-parallel rank of the last stage samples another token"
    WHERE = Where.LAST_TP
    LEAST = _TP2

    def targets(self, block: Block, batch: InputBatch, targets: I32) -> I32:
        ranks = self.strikes(block, block.step)
        rows = np.flatnonzero(batch.mirror[0] + batch.scheduled >= batch.prefill_len[0])
        if ranks is None or not len(rows):
            return targets
        row = int(rows[0])
        struck = np.zeros(batch.mirror.shape, np.bool_)
        struck[ranks, row] = True
        self.did_rows(block, block.step, batch.handles, struck, list(block.ranks))
        changed = targets.copy()
        first = batch.row_end[row] - batch.draft_count[row] - 1
        changed[ranks[block.last], first] ^= 1
        return changed


class DrafterSkipped(Fault):
    """The drafter's "does it still fit" is decided rank by rank."""

    NAME = "drafter-skipped"
    CASES = (30,)
    INVARIANTS = ("I13", "I7", "I17")
    DESCRIPTION = "one tensor-parallel rank leaves out the drafter's pass, and with it its collective"
    WHERE = Where.LAST_TP
    WEDGES = True
    LEAST = _TP2
    LEAST_SPEC_TOKENS = 1
    SIMULATOR_ONLY = True

    def path(self, block: Block, spec_tokens: I32) -> I32:
        ranks = self.strikes(block, block.step)
        if ranks is None or not spec_tokens.any():
            return spec_tokens
        for index in np.flatnonzero(ranks):
            self.did(block.step, block.ranks[index])
        return np.where(ranks, 0, spec_tokens).astype(np.int32)

    def calls(self, block: Block, rank: int, calls: list[Call]) -> list[Call]:
        ranks = self.strikes(block, block.step)
        if ranks is None or not ranks[rank]:
            return calls
        return [call for call in calls if not (call.group == "tp" and call.op == DRAFTER_OP)]


DRAFTER_OP: Final = "all_reduce_drafter"
"""Name of the drafter's collective within the tensor-parallel group."""


class _CallFault(Fault):
    """A fault that changes one call of one rank; its group then waits for ever."""

    WEDGES = True
    SIMULATOR_ONLY = True

    def calls(self, block: Block, rank: int, calls: list[Call]) -> list[Call]:
        ranks = self.strikes(block, block.step)
        if ranks is None or not ranks[rank]:
            return calls
        changed = self.changed(block, calls)
        if changed != calls:
            self.did(block.step, block.ranks[rank])
        return changed

    def changed(self, block: Block, calls: list[Call]) -> list[Call]:
        """``calls`` as the struck rank makes them."""
        raise NotImplementedError


class WidthMismatch(_CallFault):
    """NCCL does not negotiate counts."""

    NAME = "width-mismatch"
    CASES = (3,)
    INVARIANTS = ("I7", "I17")
    DESCRIPTION = "the last stage broadcasts another number of token columns than the others expect"
    WHERE = Where.LAST
    LEAST = _PP2
    LEAST_SPEC_TOKENS = 1

    def changed(self, block: Block, calls: list[Call]) -> list[Call]:
        first = next((i for i, call in enumerate(calls) if call.group == "pp_broadcast"), None)
        if first is None or block.order.draft_count.any():
            return calls
        # Without drafts to verify there is one column to send; receivers of a fixed width expect K + 1.
        columns = block.config.spec_tokens + 1 if block.config.variable_width else 1
        return [
            *calls[:first],
            calls[first]._replace(numel=len(block.order.handles) * columns),
            *calls[first + 1 :],
        ]


class OpDropped(_CallFault):
    """A rank leaves out one operation of the broadcast."""

    NAME = "op-dropped"
    CASES = (10, 32)
    INVARIANTS = ("I7", "I17")
    DESCRIPTION = "one rank leaves out one broadcast of a step"
    WHERE = Where.FIRST
    LEAST = _PP2

    def changed(self, block: Block, calls: list[Call]) -> list[Call]:
        last = max((i for i, call in enumerate(calls) if call.group == "pp_broadcast"), default=None)
        return calls if last is None else [*calls[:last], *calls[last + 1 :]]


class OrderSwapped(_CallFault):
    """Receives posted early wait ahead of the point-to-point calls that would let the others go on."""

    NAME = "order-swapped"
    CASES = (11, 34)
    INVARIANTS = ("I7", "I17")
    DESCRIPTION = "one rank enters a step's broadcast before its point-to-point call"
    WHERE = Where.FIRST
    LEAST = _PP2

    def changed(self, block: Block, calls: list[Call]) -> list[Call]:
        early = [call for call in calls if call.group == "pp_broadcast"]
        return [*early, *(call for call in calls if call.group != "pp_broadcast")] if early else calls


class SizeMismatch(_CallFault):
    """All-gather sizes differ by one row."""

    NAME = "size-mismatch"
    CASES = (28, 34)
    INVARIANTS = ("I7", "I17")
    DESCRIPTION = "one tensor-parallel rank gathers one row fewer than its peers"
    WHERE = Where.LAST_TP
    LEAST = _TP2

    def changed(self, block: Block, calls: list[Call]) -> list[Call]:
        rows = len(block.order.handles)
        gather = next((i for i, call in enumerate(calls) if call.op == "all_gather"), None)
        if gather is None:
            return calls
        fewer = calls[gather]._replace(numel=calls[gather].numel // rows * (rows - 1))
        return [*calls[:gather], fewer, *calls[gather + 1 :]]


class DummySkipped(Fault):
    """An idle data-parallel replica must keep the others company."""

    NAME = "dummy-skipped"
    CASES = (31,)
    INVARIANTS = ("I7", "I17")
    DESCRIPTION = "an idle data-parallel replica leaves out its dummy batch and the collective in it"
    WHERE = Where.REPLICA
    WEDGES = True
    LEAST = Sizes(2, 1, 1)
    SIMULATOR_ONLY = True

    def skips_dummy(self, block: Block) -> bool:
        ranks = self.strikes(block, block.step + 1)
        if ranks is None:
            return False
        for index in np.flatnonzero(ranks):
            self.did(block.step + 1, block.ranks[index])
        return True


class DrafterLayoutDiffers(Fault):
    """Whether embeddings are tied is decided per rank at load."""

    NAME = "drafter-layout-differs"
    CASES = (29,)
    INVARIANTS = ("I13",)
    DESCRIPTION = "one tensor-parallel rank builds another drafter than its peers"
    WHERE = Where.LAST_TP
    LEAST = _TP2

    def fingerprints(
        self, rank: Rank, found: tuple[Fingerprint, ...], sizes: Sizes
    ) -> tuple[Fingerprint, ...]:
        own = Rank(0, sizes.pp - 1, sizes.tp - 1) if self.plan.rank is None else self.plan.rank
        if rank != own:
            return found
        self.did(0, rank)
        return tuple(replace_value(one, "drafter_layout", "embedding untied") for one in found)


def replace_value(one: Fingerprint, name: str, value: str) -> Fingerprint:
    """``one``, or ``name`` with another value."""
    return Fingerprint(name, value) if one.name == name else one


FAULTS: Final[tuple[type[Fault], ...]] = (
    CadenceUnguarded,
    StaleOutputAfterPreemption,
    BatchReordered,
    TpSamplesApart,
    DrafterSkipped,
    WidthMismatch,
    OpDropped,
    OrderSwapped,
    SizeMismatch,
    DummySkipped,
    DrafterLayoutDiffers,
)
