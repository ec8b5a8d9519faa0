"""What is counted beside verdicts: acceptance, repetition, exclusions, and what the broadcast costs.

Context, never a trigger: acceptance collapses where every rank agrees (an uninitialised drafter) and looks normal
where they do not.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64
from stagewatch.agents.mask import faulty_rows
from stagewatch.agents.record import UNKNOWN
from stagewatch.monitor.blocks import select
from stagewatch.monitor.calls import Calls, Names
from stagewatch.monitor.checks.base import Chunk
from stagewatch.monitor.history import History
from stagewatch.monitor.windows import Group, InputsWindow, MaskWindow, life_of

EXCLUDED_MAX: Final = 65_536
"""Requests with excluded rows that are remembered until they are found diverged; most never are."""
MASK_WAIT_STEPS: Final = 64
"""How long a step's inputs wait for its masks; an adapter may record none."""
BROADCAST: Final = "pp_broadcast"
"""Name of the communicator over which the last stage sends what it sampled."""
_BYTES: Final = {"int64": 8, "float64": 8, "int32": 4, "float32": 4, "int16": 2, "float16": 2, "bfloat16": 2}


class Statistics:
    """Counts over all steps of a group."""

    def __init__(self, group: Group) -> None:
        self.accepted = 0
        self.rejected = 0
        self.sampled = 0
        self.repeated = 0
        self.excluded = 0
        """Rows dropped from the broadcast although they may have sampled."""
        self.harmed = 0
        """Of these, rows whose request was found diverged afterwards."""
        self.broadcast: Final = Broadcast(group)
        self._waiting: OrderedDict[tuple[int, int], int] = OrderedDict()
        """(request, life) -> excluded rows not counted as harmed."""

    def add(self, chunk: Chunk, history: History) -> None:
        """Count what became comparable; ``history`` holds the chunk's inputs and payloads already."""
        if chunk.sent is not None:
            block = chunk.sent.blocks[0]
            sampled = block.num_sampled > 0
            self.sampled += int(sampled.sum())
            self.accepted += int((block.num_sampled[sampled] - 1).sum())
            self.rejected += int(block.num_rejected[sampled].sum())
        if history.links is not None:
            self.repeated += int(np.count_nonzero(history.links.repeats))
        for _, seen in chunk.dropped:
            self._exclude(int(seen.reference.request[seen.row]), life_of(seen.reference, seen.row))
        self.broadcast.add(chunk)

    def diverged(self, requests: Iterable[tuple[int, int]]) -> None:
        """Requests, as (request, life), some of whose rows ranks hold or feed differently."""
        for key in requests:
            self.harmed += self._waiting.pop(key, 0)

    def _exclude(self, request: int, life: int) -> None:
        self.excluded += 1
        self._waiting[request, life] = self._waiting.get((request, life), 0) + 1
        if len(self._waiting) > EXCLUDED_MAX:
            self._waiting.popitem(last=False)


class Broadcast:
    """What the last stage's first rank sends to the earlier stages, and the part of it that only a sound mask sends."""

    def __init__(self, group: Group) -> None:
        self.size_bytes = 0
        self.steps = 0
        """Steps with a broadcast."""
        self.rows = 0
        self.rows_fixed = 0
        """Rows that the faulty mask of vLLM 0.23 to 0.29 would have left out."""
        self._sender = group.last_stage[0]
        self._widths: I64 = np.zeros(0, np.int64)
        """Bytes of an element, by the number of the call's name."""
        self._waiting: list[InputsWindow] = []
        """Inputs whose masks are still to come."""

    def add(self, chunk: Chunk) -> None:
        """Count a chunk's calls and masks."""
        if chunk.calls and len(chunk.calls[self._sender]):
            self._add_calls(chunk.calls[self._sender], chunk.names)
        if chunk.inputs is not None:
            self._waiting.append(chunk.inputs)
            newest = int(chunk.inputs.steps[-1])
            while int(self._waiting[0].steps[-1]) < newest - MASK_WAIT_STEPS:
                del self._waiting[0]
        if chunk.mask is not None:
            self._add_masks(chunk.mask)

    def _add_calls(self, calls: Calls, names: Names) -> None:
        if len(self._widths) != len(names.texts) + 1:
            self._widths = np.array([_width(text) for text in names.texts] + [0], np.int64)
        size = self._widths[np.minimum(calls.code, len(names.texts))] * np.maximum(calls.numel, 0)
        self.size_bytes += int(size.sum())
        self.steps += len({*calls.step[size > 0].tolist()})

    def _add_masks(self, masks: MaskWindow) -> None:
        sent = masks.blocks[masks.indices.index(self._sender)].engine != 0
        self.rows += int(sent.sum())
        for window in self._waiting:
            _, here, there = np.intersect1d(
                masks.steps, window.steps, assume_unique=True, return_indices=True
            )
            inputs = select(window.blocks[-1], _marked(len(window.steps), there))
            at_masks = np.repeat(_marked(len(masks.steps), here), masks.blocks[0].rows)
            if len(inputs.cap) != int(at_masks.sum()):
                continue  # a mask of another length than its batch: another check's business
            kept = faulty_rows(inputs.mirror, inputs.scheduled, inputs.prefill_len, inputs.cap)
            self.rows_fixed += int((sent[at_masks] & (inputs.cap != UNKNOWN) & ~kept).sum())
        oldest = int(masks.steps[-1])
        self._waiting = [window for window in self._waiting if int(window.steps[-1]) > oldest]


def _marked(count: int, places: NDArray[np.intp]) -> NDArray[np.bool_]:
    marks = np.zeros(count, np.bool_)
    marks[places] = True
    return marks


def _width(text: str) -> int:
    """Bytes of one element of a broadcast from the last stage; 0 for any other call."""
    group, _, rest = text.partition(" ")
    return _BYTES.get(rest.rpartition(" ")[2], 1) if group == BROADCAST else 0
