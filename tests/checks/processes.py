"""Process faults against the watch: a simulated run delivered by its courier, and what must come of any run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from simulated import DIGESTER

from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.lab.delivery import Courier
from stagewatch.agents.lab.fault import Injection, Plan
from stagewatch.agents.lab.faults_process import ProcessFault
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.monitor.engine import CONSISTENT
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.watch import Watch

Found = list[tuple[str, tuple[int, ...]]]
"""(check, ranks) of incidents, sorted."""


class Watched(Protocol):
    """What became of a run, simulated or real."""

    @property
    def fault(self) -> ProcessFault: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def injections(self) -> Sequence[Injection]: ...
    @property
    def found(self) -> Found: ...
    @property
    def blamed(self) -> set[int]: ...
    @property
    def verdicts(self) -> Counter[str]: ...


@dataclass
class Delivered:
    """A finished run and the watch that was told of it, ticked once a virtual second."""

    sim: Simulator
    watch: Watch
    told: list[Incident] = field(default_factory=list)
    """Incidents as they were when they opened or rose."""
    seconds: list[float] = field(default_factory=list)
    """From the moment the fault struck to that, for each of them."""

    @property
    def fault(self) -> ProcessFault:
        assert isinstance(self.sim.fault, ProcessFault)
        return self.sim.fault

    @property
    def sizes(self) -> Sizes:
        return self.sim.sizes

    @property
    def injections(self) -> Sequence[Injection]:
        return self.fault.injections

    @property
    def found(self) -> Found:
        return sorted((incident.check, incident.ranks) for incident in self.watch.incidents())

    @property
    def blamed(self) -> set[int]:
        return {rank for incident in self.watch.incidents() for rank in incident.blamed}

    @property
    def verdicts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for state in self.watch.states():
            counts.update({verdict: rows for verdict, rows in state.verdicts.items() if rows})
        return counts


def process_plan(
    name: str, seed: int = 1, pp: int = 3, tp: int = 2, dp: int = 1, k: int = 5, rank: Rank | None = None
) -> SimConfig:
    """A run long enough for the fault's script to be played while requests are answered."""
    config = SimConfig.benign(seed, pp=pp, tp=tp, dp=dp, spec_tokens=k, requests=120)
    return replace(config, fault=Plan(name, rank, from_step=20))


def deliver(config: SimConfig) -> Delivered:
    """Run it, and let the watch hear of it as a collector would, restarts included."""
    sim = Simulator(config)
    identities = sim.identities()
    journal: list[tuple[Rank, Evidence, int]] = []
    run = Delivered(sim, Watch())
    struck_ns = 0
    for identity in identities.values():
        run.watch.hello(identity, 10**9)
    for delivery in Courier(sim).deliveries():
        now_ns = delivery.now_ns
        struck_ns = struck_ns or (now_ns if run.injections else 0)
        if delivery.collector_restarts:
            run.watch = Watch()
            for identity in identities.values():
                run.watch.hello(identity, now_ns)
            for rank, evidence, heard_ns in journal:
                run.watch.take(identities[rank].instance, rank, evidence, -1.0, heard_ns)
        for rank in delivery.sidecar_restarts:
            run.watch.hello(identities[rank], now_ns)
        changes = []
        for rank, own in delivery.records.items():
            evidence = digest_records(own, identities[rank], DIGESTER, lost=delivery.lost.get(rank, 0))
            journal.append((rank, evidence, now_ns))
            changes += run.watch.take(identities[rank].instance, rank, evidence, -1.0, now_ns)
        changes += run.watch.tick(now_ns)
        told = [change.incident for change in changes if change.kind != "updated"]
        run.told += told
        run.seconds += [(now_ns - struck_ns) / 1e9] * len(told)
    run.watch.finish()
    return run


def struck(fault: ProcessFault, sizes: Sizes) -> tuple[int, ...]:
    """Numbers of the ranks struck."""
    return tuple(sorted((rank.dp * sizes.pp + rank.pp) * sizes.tp + rank.tp for rank in fault.struck(sizes)))


def expected(fault: ProcessFault, sizes: Sizes) -> Found:
    """Incidents that the fault's own outcome names, each of all struck ranks."""
    return sorted((check, struck(fault, sizes)) for check in fault.OUTCOME.checks)


def wrong(run: Watched) -> list[str]:
    """In words, all in which what came of a run differs from what its fault says must come of it."""
    outcome, verdicts, must = run.fault.OUTCOME, run.verdicts, expected(run.fault, run.sizes)
    found = []
    if not run.injections:
        found.append("the fault found no opportunity")
    if run.found != must:
        found.append(f"found {run.found}, expected {must}")
    if run.blamed:
        found.append(f"blamed {run.blamed}: a dead process is no culprit")
    if not verdicts[CONSISTENT]:
        found.append("nothing was compared")
    if verdicts.keys() - {CONSISTENT} - {*outcome.reasons}:
        found.append(f"verdicts {dict(verdicts)}, allowed are {outcome.reasons}")
    return found


def unexplained(run: Watched) -> list[str]:
    """In words, whether the rows that the fault kept from being compared are missing among the verdicts."""
    reasons, verdicts = run.fault.OUTCOME.reasons, run.verdicts
    if reasons and not verdicts.keys() & {*reasons}:
        return [f"verdicts {dict(verdicts)}, none of {reasons} among them"]
    return []
