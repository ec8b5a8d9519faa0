"""What a step costs with the probe, beside what else an engine could do to be watched.

    python tests/bench/alternatives.py

All columns are taken in the same run, in turn, on the same rows: the probe's record and store of a last stage's step
(inputs, mask and payload), recorded OpenTelemetry spans (one for the step with its counts as attributes, or one for
each row besides; sampled, ended, handed to a processor that drops them), a set of prometheus_client counters and one
histogram for the step, and a hash of the step's tokens gathered from all of two ranks over gloo, in line, as an engine
does that checks its ranks' consensus by itself. That last one makes every rank wait for the slowest.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from probe import bodies, identity, us_each
from prometheus_client import CollectorRegistry, Counter, Histogram
from report import exponent, median_and_spread, parser, show

from stagewatch.agents.probe import Probe
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import RingWriter

COUNTERS = ("steps", "rows", "tokens", "drafts", "accepted", "rejected")
GATHER = """
import hashlib, sys, time
import numpy as np, torch
import torch.distributed as dist
rank, port, steps, rows, width = map(int, sys.argv[1:])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
tokens = np.zeros((rows, width), np.int32)
found, times = [torch.zeros(1, dtype=torch.int64) for _ in range(2)], []
for step in range(steps + 20):
    began = time.perf_counter_ns()
    digest = int.from_bytes(hashlib.blake2b(tokens, digest_size=7).digest(), "little")
    dist.all_gather(found, torch.tensor([digest]))
    assert int(found[0]) == int(found[1])
    times.append(time.perf_counter_ns() - began)
if rank == 0:
    print(float(np.median(times[20:])) / 1e3)
dist.destroy_process_group()
"""


class Dropped(SpanProcessor):
    """Takes spans and does nothing with them."""


def probe_step(directory: Path, rows: int, drafts: int) -> Callable[[], object]:
    """What a last stage records of a step."""
    ring = RingWriter(directory, identity(drafts), 64 << 20)
    probe = Probe(ring, identity(drafts), heartbeat_s=3600)
    inputs, mask, sent = bodies(rows, drafts)
    engine_mask = mask.engine.view("?")

    def step() -> None:
        probe.inputs(inputs)
        probe.mask(engine_mask, engine_mask, rows)
        probe.payload(Kind.SENT, probe.step, sent)
        if not probe.armed:
            raise SystemExit("the probe disarmed itself: no figure")

    return step


def span_steps(rows: int, drafts: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A span for a step, and one with a span for each row inside."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Dropped())
    tracer = provider.get_tracer("bench")

    def one() -> None:
        with tracer.start_as_current_span("step", attributes={"rows": rows, "drafts": drafts, "step": 1}):
            pass

    def each() -> None:
        with tracer.start_as_current_span("step", attributes={"rows": rows, "drafts": drafts, "step": 1}):
            for row in range(rows):
                tracer.start_span("row", attributes={"slot": row, "computed": row, "drafts": drafts}).end()

    return one, each


def counter_step(rows: int, drafts: int) -> Callable[[], object]:
    """Six counters and a histogram."""
    registry = CollectorRegistry()
    counters = [Counter(name, name, ["rank"], registry=registry).labels("0") for name in COUNTERS]
    seconds = Histogram("step_seconds", "step", ["rank"], registry=registry).labels("0")

    def step() -> None:
        for counter, amount in zip(
            counters, (1, rows, rows * (drafts + 1), rows * drafts, rows, rows), strict=True
        ):
            counter.inc(amount)
        seconds.observe(0.02)

    return step


def gather_us(steps: int, rows: int, drafts: int) -> float:
    """Median microseconds of a hash gathered by two processes over gloo."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(number) for number in (port, steps, rows, drafts + 1)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", GATHER, str(rank), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    return float(told[0])


def main() -> None:
    """Measure and show."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    arguments.add_argument("--drafts", type=int, default=7)
    arguments.add_argument("--steps", type=int, default=200)
    args = arguments.parse_args()
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  # rings live there
    table = []
    for rows in args.rows:
        with tempfile.TemporaryDirectory(dir=shm) as name:
            directory = Path(name)
            directory.chmod(0o700)
            one, each = span_steps(rows, args.drafts)
            parts = {
                "probe us": probe_step(directory, rows, args.drafts),
                "span a step us": one,
                "span a row us": each,
                "counters us": counter_step(rows, args.drafts),
                "hash alone us": lambda rows=rows: hashlib.blake2b(bytes(rows * (args.drafts + 1) * 4)),
            }
            for part in parts.values():
                us_each(part, 20)
            # Round by round, so that what else the machine does falls on all of them alike.
            rounds = [
                {key: us_each(part, args.steps) for key, part in parts.items()} for _ in range(args.repeats)
            ]
        line: dict[str, object] = {"rows": rows}
        for key in parts:
            values = iter([found[key] for found in rounds])
            line[key], spread = median_and_spread(lambda values=values: next(values), args.repeats)
            if key == "probe us":
                line["spread"] = f"{spread:.0%}"
        line["gloo all_gather us"] = gather_us(args.steps, rows, args.drafts)
        line["probe / span a step"] = float(line["probe us"]) / float(line["span a step us"])  # type: ignore[arg-type]
        line["probe / span a row"] = float(line["probe us"]) / float(line["span a row us"])  # type: ignore[arg-type]
        line["probe / all_gather"] = float(line["probe us"]) / float(line["gloo all_gather us"])  # type: ignore[arg-type]
        table.append(line)
    grown = {
        f"exponent of {key}": exponent([row["rows"] for row in table], [row[key] for row in table])
        for key in ("probe us", "span a row us")
    }
    show("alternatives", table, {"K": args.drafts, "steps": args.steps, **grown}, args.json)


if __name__ == "__main__":
    main()
