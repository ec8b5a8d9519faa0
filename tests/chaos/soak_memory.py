"""Resident memory of a real collector under a steady load, sampled for half an hour.

    python tests/chaos/soak_memory.py --minutes 30 --json docs/soak-memory.json --svg docs/img/soak-memory.svg

A generator process runs the lab's simulator (two stages, K=7, requests that come and go), digests what it records as
a sidecar does, and sends it over the real wire; ``--lives`` makes the engine restart so many times on the way. A row
is one batch row of one rank's step. The journal keeps little, so that its retention works all along. Exit status 1
where memory still grew in the second half by more than ``--growth-max`` (a share of the median there).
"""

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from websockets.sync.client import connect

from stagewatch.agents import wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Record

TOKEN = "t" * 43
STEPS_PER_FRAME = 4
SEATS = 512
KEEP_BYTES = 1 << 30
WINDOW_FRAMES = 64
"""Frames that may be unacknowledged before the generator waits, as a sidecar does at its bound."""


@dataclass(frozen=True)
class Sample:
    """The collector at one moment."""

    at_s: float
    rss_bytes: int
    anonymous_bytes: int
    """Of these, what no file backs."""
    rows: int
    """Rows taken so far."""
    journal_bytes: int
    engines: int
    incidents: int


def generate(url: str, rows_per_s: float, seconds: float, lives: int) -> None:
    """Send a paced load until the time is over; ``lives`` engines, one after the other."""
    began, sent = time.monotonic(), 0
    for life in range(lives):
        until = began + seconds * (life + 1) / lives
        header = {"Authorization": f"Bearer {TOKEN}"}
        with connect(url, additional_headers=header, compression=None, max_size=None) as socket:
            workload = Workload(requests=10**9, max_tokens=(60, 90), arrivals_per_iteration=SEATS / 4)
            simulator = Simulator(
                SimConfig(seed=life, seats=SEATS, token_budget=SEATS * 16, workload=workload)
            )
            identities, digester = simulator.identities("soak"), Digester(bytes(16))
            for identity in identities.values():
                socket.send(wire.encode_frame(wire.Hello(wire.PROTOCOL, identity)))
                socket.recv()
            pending: dict[Any, list[Record]] = {rank: [] for rank in identities}
            unacknowledged = 0
            for number, made in enumerate(simulator.iterate(), 1):
                for rank, records in made.items():
                    pending[rank] += records
                if number % STEPS_PER_FRAME:
                    continue
                for rank, records in pending.items():
                    if records:
                        part = digest_records(records, identities[rank], digester)
                        socket.send(wire.encode_frame(wire.batch_of(identities[rank], part, 1.0)))
                        sent += 0 if part.inputs is None else len(part.inputs.slot)
                        unacknowledged += 1
                    pending[rank] = []
                while unacknowledged:
                    try:
                        # An acknowledgement may stand for several frames, so one for each is not waited for.
                        socket.recv(timeout=5.0 if unacknowledged > WINDOW_FRAMES else 0)
                        unacknowledged = 0 if unacknowledged > WINDOW_FRAMES else unacknowledged - 1
                    except TimeoutError:
                        break
                now = time.monotonic()
                if now >= until:
                    break
                ahead_s = sent / rows_per_s - (now - began)
                if ahead_s > 0:
                    time.sleep(ahead_s)
                elif ahead_s < -1:
                    sent += int(-ahead_s * rows_per_s) - int(
                        rows_per_s
                    )  # what a busy machine costs is not made up


def sample(pid: int, http: httpx.Client, began: float) -> Sample:
    """Look at the process, and at what it says of itself."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    metrics = http.get("/metrics").text.splitlines()

    def total(name: str) -> int:
        return int(
            sum(
                float(line.rsplit(" ", 1)[1]) for line in metrics if line.startswith((name + "{", name + " "))
            )
        )

    return Sample(
        round(time.monotonic() - began, 1),
        int(status["VmRSS"].split()[0]) * 1024,
        int(status["RssAnon"].split()[0]) * 1024,
        total("stagewatch_ingest_rows_total"),
        total("stagewatch_journal_size_bytes"),
        len(http.get("/v1/engines").json()["engines"]),
        total("stagewatch_incidents_total"),
    )


def soak(args: argparse.Namespace) -> list[Sample]:
    """Run collector and generator; return the samples."""
    seconds = args.minutes * 60
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        command = [
            Path(sys.executable).parent / "stagewatch",
            "collect",
            "--port",
            "0",
            "--data-dir",
            directory,
        ]
        command += ["--keep-bytes", str(KEEP_BYTES)]
        environment = {**os.environ, "STAGEWATCH_TOKEN": TOKEN}
        log = Path(directory) / "collector.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=output, text=True, env=environment
            )
        generator: multiprocessing.Process | None = None
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)
            generator = multiprocessing.get_context("spawn").Process(
                target=generate,
                args=(url.replace("http", "ws") + "/v1/ingest", args.rows_per_s, seconds, args.lives),
            )
            generator.start()
            began, samples = time.monotonic(), []
            while time.monotonic() - began < seconds and generator.is_alive():
                samples.append(sample(process.pid, http, began))
                time.sleep(args.every_s)
            generator.join(30)
            samples.append(sample(process.pid, http, began))
            return samples
        finally:
            if generator is not None and generator.is_alive():
                generator.kill()
            process.terminate()
            process.wait(60)
            print(log.read_text()[-2000:], file=sys.stderr, end="")


def verdict(samples: list[Sample]) -> dict[str, float]:
    """Figures of the second half, when every cache and bound has been reached."""
    half = [each for each in samples if each.at_s >= samples[-1].at_s / 2]
    times, sizes = np.array([s.at_s for s in half]), np.array([s.rss_bytes for s in half], float)
    slope = float(np.polyfit(times, sizes, 1)[0]) if len(half) > 2 else 0.0
    return {
        "seconds": samples[-1].at_s,
        "rows": samples[-1].rows,
        "rows_per_s": round(samples[-1].rows / samples[-1].at_s),
        "rss_median_mib": round(median(sizes) / 2**20, 1),
        "rss_min_mib": round(float(sizes.min()) / 2**20, 1),
        "rss_max_mib": round(float(sizes.max()) / 2**20, 1),
        "slope_kib_per_min": round(slope * 60 / 1024, 1),
        "growth_of_second_half": round(slope * (times[-1] - times[0]) / float(median(sizes)), 4),
    }


def plot(samples: list[Sample], figures: dict[str, float], path: Path) -> None:
    """Resident memory over time, and the rows taken."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "stagewatch"
    from matplotlib import pyplot

    minutes = [each.at_s / 60 for each in samples]
    figure, memory = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    memory.plot(minutes, [s.rss_bytes / 2**20 for s in samples], color="#1f5fa8", label="resident memory")
    memory.set(xlabel="minutes", ylabel="MiB", ylim=(0, None))
    rows = memory.twinx()
    rows.plot(minutes, [s.rows / 1e6 for s in samples], color="#b0651d", linestyle=":", label="rows taken")
    rows.set(ylabel="million rows", ylim=(0, None))
    lines = [*memory.get_lines(), *rows.get_lines()]
    memory.legend(lines, [str(line.get_label()) for line in lines], loc="lower right", frameon=False)
    memory.set_title(f"collector at {figures['rows_per_s']:,.0f} rows/s", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Soak, write, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rows-per-s", type=float, default=50_000)
    parser.add_argument("--lives", type=int, default=6, help="engines, one after the other")
    parser.add_argument("--every-s", type=float, default=5)
    parser.add_argument("--growth-max", type=float, default=0.05)
    parser.add_argument("--directory", type=Path, help="where the collector's data directory is made")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    samples = soak(args)
    figures = verdict(samples)
    found = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "asked_rows_per_s": args.rows_per_s,
        "lives": args.lives,
        **figures,
        "samples": [asdict(each) for each in samples],
    }
    if args.json:
        args.json.write_text(json.dumps(found, indent=None, separators=(",", ":")) + "\n")
    if args.svg:
        plot(samples, figures, args.svg)
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}))
    return 0 if abs(figures["growth_of_second_half"]) <= args.growth_max else 1


if __name__ == "__main__":
    sys.exit(main())
