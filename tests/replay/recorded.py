"""One simulated run, recorded in every way at once: in rings, in a journal, and as the live watch saw it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from simulated import Run, plan

from stagewatch.agents import wire
from stagewatch.agents.credentials import key_fingerprint, key_of_directory
from stagewatch.agents.digest import Digester
from stagewatch.agents.identity import Rank
from stagewatch.agents.probe import Health
from stagewatch.agents.record import Body, Heartbeat, Kind
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.tail import Privacy, Tail
from stagewatch.agents.wire import Batch, Hello, Limits
from stagewatch.monitor.incidents import Report
from stagewatch.monitor.journal import EntryKind, head_of
from stagewatch.monitor.story.verdicts import reports
from stagewatch.monitor.ticks import Ticks
from stagewatch.monitor.watch import REST_AFTER_NS, Watch

TRACES = Path(__file__).parents[1] / "data" / "traces"
"""Traces of the real engine."""
S = 10**9
BEGAN_NS = 1_800_000_000 * S
STEP_NS = S // 25
SILENCE_S = 40
"""How long a wedged engine's ranks only beat: longer than what the watch waits for."""
FRAME_EVERY = 10
"""Iterations between two looks of the sidecar."""
HEALTH = msgspec.json.encode(Health(True, "", 1, 0, 0, 0, 0)).decode()


def founding_fault() -> Run:
    """A run with the fault of vLLM PR 54436, and with preemptions."""
    return Run(plan("old-mask", from_step=3, requests=30))


@dataclass(frozen=True)
class Recorded:
    """A run and its recordings."""

    rings: Path
    journal: Path
    live: list[Report]
    """What the live watch had said by the end, worst first."""


class _Collector:
    """What a collector does with frames: journal them, let time pass, judge them."""

    def __init__(self, directory: Path) -> None:
        self.watch = Watch()
        self._ticks = Ticks()
        self._now_ns = 0
        directory.mkdir()
        self._journal = (directory / f"{1:016d}.journal").open("wb")
        self._journal.write(b"STGWJRN1")

    def take(self, message: bytes, now_ns: int) -> None:
        frame = wire.decode_upward(message, Limits())
        kind = EntryKind.HELLO if isinstance(frame, Hello) else EntryKind.BATCH
        self._journal.write(head_of(kind, now_ns, message) + message)
        if self._ticks.is_due(now_ns):
            self.watch.tick(now_ns // S * S)
        if isinstance(frame, Batch):
            evidence = wire.evidence_of(frame, Limits())
            self.watch.take(frame.instance, frame.rank, evidence, -1.0, now_ns)
        else:
            self.watch.hello(frame.identity, now_ns)

    def close(self, now_ns: int) -> None:
        """The engine is gone; in time the watch judges what it still waited for."""
        self.watch.tick(now_ns + REST_AFTER_NS + S)
        self._journal.close()


class _Sidecar:
    """The real tails over the rings."""

    def __init__(self, rings: list[Path], directory: Path, collector: _Collector) -> None:
        key = key_of_directory(directory)
        privacy = Privacy(Digester(key), key_fingerprint(key), False, False)
        self._tails = [Tail(path, privacy) for path in rings]
        self._collector = collector
        self._greeted = False

    def look(self, now_ns: int) -> None:
        for tail in self._tails:
            if not self._greeted:
                self._collector.take(wire.encode_frame(Hello(wire.PROTOCOL, tail.identity)), now_ns)
                tail.welcome(0)
            while tail.read(1 << 40):
                held = tail.unsent()
                if held is not None:
                    self._collector.take(held.message, now_ns)
                    tail.acknowledge(held.next_seq)
        self._greeted = True

    def close(self) -> None:
        for tail in self._tails:
            tail.close()


def record(run: Run, directory: Path, *, ring_bytes: int = 1 << 24) -> Recorded:
    """Record ``run``, iteration by iteration, as if it ran in real time. Reading goes on while it runs."""
    rings_at, journal_at = directory / "rings", directory / "data" / "journal"
    rings_at.mkdir(mode=0o700)
    journal_at.parent.mkdir()
    rings = {rank: RingWriter(rings_at, identity, ring_bytes) for rank, identity in run.identities.items()}
    collector = _Collector(journal_at)
    with contextlib.closing(_Sidecar([ring.path for ring in rings.values()], rings_at, collector)) as sidecar:
        sidecar.look(BEGAN_NS)
        for place, (t_ns, made) in enumerate(_moments(run)):
            for rank, kind, step, body in made:
                rings[rank].append(kind, step, t_ns, body)
            if place % FRAME_EVERY == 0 or t_ns % S == 0:
                sidecar.look(t_ns)
        sidecar.look(t_ns)
    for ring in rings.values():
        ring.close()
    collector.close(t_ns)
    return Recorded(rings_at, journal_at.parent, reports(collector.watch))


Made = list[tuple[Rank, Kind, int, Body]]


def _moments(run: Run) -> Iterator[tuple[int, Made]]:
    """(wall clock, records made then) of the whole run; a wedged engine's ranks beat on."""
    at = dict.fromkeys(run.records, 0)
    now = BEGAN_NS
    for iteration in run.iterations:
        now += STEP_NS
        made: Made = []
        for rank, count in iteration.items():
            for record in run.records[rank][at[rank] : at[rank] + count]:
                made.append((rank, record.kind, record.step, record.body))
            at[rank] += count
        yield now, made
    steps = {rank: own[-1].step if own else 0 for rank, own in run.records.items()}
    now = (now // S + 1) * S
    for _ in range(SILENCE_S if run.wedged else 1):
        now += S
        yield now, [(rank, Kind.HEARTBEAT, steps[rank], Heartbeat(HEALTH)) for rank in run.identities]
