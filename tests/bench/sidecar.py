"""What the sidecar takes: rows per second and core from ring to frame, and its CPU share under a steady load.

    python tests/bench/sidecar.py

The first part reads full rings of a last stage's steps (K=7) into frames, digests included, as fast as it goes. The
second runs a real sidecar, which ships to a real collector what eight ranks of 64 rows record 100 times a second. A
row is one batch row of one rank's step. The reference, in the same run, is one copy of the ring's bytes.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
from probe import bodies, identity
from report import Row, cpu_s, exponent, median_and_spread, parser, show

from stagewatch.agents.digest import Digester
from stagewatch.agents.identity import Fingerprint, Identity, Rank, Sizes
from stagewatch.agents.probe import Probe
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.tail import Privacy, Tail
from stagewatch.monitor.demo_stage import DemoStage

PRIVACY = Privacy(Digester(bytes(16)), Fingerprint("digest_key", "bench"), False, False)


def from_ring(rows: int, drafts: int, repeats: int) -> Row:
    """Read one ring of steps of ``rows`` rows into frames, again and again."""
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  # rings live there
    with tempfile.TemporaryDirectory(dir=shm) as name:
        directory = Path(name)
        directory.chmod(0o700)
        ring = RingWriter(directory, identity(drafts), 64 << 20)
        probe = Probe(ring, identity(drafts), heartbeat_s=3600)
        inputs, mask, sent = bodies(rows, drafts)
        engine_mask = mask.engine.view(np.bool_)
        steps = max(min(20_000 // rows, 2000), 20)
        for _ in range(steps):
            probe.inputs(inputs)
            probe.mask(engine_mask, engine_mask, rows)
            probe.payload(Kind.SENT, probe.step, sent)
        path = next(directory.glob("*.ring"))
        content = path.read_bytes()[: steps * 4096]
        sizes = [0]

        def once() -> float:
            tail = Tail(path, PRIVACY)
            tail.welcome(0)
            began = time.process_time()
            while tail.read(1 << 40):
                pass
            took = time.process_time() - began
            frames = []
            while (held := tail.unsent()) is not None:
                frames.append(len(held.message))
            sizes[0] = sum(frames)
            tail.close()
            return took

        once()
        seconds, spread = median_and_spread(once, repeats)
        began = time.process_time()
        for _ in range(50):
            bytearray(content)
        copy = (time.process_time() - began) / 50 / len(content)
    return {
        "rows per step": rows,
        "rows/s/core": steps * rows / seconds,
        "us/step": seconds / steps * 1e6,
        "spread": f"{spread:.0%}",
        "wire bytes/row": sizes[0] / steps / rows,
        "copy rows/s": 1 / (copy * sizes[0] / steps / rows) if copy else float("inf"),
    }


FEED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from sidecar import writers
writers(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), float(sys.argv[6]))
"""


def writers(directory: Path, ranks: int, rows: int, steps_per_s: float, seconds: float) -> None:
    """Record steps of ``ranks`` ranks at a pace: a pipeline of two stages with TP peers that agree."""
    sizes = Sizes(1, 2, ranks // 2)
    probes = []
    for number in range(ranks):
        rank = Rank(0, number // sizes.tp, number % sizes.tp)
        who = replace_identity(rank, sizes)
        probes.append(Probe(RingWriter(directory, who, 64 << 20), who, heartbeat_s=1))
    inputs, mask, sent = bodies(rows, 7)
    engine_mask = mask.engine.view(np.bool_)
    began = time.monotonic()
    step = 0
    while time.monotonic() - began < seconds:
        for probe in probes:
            probe.inputs(inputs)
            probe.mask(engine_mask, engine_mask, rows)
            probe.payload(Kind.SENT if probe.identity.rank.pp else Kind.RECEIVED, probe.step, sent)
        step += 1
        time.sleep(max(0.0, began + step / steps_per_s - time.monotonic()))
    print(step, flush=True)


def replace_identity(rank: Rank, sizes: Sizes) -> Identity:
    """The same engine's rank elsewhere."""
    return msgspec.structs.replace(identity(7), rank=rank, sizes=sizes)


def steady(ranks: int, rows: int, steps_per_s: float, seconds: float) -> Row:
    """The sidecar's and the collector's share of a core."""
    with DemoStage(raw_tokens=False) as stage:
        pids = {"sidecar": stage.pid("ship"), "collector": stage.pid("collect")}
        command = [sys.executable, "-c", FEED, str(Path(__file__).parent), str(stage.ring_dir)]
        command += [str(part) for part in (ranks, rows, steps_per_s, seconds + 2)]
        feeder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        time.sleep(2)
        began, before = time.monotonic(), {name: cpu_s(pid) for name, pid in pids.items()}
        time.sleep(seconds - 1)
        took = time.monotonic() - began
        shares = {name: (cpu_s(pid) - before[name]) / took for name, pid in pids.items()}
        steps = int(feeder.communicate(timeout=30)[0])
    return {
        "ranks": ranks,
        "rows per step": rows,
        "steps/s": steps / (seconds + 2),
        **{f"{name} cores": share for name, share in shares.items()},
    }


def main() -> None:
    """Measure and show."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    options.add_argument("--drafts", type=int, default=7)
    options.add_argument("--seconds", type=float, default=10.0)
    args = options.parse_args()
    table = [from_ring(rows, args.drafts, args.repeats) for rows in args.rows]
    parameters = {
        "K": args.drafts,
        "exponent of us/step in rows": exponent(
            [row["rows per step"] for row in table], [row["us/step"] for row in table]
        ),
    }
    table.append(steady(8, 64, 100, args.seconds))
    show("sidecar", table, parameters, args.json)


if __name__ == "__main__":
    main()
