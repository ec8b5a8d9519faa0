"""Soak: simulated request-steps with every legitimate event, until enough have gone by without a word.

``python tests/checks/soak.py --request-steps 10000000 [--seed S]``. Prints one line per leg; the one that fails is
reproduced by its own line and the commit it names. Exit status 1 where the watch said anything, or a row was not
found CONSISTENT.
"""

import argparse
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.agents.record import Record
from stagewatch.monitor.engine import CONSISTENT
from stagewatch.monitor.watch import Watch

LEG_REQUEST_STEPS = 100_000
ITERATIONS_PER_BATCH = 32
"""A sidecar ships several steps at a time; batches of ranks are handed over in random order."""


@dataclass
class Leg:
    """One simulated engine's life."""

    config: SimConfig
    request_steps: int
    simulated_s: float
    digested_s: float
    watched_s: float
    rows_taken: int
    """Rows of all ranks that the watch compared."""
    incidents: list[str]
    verdicts: dict[str, int]

    @property
    def silent(self) -> bool:
        return not self.incidents and self.verdicts == {CONSISTENT: self.request_steps}

    def told(self) -> str:
        seconds = self.simulated_s + self.digested_s + self.watched_s
        config = self.config
        return (
            f"{'ok' if self.silent else 'FAILED'} {self.request_steps} request-steps, pp {config.pp} tp {config.tp} "
            f"dp {config.dp} K {config.spec_tokens}: {self.request_steps / seconds:.0f}/s "
            f"(simulate {self.simulated_s:.1f} s, digest {self.digested_s:.1f} s, watch {self.watched_s:.1f} s, "
            f"{self.rows_taken / self.watched_s / 1e6:.2f} M rows/s in the watch)"
        )


def drawn(seed: int) -> SimConfig:
    """A benign run of any shape."""
    rng = random.Random(seed)
    config = SimConfig.benign(
        seed,
        pp=rng.choice((2, 2, 3, 3, 4, 5, 6, 8)),
        tp=rng.choice((1, 1, 1, 2, 2, 4)),
        dp=rng.choice((1, 1, 2)),
        spec_tokens=rng.randint(0, 7),
        requests=10_000_000,
    )
    busy = replace(config.workload, arrivals_per_iteration=rng.choice((1.0, 3.0, 6.0)))
    return replace(config, workload=busy, seats=192, token_budget=1024, blocks=2000)


def leg(config: SimConfig, request_steps: int, order_seed: int) -> Leg:
    """Simulate, digest and watch one engine for so many request-steps."""
    sim, watch, digester = Simulator(config), Watch(), Digester(b"\x09" * 16)
    identities = sim.identities()
    for identity in identities.values():
        watch.hello(identity)
    rng = random.Random(order_seed)
    spent: dict[str, float] = defaultdict(float)
    rows = 0
    for batch in _batches(sim, request_steps, spent):
        ranks = [rank for rank, own in batch.items() if own]
        rng.shuffle(ranks)
        for rank in ranks:
            began = time.perf_counter()
            evidence = digest_records(batch[rank], identities[rank], digester)
            between = time.perf_counter()
            watch.take(identities[rank].instance, rank, evidence, -1.0, 0)
            spent["digest"] += between - began
            spent["watch"] += time.perf_counter() - between
            rows += 0 if evidence.inputs is None else len(evidence.inputs.request)
    watch.finish()
    verdicts: Counter[str] = Counter()
    for state in watch.states():
        verdicts.update({verdict: count for verdict, count in state.verdicts.items() if count})
    told = [
        f"{i.check} {i.severity.word} {i.request} at {i.first_bad_step}: {i.chain[0].text}"
        for i in watch.incidents()
    ]
    return Leg(
        config,
        sim.request_steps,
        spent["simulate"],
        spent["digest"],
        spent["watch"],
        rows,
        told,
        dict(verdicts),
    )


def _batches(
    sim: Simulator, request_steps: int, spent: dict[str, float]
) -> Iterator[dict[Rank, list[Record]]]:
    made: dict[Rank, list[Record]] = {rank: [] for rank in sim.ranks}
    began = time.perf_counter()
    for count, fresh in enumerate(sim.iterate(), 1):
        for rank, own in fresh.items():
            made[rank] += own
        if count % ITERATIONS_PER_BATCH == 0:
            spent["simulate"] += time.perf_counter() - began
            yield made
            made = {rank: [] for rank in sim.ranks}
            began = time.perf_counter()
        if sim.request_steps >= request_steps:
            break
    yield made


def commit() -> str:
    """The commit under test."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def soak(request_steps: int, seed: int, seconds: float | None = None) -> Iterator[Leg]:
    """Legs until enough request-steps, or seconds, have gone by."""
    began, done, number = time.monotonic(), 0, 0
    while done < request_steps and (seconds is None or time.monotonic() - began < seconds):
        leg_seed = seed + number
        each = leg(drawn(leg_seed), min(LEG_REQUEST_STEPS, request_steps - done), leg_seed)
        done += each.request_steps
        number += 1
        yield each


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request-steps", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, help="stop after so long, whatever has gone by")
    parser.add_argument(
        "--seed", type=int, help="of the first leg; each further leg's is one more. Default: the time"
    )
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else time.time_ns() // 10**9
    total = 0
    for number, each in enumerate(soak(args.request_steps, seed, args.seconds)):
        total += each.request_steps
        print(f"seed {seed + number}: {each.told()}", flush=True)
        if not each.silent:
            print(*each.incidents[:10], each.verdicts, sep="\n")
            print(
                f"reproduce: soak.py --seed {seed + number} --request-steps {each.request_steps}, commit {commit()}"
            )
            return 1
    print(f"{total} request-steps without a word, seed {seed}, commit {commit()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
