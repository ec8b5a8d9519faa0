"""Run the CUDA path of the probe's copies beside the synchronous one, compare them, and print figures.

``python tests/gpu/staging.py [--steps 500] [--rows 64] [--drafts 7]``. Needs torch with a CUDA device, numpy and this
package; prints one JSON line with ``"skipped"`` and ends with status 0 where there is no device.

A step here is what the engine does to its own state between two copies: it rewrites every table and buffer in
place, on the stream it computes on, right after the copy was asked for. A copy that is not ordered before that
reads the next step's values, and is found out.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

from stagewatch.agents.engines.staging import CudaStaging, Gather

SLOTS = 256
SETTLE_S = 10.0


def main() -> int:
    """Compare and measure; status 1 where a value differs or is missing without having been counted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=7)
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print(json.dumps({"skipped": "torch is not installed"}))
        return 0
    if not torch.cuda.is_available():
        print(json.dumps({"skipped": "no CUDA device"}))
        return 0
    figures = compare(torch, args.steps, args.rows, args.drafts)
    figures["starved"] = starve(torch, args.rows, args.drafts)
    print(json.dumps(figures))
    return int(bool(figures["wrong"]) or figures["published"] + figures["dropped"] != args.steps)


class State:
    """The tensors an engine keeps, on a device."""

    def __init__(self, torch: Any, rows: int, drafts: int) -> None:
        device = torch.device("cuda")
        self.torch, self.rows, self.width = torch, rows, drafts + 1
        self.computed = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self.last = torch.zeros(SLOTS, 1, dtype=torch.int64, device=device)
        self.drafts = torch.zeros(SLOTS, drafts, dtype=torch.int64, device=device)
        self.ids = torch.zeros(rows * self.width, dtype=torch.int32, device=device)
        self.positions = torch.zeros(rows * self.width, dtype=torch.int64, device=device)
        self.rows_np = np.random.default_rng(0).permutation(SLOTS)[:rows]
        self.rows_gpu = torch.from_numpy(self.rows_np).to(device)
        self.weights = torch.randn(2048, 2048, device=device)

    def pieces(self) -> list[Any]:
        """What a step's inputs record is made of."""
        tables = (self.computed, self.last, self.drafts)
        return [*(Gather(table, self.rows_gpu, self.rows_np) for table in tables), self.ids, self.positions]

    def overwrite(self, step: int) -> None:
        """Rewrite everything in place, behind some work so that the device lags behind the host."""
        self.torch.mm(self.weights, self.weights, out=self.weights).clamp_(-1, 1)
        for tensor in (self.computed, self.last, self.drafts, self.ids, self.positions):
            offsets = self.torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
            tensor.copy_(offsets + step)

    def expected(self, step: int) -> list[np.ndarray]:
        """What the copy of ``step`` must hold, computed on the host alone."""
        found = []
        for piece in self.pieces():
            table = piece.table if isinstance(piece, Gather) else piece
            values = np.arange(table.numel()).reshape(tuple(table.shape)) + step
            found.append(values[piece.rows_np] if isinstance(piece, Gather) else values)
        return found


def compare(torch: Any, steps: int, rows: int, drafts: int) -> dict[str, Any]:
    """Host microseconds per step without copies, with synchronous ones and with ours; and every value of ours."""
    state = State(torch, rows, drafts)
    size = rows * (2 * state.width + drafts + 2)
    published: dict[int, list[np.ndarray]] = {}
    dropped: list[int] = []
    staging = CudaStaging(torch.device("cuda"), size, dropped.append)

    def synchronous() -> None:
        for piece in state.pieces():
            (piece.table[piece.rows] if isinstance(piece, Gather) else piece).cpu()

    def staged(step: int) -> None:
        staging.take(state.pieces(), lambda values, at=step: published.__setitem__(at, values))

    without = _run(torch, state, steps, lambda step: None)
    with_waiting = _run(torch, state, steps, lambda step: synchronous())
    with_ours = _run(torch, state, steps, staged)
    deadline = time.monotonic() + SETTLE_S
    while len(published) + sum(dropped) < steps and time.monotonic() < deadline:
        staging.poll()
    wrong = [
        step
        for step, values in published.items()
        if any(not np.array_equal(a, b) for a, b in zip(values, state.expected(step), strict=True))
    ]
    return {
        "device": torch.cuda.get_device_name(),
        "rows": rows,
        "drafts": drafts,
        "steps": steps,
        "step_us_without": without,
        "step_us_synchronous": with_waiting,
        "step_us_staged": with_ours,
        "published": len(published),
        "dropped": sum(dropped),
        "order_kept": list(published) == sorted(published),
        "wrong": wrong[:10],
    }


def starve(torch: Any, rows: int, drafts: int) -> dict[str, int]:
    """With two buffers and a device that lags: nothing waits, every copy is either published or counted."""
    state = State(torch, rows, drafts)
    published: list[int] = []
    dropped: list[int] = []
    staging = CudaStaging(
        torch.device("cuda"), rows * (2 * state.width + drafts + 2), dropped.append, buffers=2
    )
    for step in range(50):
        state.overwrite(step)
        staging.take(state.pieces(), lambda values, at=step: published.append(at))
    torch.cuda.synchronize()
    staging.poll()
    return {"published": len(published), "dropped": sum(dropped)}


def _run(torch: Any, state: State, steps: int, copy: Any) -> dict[str, float]:
    """Median and 99th percentile of the host microseconds that ``copy`` takes, and the mean step."""
    torch.cuda.synchronize()
    spent = np.zeros(steps)
    began = time.perf_counter()
    for step in range(steps):
        state.overwrite(step)
        before = time.perf_counter()
        copy(step)
        spent[step] = (time.perf_counter() - before) * 1e6
    torch.cuda.synchronize()
    mean = (time.perf_counter() - began) / steps * 1e6
    return {
        "copy_median": float(np.median(spent)),
        "copy_p99": float(np.percentile(spent, 99)),
        "step_mean": mean,
    }


if __name__ == "__main__":
    sys.exit(main())
