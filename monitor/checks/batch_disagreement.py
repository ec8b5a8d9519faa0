"""I9: the batch itself. Every rank must execute the same requests in the same order with the same counts."""

from collections.abc import Iterable
from typing import ClassVar

from stagewatch.monitor.blame import outvoted
from stagewatch.monitor.checks.base import Chunk, Finding, Phase, Unaligned
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, lives_of


class BatchDisagreement:
    """Rows of a broadcast are matched by their place in the batch, so batches must be equal."""

    NAME: ClassVar = "batch-disagreement"
    INVARIANT: ClassVar = "I9"
    COMPARES: ClassVar = (
        "ordered requests, scheduled counts and draft counts of every step, between all ranks"
    )
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = "none: all ranks get the same scheduler output"
    REMEDY: ClassVar = (
        "Ranks execute different batches: one admitted, timed out or matched its cache differently. Restart the "
        "engine; look for a decision that each rank takes for itself (cache hits, grammar readiness, time-outs)."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """One finding per step whose batch differs."""
        for each in chunk.unaligned:
            rows = [
                tuple(zip(b.request.tolist(), b.scheduled.tolist(), b.draft_count.tolist(), strict=True))
                for b in each.blocks
            ]
            wrong = outvoted(group, each.indices, rows)
            reference = each.blocks[-1]
            yield Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=each.step,
                phase=Phase.INPUTS,
                text=f"ranks execute different batches: {_sizes(group, each)}",
                remedy=self.REMEDY,
                ranks=wrong or group.numbers(each.indices),
                blamed=wrong,
                fields=("batch",),
                values=tuple(
                    Value(
                        group.number(index),
                        "batch",
                        f"{len(block.request)} rows, {int(block.scheduled.sum())} tokens",
                    )
                    for index, block in zip(each.indices, each.blocks, strict=True)
                ),
                t_ns=min(int(block.t_ns[0]) for block in each.blocks),
                # What is broadcast of this step lands in other requests' rows.
                covers=tuple(zip(reference.request.tolist(), lives_of(reference).tolist(), strict=True)),
            )


def _sizes(group: Group, each: Unaligned) -> str:
    return ", ".join(
        f"{len(block.request)} rows on rank {group.number(index)}"
        for index, block in zip(each.indices, each.blocks, strict=True)
    )
