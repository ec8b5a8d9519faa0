"""The confusion matrix of the docs: ``python tests/checks/matrix.py > docs/confusion-matrix.md``.

Runs every fault over several seeds, pipelines, strikes and struck ranks; takes a few minutes. ``--fault NAME``
prints the row of one fault only, and a line for each of its runs, which repeats it: ``--run CONFIG``.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from processes import Delivered, deliver, process_plan
from processes import expected as expected_of_process
from simulated import REGISTRY, Expected, Run, expected, feed_live, found, plan, settle

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.fault import Where
from stagewatch.agents.lab.faults_process import PROCESS_REGISTRY
from stagewatch.agents.lab.simconfig import SimConfig
from stagewatch.monitor.engine import CONSISTENT
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.watch import Watch

RUNS = ((1, 3, 1, None), (2, 4, 2, None), (3, 2, 1, None), (4, 3, 2, 1))
"""(seed, PP, TP, times)."""

HEAD = """\
# Confusion matrix

<!-- Written by `python tests/checks/matrix.py`; a test holds its shape to the registry of faults. -->

Every fault of the lab's registry, put into simulated pipelines and watched live. A fault that strikes one stage of
itself is also put on a middle stage. *Expected* counts what the injections must lead to: one incident per request and
life, or one of the whole engine. *Found by* says which checks named them. *Steps* is the longest time from the first
bad step to the incident, in steps. Of the expected incidents that were found, the blame was *right* (the ranks that
were struck, or nobody where no rank was), *undecided* (nobody, though ranks were struck: two peers cannot outvote
each other), or *wrong*. *Other* counts incidents that nothing injected explains.

| fault | cases | expected | found | found by | steps | right | undecided | wrong | other |
|---|---|---|---|---|---|---|---|---|---|
"""

PROCESS_HEAD = """
## Process faults

Ranks, sidecars and the collector, killed, stopped and started again while a simulated pipeline is answering, by a
virtual clock; each on several ranks, in several pipelines. `tests/lab/test_lab_processes.py` plays the same scripts on
real processes and expects the same. *Expected* are the incidents of each run: every one names all ranks struck, and
blames none, for nobody saw what they did last. *Seconds* is the longest time from the strike to the incident; the
checks wait for half a minute. *Not compared* counts rows without a verdict, of all rows, by their reason.

| fault | runs | expected | found | seconds | not compared | blamed | other |
|---|---|---|---|---|---|---|---|
"""

PROCESS_RUNS = ((1, 3, 2, None), (2, 4, 1, (0, 2, 0)), (3, 2, 2, (0, 1, 1)), (4, 3, 1, (0, 0, 0)))
"""(seed, PP, TP, rank struck)."""

TAIL = """
The last {controls} engine faults are controls: they leave all ranks agreed, so there is nothing to find
([why](checks.md#what-cannot-be-observed)).

`python tests/checks/matrix.py --fault NAME` repeats a row, and prints a line for each of its runs that repeats that run
alone and says what was expected and what was found.
"""


@dataclass
class Outcome:
    """What became of all runs of one fault."""

    name: str
    expected: int = 0
    found: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    blame: Counter[str] = field(default_factory=Counter)
    other: int = 0
    lines: list[str] = field(default_factory=list)

    def row(self) -> str:
        cases = ", ".join(map(str, REGISTRY[self.name].CASES))
        count = sum(self.found.values())
        share = f"{100 * count / self.expected:.0f} %" if self.expected else "none to find"
        checks = ", ".join(f"{check} {found}" for check, found in self.found.most_common())
        blame = " | ".join(str(self.blame[kind]) for kind in ("right", "undecided", "wrong"))
        steps = str(self.steps) if count else ""
        return f"| {self.name} | {cases} | {self.expected} | {share} | {checks} | {steps} | {blame} | {self.other} |"


def runs(name: str) -> Iterator[Run]:
    fault = REGISTRY[name]
    for seed, pp, tp, times in RUNS:
        from_step = 3 if name in ("all-chunk-broadcast", "width-mismatch") else 15
        sizes = {"pp": max(pp, fault.LEAST.pp), "tp": max(tp, fault.LEAST.tp)}
        ranks: list[Rank | None] = [None]
        if fault.WHERE is Where.FIRST and pp > 2:
            ranks.append(Rank(0, 1, sizes["tp"] - 1))
        for rank in ranks:
            run = Run(
                plan(name, seed=seed, **sizes, times=times, from_step=from_step, rank=rank, requests=40)
            )
            if run.injections:
                yield run


def outcome(name: str) -> Outcome:
    result = Outcome(name)
    for run in runs(name):
        result.lines.append(again(run.config))
        watch = Watch()
        raised = {incident.id: incident for incident in feed_live(run, watch)}
        settle(run, watch)
        must = expected(run)
        struck = {run.number(one.rank) for one in run.injections if one.rank is not None}
        result.expected += len(must)
        for incident in watch.incidents():
            own = Expected.of(incident)
            same = [
                each
                for each in must
                if (each.request, each.first_bad_step) == (own.request, own.first_bad_step)
            ]
            if not same:
                result.other += 1
                continue
            each = max(same, key=lambda each: (each.check == own.check) + (each.severity == own.severity))
            must.remove(each)
            result.found[incident.check] += 1
            result.steps = max(result.steps, raised.get(incident.id, incident).latency_steps)
            result.blame[_blame(incident, each, struck)] += 1
    return result


def _blame(incident: Incident, each: Expected, struck: set[int]) -> str:
    blamed = {*incident.blamed}
    if blamed == {*each.blamed}:
        return "right"
    if not blamed:
        return "undecided"
    # A subset of who was struck is right as far as it goes; expectations name the ranks struck at the first bad step.
    return "right" if blamed <= (struck or {*each.blamed}) else "wrong"


@dataclass
class ProcessOutcome:
    """What became of all runs of one process fault."""

    name: str
    runs: int = 0
    expected: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    blamed: int = 0
    other: int = 0
    lines: list[str] = field(default_factory=list)

    def row(self) -> str:
        share = (
            f"{100 * self.found.total() / self.expected.total():.0f} %" if self.expected else "none to find"
        )
        expected = ", ".join(sorted(PROCESS_REGISTRY[self.name].OUTCOME.checks)) or "none"
        reasons = ", ".join(f"{reason} {rows}" for reason, rows in sorted(self.reasons.items())) or "none"
        seconds = f"{self.seconds:.0f}" if self.found else ""
        return (
            f"| {self.name} | {self.runs} | {expected} | {share} | {seconds} | {reasons} of {self.rows} "
            f"| {self.blamed} | {self.other} |"
        )

    def add(self, run: Delivered) -> None:
        self.runs += 1
        must = Counter(expected_of_process(run.fault, run.sizes))
        seen = Counter(run.found)
        for (check, _), count in must.items():
            self.expected[check] += count
        for (check, _), count in (must & seen).items():
            self.found[check] += count
        self.other += (seen - must).total()
        self.blamed += len(run.blamed)
        self.seconds = max(self.seconds, *run.seconds, 0.0)
        verdicts = run.verdicts
        self.rows += verdicts.total()
        del verdicts[CONSISTENT]
        self.reasons.update(verdicts)


def process_outcome(name: str) -> ProcessOutcome:
    result = ProcessOutcome(name)
    for seed, pp, tp, rank in PROCESS_RUNS:
        config = process_plan(name, seed, pp, tp, rank=Rank(*rank) if rank else None)
        result.add(deliver(config))
        result.lines.append(again(config))
    return result


def page() -> Iterator[str]:
    yield HEAD
    for name in REGISTRY:
        yield outcome(name).row() + "\n"
    yield PROCESS_HEAD
    for name in PROCESS_REGISTRY:
        yield process_outcome(name).row() + "\n"
    yield TAIL.format(controls=sum(not fault.INVARIANTS for fault in REGISTRY.values()))


def again(config: SimConfig) -> str:
    """The line that repeats a run."""
    return f"python tests/checks/matrix.py --run '{config.text}'"


def one_run(config: SimConfig) -> Iterator[str]:
    if config.fault is not None and config.fault.name in PROCESS_REGISTRY:
        delivered = deliver(config)
        must: list[object] = [*expected_of_process(delivered.fault, delivered.sizes)]
        seen: list[object] = [*delivered.found]
    else:
        run, watch = Run(config), Watch()
        feed_live(run, watch)
        settle(run, watch)
        must, seen = [*expected(run)], [*found(watch)]
    for title, lines in (("expected", must), ("found", seen)):
        yield f"{title}: {len(lines)}\n"
        yield from (f"  {line}\n" for line in lines)


def one(name: str) -> Iterator[str]:
    result = outcome(name) if name in REGISTRY else process_outcome(name)
    yield result.row() + "\n"
    yield from (f"{line}\n" for line in result.lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=[*REGISTRY, *PROCESS_REGISTRY])
    parser.add_argument("--run", metavar="CONFIG", type=lambda text: SimConfig.decode(text, benign=True))
    options = parser.parse_args()
    parts = one_run(options.run) if options.run else one(options.fault) if options.fault else page()
    for part in parts:
        sys.stdout.write(part)
        sys.stdout.flush()
