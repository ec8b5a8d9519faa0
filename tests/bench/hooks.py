"""Time the vLLM adapter's hooks take of a step on a stand-in engine, stage by stage and hook by hook.

    python tests/bench/hooks.py

The stand-in (tests/engines/standins.py, variant C) calls what vLLM calls, on CPU tensors; only the time inside the
hooks is counted, the ring's included. The reference, taken in the same run, is the store alone: the same records
appended again to a ring of the same size.
"""

import inspect
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import median_and_spread, parser, show

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))

import standins
from watched import Watched

from stagewatch.agents.engines.wrapping import Wrapping
from stagewatch.agents.record import Kind

STEP_KINDS = (Kind.INPUTS, Kind.MASK, Kind.SENT, Kind.RECEIVED, Kind.CONSUMED, Kind.COLLECTIVE)

PER_REQUEST = ("added", "freed")
"""Hooks of a request's beginning and end, not of a step."""


def serve(rows: int, drafts: int, tokens: int) -> dict[str, Any]:
    """Serve ``rows`` requests side by side; microseconds per step by stage, and by hook."""
    standins.SLOTS = rows
    spent: dict[int, dict[str, list[int]]] = {}
    plain = Wrapping.wrap

    def wrap(self: Wrapping, target: Any, name: str, before: Any = None, after: Any = None) -> None:
        """Wrap, and time the wrapper as a whole, less the engine's own part."""
        original, clock = getattr(target, name), time.perf_counter_ns
        inside = [0]

        def engine(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return original(*args, **kwargs)
            finally:
                inside[0] += clock() - began

        engine.__name__ = name
        engine.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        setattr(target, name, engine)
        plain(self, target, name, before, after)
        wrapper = getattr(target, name)
        times = spent.setdefault(id(self._probe), {}).setdefault((before or after).__name__.lstrip("_"), [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            inside[0] = 0
            began = clock()
            result = wrapper(*args, **kwargs)
            times.append(clock() - began - inside[0])
            return result

        timed.__signature__ = engine.__signature__  # type: ignore[attr-defined]
        setattr(target, name, timed)

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:  # noqa: S108  # rings live there
        directory = Path(name)
        directory.chmod(0o700)
        Wrapping.wrap = wrap  # type: ignore[method-assign]
        try:
            watched = Watched("C", directory, drafts)
        finally:
            Wrapping.wrap = plain  # type: ignore[method-assign]
        requests = [standins.Request(f"request-{i:03}", [i + 1, 2], tokens) for i in range(rows)]
        watched.pipeline.serve(requests)
        found = {}
        for stage, probe in enumerate(watched.probes):
            if not probe.armed:
                raise SystemExit("the probe disarmed itself: no figure")
            found[stage] = {
                # The median call: what the machine does besides must not count.
                name: float(np.median(ns)) * round(len(ns) / probe.step) / 1e3
                for name, ns in spent[id(probe)].items()
                if ns and name not in PER_REQUEST
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
