"""Faults of what a stage holds: the mask, the payload and its consumption, slots, counts."""

from typing import Final

import numpy as np

from stagewatch.agents import mask as masks
from stagewatch.agents.identity import Sizes
from stagewatch.agents.lab.batch import InputBatch
from stagewatch.agents.lab.fault import Fault, Plan, Where
from stagewatch.agents.lab.messages import I32, Bool, NewRequest
from stagewatch.agents.lab.stage import Block, Pending, Sampled

_PP2: Final = Sizes(1, 2, 1)


class StageFault(Fault):
    """A fault that strikes some of the earlier stages' rows at consumption."""

    LEAST = _PP2

    def struck_rows(self, block: Block, rows: Bool) -> Bool | None:
        """``rows`` [earlier ranks, rows] of the struck ranks, at the step about to run; None if there are none."""
        ranks = self.strikes(block, block.step + 1)
        if ranks is None:
            return None
        struck: Bool = rows & ranks[block.earlier][:, None]
        return struck if struck.any() else None

    def note(self, block: Block, handles: I32, struck: Bool) -> None:
        """Write down rows struck at consumption."""
        ranks = [block.ranks[i] for i in block.earlier]
        self.did_rows(block, block.step + 1, handles, struck, ranks)


class OldMask(Fault):
    """The fault stagewatch was founded on."""

    NAME = "old-mask"
    CASES = (1,)
    INVARIANTS = ("I2", "I3", "I4", "I5")
    DESCRIPTION = "rows predicted to finish are left out of the broadcast while they go on decoding"
    LEAST = _PP2

    def mask(self, block: Block, batch: InputBatch, cap: I32, mask: Bool) -> Bool:
        ranks = self.strikes(block, block.step)
        if ranks is None:
            return mask
        scheduled = np.broadcast_to(batch.scheduled, cap.shape)
        columns = (batch.mirror.ravel(), scheduled.ravel(), batch.prefill_len.ravel(), cap.ravel())
        found = masks.faulty_mask(*columns)
        faulty = np.zeros(mask.shape, np.bool_) if found is None else found.reshape(mask.shape)
        struck = ranks[:, None] & mask & ~faulty
        if struck.any():
            self.did_rows(block, block.step, batch.handles, struck, list(block.ranks))
        return np.where(ranks[:, None], faulty, mask)


class DraftsNotRelayed(Fault):
    """Natural in vLLM up to 0.29 where PP x spec is let boot."""

    NAME = "drafts-not-relayed"
    CASES = (2,)
    INVARIANTS = ("I4", "I6")
    DESCRIPTION = "draft blocks never leave the last stage; earlier stages feed zeros or an old block"
    WHERE = Where.EARLIER
    LEAST = _PP2
    LEAST_SPEC_TOKENS = 1

    def relays(self, block: Block) -> bool:
        plan = self.plan
        if plan.rank is not None or block.step < plan.from_step or self._spent(block.step):
            return True
        self.did(block.step, None)
        return False

    def received(self, block: Block, pending: Pending) -> None:
        ranks = self.strikes(block, pending.step) if self.plan.rank is not None else None
        if ranks is None or not pending.payload.drafts.shape[2]:
            return
        struck = ranks[block.earlier]
        pending.payload.drafts[struck] = 0
        rows = pending.mask & struck[:, None]
        self.did_rows(block, pending.step, pending.handles, rows, [block.ranks[i] for i in block.earlier])


class RejectionNotSubtracted(StageFault):
    """Positions run ahead of the truth after each rejection."""

    NAME = "rejection-not-subtracted"
    CASES = (7,)
    INVARIANTS = ("I5", "I6")
    DESCRIPTION = "an earlier stage keeps counting rejected drafts as computed"
    WHERE = Where.FIRST
    LEAST_SPEC_TOKENS = 1
    _now: Bool | None = None

    def consuming(self, block: Block, pending: Pending, applied: Bool) -> Bool:
        self._now = self.struck_rows(block, applied & (pending.payload.num_rejected > 0))
        if self._now is not None:
            self.note(block, pending.handles, self._now)
        return applied

    def rejections(self, block: Block, applied: Bool, num_rejected: I32) -> I32:
        return num_rejected if self._now is None else np.where(self._now, 0, num_rejected)


class RollbackBroken(Fault):
    """The last stage itself builds on rejected drafts."""

    NAME = "rollback-broken"
    CASES = (8,)
    INVARIANTS = ("I5", "I6")
    DESCRIPTION = "the last stage does not roll back over rejected drafts"
    WHERE = Where.LAST
    LEAST = _PP2
    LEAST_SPEC_TOKENS = 1

    def rejections_kept(self, block: Block, num_rejected: I32) -> I32:
        ranks = self.strikes(block, block.step)
        if ranks is None or block.batch is None:
            return num_rejected
        struck = ranks[block.last][:, None] & (num_rejected > 0)
        if struck.any():
            self.did_rows(
                block, block.step, block.batch.handles, struck, [block.ranks[i] for i in block.last]
            )
        return np.where(struck, 0, num_rejected)


class PayloadAltered(StageFault):
    """Memory of the receive changes while it waits."""

    NAME = "payload-altered"
    CASES = (13,)
    INVARIANTS = ("I15", "I3")
    DESCRIPTION = "a sampled token changes between receive and consume"
    WHERE = Where.FIRST

    def consuming(self, block: Block, pending: Pending, applied: Bool) -> Bool:
        struck = self.struck_rows(block, applied)
        if struck is not None:
            rank, row = np.nonzero(struck)
            sampled = pending.sampled = pending.payload.copy()
            column = np.clip(sampled.num_sampled[rank, row], 1, sampled.tokens.shape[2]) - 1
            sampled.tokens[rank, row, column] ^= 1
            self.note(block, pending.handles, struck)
        return applied


class BufferOverwritten(StageFault):
    """Receive buffers are handed out again before they are consumed."""

    NAME = "buffer-overwritten"
    CASES = (13,)
    INVARIANTS = ("I15", "I16")
    DESCRIPTION = "a receive buffer is overwritten before it is consumed: counts become garbage"
    WHERE = Where.FIRST

    def consuming(self, block: Block, pending: Pending, applied: Bool) -> Bool:
        struck = self.struck_rows(block, applied)
        if struck is not None:
            pending.sampled = pending.payload.copy()
            pending.payload.num_sampled[struck] = 1 << 20
            pending.payload.tokens[struck] = 0x5A5A5A5A
            self.note(block, pending.handles, struck)
        return applied


class StaleSlotWrite(StageFault):
    """The generation check is missing."""

    NAME = "stale-slot-write"
    CASES = (9,)
    INVARIANTS = ("I8", "I3", "I5")
    DESCRIPTION = "an update for a released slot is written to its next owner"
    WHERE = Where.FIRST
    NEEDS = ("abort_probability",)

    def consuming(self, block: Block, pending: Pending, applied: Bool) -> Bool:
        struck = self.struck_rows(block, pending.mask & ~applied)
        if struck is None:
            return applied
        for position, row in zip(*np.nonzero(struck), strict=True):
            index = block.earlier[position]
            owner = np.flatnonzero(block.states.slot_of[index] == pending.slots[position, row])
            name = block.request_ids[owner[0]] if len(owner) else ""
            self.did(block.step + 1, block.ranks[index], name)
        return applied | struck


class FirstColumnOnly(Fault):
    """One token per row is all the receiver's contract knows."""

    NAME = "first-column-only"
    CASES = (4,)
    INVARIANTS = ("I15", "I3", "I5")
    DESCRIPTION = "earlier stages take only the first sampled token of a row"
    WHERE = Where.EARLIER
    LEAST = _PP2
    LEAST_SPEC_TOKENS = 1

    def received(self, block: Block, pending: Pending) -> None:
        ranks = self.strikes(block, pending.step)
        sampled = pending.payload
        if ranks is None:
            return
        struck = ranks[block.earlier][:, None] & (sampled.num_sampled > 1) & pending.mask
        if struck.any():
            sampled.num_rejected[struck] += sampled.num_sampled[struck] - 1
            sampled.num_sampled[struck] = 1
            self.did_rows(
                block, pending.step, pending.handles, struck, [block.ranks[i] for i in block.earlier]
            )


class TokensAtWrongOffset(StageFault):
    """Tokens are lost by being written where nobody looks."""

    NAME = "tokens-at-wrong-offset"
    CASES = (22,)
    INVARIANTS = ("I3", "I6")
    DESCRIPTION = "an earlier stage takes the first accepted token for the last"
    WHERE = Where.FIRST
    LEAST_SPEC_TOKENS = 1
    _now: Bool | None = None

    def consuming(self, block: Block, pending: Pending, applied: Bool) -> Bool:
        self._now = self.struck_rows(block, applied & (pending.payload.num_sampled > 1))
        if self._now is not None:
            self.note(block, pending.handles, self._now)
        return applied

    def last_tokens(self, block: Block, applied: Bool, sampled: Sampled, last: I32) -> I32:
        if self._now is None:
            return last
        return np.where(self._now[applied], sampled.tokens[applied][:, 0], last)


class PlaceholderNotOverwritten(StageFault):
    """A -1 that stands for "to be filled in" is fed."""

    NAME = "placeholder-not-overwritten"
    CASES = (17,)
    INVARIANTS = ("I4", "I16")
    DESCRIPTION = "a row's draft placeholders stay -1 and reach the embedding"
    WHERE = Where.FIRST
    LEAST_SPEC_TOKENS = 1

    def consuming(self, block: Block, pending: Pending, applied: Bool) -> Bool:
        struck = self.struck_rows(block, applied) if pending.payload.drafts.shape[2] else None
        if struck is not None:
            pending.sampled = pending.payload.copy()
            pending.payload.drafts[struck] = -1
            self.note(block, pending.handles, struck)
        return applied


class MirrorInflates(StageFault):
    """The host's count on earlier stages is never trimmed."""

    NAME = "mirror-inflates"
    CASES = (6,)
    INVARIANTS = ("I5", "I1")
    DESCRIPTION = "an earlier stage's host count is not corrected for rejected drafts and grows at every step"
    WHERE = Where.FIRST
    LEAST_SPEC_TOKENS = 1

    def __init__(self, plan: Plan | None = None) -> None:
        super().__init__(plan)
        self._excess: I32 | None = None

    def consuming(self, block: Block, pending: Pending, applied: Bool) -> Bool:
        struck = self.struck_rows(block, applied & (pending.payload.num_rejected > 0))
        if struck is not None:
            excess = self._excess_of(block)
            position, row = np.nonzero(struck)
            added = pending.payload.num_rejected[position, row]
            excess[block.earlier[position], pending.handles[row]] += added
            self.note(block, pending.handles, struck)
        return applied

    def added(self, block: Block, request: NewRequest, slots: I32) -> None:
        self._excess_of(block)[:, request.handle] = 0

    def mirror(self, block: Block, handles: I32, mirror: I32) -> I32:
        return (mirror + self._excess_of(block)[:, handles]).astype(np.int32)

    def _excess_of(self, block: Block) -> I32:
        if self._excess is None:
            self._excess = np.zeros((len(block.ranks), block.config.handles), np.int32)
        return self._excess


class MaskDiffers(Fault):
    """A rank computes its mask from a count of its own."""

    NAME = "mask-differs"
    CASES = (12,)
    INVARIANTS = ("I1", "I3")
    DESCRIPTION = "one rank's mask lacks a row that the others have"
    WHERE = Where.FIRST
    LEAST = _PP2

    def mask(self, block: Block, batch: InputBatch, cap: I32, mask: Bool) -> Bool:
        ranks = self.strikes(block, block.step)
        # With one row only the rank would broadcast nothing and the others wait: another fault.
        if ranks is None or mask.sum(axis=1).min() < 2:
            return mask
        row = int(np.argmax(mask.all(axis=0)))
        struck = np.zeros(mask.shape, np.bool_)
        struck[ranks, row] = True
        self.did_rows(block, block.step, batch.handles, struck, list(block.ranks))
        return mask & ~struck


class AllChunkBroadcast(Fault):
    """Both sides must skip identically."""

    NAME = "all-chunk-broadcast"
    CASES = (23,)
    INVARIANTS = ("I1", "I7", "I17")
    DESCRIPTION = "the last stage broadcasts a batch of prefill chunks that the others skip"
    WHERE = Where.LAST
    WEDGES = True
    LEAST = _PP2

    def mask(self, block: Block, batch: InputBatch, cap: I32, mask: Bool) -> Bool:
        ranks = self.strikes(block, block.step)
        if ranks is None or mask.any():
            return mask
        for index in np.flatnonzero(ranks):
            self.did(block.step, block.ranks[index])
        return mask | ranks[:, None]


class StaleAnchor(Fault):
    """The first decode of a request that was prefilled elsewhere feeds the last owner's token."""

    NAME = "stale-anchor"
    CASES = (20,)
    INVARIANTS = ("I3", "I8")
    DESCRIPTION = "a reused slot's last sampled token belongs to its last owner"
    WHERE = Where.FIRST
    LEAST = _PP2
    NEEDS = ("remote_probability",)

    def adding(self, block: Block) -> None:
        self._before = block.states.last_sampled.copy()

    def added(self, block: Block, request: NewRequest, slots: I32) -> None:
        ranks = self.strikes(block, block.step + 1)
        if ranks is None or request.anchor < 0:
            return
        for index in np.flatnonzero(ranks):
            if self._before[index, slots[index]] != request.anchor:
                block.states.last_sampled[index, slots[index]] = self._before[index, slots[index]]
                self.did(block.step + 1, block.ranks[index], request.request_id)


class HitTokensDisagree(Fault):
    """Caches are each rank's own."""

    NAME = "hit-tokens-disagree"
    CASES = (26,)
    INVARIANTS = ("I5", "I6")
    DESCRIPTION = "one rank finds fewer prompt tokens in its prefix cache than the others"
    WHERE = Where.FIRST
    LEAST = _PP2
    NEEDS = ("cached_probability",)

    def added(self, block: Block, request: NewRequest, slots: I32) -> None:
        ranks = self.strikes(block, block.step + 1)
        if ranks is None or not request.computed or request.anchor >= 0:
            return
        for index in np.flatnonzero(ranks):
            block.states.computed[index, slots[index]] = request.computed - 1
            self.did(block.step + 1, block.ranks[index], request.request_id)


FAULTS: Final[tuple[type[Fault], ...]] = (
    OldMask,
    DraftsNotRelayed,
    RejectionNotSubtracted,
    PayloadAltered,
    StaleSlotWrite,
    RollbackBroken,
    BufferOverwritten,
    FirstColumnOnly,
    TokensAtWrongOffset,
    PlaceholderNotOverwritten,
    MirrorInflates,
    MaskDiffers,
    AllChunkBroadcast,
    StaleAnchor,
    HitTokensDisagree,
)
