"""Faults that leave all ranks agreed, so that comparing ranks finds nothing: controls, which must stay silent.

Each says by ``UNSEEN`` why nothing else shows it either; the docs of the checks repeat that.
"""

from typing import Final

import numpy as np

from stagewatch.agents.identity import Sizes
from stagewatch.agents.lab.batch import InputBatch
from stagewatch.agents.lab.fault import Fault, Where
from stagewatch.agents.lab.messages import I32
from stagewatch.agents.lab.stage import Block, Sampled


class DrafterUninitialised(Fault):
    """Acceptance collapses, and nothing else."""

    NAME = "drafter-uninitialised"
    CASES = (14,)
    DESCRIPTION = "the drafter proposes garbage; every rank has the same garbage"
    UNSEEN = "a draft is right or wrong, and drafts that are all wrong are only slow"
    LEAST_SPEC_TOKENS = 1

    def proposed(self, block: Block, batch: InputBatch, sampled: Sampled) -> None:
        if self.strikes(block, block.step) is not None and sampled.drafts.shape[2]:
            sampled.drafts[:, :, : batch.spec_tokens] = 8 + (batch.positions[0, -1] * 7) % 50
            self.did(block.step, None)


class StridedPrefillState(Fault):
    """Rows after the first of a multi-row prefill read a wrong state: outputs are wrong."""

    NAME = "strided-prefill-state"
    CASES = (16,)
    DESCRIPTION = "later rows of a step that prefills several read the first row's state; every rank alike"
    UNSEEN = "states are read inside the model's kernels, and all ranks are told what came of it"

    def targets(self, block: Block, batch: InputBatch, targets: I32) -> I32:
        rows = np.flatnonzero(batch.prefilling[0])[1:]
        if self.strikes(block, block.step) is None or not len(rows):
            return targets
        changed = targets.copy()
        changed[:, batch.row_end[rows] - 1] ^= 1
        for row in rows:
            self.did(block.step, None, block.request_ids[batch.handles[row]])
        return changed


class StateOfRow(Fault):
    """A recurrent state is committed under the row's number instead of its slot's: another request's is read."""

    NAME = "state-of-row"
    CASES = (15,)
    DESCRIPTION = (
        "a recurrent state is read by batch row instead of slot, and all ranks are told what came of it"
    )
    UNSEEN = "states are committed inside the model's kernels, and all ranks are told what came of it"

    def targets(self, block: Block, batch: InputBatch, targets: I32) -> I32:
        wrong = (batch.slots[block.last[0]] != np.arange(batch.rows)) & ~batch.prefilling[block.last[0]]
        if self.strikes(block, block.step) is None or not wrong.any():
            return targets
        changed = targets.copy()
        for row in np.flatnonzero(wrong):
            changed[:, batch.row_end[row] - batch.draft_count[row] - 1] ^= 1
            self.did(block.step, None, block.request_ids[batch.handles[row]])
        return changed


class GrammarStale(Fault):
    """The drafts that a bitmask was made for are not the drafts that are verified, and it lets anything through."""

    NAME = "grammar-stale"
    CASES = (18,)
    DESCRIPTION = (
        "a grammar's bitmask is made for the drafts of another step, so that tokens it forbids are sampled"
    )
    UNSEEN = "bitmasks carry no step, and all ranks are told what was sampled under them"
    LEAST_SPEC_TOKENS = 1

    def targets(self, block: Block, batch: InputBatch, targets: I32) -> I32:
        # Requests in even seats have a grammar; it forbids every other token.
        rows = np.flatnonzero((batch.handles % 2 == 0) & (batch.draft_count > 0))
        if self.strikes(block, block.step) is None or not len(rows):
            return targets
        changed = targets.copy()
        for row in rows:
            changed[:, batch.row_end[row] - 1] |= 1
            self.did(block.step, None, block.request_ids[batch.handles[row]])
        return changed


class DummyWritesStaleRows(Fault):
    """An idle replica's dummy batch writes KV through slots of requests that have left."""

    NAME = "dummy-writes-stale-rows"
    CASES = (25,)
    DESCRIPTION = (
        "an idle replica's dummy batch overwrites cached KV, and no draft of that replica is right again"
    )
    UNSEEN = "a dummy batch has no request, and where it writes KV is decided inside the model"
    WHERE = Where.REPLICA
    LEAST = Sizes(2, 1, 1)
    LEAST_SPEC_TOKENS = 1

    def skips_dummy(self, block: Block) -> bool:
        if self.strikes(block, block.step + 1) is not None:
            self.did(block.step + 1, None)
        return False

    def proposed(self, block: Block, batch: InputBatch, sampled: Sampled) -> None:
        since = min((one.step for one in self.injections), default=None)
        if since is not None and self.strikes(block, block.step) is not None and sampled.drafts.shape[2]:
            sampled.drafts[:, :, : batch.spec_tokens] ^= 1


FAULTS: Final[tuple[type[Fault], ...]] = (
    DrafterUninitialised,
    StridedPrefillState,
    StateOfRow,
    GrammarStale,
    DummyWritesStaleRows,
)
