"""The simulator's model: integers in place of tensors, fast and exact, and as sensitive as a transformer.

A token's state is one 32-bit number: the token itself in the low bits, a hash of its context above them. Each layer
stores the state under (slot, position), as a KV cache does, and mixes in what it finds at the position before. So a
stale token, a wrong position or a wrong slot on any stage changes what the last stage samples, as it would in earnest.
Only relative positions count: a row that is fed the same block again answers the same again.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.lab.batch import InputBatch
from stagewatch.agents.lab.messages import I32, I64, NewRequest
from stagewatch.agents.lab.stage import Block
from stagewatch.agents.lab.workload import FIRST_TOKEN

U32 = NDArray[np.uint32]

TOKEN_BITS = 12
VOCAB_SIZE_MAX = 1 << TOKEN_BITS
_TOKEN = np.uint32(VOCAB_SIZE_MAX - 1)
_SHIFT = np.uint32(TOKEN_BITS)
_MIX_A = np.uint32(0x9E3779B1)
_MIX_B = np.uint32(0x85EBCA6B)
_STOP_ONE_IN = 512


class Vocabulary:
    """What follows what: the tables that target and drafter share.

    ``likely`` [vocab] is the usual next token; ``chain`` [vocab, K] its repeated application, which the drafter
    proposes; the target strays from it in ``strays_of_16`` of sixteen contexts.
    """

    def __init__(
        self, size: int, drafts: int, seed: int, *, strays_of_16: int = 4, stops: bool = True
    ) -> None:
        if not FIRST_TOKEN + 8 <= size <= VOCAB_SIZE_MAX:
            raise ValueError(f"vocabulary of {size} tokens is outside {FIRST_TOKEN + 8} to {VOCAB_SIZE_MAX}")
        rng = np.random.default_rng([seed, 0x70C])
        self.size = size
        self.likely: I32 = rng.integers(FIRST_TOKEN, size, VOCAB_SIZE_MAX, dtype=np.int32)
        # One long cycle through the vocabulary: a sound text does not repeat itself, so a repeating one stands out.
        cycle = rng.permutation(np.arange(FIRST_TOKEN, size, dtype=np.int32))
        self.likely[cycle] = np.roll(cycle, 1)
        self.chain: I32 = np.zeros((VOCAB_SIZE_MAX, drafts), np.int32)
        following = self.likely
        for position in range(drafts):
            self.chain[:, position] = following
            following = self.likely[following]
        self._strays_of_16 = strays_of_16
        self._stops = stops

    def targets(self, state: U32) -> I32:
        """Next tokens of final ``state``, int32 of its shape."""
        context = state >> _SHIFT
        stray = FIRST_TOKEN + (context >> np.uint32(4)) % np.uint32(self.size - FIRST_TOKEN)
        follows = (context & np.uint32(15)) >= self._strays_of_16
        found = np.where(follows, self.likely.take(state & _TOKEN), stray.astype(np.int32))
        if self._stops:
            found[context & np.uint32(_STOP_ONE_IN - 1) == 0] = 1
        return found


class IntegerModel:
    """All layers of one pipeline; rank (pp, tp) holds ``layers / pp`` of them."""

    def __init__(self, block: Block, vocabulary: Vocabulary, layers: int) -> None:
        sizes = block.config.sizes
        if layers % sizes.pp:
            raise ValueError(f"{layers} layers do not divide into {sizes.pp} stages")
        self._vocabulary = vocabulary
        self._block = block
        self._length = block.config.length_max
        self._stages: list[I64] = [
            np.array([i for i, rank in enumerate(block.ranks) if rank.pp == pp], np.int64)
            for pp in range(sizes.pp)
        ]
        cells = len(block.ranks) * block.config.slots * self._length
        self._cache = [np.zeros(cells, np.uint32) for _ in range(layers // sizes.pp)]
        self._contiguous = all(np.all(np.diff(stage) == 1) for stage in self._stages)

    def forward(self, batch: InputBatch) -> I32:
        """Next token after each fed token, on each rank of the last stage: int32 [last ranks, tokens]."""
        base = batch.flat * self._length
        return self._run(batch.input_ids, batch.positions, base.take(batch.token_row, axis=1))

    def load_prefixes(self, requests: Sequence[NewRequest]) -> None:
        """Fill the caches for tokens of ``requests`` that count as computed when they start."""
        cached = [request for request in requests if request.computed]
        if not cached:
            return
        block = self._block
        slots = block.states.slot_of[:, [request.handle for request in cached]]
        counts = [request.computed for request in cached]
        ids = np.concatenate([request.tokens[: request.computed] for request in cached])
        positions = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        base = (block.states.flat(slots) * self._length).repeat(counts, axis=1)
        shape = len(block.ranks), len(ids)
        self._run(np.broadcast_to(ids, shape), np.broadcast_to(positions, shape), base)

    def _run(self, ids: I32, positions: I32, base: I64) -> I32:
        # A fault can carry a row past the longest request; the cache of a real engine has no such cell either.
        cells = base + np.minimum(positions, self._length - 1)
        first = positions == 0
        cells_before = np.maximum(cells - 1, 0)
        state = ids[self._stages[0]].astype(np.uint32) & _TOKEN
        for stage in self._stages:
            own = slice(int(stage[0]), int(stage[-1]) + 1) if self._contiguous else stage
            for cache in self._cache:
                cache[cells[own]] = state
                before = cache.take(cells_before[own])
                before[first[own]] = _MIX_B
                state = self._mix(state, before)
        return self._vocabulary.targets(state)

    @staticmethod
    def _mix(state: U32, before: U32) -> U32:
        mixed = (state ^ (before * _MIX_A)) * _MIX_B
        mixed ^= mixed >> np.uint32(15)
        mixed = (mixed & ~_TOKEN) | (state & _TOKEN)
        if len(mixed) > 1 and (mixed[1:] != mixed[0]).any():
            # Tensor-parallel ranks add their parts up: when one is wrong, all are, in the same way.
            mixed = np.broadcast_to(
                mixed[0] + (mixed - mixed[0]).sum(axis=0, dtype=np.uint32), mixed.shape
            ).copy()
        return mixed
