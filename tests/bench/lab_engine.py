"""A real engine with the probe off, on, and on with a sidecar that ships to a collector: what it costs the engine.

    python tests/bench/lab_engine.py

The engine is the lab: two processes of one pipeline over gloo, a small model, K=7. The three arms run in turn, in an
order drawn for each round, and are compared within the round, so that what else the machine does falls on all alike.
A step's time is the one between the answers of two iterations; CPU time is that of a rank's process, which tells more
where cores are shared. The interval is that of the mean difference over rounds, by bootstrap (95 %). On a machine of
few cores the sidecar and the collector compete with the engine's ranks for them; in production they run on cores that
the engine does not use.
"""

import contextlib
import os
import random
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from report import Row, cpu_s, median_and_spread, parser, show

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.engine import LabConfig, start_lab
from stagewatch.agents.lab.messages import Output
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.settings import ProbeSettings
from stagewatch.monitor.demo_stage import DemoStage

ARMS = ("off", "on", "on + sidecar")


@dataclass(frozen=True)
class Figures:
    """Of one run."""

    tokens_per_s: float
    step_ms: list[float]
    """Time between the answers of one iteration and the next."""
    cpu_ms: float
    """CPU time that a rank takes for an iteration."""


def run(config: LabConfig) -> Figures:
    """One run, from its first answer to its last."""
    times: dict[int, int] = {}
    used: dict[Rank, list[tuple[int, float]]] = {}
    ranks: dict[Rank, int] = {}

    def answered(tick: int, output: Output) -> None:
        if tick in times or not ranks:
            return
        times[tick] = time.perf_counter_ns()
        if tick % 16 == 0:
            for rank, pid in ranks.items():
                with contextlib.suppress(OSError):  # it has ended
                    used.setdefault(rank, []).append((tick, cpu_s(pid)))

    with start_lab(replace(config, stream_every=1), answered) as lab:
        ranks = lab.pids()
        result = lab.wait(300)
    if result.error:
        raise SystemExit(f"the lab ended early: {result.error}")
    tokens = sum(len(output.tokens) for output in result.outputs.values())
    ticks = sorted(times)
    steps = [(times[b] - times[a]) / 1e6 / (b - a) for a, b in pairwise(ticks)]
    seconds = (times[ticks[-1]] - times[ticks[0]]) / 1e9
    # From the first look to the last: starting a process is no part of a step.
    cpu = [(own[-1][1] - own[0][1]) / (own[-1][0] - own[0][0]) * 1e3 for own in used.values()]
    return Figures(tokens / seconds, steps, sum(cpu) / len(cpu))


def probe_settings(ring_dir: Path) -> ProbeSettings:
    # No budget: a probe that takes itself out on a busy machine would be measured as no probe.
    return ProbeSettings(ring_dir, "bench", 64 << 20, 1.0, 0.0, 2, fixed_mask=False)


def interval(values: list[float]) -> tuple[float, float]:
    """95 % of the means of resampled values."""
    rng = np.random.default_rng(1)
    means = rng.choice(np.array(values), (4000, len(values))).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    """Measure and show."""
    options = parser("what the probe and the sidecar cost a real engine")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--requests", type=int, default=24)
    args = options.parse_args()
    workload = Workload(
        requests=args.requests, prompt_len=(8, 16), max_tokens=(160, 161), arrivals_per_iteration=16.0
    )
    found: dict[str, list[Figures]] = {arm: [] for arm in ARMS}
    rng = random.Random(1)
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  # rings live there
    for seed in range(args.rounds):
        config = LabConfig(seed=seed, pp=2, spec_tokens=7, workload=workload)
        for arm in rng.sample(ARMS, len(ARMS)):
            if arm == "off":
                found[arm].append(run(config))
            elif arm == "on":
                with TemporaryDirectory(dir=shm) as name:
                    Path(name).chmod(0o700)
                    found[arm].append(run(replace(config, probe=probe_settings(Path(name)))))
            else:
                with DemoStage(raw_tokens=False) as stage:
                    found[arm].append(run(replace(config, probe=probe_settings(stage.ring_dir))))
    rows: list[Row] = []
    for arm in ARMS:
        rates = iter([one.tokens_per_s for one in found[arm]])
        rate, spread = median_and_spread(lambda rates=rates: next(rates), args.rounds)  # type: ignore[misc]
        steps = np.concatenate([one.step_ms for one in found[arm]])
        row: Row = {
            "arm": arm,
            "tokens/s": rate,
            "spread": f"{spread:.0%}",
            "step ms p50": float(np.quantile(steps, 0.5)),
            "step ms p99": float(np.quantile(steps, 0.99)),
            "CPU ms/step": float(np.median([one.cpu_ms for one in found[arm]])),
        }
        if arm != "off":
            pairs = list(zip(found[arm], found["off"], strict=True))
            shares = [one.tokens_per_s / base.tokens_per_s - 1 for one, base in pairs]
            added = [(one.cpu_ms - base.cpu_ms) * 1e3 for one, base in pairs]
            row |= {
                "tokens/s against off": "{:+.1%} ({:+.1%} to {:+.1%})".format(
                    np.mean(shares), *interval(shares)
                ),
                "CPU us/step added": "{:+.0f} ({:+.0f} to {:+.0f})".format(np.mean(added), *interval(added)),
            }
        rows.append(row)
    show(
        "lab engine",
        rows,
        {
            "rounds": args.rounds,
            "requests": args.requests,
            "pp": 2,
            "K": 7,
            "interval": "95 %, bootstrap of rounds",
        },
        args.json,
    )


if __name__ == "__main__":
    main()
