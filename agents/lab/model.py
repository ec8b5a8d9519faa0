"""The lab's model: a transformer of a few thousand weights, split over stages and tensor-parallel ranks.

Its output matrix is made so that each token has a usual successor, which the drafter knows; attention over the last
`WINDOW` positions makes the target stray from it in a share of contexts. So drafts are accepted for a while and then
rejected, as in earnest. Attention knows distances, not positions: a row that is fed the same block at later
and later positions answers the same, and its text repeats itself.

Double precision throughout: a batch's make-up changes the order of sums, and must not change a sampled token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.lab.batch import InputBatch
from stagewatch.agents.lab.integer_model import Vocabulary

DIM: Final = 32
HEADS: Final = 2
WINDOW: Final = 12
DTYPE: Final = torch.float64

Reduce = Callable[[Tensor], None]
"""Adds up, in place, the parts that tensor-parallel ranks hold."""
Gather = Callable[[Tensor], Tensor]
"""Joins, along the last axis, the slices that tensor-parallel ranks hold."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What determines the weights. ``layers`` is a multiple of the number of stages."""

    vocab_size: int
    layers: int
    seed: int
    slots: int
    length_max: int
    context: float
    """How much context counts against the token itself: 0 never strays from the usual successor."""


class StageModel:
    """The layers of one rank, with their KV caches."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary: Vocabulary,
        rank: Rank,
        sizes: Sizes,
        reduce: Reduce,
        gather: Gather,
    ) -> None:
        self.first = rank.pp == 0
        self.last = rank.pp == sizes.pp - 1
        self._length = config.length_max
        self._reduce, self._gather, self._tp = reduce, gather, sizes.tp
        # Every rank draws all weights and keeps its own, so that no split changes the model.
        draw = torch.Generator().manual_seed(config.seed)
        embedding = torch.randn(config.vocab_size, DIM, generator=draw, dtype=DTYPE)
        embedding *= DIM**0.5 / embedding.norm(dim=1, keepdim=True)
        per_stage = config.layers // sizes.pp
        heads = slice(rank.tp * HEADS // sizes.tp, (rank.tp + 1) * HEADS // sizes.tp)
        layers = [_Layer(draw, heads, config) for _ in range(config.layers)]
        self._layers = layers[rank.pp * per_stage : (rank.pp + 1) * per_stage]
        self._embedding = embedding
        # Column t of the output matrix answers to the tokens that t usually follows.
        likely = torch.from_numpy(vocabulary.likely[: config.vocab_size].astype(np.int64))
        output = torch.zeros(config.vocab_size, DIM, dtype=DTYPE).index_add_(0, likely, embedding)
        columns = slice(
            rank.tp * config.vocab_size // sizes.tp, (rank.tp + 1) * config.vocab_size // sizes.tp
        )
        self._output = output[columns].T.contiguous()

    def embed(self, batch: InputBatch) -> Tensor:
        """First stage: hidden state of the fed tokens, [tokens, DIM]. A token outside the vocabulary is fed as 0."""
        ids = torch.from_numpy(batch.input_ids[0].astype(np.int64))
        valid = (ids >= 0) & (ids < len(self._embedding))
        return self._embedding[torch.where(valid, ids, 0)]

    def forward(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """Hidden state after this stage's layers, [tokens, DIM]."""
        positions = np.minimum(batch.positions[0], self._length - 1).astype(np.int64)
        base = (batch.slots[0].astype(np.int64) * self._length)[batch.token_row]
        back = positions[:, None] - np.arange(WINDOW)
        seen = torch.from_numpy(base[:, None] + np.maximum(back, 0))
        unseen = torch.from_numpy(back < 0)
        cells = torch.from_numpy(base + positions)
        for layer in self._layers:
            hidden = hidden + layer.forward(hidden, cells, seen, unseen, self._reduce)
        return hidden

    def sample(self, hidden: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """Last stage: the greedy next token after each fed token, int32 [1, tokens]."""
        logits = self._gather(hidden @ self._output)
        return logits.argmax(dim=-1).to(torch.int32).numpy()[None, :]


class _Layer:
    """Attention over a window of the row's own cache, then a sine layer; of both this rank's part only.

    The sines make the change depend sharply on the token and what stood before it. It points to a random token
    therefore, not to the same one for as long as the window is much the same.
    """

    def __init__(self, draw: torch.Generator, part: slice, config: ModelConfig) -> None:
        size = DIM // HEADS
        weights = torch.randn(4, HEADS, DIM, size, generator=draw, dtype=DTYPE) / DIM**0.5
        units = torch.randn(3, HEADS, DIM, DIM, generator=draw, dtype=DTYPE) / DIM**0.5
        self._query, self._key, self._value, out = weights[:, part]
        self._out = out.transpose(1, 2)
        from_token, from_context, to_change = units[:, part]
        self._from_token = 2.0 * from_token
        self._from_context = 2.0 * from_context
        self._to_change = config.context * to_change
        cells = config.slots * config.length_max
        count = self._query.shape[0]
        self._keys = torch.zeros(count, cells, size, dtype=DTYPE)
        self._values = torch.zeros(count, cells, size, dtype=DTYPE)
        # Near tokens count more, whatever the position: answers depend on distances alone.
        self._decay = -0.5 * torch.arange(WINDOW, dtype=DTYPE)

    def forward(self, hidden: Tensor, cells: Tensor, seen: Tensor, unseen: Tensor, reduce: Reduce) -> Tensor:
        """What this layer adds to ``hidden``, summed over tensor-parallel ranks."""
        self._keys[:, cells] = hidden @ self._key
        self._values[:, cells] = hidden @ self._value
        scores = ((hidden @ self._query).unsqueeze(2) * self._keys[:, seen]).sum(-1) / 4 + self._decay
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        mixed = (weights.unsqueeze(-1) * self._values[:, seen]).sum(2)
        context = (mixed @ self._out).sum(0)
        reduce(context)
        active = torch.sin(hidden @ self._from_token + context @ self._from_context)
        change: Tensor = (active @ self._to_change).sum(0)
        reduce(change)
        return change
