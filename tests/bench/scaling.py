"""How the collector's work grows: with ranks, rows per step, engines, and steps per frame; and what it keeps.

    python tests/bench/scaling.py

Each line is decode, validate, align, check and correlate, in one process, for frames that a simulated pipeline's ranks
sent (K=7); more ranks are TP peers that say what their stage's simulated rank says, and more engines the same engine
under other names. A row is one batch row of one rank's step. "compare" is numpy comparing nine columns of aligned
ranks and "copy" one copy of the frames, both in the same run: what no collector can go below. Memory is that of a
process of its own for each number of engines, less what one without engines takes. An exponent is the e of
seconds = c * size ** e: 1 is in proportion, 2 a quadratic.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from collector import COMPARED, Load, cpu, make_load
from report import Row, exponent, median_and_spread, parser, show

from stagewatch.agents import wire
from stagewatch.agents.evidence import InputsBlock
from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.wire import Batch, Limits
from stagewatch.monitor.watch import Watch


@dataclass(frozen=True)
class Many:
    """Frames of several engines' ranks in the order in which they arrive."""

    identities: list[Identity]
    frames: list[bytes]
    rows: int
    steps: int

    @property
    def size(self) -> int:
        return sum(map(len, self.frames))


def multiply(load: Load, ranks: int, engines: int) -> Many:
    """The load of one pipeline of two stages, as ``ranks`` ranks of each of so many engines send it."""
    tp = ranks // 2
    sizes = Sizes(1, 2, tp)
    identities, frames, rows = [], [], 0
    for engine in range(engines):
        for identity in load.identities:
            for peer in range(tp):
                rank = Rank(0, identity.rank.pp, peer)
                identities.append(
                    msgspec.structs.replace(identity, instance=f"bench-{engine}", rank=rank, sizes=sizes)
                )
    for (identity, evidence), message in zip(load.evidence, load.messages, strict=True):
        batch = wire.decode_upward(message, Limits())
        assert isinstance(batch, Batch)
        for engine in range(engines):
            for peer in range(tp):
                rank = Rank(0, identity.rank.pp, peer)
                frames.append(
                    wire.encode_frame(msgspec.structs.replace(batch, instance=f"bench-{engine}", rank=rank))
                )
        rows += 0 if evidence.inputs is None else len(evidence.inputs.slot) * engines * tp
    steps = sum(
        len(found.inputs.step) for who, found in load.evidence if found.inputs is not None and not who.rank.pp
    )
    return Many(identities, frames, rows, steps * engines)


def judge(many: Many) -> Watch:
    """Everything between a frame and its verdict."""
    watch, limits = Watch(), Limits()
    for identity in many.identities:
        watch.hello(identity, 1)
    for message in many.frames:
        batch = wire.decode_upward(message, limits)
        assert isinstance(batch, Batch)
        watch.take(batch.instance, batch.rank, wire.evidence_of(batch, limits), 1.0, 1)
    return watch


def compare(many: Many) -> float:
    """Seconds in which numpy compares nine columns of every rank with those of the first, step by step aligned."""
    first: dict[tuple[str, int], InputsBlock] = {}
    spent = 0.0
    for message in many.frames:
        batch = wire.decode_upward(message, Limits())
        assert isinstance(batch, Batch)
        block = wire.evidence_of(batch, Limits()).inputs
        if block is None:
            continue
        other = first.setdefault((batch.instance, int(block.step[0])), block)
        if other is block or len(other.slot) != len(block.slot):
            continue
        began = time.process_time()
        for name in COMPARED:
            (getattr(block, name) != getattr(other, name)).any()
        spent += time.process_time() - began
    return spent


def line(what: str, size: int, many: Many, repeats: int) -> Row:
    watch = judge(many)
    told = watch.incidents()
    assert told == [], told[:1]
    consistent = sum(state.verdicts.get("CONSISTENT", 0) for state in watch.states())
    assert consistent, "nothing was compared"
    seconds, spread = median_and_spread(lambda: cpu(lambda: judge(many)), repeats)
    copies = cpu(lambda: [bytearray(message) for message in many.frames for _ in range(5)]) / 5
    compared = compare(many)
    return {
        "by": what,
        "size": size,
        "rows": many.rows,
        "frames": len(many.frames),
        "rows/s/core": many.rows / seconds,
        "us/frame": seconds / len(many.frames) * 1e6,
        "us/step": seconds / many.steps * 1e6,
        "spread": f"{spread:.0%}",
        "wire bytes/row": many.size / many.rows,
        "compare rows/s": many.rows / compared if compared else float("inf"),
        "copy rows/s": many.rows / copies if copies else float("inf"),
        "seconds": seconds,
    }


def resident_kib() -> int:
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0])


def memory_of(engines: int) -> int:
    """Resident KiB of a process that watches so many engines of two ranks, 64 rows a step, for 200 steps."""
    command = [sys.executable, __file__, "--memory", str(engines)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def keep(engines: int) -> None:
    """In a process of its own: judge, and say what memory that left in use."""
    load = make_load(200, 128, 10)
    watch, limits = Watch(), Limits()
    many = multiply(load, 2, 1)
    before = resident_kib()
    for engine in range(engines):
        for identity in many.identities:
            watch.hello(msgspec.structs.replace(identity, instance=f"bench-{engine}"), 1)
    for message in many.frames:
        batch = wire.decode_upward(message, limits)
        assert isinstance(batch, Batch)
        for engine in range(engines):
            # Each engine's frame arrives in bytes of its own, which its columns are views of.
            own = msgspec.structs.replace(
                batch,
                instance=f"bench-{engine}",
                parts={name: bytes(bytearray(part)) for name, part in batch.parts.items()},
            )
            watch.take(own.instance, own.rank, wire.evidence_of(own, limits), 1.0, 1)
    print(resident_kib() - before)


def sweep(
    what: str, sizes: Sequence[int], make: Callable[[int], Many], repeats: int
) -> tuple[list[Row], float]:
    rows = [line(what, size, make(size), repeats) for size in sizes]
    cost = "us/frame" if what == "steps per frame" else "seconds"
    grown = exponent(sizes, [row[cost] for row in rows])
    for row in rows:
        del row["seconds"]
    return rows, grown


def main() -> None:
    """Measure and show."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--memory", type=int, help="only this: resident KiB of so many engines")
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 128, 512, 1024])
    options.add_argument("--rows", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    options.add_argument("--engines", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    options.add_argument("--steps-per-frame", type=int, nargs="+", default=[1, 4, 16, 64])
    args = options.parse_args()
    if args.memory:
        keep(args.memory)
        return
    few = make_load(40, 128, 10)
    table: list[Row] = []
    exponents: dict[str, float] = {}
    sweeps: list[tuple[str, list[int], Callable[[int], Many]]] = [
        ("ranks", args.ranks, lambda size: multiply(few, size, 1)),
        ("rows per step", args.rows, lambda size: multiply(make_load(200, size * 2, 10), 2, 1)),
        ("engines", args.engines, lambda size: multiply(few, 2, size)),
        ("steps per frame", args.steps_per_frame, lambda size: multiply(make_load(512, 128, size), 2, 1)),
    ]
    for what, sizes, make in sweeps:
        rows, grown = sweep(what, sizes, make, min(args.repeats, 3))
        table += rows
        exponents[f"exponent, {what}"] = grown
    counts = [1, 16, 64, 256]
    kept = [memory_of(count) for count in counts]
    table += [
        {"by": "memory of engines", "size": count, "KiB": size, "KiB/engine": size / count}
        for count, size in zip(counts, kept, strict=True)
    ]
    exponents["exponent, memory of engines"] = exponent(counts[1:], kept[1:])
    show("scaling", table, {"K": 7, "steps per frame": 10, **exponents}, args.json)


if __name__ == "__main__":
    main()
