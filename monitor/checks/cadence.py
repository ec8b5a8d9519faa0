"""I11: a request's decode may not run again before the update of its last one was consumed."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from stagewatch.agents.evidence import I64
from stagewatch.agents.record import U64
from stagewatch.monitor.checks.base import Chunk, Finding, Phase
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.windows import Group


class Cadence:
    """Two sampling steps of a request are at least pp_size iterations apart."""

    NAME: ClassVar = "decode-cadence"
    COMPARES: ClassVar = (
        "iterations between two steps of a request of which the first may sample and the second decodes"
    )
    EXCEPTIONS: ClassVar = (
        "prefill chunks; a request that was preempted or started again; adapters that know no iterations"
    )
    REMEDY: ClassVar = (
        "The scheduler runs a request before its token came back: earlier stages feed an old one. With vLLM, do not "
        "combine pipeline parallelism and speculation with --no-async-scheduling (vLLM issue 52071)."
    )

    def __init__(self) -> None:
        self._request: U64 = np.zeros(0, np.uint64)
        self._generation: I64 = np.zeros(0, np.int64)
        self._tick: I64 = np.zeros(0, np.int64)

    def examine(self, chunk: Chunk, group: Group, history: History) -> Iterable[Finding]:
        """Compare each decoding row with the same request's last sampling step."""
        if chunk.inputs is None:
            return
        block = chunk.inputs.blocks[-1]
        rows = block.rows
        tick = np.concatenate([self._tick, np.repeat(block.tick, rows)])
        request = np.concatenate([self._request, block.request])
        generation = np.concatenate([self._generation, block.generation])
        known = len(self._tick)
        may_sample = block.mirror.astype(np.int64) + block.scheduled >= block.prefill_len
        samples = np.concatenate([np.ones(known, np.bool_), may_sample])
        decodes = np.concatenate([np.zeros(known, np.bool_), block.prefilling == 0])
        order = np.lexsort((tick, generation, request))
        before, after = order[:-1], order[1:]
        same = (request[before] == request[after]) & (generation[before] == generation[after])
        known_ticks = (tick[before] >= 0) & (tick[after] >= 0)
        close = tick[after] - tick[before] < group.sizes.pp
        bad = after[same & known_ticks & close & samples[before] & decodes[after]]
        distance = dict(zip(after.tolist(), (tick[after] - tick[before]).tolist(), strict=True))
        for row in np.sort(bad).tolist():
            at, in_step = chunk.inputs.locate(row - known)
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=int(block.step[at]),
                phase=Phase.INPUTS,
                text=f"decoded again after {distance[row]} of at least {group.sizes.pp} iterations",
                remedy=self.REMEDY,
                request=int(request[row]),
                generation=int(generation[row]),
                row=in_step,
                ranks=group.numbers(chunk.inputs.indices),
                fields=("cadence",),
                absolves=True,
                t_ns=int(block.t_ns[at]),
            )
        recent = samples & (tick > (int(tick.max()) if len(tick) else 0) - group.sizes.pp)
        self._request, self._generation, self._tick = request[recent], generation[recent], tick[recent]
