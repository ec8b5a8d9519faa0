"""I1: the mask, None-ness included, must be the same on every rank: else one side waits for a broadcast."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from stagewatch.agents.record import I32, U8
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group


class MaskDisagreement:
    """Sender and receivers must agree on which rows a broadcast carries."""

    NAME: ClassVar = "mask-disagreement"
    COMPARES: ClassVar = "the engine's mask and whether it is None, between all ranks"
    EXCEPTIONS: ClassVar = "none"
    REMEDY: ClassVar = (
        "Ranks decide differently what to broadcast: rows land in the wrong place, or a rank waits for ever. The "
        "mask is computed from host state alone, so compare num_computed and prefill_len of that step by rank."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """One finding per step at which masks differ."""
        window = chunk.mask
        if window is None:
            return []
        steps = np.zeros(len(window.steps), np.bool_)
        for block in window.blocks[1:]:
            steps |= block.engine_none != window.blocks[0].engine_none
        rows = window.differing("engine")
        if rows is not None:
            steps |= np.isin(window.steps, window.row_steps[rows])
        return [
            Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=int(window.steps[at]),
                phase=Phase.MASK,
                text="ranks disagree on which rows are broadcast",
                remedy=self.REMEDY,
                ranks=group.numbers(window.indices),
                fields=("need_sampled_mask",),
                values=tuple(
                    Value(
                        group.number(index),
                        "need_sampled_mask",
                        _shown(block.engine, block.rows, block.engine_none, int(at)),
                    )
                    for index, block in zip(window.indices, window.blocks, strict=True)
                ),
                t_ns=min(int(block.t_ns[at]) for block in window.blocks),
            )
            for at in np.flatnonzero(steps)
        ]


def _shown(engine: U8, rows: I32, none: I32, at: int) -> str:
    if none[at]:
        return "None"
    start = int(rows[:at].sum())
    return "".join("T" if value else "F" for value in engine[start : start + int(rows[at])])
