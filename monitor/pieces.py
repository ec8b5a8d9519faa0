"""Evidence cut where the wall clock of its records turns a second, so that a replay can let time pass as it did."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from stagewatch.agents.evidence import I64, Evidence, slice_steps

SECOND_NS: Final = 10**9
STEP_MAX: Final = (1 << 62) - 1
"""No step is a later one."""
BLOCKS: Final = ("inputs", "mask", "sent", "received", "consumed", "events")
"""The fields of `Evidence` that hold records."""


def by_second(evidence: Evidence) -> Iterator[tuple[int, Evidence]]:
    """(time of its newest record, evidence) of each second; times are nanoseconds since the epoch and never fall."""
    blocks = [block for name in BLOCKS if (block := getattr(evidence, name)) is not None]
    if not blocks:
        yield 0, evidence
        return
    seqs = np.concatenate([block.seq for block in blocks])
    order = np.argsort(seqs, kind="stable")
    seqs, times = seqs[order], np.concatenate([block.t_ns for block in blocks])[order]
    times = np.maximum.accumulate(times)
    seconds = times // SECOND_NS
    if seconds[0] == seconds[-1]:
        yield int(times[-1]), evidence
        return
    turns = np.flatnonzero(np.diff(seconds)) + 1
    edges = [evidence.first_seq, *seqs[turns].tolist(), evidence.next_seq]
    newest = times[np.concatenate([turns - 1, [len(times) - 1]])].tolist()
    for place, t_ns in enumerate(newest):
        yield t_ns, part_of(evidence, edges[place], edges[place + 1], is_first=place == 0)


def part_of(evidence: Evidence, first: int, end: int, *, is_first: bool) -> Evidence:
    """The records numbered from ``first`` up to ``end`` (exclusive); what was lost lies before the first part."""
    blocks: dict[str, Any] = {name: _cut(getattr(evidence, name), first, end) for name in BLOCKS}
    part = replace(evidence, first_seq=first, next_seq=end, **blocks)
    return part if is_first else replace(part, lost=0, left_out=0)


def _cut(block: Any, first: int, end: int) -> Any:
    if block is None:
        return None
    a, b = np.searchsorted(block.seq, [first, end]).tolist()
    return slice_steps(block, a, b) if a < b else None


def step_times(evidence: Evidence) -> tuple[I64, I64]:
    """Steps whose inputs the evidence holds, and when each was recorded: two int64 [steps]."""
    inputs = evidence.inputs
    return (np.zeros(0, np.int64),) * 2 if inputs is None else (inputs.step, inputs.t_ns)
