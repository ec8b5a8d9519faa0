"""What the collector gets of a simulated run, and when, while processes around the engine fail. By a virtual clock.

An iteration takes `ITERATION_S`, and every rank's process writes a heartbeat a second, as its probe's timer does. A
rank that is stopped or killed enters no call any more; the others enter theirs until they wait for it. What a
dead sidecar did not ship stays in the rings, and what a dead collector did not acknowledge is sent again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.collectives import entered
from stagewatch.agents.lab.fault import Call
from stagewatch.agents.lab.faults_process import Act, Part, Pause, ProcessFault, Verb
from stagewatch.agents.lab.simulator import Simulator
from stagewatch.agents.probe import Health
from stagewatch.agents.record import Collective, Heartbeat, Kind, Record

ITERATION_S: Final = 0.5
SLOW_ITERATIONS: Final = 2
"""How much later a slow rank's records come."""
UNACKNOWLEDGED: Final = 25
"""Newest records of each rank that a collector loses when it is killed, as it had not acknowledged them."""
RING_RECORDS: Final = 40
"""Newest records that a ring still has after it was overrun."""
_BEAT: Final = msgspec.json.encode(Health(True, "", 1, 0, 0, 0, 0)).decode()

Streams = dict[Rank, list[Record]]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What arrives at one moment."""

    now_ns: int
    records: Streams
    """Of ranks from which something arrives."""
    lost: dict[Rank, int] = field(default_factory=dict)
    """Records that the ring had overwritten before the first of these."""
    collector_restarts: bool = False
    """Whether the collector is a new process, with the journal of the old one."""
    sidecar_restarts: tuple[Rank, ...] = ()
    """Ranks whose stream begins again."""


class Courier:
    """Runs a simulator whose fault is a `ProcessFault`, or which has none, and delivers what it records."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        fault = simulator.fault
        self._fault = fault if isinstance(fault, ProcessFault) else None
        self._script = list(self._fault.SCRIPT) if self._fault else []
        self._struck = self._fault.struck(simulator.sizes) if self._fault else ()
        ranks = simulator.ranks
        self._waiting: Streams = {rank: [] for rank in ranks}
        """In the rings, not delivered yet."""
        self._delivered: Streams = {rank: [] for rank in ranks}
        """Newest records that may have to be sent again."""
        self._held: Streams = {rank: [] for rank in ranks}
        """Of a rank that is stopped, or waits for one: not recorded yet."""
        self._slow: list[list[Record]] = []
        self._seq = dict.fromkeys(ranks, 0)
        self._lost: dict[Rank, int] = {}
        self._step = dict.fromkeys(ranks, 0)
        self._now_ns = 10**9
        self._beat_ns = 0
        self._next_act_ns: int | None = None
        """When the script goes on; None before it began."""
        self._dead: set[Rank] = set()
        self._without_sidecar: set[Rank] = set()
        self._collector_down = False
        self._delays = False

    def deliveries(self) -> Iterator[Delivery]:
        """Everything, until the run is over and the script has been played to its end."""
        for made in self._simulator.iterate():
            if self._begins(made):
                self._next_act_ns = self._now_ns
                yield from self._play()
                if self._dead:
                    yield from self._stand_still(made)
                    if self._dead:
                        return
                    continue
            for rank, own in made.items():
                self._record(rank, self._late(own) if self._delays and rank in self._struck else own)
            yield from self._pass_time(ITERATION_S)
        yield from self._end()

    # ---- the script

    def _begins(self, made: Streams) -> bool:
        """Whether the step to be struck is among these records."""
        if self._fault is None or self._next_act_ns is not None:
            return False
        rank = self._struck[0]
        return any(
            record.kind is Kind.INPUTS and record.step >= self._fault.plan.from_step for record in made[rank]
        )

    def _play(self) -> Iterator[Delivery]:
        """Carry out what is due."""
        while self._script and self._next_act_ns is not None and self._next_act_ns <= self._now_ns:
            act = self._script.pop(0)
            if isinstance(act, Pause):
                self._next_act_ns = self._now_ns + int(act.seconds * 1e9)
            else:
                yield from self._do(act)

    def _do(self, act: Act) -> Iterator[Delivery]:
        if self._fault is not None and not self._fault.injections:
            for rank in self._struck:
                self._fault.did(self._step[rank] + 1, rank)
        match act.part, act.verb:
            case Part.RANK, Verb.KILL | Verb.STOP:
                self._dead.update(self._struck)
            case Part.RANK, Verb.CONTINUE:
                self._dead.clear()
            case Part.RANK, Verb.SLOW:
                self._delays = True
            case Part.SIDECAR, Verb.KILL | Verb.STOP:
                self._without_sidecar.update(self._struck)
            case Part.SIDECAR, Verb.OUTRUN:
                for rank in self._struck:
                    self._outrun(rank)
            case Part.SIDECAR, Verb.START | Verb.CONTINUE:
                self._without_sidecar.clear()
                yield Delivery(self._now_ns, {}, sidecar_restarts=self._struck)
            case Part.COLLECTOR, Verb.KILL | Verb.STOP:
                self._collector_down = True
            case Part.COLLECTOR, Verb.START | Verb.CONTINUE:
                self._collector_down = False
                for rank, own in self._delivered.items():
                    self._waiting[rank][:0] = own[-UNACKNOWLEDGED:]
                yield Delivery(self._now_ns, {}, collector_restarts=True)
            case _:
                raise ValueError(f"no part of a simulated run can {act.verb} a {act.part}")

    def _stand_still(self, made: Streams) -> Iterator[Delivery]:
        """Let time pass while ranks wait for dead ones; then, if those come back, finish the iteration."""
        before, after = _cut(made, self._dead)
        for rank, own in before.items():
            self._record(rank, own)
        while self._dead and (self._script or self._now_ns < (self._next_act_ns or 0)):
            yield from self._pass_time(1.0)
        if not self._dead:
            for rank, own in after.items():
                self._record(rank, own)

    def _end(self) -> Iterator[Delivery]:
        """The last request was answered: play the rest, and let everything arrive."""
        while self._script or self._now_ns < (self._next_act_ns or 0):
            yield from self._pass_time(1.0)
        self._delays = False
        for own in self._slow:
            self._record(self._struck[0], own)
        self._slow = []
        yield from self._pass_time(2.0)

    # ---- time

    def _pass_time(self, seconds: float) -> Iterator[Delivery]:
        self._now_ns += int(seconds * 1e9)
        if self._now_ns - self._beat_ns >= 10**9:
            self._beat_ns = self._now_ns
            for rank in self._waiting.keys() - self._dead:
                beat = Record(Kind.HEARTBEAT, 0, self._step[rank], 0, Heartbeat(_BEAT))
                self._record(rank, [beat])
        yield from self._play()
        yield self._deliver()

    def _deliver(self) -> Delivery:
        records: Streams = {}
        if not self._collector_down:
            for rank, own in self._waiting.items():
                if own and rank not in self._without_sidecar:
                    records[rank] = own
                    self._delivered[rank] = [*self._delivered[rank], *own][-UNACKNOWLEDGED:]
                    self._waiting[rank] = []
        lost = {rank: self._lost.pop(rank) for rank in records if rank in self._lost}
        return Delivery(self._now_ns, records, lost)

    # ---- streams

    def _record(self, rank: Rank, records: list[Record]) -> None:
        """Put records into a rank's ring, in the order of its own numbers."""
        seq = self._seq[rank]
        numbered = [replace(record, seq=seq + place) for place, record in enumerate(records)]
        self._seq[rank] = seq + len(records)
        self._waiting[rank] += numbered
        self._step[rank] = max([self._step[rank], *(r.step for r in records if r.kind is Kind.INPUTS)])

    def _late(self, records: list[Record]) -> list[Record]:
        self._slow.append(records)
        return self._slow.pop(0) if len(self._slow) > SLOW_ITERATIONS else []

    def _outrun(self, rank: Rank) -> None:
        waiting = self._waiting[rank]
        lost = max(len(waiting) - RING_RECORDS, 0)
        self._waiting[rank] = waiting[lost:]
        if lost:
            self._lost[rank] = lost


def _cut(made: Streams, dead: set[Rank]) -> tuple[Streams, Streams]:
    """What ranks record of an iteration before they wait for the ``dead``, which record nothing; and the rest."""
    ranks = sorted(made)
    calls = [
        [] if rank in dead else [_call(record) for record in made[rank] if _is_call(record)] for rank in ranks
    ]
    reached, _ = entered(ranks, calls)
    before: Streams = {}
    after: Streams = {}
    for rank, own in zip(ranks, reached, strict=True):
        places = [place for place, record in enumerate(made[rank]) if _is_call(record)]
        end = 0 if rank in dead else len(made[rank])
        if rank not in dead and own and len(own) <= len(places):
            end = places[len(own) - 1] + 1
        before[rank], after[rank] = made[rank][:end], made[rank][end:]
    return before, after


def _is_call(record: Record) -> bool:
    return record.kind is Kind.COLLECTIVE


def _call(record: Record) -> Call:
    body = record.body
    if not isinstance(body, Collective):
        raise ValueError("not a call")
    group, op, dtype = body.what.split(" ")
    return Call(group, op, dtype, body.numel, body.group_size)
