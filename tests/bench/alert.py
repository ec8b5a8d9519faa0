"""From a fault to its alarm, through the whole chain: lab, ring, sidecar, collector, incident.

    python tests/bench/alert.py

A pipeline of two processes runs with the founding fault. A time is that between a request's first bad step, as its
ranks recorded it, and the moment the collector raised it to critical. The references are taken in the same run: the
pipeline's own step, and a round trip of HTTP to the collector.
"""

import statistics
import sys
import time
from itertools import pairwise

from report import Row, parser, show

from stagewatch.agents.lab.engine import LabConfig, start_lab
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import RingReader
from stagewatch.agents.settings import ProbeSettings
from stagewatch.monitor.demo_stage import DemoStage

REQUESTS = 40


def measure(stage: DemoStage, seed: int, step_ms: float) -> tuple[list[float], list[int], list[float]]:
    """(ms to the alarm, steps to the alarm) of each critical request, and ms of each step, of one run."""
    config = LabConfig(
        seed=seed,
        workload=Workload(
            requests=REQUESTS, prompt_len=(8, 24), max_tokens=(16, 32), arrivals_per_iteration=0.5
        ),
        probe=ProbeSettings(stage.ring_dir, "bench", 16 << 20, 1.0, 0.0, 2, fixed_mask=False),
        fault=Plan("old-mask"),
        step_sleep_ms=step_ms,
    )
    with start_lab(config) as lab:
        result = lab.wait(120)
    stage.wait_for(config.instance, result.steps)
    critical = [found for found in stage.incidents(config.instance) if found["severity"] == "critical"]
    waits = [(found["raised_ns"] - found["first_bad_ns"]) / 1e6 for found in critical]
    reader = RingReader(next(stage.ring_dir.glob(f"{config.instance}.*.ring")))
    times = [record.t_ns for record in reader.read(1 << 20) if record.kind is Kind.INPUTS]
    return waits, [found["latency_steps"] for found in critical], [(b - a) / 1e6 for a, b in pairwise(times)]


def round_trip_ms(stage: DemoStage) -> float:
    """One HTTP request to the collector."""
    began = time.perf_counter()
    stage.engine("nobody")
    return (time.perf_counter() - began) * 1e3


def quantile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def main() -> None:
    """Run and show."""
    options = parser("fault to alarm, through the whole chain")
    options.add_argument("--step-ms", type=float, default=5.0, help="pause after each step of the lab")
    arguments = options.parse_args()
    waits: list[float] = []
    behind: list[int] = []
    steps: list[float] = []
    with DemoStage() as stage:
        for seed in range(arguments.repeats):
            more_waits, more_behind, more_steps = measure(stage, seed, arguments.step_ms)
            waits, behind, steps = waits + more_waits, behind + more_behind, steps + more_steps
        trips = [round_trip_ms(stage) for _ in range(50)]
    if not waits:
        sys.exit("no request went critical: nothing to measure")
    rows: list[Row] = [
        {
            "part": "first bad step to alarm",
            "ms p50": statistics.median(waits),
            "ms p99": quantile(waits, 0.99),
        },
        {
            "part": "reference: one step of the lab",
            "ms p50": statistics.median(steps),
            "ms p99": quantile(steps, 0.99),
        },
        {
            "part": "reference: HTTP round trip",
            "ms p50": statistics.median(trips),
            "ms p99": quantile(trips, 0.99),
        },
    ]
    parameters = {
        "seeds": arguments.repeats,
        "alarms": len(waits),
        "steps to alarm, largest": max(behind),
        "alarm p50 in lab steps": statistics.median(waits) / statistics.median(steps),
    }
    show("alert", rows, parameters, arguments.json)


if __name__ == "__main__":
    main()
