"""What every row needs of its request's last step, as columns: found for a whole window at once."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, InputsBlock
from stagewatch.agents.record import U64
from stagewatch.monitor.windows import InputsWindow, PayloadWindow, lives_of

LINK_STEPS: Final = 64
"""How far back a row's last step is looked for: far more than pp_size, the usual distance."""
UNKNOWN: Final = -1
SENT_COLUMNS: Final = ("num_sampled", "num_rejected", "tokens_digest", "draft_digest")


@dataclass(frozen=True, slots=True)
class Links:
    """A window's rows beside their request's last step. Columns have one entry per linked row."""

    row: I64
    """Row of the window."""
    step: I64
    """Ordinal of the last step."""
    tick: I64
    computed: I64
    """Count of computed tokens then; UNKNOWN where ranks differed."""
    scheduled: I64
    samples: NDArray[np.bool_]
    """Whether the last step may have sampled."""
    sampled: I64
    """Tokens that the last stage sent of it; UNKNOWN where that is not on record or its TP ranks differ."""
    rejected: I64
    repeats: NDArray[np.bool_]
    """Whether the last step yielded the same tokens as the one before it."""
    complete: NDArray[np.bool_]
    """Whether every step in between is on record, so that the last step seen is the last step run."""


class Rows:
    """Columns over the rows of recent steps, in the order of steps."""

    COLUMNS: Final = (
        "key",
        "step",
        "tick",
        "computed",
        "scheduled",
        "samples",
        "sampled",
        "rejected",
        "digest",
        "prior",
    )

    def __init__(self) -> None:
        self.key: U64 = np.zeros(0, np.uint64)
        self.step: I64 = np.zeros(0, np.int64)
        self.tick: I64 = np.zeros(0, np.int64)
        self.computed: I64 = np.zeros(0, np.int64)
        self.scheduled: I64 = np.zeros(0, np.int64)
        self.samples: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.sampled: I64 = np.zeros(0, np.int64)
        self.rejected: I64 = np.zeros(0, np.int64)
        self.digest: U64 = np.zeros(0, np.uint64)
        self.prior: U64 = np.zeros(0, np.uint64)
        """Of the request's step before."""

    def add(self, window: InputsWindow) -> None:
        """Take the rows of newer steps."""
        block = window.blocks[-1]
        rows = len(block.request)
        unequal = window.differing("computed")
        computed = block.computed.astype(np.int64)
        unknown = np.full(rows, UNKNOWN, np.int64)
        new = {
            "key": keys_of(block),
            "step": window.row_steps,
            "tick": np.repeat(block.tick, block.rows),
            "computed": computed if unequal is None else np.where(unequal, UNKNOWN, computed),
            "scheduled": block.scheduled.astype(np.int64),
            "samples": block.mirror.astype(np.int64) + block.scheduled >= block.prefill_len,
            "sampled": unknown,
            "rejected": unknown,
            "digest": np.zeros(rows, np.uint64),
            "prior": np.zeros(rows, np.uint64),
        }
        for name in self.COLUMNS:
            setattr(self, name, np.concatenate([getattr(self, name), new[name]]))

    def note_sent(self, window: PayloadWindow) -> None:
        """Note what the last stage sent for rows that are kept."""
        mine, theirs = np.isin(self.step, window.steps), np.isin(window.row_steps, self.step)
        if not np.array_equal(self.step[mine], window.row_steps[theirs]):
            return  # inputs and payload of a step differ in rows: nothing can be matched by place
        agreed = np.ones(len(theirs), np.bool_)
        for column in SENT_COLUMNS:
            unequal = window.differing(column)
            if unequal is not None:
                agreed &= ~unequal
        block = window.blocks[0]
        self.sampled[mine] = np.where(agreed, block.num_sampled, UNKNOWN)[theirs]
        self.rejected[mine] = np.where(agreed, block.num_rejected, UNKNOWN)[theirs]
        self.digest[mine] = block.tokens_digest[theirs]

    def forget(self, upto: int) -> None:
        """Drop the rows of steps up to this one."""
        first = int(np.searchsorted(self.step, upto, side="right"))
        if first:
            for name in self.COLUMNS:
                setattr(self, name, getattr(self, name)[first:])

    def link(self, first: int) -> Links:
        """Each row from place ``first`` on beside the same life's row before it."""
        rows = self
        order = np.argsort(rows.key, kind="stable")
        keys = rows.key[order]
        same = keys[1:] == keys[:-1]
        before, after = order[:-1][same], order[1:][same]
        new = after >= first
        near = rows.step[after] - rows.step[before] <= LINK_STEPS
        before, after = before[new & near], after[new & near]
        rows.prior[after] = rows.digest[before]
        steps = np.unique(rows.step)
        apart = np.searchsorted(steps, rows.step[after]) - np.searchsorted(steps, rows.step[before])
        return Links(
            row=after - first,
            step=rows.step[before],
            tick=rows.tick[before],
            computed=rows.computed[before],
            scheduled=rows.scheduled[before],
            samples=rows.samples[before],
            sampled=rows.sampled[before],
            rejected=rows.rejected[before],
            repeats=(rows.digest[before] == rows.prior[before]) & (rows.sampled[before] > 0),
            complete=apart == rows.step[after] - rows.step[before],
        )


def keys_of(block: InputsBlock) -> U64:
    """One number per row for (request, life)."""
    keys: U64 = block.request ^ (lives_of(block).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return keys
