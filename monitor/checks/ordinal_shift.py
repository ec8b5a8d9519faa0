"""I9, the count: a rank's ordinals must go on counting the batches that the others' count."""

from collections.abc import Iterable
from typing import ClassVar

from stagewatch.monitor.checks.base import Chunk, Finding, Phase, Shifted
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.shifts import SHIFT_MAX
from stagewatch.monitor.windows import Group


class OrdinalShift:
    """A rank that counts more or fewer batches than the others is compared at the right steps, and named."""

    NAME: ClassVar = "ordinal-shift"
    INVARIANT: ClassVar = "I9"
    COMPARES: ClassVar = (
        "at which distance the ranks' batches are the same, where those of one ordinal are not"
    )
    SEVERITY: ClassVar = (
        "warning: a recorder that missed a batch harms no request; a rank that really ran one more or less is "
        "critical by what it then holds, receives or waits for"
    )
    EXCEPTIONS: ClassVar = (
        f"batches that are no other's at a constant distance of at most {SHIFT_MAX}, which batch-disagreement reports; "
        "batches that are found again, but too few of them to tell the distance: their rows are not compared"
    )
    REMEDY: ClassVar = (
        "Look for what the rank did at this step: a probe that was late or failed, or a batch that only some ranks "
        "execute. Its later steps are compared at their right place; the batches in question are not."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """One finding per shift; all of them are one incident."""
        for place, shifted in enumerate(chunk.shifted):
            counting = group.numbers(shifted.indices)
            numbers = counting if shifted.outvoted else group.numbers(range(len(group.ranks)))
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=shifted.shift.step,
                phase=Phase.INPUTS,
                text=f"{_counting(counting)} {_batches(shifted)} than the others",
                remedy=self.REMEDY,
                of_step=False,
                row=place,
                ranks=numbers,
                blamed=counting if shifted.outvoted else (),
                fields=("ordinal",),
                values=tuple(Value(number, "ordinal", f"{shifted.batches:+d}") for number in counting),
                t_ns=shifted.t_ns,
            )


def _counting(numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]} counts"
    return f"ranks {', '.join(map(str, numbers))} count"


def _batches(shifted: Shifted) -> str:
    many = abs(shifted.batches)
    return f"{many} batch{'' if many == 1 else 'es'} {'more' if shifted.batches > 0 else 'fewer'}"
