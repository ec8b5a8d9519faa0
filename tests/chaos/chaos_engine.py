"""An engine to be killed: the lab's simulator at a steady pace, into real rings, one per rank.

    python chaos_engine.py RING_DIR SEED LIFE STEPS_PER_S

Which fault it has, and when, follows from the seed. It holds its rings open until it is told to end.
"""

import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.agents.ring import RingWriter

FAULTS = (
    None,
    "old-mask",
    "payload-altered",
    "drafts-not-relayed",
    "mask-differs",
    "rejection-not-subtracted",
)
CAPACITY = 32 << 20
"""Bytes of a ring: more than a run writes, so that what it holds at the end is everything."""
REQUESTS = 240


def config_of(seed: int, life: int) -> SimConfig:
    """The run of one life of the engine."""
    draw = random.Random(f"{seed}.{life}")
    fault = draw.choice(FAULTS)
    made = SimConfig.benign(
        seed * 100 + life, pp=draw.choice((2, 2, 3)), tp=draw.choice((1, 1, 2)), requests=REQUESTS
    )
    if fault is None:
        return made
    # A fault now and then: each strike is an incident of its own.
    return replace(made, stops=fault != "old-mask", fault=Plan(fault, from_step=20, times=40))


def main() -> None:
    """Write until the requests are over, then wait for SIGTERM."""
    ring_dir, seed, life, pace = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    simulator = Simulator(config_of(seed, life))
    ring_dir.mkdir(mode=0o700, exist_ok=True)
    rings: dict[object, RingWriter] = {}
    for rank, identity in simulator.identities("chaos").items():
        lived = msgspec.structs.replace(
            identity, instance=f"chaos-{seed}-{life}", started_ns=time.time_ns(), pid=life + 1
        )
        rings[rank] = RingWriter(ring_dir, lived, CAPACITY)
    print("writing", flush=True)
    began = time.monotonic()
    for number, made in enumerate(simulator.iterate(), 1):
        for rank, records in made.items():
            for record in records:
                rings[rank].append(record.kind, record.step, time.time_ns(), record.body)
        ahead_s = number / pace - (time.monotonic() - began)
        if ended.wait(max(ahead_s, 0)):
            return
    print("written", flush=True)
    ended.wait()


if __name__ == "__main__":
    main()
