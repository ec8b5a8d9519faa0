"""I1: the mask, None-ness included, must be the same on every rank: else one side waits for a broadcast."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from stagewatch.agents.record import I32, U8
from stagewatch.monitor.blame import outvoted
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History, Seen
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, MaskWindow, life_of


class MaskDisagreement:
    """Sender and receivers must agree on which rows a broadcast carries, and whether there is one."""

    NAME: ClassVar = "mask-disagreement"
    INVARIANT: ClassVar = "I1"
    COMPARES: ClassVar = "the engine's mask and whether it is None, between all ranks"
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = "steps at which batches differ: their masks differ with them"
    REMEDY: ClassVar = (
        "Ranks decide differently what to broadcast: rows land in the wrong place, or a rank waits for ever. The "
        "mask is computed from host state alone, so compare num_computed and prefill_len of that step by rank."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """One finding per row on which masks differ, or one for the whole step where some rank's is None."""
        window = chunk.mask
        if window is None:
            return
        split = np.zeros(len(window.steps), np.bool_)
        for block in window.blocks[1:]:
            split |= block.engine_none != window.blocks[0].engine_none
        for at in np.flatnonzero(split).tolist():
            yield self._whole_step(window, at, history)
        rows = window.differing("engine")
        if rows is None:
            return
        for row in np.flatnonzero(rows).tolist():
            at, in_step = window.locate(row)
            seen = history.row_at(int(window.steps[at]), in_step)
            if not split[at] and seen is not None:
                yield self._row(window, at, row, in_step, seen)

    def _whole_step(self, window: MaskWindow, at: int, history: History) -> Finding:
        first, end = int(window.starts[at]), int(window.starts[at + 1])
        masks = [block.engine[first:end].tobytes() for block in window.blocks]
        sound = {block.fixed[first:end].tobytes() for block in window.blocks}
        step = int(window.steps[at])
        rows = [history.row_at(step, row) for row in range(end - first)]
        return self._finding(
            window,
            at,
            blamed=_wrong(window, masks, sound),
            text="some ranks broadcast this step and others do not: they will wait for each other",
            row=0,
            covers=tuple(
                (int(seen.reference.request[seen.row]), life_of(seen.reference, seen.row))
                for seen in rows
                if seen is not None
            ),
        )

    def _row(self, window: MaskWindow, at: int, row: int, in_step: int, seen: Seen) -> Finding:
        masks = [bytes([block.engine[row]]) for block in window.blocks]
        sound = {bytes([block.fixed[row]]) for block in window.blocks}
        return self._finding(
            window,
            at,
            blamed=_wrong(window, masks, sound),
            text="ranks disagree on whether its row is broadcast",
            row=in_step,
            request=int(seen.reference.request[seen.row]),
            life=life_of(seen.reference, seen.row),
        )

    def _finding(
        self,
        window: MaskWindow,
        at: int,
        *,
        blamed: tuple[int, ...],
        text: str,
        row: int,
        request: int = 0,
        life: int = 0,
        covers: tuple[tuple[int, int], ...] = (),
    ) -> Finding:
        numbers = window.group.numbers(window.indices)
        return Finding(
            check=self.NAME,
            severity=Severity.CRITICAL,
            step=int(window.steps[at]),
            phase=Phase.MASK,
            text=text,
            remedy=self.REMEDY,
            request=request,
            life=life,
            row=row,
            ranks=blamed or numbers,
            blamed=blamed,
            fields=("need_sampled_mask",),
            values=tuple(
                Value(
                    number,
                    "need_sampled_mask",
                    _shown(block.engine, block.rows, block.engine_none, at, window),
                )
                for number, block in zip(numbers, window.blocks, strict=True)
            ),
            t_ns=min(int(block.t_ns[at]) for block in window.blocks),
            covers=covers,
        )


def _wrong(window: MaskWindow, masks: list[bytes], sound: set[bytes]) -> tuple[int, ...]:
    """Whoever departs from the fixed mask, if all ranks come to the same one; else whoever is outvoted."""
    if len(sound) == 1 and sound & {*masks}:
        right = sound.pop()
        wrong = [i for i, mask in zip(window.indices, masks, strict=True) if mask != right]
        return window.group.numbers(wrong)
    return outvoted(window.group, window.indices, masks)


def _shown(engine: U8, rows: I32, none: I32, at: int, window: MaskWindow) -> str:
    if none[at]:
        return "None"
    start = int(window.starts[at])
    return "".join("T" if value else "F" for value in engine[start : start + int(rows[at])])
