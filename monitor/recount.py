"""Recounting: ranks whose ordinals are off are found and renumbered, before anything of these steps is compared."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import I64, InputsBlock
from stagewatch.monitor.batches import fingerprints_agree, in_common, same_steps
from stagewatch.monitor.checks.base import Shifted
from stagewatch.monitor.lanes import Lane
from stagewatch.monitor.ordinals import Shift
from stagewatch.monitor.shifts import MATCHES, Batches, Verdict, doubtful, judge, reference


class Recount:
    """Of one group's lanes: which steps are in doubt, and what was found."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes: Final = lanes
        self._looked_at: dict[int, Verdict] = {}
        """Steps not yet handed out at which ranks' batches have no row in common."""
        self._shifted: list[Shifted] = []
        """The newest shifts."""

    def doubts(self, blocks: Sequence[InputsBlock | None]) -> tuple[list[int], NDArray[np.bool_] | None]:
        """(steps in doubt, at which steps all ranks ran the same batch).

        In doubt are steps that all ranks have, at which batches may have no row in common and nobody has looked yet.
        The second is None where ranks do not have the same steps.
        """
        present = [block for block in blocks if block is not None]
        if len(present) < len(blocks) or len(blocks) < 2:
            return [], None
        kept = in_common(present)
        if kept is None:
            return [], None
        agree = fingerprints_agree(kept)
        steps = [int(kept[0].step[place]) for place in doubtful(kept, agree)]
        return [step for step in steps if step not in self._looked_at], agree if same_steps(present) else None

    def look_at(self, doubts: list[int], absent: frozenset[int], patient: bool) -> Shifted | int | None:
        """Judge doubtful steps in turn: a shift that was found and applied, or the step to wait before, or None."""
        waiting = [lane.waiting() for lane in self._lanes]
        batches = [Batches(block) for block in waiting if block is not None]
        heard = [lane for index, lane in enumerate(self._lanes) if index not in absent]
        newest = min(lane.newest for lane in heard) if patient else max(lane.newest for lane in heard)
        for step in doubts:
            first, odd = reference(batches, step)
            verdicts = [judge(batches[i], batches[first], step, newest - step, patient=patient) for i in odd]
            distances = [verdict for verdict in verdicts if isinstance(verdict, int)]
            if distances:
                same = [i for i, verdict in zip(odd, verdicts, strict=True) if verdict == distances[0]]
                return self._shift(tuple(same), step, distances[0], odd)
            if Verdict.WAIT in verdicts:
                return step
            unclear = Verdict.UNCLEAR in verdicts
            self._looked_at[step] = Verdict.UNCLEAR if unclear else Verdict.OTHER_BATCH
        return None

    def unclear(self, steps: I64) -> NDArray[np.bool_]:
        """Steps of which nobody can tell what the other ranks' counterparts are: bool [steps]."""
        if not self._looked_at:
            return np.zeros(len(steps), np.bool_)
        return np.isin(steps, [step for step, found in self._looked_at.items() if found is Verdict.UNCLEAR])

    def forget(self, upto: int) -> None:
        """Steps up to this one were handed out."""
        self._looked_at = {step: found for step, found in self._looked_at.items() if step > upto}

    def _shift(self, indices: tuple[int, ...], step: int, batches: int, odd: tuple[int, ...]) -> Shifted:
        """Renumber whoever lacks batches that other ranks have."""
        block = self._lanes[indices[0]].waiting()
        t_ns = 0 if block is None else int(block.t_ns[np.searchsorted(block.step, step)])
        others = tuple(i for i in range(len(self._lanes)) if i not in indices)
        renumbered = others if batches > 0 else indices
        shift = Shift(step, abs(batches))
        for each in renumbered:
            self._lanes[each].shift(shift)
        # Whoever was found to count otherwise just here is no witness.
        self._shifted = [
            near for near in self._shifted if step <= near.shift.step + near.shift.missing + MATCHES
        ]
        doubted = {i for near in self._shifted for i in near.indices}
        witnesses = [i for i in range(len(self._lanes)) if i not in odd and i not in doubted]
        outvoted = 2 * len(witnesses) > len(self._lanes) > 2
        found = Shifted(indices, batches, renumbered, shift, outvoted, t_ns)
        self._shifted.append(found)
        return found
