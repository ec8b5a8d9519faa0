"""How fast a long recording is replayed and exported, and in how much memory, at two lengths.

    python tests/bench/replay.py --rows 1000000 10000000

The recording is a collector's journal, written as a collector writes it, of one engine of the lab's simulator: two
stages, K=7, 64 requests at a time, every kind of record, 25 steps a second by its clock. A row is one batch row of
one rank's step. Each command runs in a process of its own, whose memory is its peak resident size as the kernel
counts it; if that is about the same at both lengths, it is bounded.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from report import Row, parser, show

from stagewatch.agents import wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Inputs, Record
from stagewatch.monitor.journal import VERSION, EntryKind, Header, head_of

SEATS: Final = 64
STEP_NS: Final = 10**9 // 25
BEGAN_NS: Final = 1_800_000_000 * 10**9
STEPS_PER_FRAME: Final = 10
SEGMENT_BYTES: Final = 128 << 20
COMMANDS: Final = {
    "replay": ("replay", "SOURCE", "--json"),
    "replay step": ("replay", "SOURCE", "step", "1000", "--json"),
    "replay diff": ("replay", "SOURCE", "diff", "0", "1", "--json"),
    "export parquet": ("export", "parquet", "SOURCE", "-o", "OUTPUT"),
    "export perfetto": ("export", "perfetto", "SOURCE", "-o", "OUTPUT"),
    "export html": ("export", "html", "SOURCE", "-o", "OUTPUT"),
}

_RUN: Final = """
import sys
from stagewatch.monitor.cli import main
status = main(sys.argv[1:])
with open("/proc/self/status") as lines:
    print(*(line.split()[1] for line in lines if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(status)
"""
"""Runs a command and says its peak memory. The kernel's figure for children counts what they were forked from, too."""


class Journal:
    """Writes entries into segments, as the collector does, without waiting for the disk."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._file: BinaryIO | None = None
        self._seed = self._number = 0
        self.size_bytes = 0

    def add(self, kind: EntryKind, t_ns: int, message: bytes) -> None:
        if self._file is None or self._file.tell() > SEGMENT_BYTES:
            self.close()
            self._number += 1
            header = Header(VERSION, self._number, t_ns)
            self._seed = header.seed
            self._file = (self._directory / f"{self._number:016d}.journal").open("wb")
            self._file.write(header.encode())
        self._file.write(head_of(kind, t_ns, message, self._seed) + message)

    def close(self) -> None:
        if self._file is not None:
            self.size_bytes += self._file.tell()
            self._file.close()


def make_journal(directory: Path, lengths: Sequence[int]) -> dict[int, tuple[Path, int, int]]:
    """By wanted length, (data directory, rows, bytes) of a journal that is a beginning of the next longer one."""
    workload = Workload(requests=max(lengths), max_tokens=(60, 90), arrivals_per_iteration=SEATS / 4)
    simulator = Simulator(SimConfig(seats=SEATS, spec_tokens=7, token_budget=SEATS * 16, workload=workload))
    identities = simulator.identities("bench")
    digester = Digester(bytes(16))
    journals = {length: Journal(directory / str(length) / "journal") for length in lengths}
    made: dict[int, tuple[Path, int, int]] = {}
    rows, now = 0, BEGAN_NS
    for identity in identities.values():
        for journal in journals.values():
            journal.add(EntryKind.HELLO, now, wire.encode_frame(wire.Hello(wire.PROTOCOL, identity)))
    pending: dict[Rank, list[Record]] = {rank: [] for rank in identities}
    for number, found in enumerate(simulator.iterate(), 1):
        now += STEP_NS
        for rank, records in found.items():
            pending[rank] += [Record(r.kind, r.seq, r.step, now, r.body) for r in records]
        if number % STEPS_PER_FRAME:
            continue
        for rank, records in pending.items():
            evidence = digest_records(records, identities[rank], digester)
            message = wire.encode_frame(wire.batch_of(identities[rank], evidence, 1.0))
            rows += sum(len(r.body.request) for r in records if isinstance(r.body, Inputs))
            for journal in journals.values():
                journal.add(EntryKind.BATCH, now, message)
            pending[rank] = []
        for length in [length for length in journals if rows >= length]:
            journal = journals.pop(length)
            journal.close()
            made[length] = directory / str(length), rows, journal.size_bytes
        if not journals:
            break
    return made


def measured(name: str, source: Path, rows: int, scratch: Path) -> Row:
    """One command over one journal: seconds, rows per second, peak memory."""
    output = scratch / "out"
    words = [{"SOURCE": str(source), "OUTPUT": str(output)}.get(word, word) for word in COMMANDS[name]]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    told = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    written = sum(path.stat().st_size for path in (output, *output.glob("*")) if path.is_file())
    shutil.rmtree(output) if output.is_dir() else output.unlink(missing_ok=True)
    return {
        "command": name,
        "rows": rows,
        "seconds": round(seconds, 1),
        "cpu seconds": round(used.ru_utime + used.ru_stime, 1),
        "rows per second": round(rows / seconds),
        "peak RSS, MiB": round(int(told.split()[-1]) / 1024),
        "written, MiB": round(written / 2**20),
        "status": process.returncode,
    }


def main() -> None:
    made = parser(__doc__.split("\n", 1)[0])
    made.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000], help="lengths, in rows")
    made.add_argument("--commands", nargs="+", choices=COMMANDS, default=[*COMMANDS], help="what to measure")
    arguments = made.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        journals = make_journal(Path(scratch), sorted(arguments.rows))
        sizes = {str(length): size for length, (_, _, size) in journals.items()}
        rows: list[Row] = []
        for name in arguments.commands:
            for source, count, _ in journals.values():
                rows.append(measured(name, source, count, Path(scratch)))
                print(rows[-1], file=sys.stderr, flush=True)  # long ones are worth having before the end
    show("replay", rows, {"seats": SEATS, "journal_bytes": sizes}, arguments.json)


if __name__ == "__main__":
    main()
