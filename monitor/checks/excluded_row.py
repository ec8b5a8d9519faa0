"""I2: rows that the mask drops although they may have sampled. The founding fault (vLLM PR 54436).

Excluded is not yet harmed: a row dropped at its very last step never runs again. So this check only
notices, warns when the same life of the request is scheduled again, and leaves it to the checks of
state to call it critical.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History, Seen
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.windows import Group, InputsWindow, MaskWindow, life_of

REMEMBERED_MAX: Final = 65_536
"""Excluded rows waited for; far more than an engine has slots, since most never run again."""


@dataclass(frozen=True, slots=True)
class _Excluded:
    step: int
    life: int
    warned: bool


def finishes(prefill_len: int, cap: int) -> bool:
    """Whether the one token that a final prefill chunk yields ends its request: no stage will need it."""
    return 0 <= cap <= prefill_len + 1


def dropped_rows(window: MaskWindow, history: History) -> Iterator[tuple[int, Seen]]:
    """Rows of the window that some rank's mask drops although they may have sampled, beside what they fed."""
    dropped = np.zeros(len(window.blocks[0].fixed), np.bool_)
    for mask in window.blocks:
        dropped |= (mask.fixed != 0) & (mask.engine == 0)
    for row in np.flatnonzero(dropped).tolist():
        at, in_step = window.locate(row)
        seen = history.row_at(int(window.steps[at]), in_step)
        if seen is None:
            continue
        block, i = seen.reference, seen.row
        if not (block.prefilling[i] and finishes(int(block.prefill_len[i]), int(block.cap[i]))):
            yield row, seen


class ExcludedRow:
    """A row that may have sampled must be in the broadcast."""

    NAME: ClassVar = "excluded-row"
    INVARIANT: ClassVar = "I2"
    COMPARES: ClassVar = "the engine's mask with the fixed mask, and what is scheduled after"
    SEVERITY: ClassVar = (
        "notice when dropped; warning when scheduled again; critical when its state then differs"
    )
    EXCEPTIONS: ClassVar = (
        "prefill chunks that are not the last; a final chunk whose token reaches the cap (0.31 and later)"
    )
    REMEDY: ClassVar = (
        "The engine's broadcast mask predicts which rows finish and is wrong under speculation (vLLM PR 54436; "
        "0.23 to 0.29 and forks of them). Upgrade to vLLM 0.30 or later, or set STAGEWATCH_FIXED_MASK=1."
    )

    def __init__(self) -> None:
        self._excluded: OrderedDict[int, _Excluded] = OrderedDict()

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Interleave exclusions and what is scheduled after them in the order they happened."""
        exclusions = sorted(self._exclusions(chunk), key=lambda finding: finding.step)
        findings: list[Finding] = []
        inputs_from = 0
        for finding in exclusions:
            if chunk.inputs is not None:
                until = int(np.searchsorted(chunk.inputs.steps, finding.step, side="right"))
                findings += self._scheduled_again(chunk.inputs, inputs_from, until)
                inputs_from = max(inputs_from, until)
            known = self._excluded.get(finding.request)
            if known is None or known.life != finding.life:
                findings.append(finding)
            warned = known is not None and known.life == finding.life and known.warned
            self._excluded[finding.request] = _Excluded(finding.step, finding.life, warned)
            if len(self._excluded) > REMEMBERED_MAX:
                self._excluded.popitem(last=False)
        if chunk.inputs is not None:
            findings += self._scheduled_again(chunk.inputs, inputs_from, len(chunk.inputs.steps))
        return findings

    def _exclusions(self, chunk: Chunk) -> Iterator[Finding]:
        window = chunk.mask
        if window is None:
            return
        for row, seen in chunk.dropped:
            at, in_step = window.locate(row)
            step = seen.step
            block, i = seen.reference, seen.row
            prefilling = bool(block.prefilling[i])
            indices = [
                index
                for index, mask in zip(window.indices, window.blocks, strict=True)
                if mask.fixed[row] and not mask.engine[row]
            ]
            yield Finding(
                check=self.NAME,
                severity=Severity.NOTICE,
                step=step,
                phase=Phase.MASK,
                text=(
                    f"{'final prefill chunk' if prefilling else 'decoding row'} dropped from the broadcast "
                    f"(mirror {block.mirror[i]}, prefill {block.prefill_len[i]}, cap {block.cap[i]})"
                ),
                remedy=self.REMEDY,
                request=int(block.request[i]),
                life=life_of(block, i),
                row=in_step,
                ranks=window.group.numbers(indices),
                fields=("need_sampled_mask",),
                t_ns=min(int(mask.t_ns[at]) for mask in window.blocks),
            )

    def _scheduled_again(self, window: InputsWindow, first: int, end: int) -> list[Finding]:
        """Warnings for excluded rows among steps ``first`` to ``end`` (exclusive) of a window."""
        if not self._excluded or first >= end:
            return []
        block = window.blocks[-1]
        rows = slice(int(window.starts[first]), int(window.starts[end]))
        waiting = np.fromiter(self._excluded.keys(), np.uint64, len(self._excluded))
        findings = []
        for offset in np.flatnonzero(np.isin(block.request[rows], waiting)):
            row = rows.start + int(offset)
            request = int(block.request[row])
            excluded = self._excluded[request]
            at, in_step = window.locate(row)
            step = int(window.steps[at])
            if step <= excluded.step or life_of(block, row) != excluded.life or excluded.warned:
                continue
            self._excluded[request] = _Excluded(excluded.step, excluded.life, True)
            findings.append(
                Finding(
                    check=self.NAME,
                    severity=Severity.WARNING,
                    step=step,
                    phase=Phase.INPUTS,
                    text=f"scheduled again without the tokens of step {excluded.step}",
                    remedy=self.REMEDY,
                    request=request,
                    life=excluded.life,
                    row=in_step,
                    ranks=window.group.numbers(
                        [i for i in window.indices if i not in window.group.last_stage]
                    ),
                    fields=("need_sampled_mask",),
                    t_ns=min(int(each.t_ns[at]) for each in window.blocks),
                )
            )
        return findings
