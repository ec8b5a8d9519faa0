"""What every row needs of its request's last step, as columns: found for a whole window at once."""

from dataclasses import dataclass
from typing import Any, Final

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
    """Columns over the rows of recent steps, in the order of steps.

    Each column lies in a buffer with room to grow, so that a chunk costs its own rows and not all that are
    remembered. A place is a row's number since the beginning; where each key was seen last is kept in a sorted table.
    """

    COLUMNS: Final[dict[str, Any]] = {
        "key": np.uint64,
        "step": np.int64,
        "tick": np.int64,
        "computed": np.int64,
        "scheduled": np.int64,
        "samples": np.bool_,
        "sampled": np.int64,
        "rejected": np.int64,
        "digest": np.uint64,
        "prior": np.uint64,
    }
    """``prior`` is the digest of the request's step before."""

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {
            name: np.zeros(0, dtype) for name, dtype in self.COLUMNS.items()
        }
        self._base = 0
        """Place of the buffers' first element."""
        self._first = 0
        self._fresh = 0
        """Place of the first row of the newest window."""
        self._end = 0
        self._steps: I64 = np.zeros(0, np.int64)
        """Steps that have rows."""
        self._last_keys: U64 = np.zeros(0, np.uint64)
        """Every key on record, ascending; where it was seen last is in the next."""
        self._last_places: I64 = np.zeros(0, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """For saving: what is in use of each buffer."""
        used = {name: self._column(name).copy() for name in self.COLUMNS}
        return self.__dict__ | {"_buffers": used, "_base": self._first}

    def _column(self, name: str) -> NDArray[Any]:
        """A column of what is on record, as a view."""
        return self._buffers[name][self._first - self._base : self._end - self._base]

    def add(self, window: InputsWindow) -> None:
        """Take the rows of newer steps."""
        block = window.blocks[-1]
        self._fresh = self._end
        self._make_room(len(block.request))
        unequal = window.differing("computed")
        new = {
            "key": keys_of(block),
            "step": window.row_steps,
            "tick": np.repeat(block.tick, block.rows),
            "computed": block.computed if unequal is None else np.where(unequal, UNKNOWN, block.computed),
            "scheduled": block.scheduled,
            "samples": block.mirror.astype(np.int64) + block.scheduled >= block.prefill_len,
            "sampled": UNKNOWN,
            "rejected": UNKNOWN,
            "digest": 0,
            "prior": 0,
        }
        first, end = self._end - self._base, self._end - self._base + len(block.request)
        for name, values in new.items():
            self._buffers[name][first:end] = values
        self._end += len(block.request)
        self._steps = np.concatenate([self._steps, window.steps[block.rows > 0]])

    def _make_room(self, rows: int) -> None:
        """Twice what is needed, so that rows are copied once on average."""
        live = self._end - self._first
        if self._end - self._base + rows <= len(self._buffers["key"]):
            return
        for name, dtype in self.COLUMNS.items():
            buffer = np.empty(2 * (live + rows), dtype)
            buffer[:live] = self._column(name)
            self._buffers[name] = buffer
        self._base = self._first

    def note_sent(self, window: PayloadWindow) -> None:
        """Note what the last stage sent for rows that are kept."""
        recorded = self._column("step")
        first = int(np.searchsorted(recorded, window.steps[0]))
        end = int(np.searchsorted(recorded, window.steps[-1], side="right"))
        mine: Any = slice(first, end)
        theirs: Any = slice(None)
        if not np.array_equal(recorded[mine], window.row_steps):
            mine = first + np.flatnonzero(np.isin(recorded[mine], window.steps))
            theirs = np.isin(window.row_steps, recorded)
            if not np.array_equal(recorded[mine], window.row_steps[theirs]):
                return  # inputs and payload of a step differ in rows: nothing can be matched by place
        block = window.blocks[0]
        unequal = [found for name in SENT_COLUMNS if (found := window.differing(name)) is not None]
        sampled: NDArray[Any] = block.num_sampled
        rejected: NDArray[Any] = block.num_rejected
        if unequal:
            disagreed = np.logical_or.reduce(unequal)
            sampled, rejected = (np.where(disagreed, UNKNOWN, values) for values in (sampled, rejected))
        self._column("sampled")[mine] = sampled[theirs]
        self._column("rejected")[mine] = rejected[theirs]
        self._column("digest")[mine] = block.tokens_digest[theirs]

    def forget(self, upto: int) -> None:
        """Drop the rows of steps up to this one."""
        self._first += int(np.searchsorted(self._column("step"), upto, side="right"))
        self._fresh = max(self._fresh, self._first)
        self._steps = self._steps[np.searchsorted(self._steps, upto, side="right") :]

    def link(self) -> Links:
        """Each row of the newest window beside the same life's row before it."""
        before, after = self._pairs()
        step = self._column("step")
        near = step[after] - step[before] <= LINK_STEPS
        if not near.all():
            before, after = before[near], after[near]
        found = {name: self._column(name)[before] for name in self.COLUMNS if name != "key"}
        self._column("prior")[after] = found["digest"]
        # A window may hold several steps of a request, of which one's prior was set just now.
        found["prior"] = self._column("prior")[before]
        apart = np.searchsorted(self._steps, step[after]) - np.searchsorted(self._steps, found["step"])
        return Links(
            row=after - (self._fresh - self._first),
            step=found["step"],
            tick=found["tick"],
            computed=found["computed"],
            scheduled=found["scheduled"],
            samples=found["samples"],
            sampled=found["sampled"],
            rejected=found["rejected"],
            repeats=(found["digest"] == found["prior"]) & (found["sampled"] > 0),
            complete=apart == step[after] - found["step"],
        )

    def _pairs(self) -> tuple[I64, I64]:
        """(row before, row) of every row of the newest window whose key is on record, by key; indices of columns."""
        fresh = self._fresh - self._first
        keys = self._column("key")[fresh:]
        after = np.argsort(keys, kind="stable")
        keys = keys[after]
        again = keys[1:] == keys[:-1]
        after += fresh
        before = np.empty(len(after), np.int64)
        before[1:] = after[:-1]
        heads = np.concatenate([[True], ~again])[: len(keys)]
        tails = np.concatenate([~again, [True]])[: len(keys)]
        seen = self._last_seen(keys[heads])
        before[heads] = seen
        self._note_last(keys[tails], after[tails] + self._first)
        known = before >= 0
        return before[known], after[known]

    def _last_seen(self, keys: U64) -> I64:
        """Where ascending keys were seen last, as indices of columns; negative for those that are not on record."""
        if not len(self._last_keys):
            return np.full(len(keys), -1, np.int64)
        at = np.minimum(np.searchsorted(self._last_keys, keys), len(self._last_keys) - 1)
        seen: I64 = np.where(self._last_keys[at] == keys, self._last_places[at] - self._first, -1)
        return seen

    def _note_last(self, keys: U64, places: I64) -> None:
        """Ascending ``keys`` were seen at ``places``."""
        at = np.searchsorted(self._last_keys, keys)
        known = at < len(self._last_keys)
        known[known] = self._last_keys[at[known]] == keys[known]
        self._last_places[at[known]] = places[known]
        if known.all():
            return
        kept = self._last_places >= self._first
        merged = np.concatenate([self._last_keys[kept], keys[~known]])
        order = np.argsort(merged, kind="stable")
        self._last_keys = merged[order]
        self._last_places = np.concatenate([self._last_places[kept], places[~known]])[order]


def keys_of(block: InputsBlock) -> U64:
    """One number per row for (request, life)."""
    keys: U64 = block.request ^ (lives_of(block).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return keys
