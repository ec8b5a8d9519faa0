"""From a fault to its alarm, through the whole chain: lab, ring, sidecar, collector, incident.

    python tests/bench/alert.py

A pipeline of two processes runs with the founding fault. A time is that between a request's first bad step, as its
ranks recorded it, and the moment the collector raised it to critical. It is taken twice: with a collector that has
nothing else to do, and with one that other engines' frames keep busy for ``--load`` of a core (what it reached is in
the table). The references are taken in the same run: the pipeline's own step, and a round trip of HTTP to the
collector.
"""

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

from collector import make_load, send_life
from report import Row, cpu_s, parser, show
from websockets.sync.client import connect

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


@contextlib.contextmanager
def busy(stage: DemoStage, share: float) -> Iterator[list[float]]:
    """Keep the collector busy for a share of a core with other engines' frames; yields what it reached, at the end."""
    load, stop, reached = make_load(200, 128, 10), threading.Event(), [0.0]
    pid, pause_s = stage.pid("collect"), [0.0]

    def keep() -> None:
        life, began = 0, time.monotonic()
        spent = cpu_s(pid)
        header = {"Authorization": f"Bearer {stage.token}"}
        with connect(stage.ingest_url, additional_headers=header, compression=None, max_size=None) as socket:
            while not stop.is_set():
                before, since = cpu_s(pid), time.monotonic()
                send_life(socket, load, f"load-{life % 64}-{life}", pause_s[0])
                life += 1
                # What a frame costs is measured as it goes, so that the share holds on any machine.
                cost_s = (cpu_s(pid) - before) / len(load.messages)
                idle_s = time.monotonic() - since
                wanted_s = cost_s / share if share else 1.0
                pause_s[0] = max(0.0, pause_s[0] + (wanted_s - idle_s / len(load.messages)) / 2)
        reached[0] = (cpu_s(pid) - spent) / (time.monotonic() - began)

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        time.sleep(1.0)
        yield reached
    finally:
        stop.set()
        thread.join()


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
    options.add_argument(
        "--load", type=float, default=0.8, help="share of a core that other engines keep busy"
    )
    arguments = options.parse_args()
    rows: list[Row] = []
    for load in (0.0, arguments.load):
        rows += under(load, arguments.repeats, arguments.step_ms)
    show("alert", rows, {"seeds": arguments.repeats, "step pause ms": arguments.step_ms}, arguments.json)


def under(load: float, repeats: int, step_ms: float) -> list[Row]:
    """The table's lines under one load."""
    waits: list[float] = []
    behind: list[int] = []
    steps: list[float] = []
    with DemoStage() as stage, busy(stage, load) if load else contextlib.nullcontext([0.0]) as reached:
        for seed in range(repeats):
            more_waits, more_behind, more_steps = measure(stage, seed, step_ms)
            waits, behind, steps = waits + more_waits, behind + more_behind, steps + more_steps
        trips = [round_trip_ms(stage) for _ in range(50)]
    if not waits:
        sys.exit("no request went critical: nothing to measure")
    name = "idle" if not load else "busy"
    parts = {
        f"first bad step to alarm, {name}": waits,
        f"reference: one step of the lab, {name}": steps,
        f"reference: HTTP round trip, {name}": trips,
    }
    rows: list[Row] = [
        {
            "part": part,
            "count": len(values),
            "ms p50": statistics.median(values),
            "ms p99": quantile(values, 0.99),
        }
        for part, values in parts.items()
    ]
    rows[0] |= {
        "steps p50": statistics.median(behind),
        "steps p99": quantile([float(steps) for steps in behind], 0.99),
        "p50 in lab steps": statistics.median(waits) / statistics.median(steps),
        "collector cores": reached[0],
    }
    return rows


if __name__ == "__main__":
    main()
