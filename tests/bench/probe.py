"""Time the probe takes of a step: filling the records and storing them in the ring.

    python tests/bench/probe.py

A step is what the last stage records: inputs, mask and the payload sent. Hooks and device copies belong to the
engine's adapter and are not in it. "Hot" repeats the step; "cold" sweeps 64 MiB between steps, so that caches hold
something else, as they do after a forward pass. The references are taken in the same run: CRC-32 of the same bytes, a
copy of the same bytes, and one OpenTelemetry span that nobody records.
"""

import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from opentelemetry import trace
from report import median_and_spread, parser, show

from stagewatch.agents import record
from stagewatch.agents.bodies import Inputs, Mask, Payload
from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.probe import Probe
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import RingWriter

SWEPT = np.zeros(64 << 20, np.uint8)


def identity(drafts: int) -> Identity:
    """The rank that records."""
    return Identity(
        "bench", "bench", Rank(0, 1, 0), Sizes(1, 2, 1), "host", 1, "none", "0", "C", drafts, 1, 1, 1
    )


def bodies(rows: int, drafts: int) -> tuple[Inputs, Mask, Payload]:
    """What a step of ``rows`` decoding rows with ``drafts`` draft tokens each is made of."""
    column, width = np.arange(rows, dtype=np.int32), drafts + 1
    table = np.zeros((rows, drafts), np.int32)
    inputs = Inputs(
        tick=1,
        graph_mode=0,
        spec_tokens=drafts,
        padded_tokens=0,
        request=column.astype(np.uint64),
        slot=column,
        generation=column,
        mirror=column,
        computed=column,
        prefill_len=column,
        scheduled=np.full(rows, width, np.int32),
        draft_count=np.full(rows, drafts, np.int32),
        cap=column,
        last_sampled=column,
        draft_tokens=table,
        input_ids=np.zeros(rows * width, np.int32),
        positions=np.zeros(rows * width, np.int32),
        prefilling=np.zeros(rows, np.uint8),
    )
    mask = Mask(0, 0, np.ones(rows, np.uint8), np.ones(rows, np.uint8))
    sent = Payload(
        at=-1,
        skipped=0,
        request=inputs.request,
        slot=column,
        generation=column,
        generation_now=column,
        num_sampled=column,
        num_rejected=column,
        tokens=np.zeros((rows, width), np.int32),
        draft_tokens=table,
        applied=np.ones(rows, np.uint8),
    )
    return inputs, mask, sent


def us_each(call: Callable[[], object], count: int, between: Callable[[], object] | None = None) -> float:
    """Median microseconds of ``count`` calls."""
    times = np.empty(count)
    for index in range(count):
        if between is not None:
            between()
        began = time.perf_counter_ns()
        call()
        times[index] = time.perf_counter_ns() - began
    return float(np.median(times)) / 1e3


def measure(rows: int, drafts: int, steps: int, repeats: int) -> dict[str, object]:
    """One line of the table."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:  # noqa: S108  # rings live there
        directory = Path(name)
        directory.chmod(0o700)
        ring = RingWriter(directory, identity(drafts), 64 << 20)
        probe = Probe(ring, identity(drafts), heartbeat_s=3600)
        inputs, mask, sent = bodies(rows, drafts)
        engine_mask = mask.engine.view(np.bool_)

        def step() -> None:
            probe.inputs(inputs)
            probe.mask(engine_mask, engine_mask, rows)
            probe.payload(Kind.SENT, probe.step, sent)

        us_each(step, 100)
        hot, spread = median_and_spread(lambda: us_each(step, steps), repeats)
        cold, _ = median_and_spread(lambda: us_each(step, 30, lambda: SWEPT.fill(1)), repeats)
        if not probe.armed:
            raise SystemExit("the probe disarmed itself: no figure")
    size = sum(map(record.size_of, (inputs, mask, sent)))
    content = bytes(size)
    crc, _ = median_and_spread(lambda: us_each(lambda: zlib.crc32(content), steps), repeats)
    copy, _ = median_and_spread(lambda: us_each(lambda: bytearray(content), steps), repeats)
    tracer = trace.get_tracer("bench")

    def span() -> None:
        with tracer.start_as_current_span("step"):
            pass

    spans, _ = median_and_spread(lambda: us_each(span, steps), repeats)
    return {
        "rows": rows,
        "K": drafts,
        "bytes": size,
        "hot us": hot,
        "spread": f"{spread:.0%}",
        "cold us": cold,
        "crc32 us": crc,
        "copy us": copy,
        "no-op span us": spans,
        "hot / span": hot / spans,
    }


def main() -> None:
    """Measure and show."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    arguments.add_argument(
        "--drafts", type=int, nargs="+", default=[0, 7, 15], help="K: draft tokens per row"
    )
    arguments.add_argument("--steps", type=int, default=150)
    args = arguments.parse_args()
    rows = [measure(rows, drafts, args.steps, args.repeats) for drafts in args.drafts for rows in args.rows]
    show("probe", rows, {"steps": args.steps, "ring bytes": 64 << 20}, args.json)


if __name__ == "__main__":
    main()
