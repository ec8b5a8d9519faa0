"""The confusion matrix of the docs: ``python tests/checks/matrix.py > docs/confusion-matrix.md``.

Runs every fault over several seeds, pipelines, strikes and struck ranks; takes a few minutes. ``--fault NAME``
prints the row of one fault only.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from simulated import REGISTRY, Expected, Run, expected, feed_live, plan, settle

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.fault import Where
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

TAIL = """
Controls: `drafter-uninitialised` and `strided-prefill-state` leave all ranks agreed, so there is nothing to find.

Each row is reproduced by `python tests/checks/matrix.py --fault NAME`. One run of each, as a single line:

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
    line: str = ""

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
        result.line = result.line or run.config.line
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


def page(names: list[str]) -> Iterator[str]:
    outcomes = []
    yield HEAD
    for name in names:
        outcomes.append(outcome(name))
        yield outcomes[-1].row() + "\n"
    yield TAIL
    for each in outcomes:
        yield f"- {each.name}: `{each.line}`\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=[*REGISTRY])
    chosen = parser.parse_args().fault
    for part in page([chosen] if chosen else [*REGISTRY]):
        sys.stdout.write(part)
        sys.stdout.flush()
