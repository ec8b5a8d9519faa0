"""Crashes of real processes by a seed, and what must hold after each run.

    python tests/chaos/chaos.py --runs 20 [--seed S] [--seconds 20]

An engine writes rings, a sidecar ships them through a proxy that plays pranks, a collector takes them; all three are
killed, stopped and started again at times drawn from the seed. Then everybody is left in peace, and: every record of
every ring is in the journal exactly once, the incidents are those that a watch finds which is given the same rings in
one piece, the collector's memory is that of one newly started over the same data, and no process is left.
One line per run; the one that fails is reproduced by its seed. Exit status 1 then.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent / "service"))

from mischief import ByteProxy, FrameProxy, Proxy
from service_processes import CollectorProcess, Process, SidecarProcess, wait_until
from service_records import journalled_seqs, lost_records

from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.ring import RingReader
from stagewatch.monitor.checks.registry import LIVENESS_CHECKS
from stagewatch.monitor.incidents import report
from stagewatch.monitor.store import Query, Store
from stagewatch.monitor.watch import Watch

PACE = 60.0
"""Iterations of the engine per second."""
LIVES_MAX = 3
MEMORY_SLACK_BYTES = 96 << 20
"""What Python's allocator and a few seconds of load may leave behind, beyond a collector that was just started."""
_LIVENESS = frozenset(check.NAME for check in LIVENESS_CHECKS)


class ChaosError(AssertionError):
    """Something that must hold did not."""


@dataclass
class Run:
    """One run's processes, and how often what was done to whom."""

    seed: int
    directory: Path
    seconds: float
    done: dict[str, int] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    life: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.ring_dir = self.directory / "rings"
        self.data_dir = self.directory / "data"
        # Little segments and early checkpoints, so that kills hit rotation and saving, too.
        self.options = ("--segment-bytes", "262144", "--segment-s", "2")
        self.collector = self.keep(CollectorProcess(self.data_dir, *self.options))
        kind = ByteProxy if self.draw.random() < 0.5 else FrameProxy
        self.proxy: Proxy = kind(self.seed, self.collector.port)
        self.engine = self.start_engine()
        self.sidecar = self.start_sidecar()

    def keep(self, process: Any) -> Any:
        self.processes.append(process)
        return process

    def start_engine(self) -> Process:
        script = Path(__file__).parent / "chaos_engine.py"
        arguments = [sys.executable, script, self.ring_dir, self.seed, self.life, PACE]
        return self.keep(Process(arguments, self.directory / f"engine-{self.life}.log"))  # type: ignore[no-any-return]

    def start_sidecar(self) -> Process:
        url = f"http://127.0.0.1:{self.proxy.port}"
        return self.keep(SidecarProcess(self.ring_dir, url, token=self.collector.token))  # type: ignore[no-any-return]

    # ---- what is done

    def kill_collector(self) -> None:
        self.collector.kill()
        time.sleep(self.draw.uniform(0, 0.5))
        self.collector = self.keep(CollectorProcess(self.data_dir, *self.options, port=self.collector.port))

    def end_collector(self) -> None:
        if self.collector.end() != 0:
            raise ChaosError(f"the collector ended badly: {self.collector.output[-2000:]}")
        self.collector = self.keep(CollectorProcess(self.data_dir, *self.options, port=self.collector.port))

    def kill_collector_as_it_starts(self) -> None:
        self.collector.kill()
        started = self.keep(Process(self.collector.arguments, self.directory / "killed.log"))
        time.sleep(self.draw.uniform(0.2, 2.5))
        started.kill()
        self.collector = self.keep(CollectorProcess(self.data_dir, *self.options, port=self.collector.port))

    def kill_sidecar(self) -> None:
        self.sidecar.kill()
        time.sleep(self.draw.uniform(0, 0.5))
        self.sidecar = self.start_sidecar()

    def kill_engine(self) -> None:
        if self.life + 1 < LIVES_MAX:
            self.engine.kill()
            self.life += 1
            self.engine = self.start_engine()

    def pause(self) -> None:
        process = self.draw.choice((self.collector, self.sidecar, self.engine))
        process.signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(0.1, 1.5))
        process.signal(signal.SIGCONT)

    def disturb(self) -> None:
        """Do things until the time is over."""
        actions = (
            self.kill_collector, self.kill_collector, self.end_collector, self.kill_collector_as_it_starts,
            self.kill_sidecar, self.kill_sidecar, self.kill_engine, self.pause, self.pause,
        )  # fmt: skip
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            time.sleep(self.draw.uniform(0.2, 1.5))
            action = self.draw.choice(actions)
            self.done[action.__name__] = self.done.get(action.__name__, 0) + 1
            action()

    # ---- what must hold

    def check(self) -> str:
        """Leave everybody in peace until all is taken, and look. Raises ChaosError."""
        self.proxy.calm.set()
        log = self.directory / f"engine-{self.life}.log"
        wait_until(lambda: "written" in log.read_text().split(), "the engine has written everything")
        written = {ring.identity_key: ring.count for ring in self.rings()}
        wait_until(lambda: self.taken() == written, "everything is taken")
        end_rss = rss_bytes(self.collector.pid)
        for process, name in (
            (self.engine, "engine"),
            (self.sidecar, "sidecar"),
            (self.collector, "collector"),
        ):
            if process.end() != 0:
                raise ChaosError(f"the {name} ended badly")
        found = journalled_seqs(self.data_dir)
        if {key: list(range(count)) for key, count in written.items() if count} != found:
            raise ChaosError("the journal does not hold every record exactly once")
        if lost_records(self.data_dir):
            raise ChaosError("records were declared lost that are there")
        self.check_incidents()
        fresh = self.keep(CollectorProcess(self.data_dir, *self.options))
        fresh_rss = rss_bytes(fresh.pid)
        fresh.end()
        if end_rss > fresh_rss + MEMORY_SLACK_BYTES:
            raise ChaosError(
                f"memory stayed at {end_rss >> 20} MiB; a fresh collector takes {fresh_rss >> 20} MiB"
            )
        self.check_incidents()
        records = sum(written.values())
        return f"{records} records, {len(self.stored())} incidents, {self.proxy.pranks} pranks, {end_rss >> 20} MiB"

    def rings(self) -> "list[Ring]":
        return [Ring(path) for path in sorted(self.ring_dir.glob("*.ring"))]

    def taken(self) -> dict[str, int]:
        """How many records of each rank the journal holds by now."""
        self.collector.get("/v1/status")
        return {key: len(set(seqs)) for key, seqs in journalled_seqs(self.data_dir).items()}

    def stored(self) -> list[dict[str, Any]]:
        store = Store(self.data_dir / "incidents.sqlite3")
        with contextlib.closing(store):
            return comparable(msgspec.to_builtins(shown) for shown in store.find(Query(limit=500)))

    def check_incidents(self) -> None:
        watch = Watch()
        for ring in self.rings():
            ring.give_to(watch)
        expected = comparable(msgspec.to_builtins(report(incident)) for incident in watch.incidents())
        if self.stored() != expected:
            ours = {(i["id"], i["severity"]) for i in self.stored()}
            theirs = {(i["id"], i["severity"]) for i in expected}
            raise ChaosError(f"incidents: only here {ours - theirs}, only undisturbed {theirs - ours}")

    def close(self) -> None:
        """End everything, and see that nothing is left."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.signal(signal.SIGCONT)
            process.kill()
        self.proxy.close()
        left = [pid for pid in own_children() if str(self.directory) in command_of(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if left:
            raise ChaosError(f"processes are left: {left}")


class Ring:
    """What one ring holds at the end."""

    def __init__(self, path: Path) -> None:
        reader = RingReader(path)
        self.identity = reader.identity
        self.records = [record for batch in iter(lambda: list(reader.read(4096)), []) for record in batch]
        reader.close()

    @property
    def identity_key(self) -> str:
        return f"{self.identity.instance}.{self.identity.rank}"

    @property
    def count(self) -> int:
        return len(self.records)

    def give_to(self, watch: Watch) -> None:
        """In one piece. The key is another one: digests differ, what they say does not."""
        watch.hello(self.identity)
        if self.records:
            evidence = digest_records(self.records, self.identity, Digester(bytes(16)), raw=False)
            watch.take(self.identity.instance, self.identity.rank, evidence, -1.0, 0)


def comparable(incidents: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on keys and moments, in one order."""
    fields = (
        "id",
        "check",
        "severity",
        "request",
        "first_bad_step",
        "last_good_step",
        "ranks",
        "blamed",
        "chain",
    )
    kept = [{name: each[name] for name in fields} for each in incidents if each["check"] not in _LIVENESS]
    return sorted(kept, key=lambda each: str(each["id"]))


def rss_bytes(pid: int) -> int:
    """Resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def own_children() -> list[int]:
    """Every process there is but this one."""
    return [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and int(path.name) != os.getpid()
    ]


def command_of(pid: int) -> str:
    """Its command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def run(seed: int, seconds: float, directory: Path) -> str:
    """One run; return what it says of itself. Raises ChaosError."""
    made = Run(seed, directory, seconds)
    try:
        made.disturb()
        told = made.check()
    finally:
        made.close()
    did = ", ".join(f"{count} {name}" for name, count in sorted(made.done.items()))
    return f"{type(made.proxy).__name__}: {did}: {told}"


def main() -> int:
    """Run, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each run is disturbed")
    parser.add_argument(
        "--seed", type=int, help="of the first run; each further one's is one more. Default: the time"
    )
    parser.add_argument("--keep", type=Path, help="keep the files of a run that fails under here")
    args = parser.parse_args()
    first = args.seed if args.seed is not None else time.time_ns() // 10**9
    for seed in range(first, first + args.runs):
        with (
            tempfile.TemporaryDirectory()
            if args.keep is None
            else contextlib.nullcontext(str(args.keep / str(seed))) as directory
        ):
            Path(directory).mkdir(parents=True, exist_ok=True)
            try:
                print(f"seed {seed}: {run(seed, args.seconds, Path(directory))}", flush=True)
            except Exception:  # noqa: BLE001  # whatever it was, the seed is what is needed
                traceback.print_exc()
                print(
                    f"FAILED, reproduce: tests/chaos/chaos.py --runs 1 --seed {seed} --seconds {args.seconds}"
                )
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
