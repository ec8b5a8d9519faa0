"""Process faults against the watch: a simulated run delivered by its courier, and what must come of it."""

from collections import Counter
from dataclasses import dataclass, field, replace

from simulated import DIGESTER

from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.delivery import Courier
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.faults_process import ProcessFault
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.monitor.engine import CONSISTENT
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.watch import Watch


@dataclass
class Delivered:
    """A finished run and the watch that was told of it, ticked once a virtual second."""

    sim: Simulator
    watch: Watch
    told: list[Incident] = field(default_factory=list)
    """Incidents as they were when they opened or rose."""

    @property
    def fault(self) -> ProcessFault:
        assert isinstance(self.sim.fault, ProcessFault)
        return self.sim.fault

    @property
    def struck(self) -> tuple[int, ...]:
        """Numbers of the ranks struck."""
        sizes = self.sim.sizes
        ranks = self.fault.struck(sizes)
        return tuple(sorted((rank.dp * sizes.pp + rank.pp) * sizes.tp + rank.tp for rank in ranks))

    @property
    def found(self) -> list[tuple[str, tuple[int, ...]]]:
        """(check, ranks) of every incident."""
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

    @property
    def expected(self) -> list[tuple[str, tuple[int, ...]]]:
        """Incidents that the fault's own outcome names, each of all struck ranks."""
        return sorted((check, self.struck) for check in self.fault.OUTCOME.checks)


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
    for identity in identities.values():
        run.watch.hello(identity, 10**9)
    for delivery in Courier(sim).deliveries():
        now_ns = delivery.now_ns
        if delivery.collector_restarts:
            run.watch = Watch()
            for identity in identities.values():
                run.watch.hello(identity, now_ns)
            for rank, evidence, heard_ns in journal:
                run.watch.take(identities[rank].instance, rank, evidence, -1.0, heard_ns)
        for rank in delivery.sidecar_restarts:
            run.watch.hello(identities[rank], now_ns)
        for rank, own in delivery.records.items():
            evidence = digest_records(own, identities[rank], DIGESTER, lost=delivery.lost.get(rank, 0))
            journal.append((rank, evidence, now_ns))
            changes = run.watch.take(identities[rank].instance, rank, evidence, -1.0, now_ns)
            run.told += [change.incident for change in changes if change.kind != "updated"]
        changes = run.watch.tick(now_ns)
        run.told += [change.incident for change in changes if change.kind != "updated"]
    run.watch.finish()
    return run


def wrong(run: Delivered) -> list[str]:
    """In words, all in which what came of a run differs from what its fault says must come of it."""
    outcome, verdicts = run.fault.OUTCOME, run.verdicts
    found = []
    if not run.fault.injections:
        found.append("the fault found no opportunity")
    if run.found != run.expected:
        found.append(f"found {run.found}, expected {run.expected}")
    if run.blamed:
        found.append(f"blamed {run.blamed}: a dead process is no culprit")
    if verdicts.keys() - {CONSISTENT} - {*outcome.reasons}:
        found.append(f"verdicts {dict(verdicts)}, allowed are {outcome.reasons}")
    if outcome.reasons and not verdicts.keys() & {*outcome.reasons}:
        found.append(f"verdicts {dict(verdicts)}, none of {outcome.reasons} among them")
    return found
