"""I11: a request's decode may not run again before the update of its last one was consumed."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.windows import Group, life_of


class Cadence:
    """Two sampling steps of a request are at least pp_size iterations apart."""

    NAME: ClassVar = "decode-cadence"
    INVARIANT: ClassVar = "I11"
    COMPARES: ClassVar = (
        "iterations between two steps of a request of which the first may sample and the second decodes"
    )
    SEVERITY: ClassVar = "warning; critical when the request's state then differs between ranks"
    EXCEPTIONS: ClassVar = (
        "prefill chunks; a request that was preempted or started again; adapters that know no iterations"
    )
    REMEDY: ClassVar = (
        "The scheduler runs a request before its token came back: earlier stages feed an old one. With vLLM, do not "
        "combine pipeline parallelism and speculation with --no-async-scheduling (vLLM issue 52071)."
    )

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Compare each decoding row with the same request's last sampling step."""
        window, links = chunk.inputs, history.links
        if window is None or links is None:
            return
        block = window.blocks[-1]
        tick = np.repeat(block.tick, block.rows)[links.row]
        distance = tick - links.tick
        known = (tick >= 0) & (links.tick >= 0)
        close = known & (distance < group.sizes.pp) & links.samples & (block.prefilling[links.row] == 0)
        for place in np.flatnonzero(close).tolist():
            row = int(links.row[place])
            at, in_step = window.locate(row)
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=int(block.step[at]),
                phase=Phase.INPUTS,
                text=f"decoded again after {int(distance[place])} of at least {group.sizes.pp} iterations",
                remedy=self.REMEDY,
                request=int(block.request[row]),
                life=life_of(block, row),
                row=in_step,
                ranks=group.numbers(window.indices),
                fields=("cadence",),
                absolves=True,
                t_ns=int(block.t_ns[at]),
            )
