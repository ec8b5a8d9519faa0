"""Time the vLLM adapter's hooks take of a step on a stand-in engine, stage by stage and hook by hook.

    python tests/bench/hooks.py

The stand-in (tests/engines/standins.py, variant C) calls what vLLM calls, on CPU tensors; only the time inside the
hooks is counted, the ring's included. The reference, taken in the same run, is the store alone: the same records
appended again to a ring of the same size.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import median_and_spread, parser, show

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

import standins
from conftest import Watched

from stagewatch.agents.engines.wrapping import Wrapping
from stagewatch.agents.record import Kind

STEP_KINDS = (Kind.INPUTS, Kind.MASK, Kind.SENT, Kind.RECEIVED, Kind.CONSUMED, Kind.COLLECTIVE)

PER_REQUEST = ("added", "freed")
"""Hooks of a request's beginning and end, not of a step."""


def serve(rows: int, drafts: int, tokens: int) -> dict[str, Any]:
    """Serve ``rows`` requests side by side; microseconds per step by stage, and by hook."""
    standins.SLOTS = rows
    spent: dict[int, dict[str, list[int]]] = {}
    original = Wrapping._safely

    def timed(self: Wrapping, hook: Any, *args: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return original(self, hook, *args)
        finally:
            name = getattr(hook, "__name__", "hook").lstrip("_")
            spent.setdefault(id(self._probe), {}).setdefault(name, []).append(time.perf_counter_ns() - began)

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:  # noqa: S108  # rings live there
        directory = Path(name)
        directory.chmod(0o700)
        Wrapping._safely = timed  # type: ignore[method-assign]
        try:
            watched = Watched("C", directory, drafts)
            requests = [standins.Request(f"request-{i:03}", [i + 1, 2], tokens) for i in range(rows)]
            watched.pipeline.serve(requests)
        finally:
            Wrapping._safely = original  # type: ignore[method-assign]
        found = {}
        for stage, probe in enumerate(watched.probes):
            if not probe.armed:
                raise SystemExit("the probe disarmed itself: no figure")
            found[stage] = {
                # The median call: what the machine does besides must not count.
                name: float(np.median(ns)) * round(len(ns) / probe.step) / 1e3
                for name, ns in spent[id(probe)].items()
                if name not in PER_REQUEST
            }
        for hooks in watched.hooks:
            hooks.remove()
        store = {stage: store_us(watched, stage, watched.probes[stage].step) for stage in (0, 1)}
    return {"hooks": found, "store": store}


def store_us(watched: Watched, stage: int, steps: int) -> float:
    """Microseconds a step that storing a stage's records takes by itself."""
    records = [record for record in watched.records(stage) if record.kind in STEP_KINDS]
    ring, times = watched.probes[stage]._ring, np.zeros(3)
    for index in range(len(times)):
        began = time.perf_counter_ns()
        for record in records:
            ring.append(record.kind, record.step, record.t_ns, record.body)
        times[index] = time.perf_counter_ns() - began
    return float(np.median(times)) / steps / 1e3


def main() -> None:
    """Measure and show."""
    options = parser("what the vLLM adapter's hooks take of a step")
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--drafts", type=int, default=7)
    options.add_argument("--tokens", type=int, default=120, help="tokens each request is served")
    args = options.parse_args()
    taken = [serve(args.rows, args.drafts, args.tokens) for _ in range(args.repeats)]
    table = []
    for stage in (0, 1):
        names = sorted({name for one in taken for name in one["hooks"][stage]})
        totals = iter([sum(one["hooks"][stage].values()) for one in taken])
        total, spread = median_and_spread(lambda each=totals: next(each), len(taken))  # type: ignore[misc]
        store = float(np.median([one["store"][stage] for one in taken]))
        table.append(
            {"stage": stage, "hook": "all", "us": total, "spread": f"{spread:.0%}", "/ store": total / store}
        )
        for name in names:
            us = float(np.median([one["hooks"][stage].get(name, 0.0) for one in taken]))
            table.append({"stage": stage, "hook": name, "us": us, "spread": "", "/ store": us / store})
        table.append(
            {"stage": stage, "hook": "reference: store alone", "us": store, "spread": "", "/ store": 1.0}
        )
    show("hooks", table, {"rows": args.rows, "K": args.drafts, "tokens": args.tokens}, args.json)


if __name__ == "__main__":
    main()
