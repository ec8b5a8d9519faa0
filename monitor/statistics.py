"""Symptoms as statistics: acceptance and repetition. Context beside verdicts, never a trigger.

Acceptance collapses where every rank agrees (an uninitialised drafter) and looks normal where they do not.
"""

import numpy as np

from stagewatch.monitor.history import Links
from stagewatch.monitor.windows import PayloadWindow


class Statistics:
    """Counts over all steps of a group, from what the last stage sent."""

    def __init__(self) -> None:
        self.accepted = 0
        self.rejected = 0
        self.sampled = 0
        self.repeated = 0

    def add(self, sent: PayloadWindow | None, links: Links | None) -> None:
        """Count a chunk's payloads and, where two steps of a request are on record, their repetitions."""
        if sent is not None:
            block = sent.blocks[0]
            sampled = block.num_sampled > 0
            self.sampled += int(sampled.sum())
            self.accepted += int((block.num_sampled[sampled] - 1).sum())
            self.rejected += int(block.num_rejected[sampled].sum())
        if links is not None:
            self.repeated += int(np.count_nonzero(links.repeats))
