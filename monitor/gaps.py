"""Gaps: the steps for which some of one rank's records are missing, as far as sequence numbers tell."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from stagewatch.agents.evidence import I64, Evidence

OPEN: Final = 1 << 62
"""End of a gap that no step has closed yet."""
GAPS_MAX: Final = 1024
AHEAD: Final = 2
"""Steps after a gap that may still lack events: on CUDA a step's inputs are published after its calls."""


class Gaps:
    """First and last step of each stretch, ascending. Past `GAPS_MAX` the oldest run together."""

    def __init__(self) -> None:
        self._stretches: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._stretches)

    def __len__(self) -> int:
        return len(self._stretches)

    def add(self, first: int, last: int) -> None:
        """Records of the steps from ``first`` to ``last`` may be missing."""
        own = self._stretches
        while own and first <= own[-1][1]:
            before = own.pop()
            first, last = min(first, before[0]), max(last, before[1])
        own.append((first, last))
        if len(own) > GAPS_MAX:
            second = own.pop(1)
            own[0] = (own[0][0], second[1])

    def close(self, step: int) -> None:
        """Inputs of ``step`` arrived: a gap that was open ends there, or little after."""
        if self._stretches and self._stretches[-1][1] == OPEN:
            self._stretches[-1] = (self._stretches[-1][0], step + AHEAD)

    def forget(self, before: int) -> None:
        """Drop stretches that end before a step."""
        if self._stretches and self._stretches[0][1] < before:
            self._stretches = [gap for gap in self._stretches if gap[1] >= before]

    def note(self, evidence: Evidence, seqs: I64, next_seq: int, newest: int, deferral_steps: int) -> None:
        """Find the holes in ``seqs``, the sequence numbers of ``evidence`` from ``next_seq`` on, and note their steps.

        ``newest`` is the step that had arrived before; a payload is recorded up to ``deferral_steps`` after its own.
        """
        before = np.concatenate([[max(next_seq, 0) - 1], seqs[:-1]])
        holes = np.flatnonzero(seqs - before > 1)
        if not len(holes):
            # The reader counted a loss that the numbers do not show: it may lie anywhere in here.
            holes = np.zeros(1, np.int64) if evidence.lost and len(seqs) else holes
        inputs = evidence.inputs
        for hole in holes.tolist():
            first, last = newest, OPEN
            if inputs is not None:
                older = int(np.searchsorted(inputs.seq, before[hole], side="right"))
                newer = int(np.searchsorted(inputs.seq, seqs[hole]))
                first = int(inputs.step[older - 1]) if older else newest
                last = int(inputs.step[newer]) + AHEAD if newer < len(inputs.step) else OPEN
            self.add(first - deferral_steps, last)
        if not len(seqs) or seqs[-1] + 1 < evidence.next_seq:
            first = newest if inputs is None else int(inputs.step[-1])
            self.add(first - deferral_steps, OPEN)
