"""Request states of one or several ranks: the tables behind the slots.

Every array has a leading axis over the ranks of the block (one in a process of its own, all of a pipeline in the
simulator), so that one numpy call serves them all. Ranks share nothing along it: each has its own
free list, and the same request may live in different slots.
"""

import numpy as np

from stagewatch.agents.lab.messages import I32, I64, NewRequest


class RequestStates:
    """Tables of shape [ranks, slots], and the free list and generations that guard them.

    ``flat`` index: rank * slots + slot, the index into a table's first two axes laid end to end.
    ``shuffle_seed`` makes every rank hand out slots in an order of its own, which an engine may.
    """

    def __init__(
        self,
        ranks: int,
        slots: int,
        handles: int,
        length_max: int,
        drafts: int,
        shuffle_seed: int | None = None,
    ) -> None:
        self.ranks = ranks
        self.slots = slots
        self.length_max = length_max
        self.generation: I32 = np.zeros((ranks, slots), np.int32)
        """Raised when a slot is released, so that an update meant for its last owner can be told."""
        self.computed: I32 = np.zeros((ranks, slots), np.int32)
        """The device's count of computed tokens."""
        self.prefill_len: I32 = np.zeros((ranks, slots), np.int32)
        self.cap: I32 = np.zeros((ranks, slots), np.int32)
        self.last_sampled: I32 = np.zeros((ranks, slots), np.int32)
        self.draft_tokens: I32 = np.zeros((ranks, slots, drafts), np.int32)
        self.tokens: I32 = np.zeros((ranks, slots, length_max), np.int32)
        """Tokens to prefill; defined up to ``prefill_len``."""
        self.slot_of: I32 = np.full((ranks, handles), -1, np.int32)
        """Slot of each handle."""
        self._rank_offset: I64 = (np.arange(ranks, dtype=np.int64) * slots)[:, None]
        self._free: I32 = np.tile(np.arange(slots, dtype=np.int32)[::-1], (ranks, 1))
        if shuffle_seed is not None:
            for rank in range(ranks):
                np.random.default_rng([shuffle_seed, rank]).shuffle(self._free[rank])
        self._free_count = slots

    def flat(self, slots: I32) -> I64:
        """Flat indices of ``slots``, shape [ranks, n]."""
        return slots + self._rank_offset

    def release(self, handles: I32) -> tuple[I32, I32]:
        """Free the slots of ``handles``; return them and the generations that ended, each [ranks, n]."""
        slots = self.slot_of[:, handles]
        flat = self.flat(slots)
        generations = self.generation.reshape(-1)[flat]
        self.generation.reshape(-1)[flat] += 1
        self.slot_of[:, handles] = -1
        count = len(handles)
        self._free[:, self._free_count : self._free_count + count] = slots
        self._free_count += count
        return slots, generations

    def add(self, requests: tuple[NewRequest, ...]) -> I32:
        """Give each of ``requests`` a slot on every rank and set its tables; return the slots, [ranks, requests]."""
        count = len(requests)
        slots = self._free[:, self._free_count - count : self._free_count][:, ::-1].copy()
        self._free_count -= count
        flat = self.flat(slots)
        self.slot_of[:, [one.handle for one in requests]] = slots
        self.computed.reshape(-1)[flat] = [one.computed for one in requests]
        self.prefill_len.reshape(-1)[flat] = [len(one.tokens) for one in requests]
        self.cap.reshape(-1)[flat] = [one.cap for one in requests]
        # The last owner's token and drafts must not become this request's first feed.
        self.last_sampled.reshape(-1)[flat] = [max(one.anchor, 0) for one in requests]
        self.draft_tokens.reshape(self.ranks * self.slots, -1)[flat] = 0
        tokens = self.tokens.reshape(-1, self.length_max)
        for number, one in enumerate(requests):
            tokens[flat[:, number], : len(one.tokens)] = one.tokens
        return slots
