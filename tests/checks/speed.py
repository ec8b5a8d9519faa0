"""How fast the simulator is, alone, recorded, and watched: ``python tests/checks/speed.py``. A minute or so.

Seconds are the process's own of the processor, so that what else the machine does counts little.
"""

import gc
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from soak import ITERATIONS_PER_BATCH

from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.agents.record import Record
from stagewatch.monitor.watch import Watch

REQUEST_STEPS = 100_000
SHAPES = ((64, 2, 1), (512, 2, 1), (512, 3, 1), (512, 4, 2))
"""(seats, PP, TP). K is 7, and everything benign happens."""


def rate(config: SimConfig, *, record: bool) -> float:
    """Request-steps a second of the simulator alone."""
    sim = Simulator(config, record=record)
    began = time.process_time()
    for _ in sim.iterate():
        if sim.request_steps >= REQUEST_STEPS:
            break
    return sim.request_steps / (time.process_time() - began)


def rate_watched(config: SimConfig) -> float:
    """The same with all checks, frames of several steps as a sidecar ships them, ranks in random order."""
    sim, watch, digester, rng = Simulator(config), Watch(), Digester(b"\x09" * 16), random.Random(1)
    identities = sim.identities()
    for identity in identities.values():
        watch.hello(identity)
    made: dict[object, list[Record]] = {rank: [] for rank in sim.ranks}
    began = time.process_time()
    for count, fresh in enumerate(sim.iterate(), 1):
        for rank, own in fresh.items():
            made[rank] += own
        if count % ITERATIONS_PER_BATCH:
            continue
        for rank in rng.sample(sim.ranks, len(sim.ranks)):
            evidence = digest_records(made[rank], identities[rank], digester)
            watch.take(identities[rank].instance, rank, evidence, -1.0, 0)
            made[rank] = []
        if sim.request_steps >= REQUEST_STEPS:
            break
    return sim.request_steps / (time.process_time() - began)


def main() -> None:
    print("| seats | PP | TP | alone | recorded | recorded, digested and checked |")
    print("|---|---|---|---|---|---|")
    for seats, pp, tp in SHAPES:
        config = SimConfig.benign(1, pp=pp, tp=tp, spec_tokens=7, seats=seats, requests=10_000_000)
        gc.collect()
        gc.disable()  # records form no cycles
        rates = rate(config, record=False), rate(config, record=True), rate_watched(config)
        gc.enable()
        cells = " | ".join(f"{one / 1e3:.0f} k" for one in rates)
        print(f"| {seats} | {pp} | {tp} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
