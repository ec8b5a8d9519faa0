"""I10: tensor-parallel peers of the last stage must sample the same."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from stagewatch.monitor.blame import blame
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.checks.fields import PAYLOAD_FIELDS, digest_or_count
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import Group, life_of


class TpDisagreement:
    """Peers sample each for themselves, from what should be the same logits."""

    NAME: ClassVar = "tp-disagreement"
    INVARIANT: ClassVar = "I10"
    COMPARES: ClassVar = "sampled tokens, counts and draft blocks between the last stage's TP ranks"
    SEVERITY: ClassVar = "critical"
    EXCEPTIONS: ClassVar = (
        "rows that sample nothing; token columns beyond num_sampled; drafts of rows outside the mask; steps that "
        "broadcast nothing, whose samples are not recorded; engines with tp_size 1"
    )
    REMEDY: ClassVar = (
        "TP peers sampled different tokens from the same step: a near-tie without a broadcast, or a seed per rank. "
        "Their later collectives will differ in size and hang. Restart; let one rank sample and broadcast."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Every row of which two peers sampled something different."""
        window = chunk.sent
        if window is None or len(window.blocks) < 2:
            return
        used = np.logical_or.reduce([block.applied != 0 for block in window.blocks])
        # A row outside the mask that samples is a request's last: what it samples is shown, its drafts never run.
        samples = used | np.logical_or.reduce([block.num_sampled > 0 for block in window.blocks])
        unequal = {
            name: found & (used if name == "draft_tokens" else samples)
            for name, column in PAYLOAD_FIELDS
            if (found := window.differing(column)) is not None
        }
        if not unequal:
            return
        for row in np.flatnonzero(np.logical_or.reduce([*unequal.values()])).tolist():
            at, in_step = window.locate(row)
            fields = [
                (name, column) for name, column in PAYLOAD_FIELDS if name in unequal and unequal[name][row]
            ]
            values = window.values(fields[0][1], row)
            blamed = blame(group, window.indices, [int(v) for v in values], expected=None, sampled=False)
            block = window.blocks[-1]
            yield Finding(
                check=self.NAME,
                severity=Severity.CRITICAL,
                step=int(window.steps[at]),
                phase=Phase.SENT,
                text="TP peers of the last stage sampled differently",
                remedy=self.REMEDY,
                request=int(block.request[row]),
                life=life_of(block, row),
                row=in_step,
                ranks=blamed or group.numbers(window.indices),
                blamed=blamed,
                fields=tuple(name for name, _ in fields),
                values=tuple(
                    Value(group.number(index), name, digest_or_count(each, row, column))
                    for name, column in fields
                    for index, each in zip(window.indices, window.blocks, strict=True)
                ),
                t_ns=min(int(each.t_ns[at]) for each in window.blocks),
                absolves=True,
            )
