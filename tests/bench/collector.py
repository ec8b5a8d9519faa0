"""Rows per second and core through the collector, part by part and whole, beside the limits of the machine.

    python tests/bench/collector.py

The load is the lab's simulator: a pipeline of two stages at K=7, every kind of record, digested as the sidecar does.
A row is one batch row of one rank's step. CPU time counts every thread of the collector's process, the journal's
included, and nothing of the sender's. The references are taken in the same run: copying the frames once, and
comparing nine columns of the two ranks that are aligned already.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from report import cpu_s, median_and_spread, parser, show
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from stagewatch.agents import wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import Evidence, InputsBlock, digest_records
from stagewatch.agents.identity import Identity, Rank
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Record
from stagewatch.agents.wire import Limits
from stagewatch.monitor.ingest import Intake
from stagewatch.monitor.journal import Position
from stagewatch.monitor.sessions import Session
from stagewatch.monitor.settings import CollectorSettings
from stagewatch.monitor.streams import BatchTaken, Taken
from stagewatch.monitor.watch import Watch

COMPARED = (
    "request",
    "computed",
    "scheduled",
    "draft_count",
    "position",
    "position_shape",
    "ids_digest",
    "last_digest",
    "draft_digest",
)


@dataclass(frozen=True)
class Load:
    """What is sent."""

    identities: list[Identity]
    messages: list[bytes]
    evidence: list[tuple[Identity, Evidence]]
    rows: int

    @property
    def hellos(self) -> list[bytes]:
        return [wire.encode_frame(wire.Hello(wire.PROTOCOL, identity)) for identity in self.identities]


def make_load(steps: int, seats: int, steps_per_frame: int) -> Load:
    """Frames of both ranks in turn, ``steps_per_frame`` steps each."""
    # More arrive than can run, so that every seat is taken.
    workload = Workload(requests=steps * seats, max_tokens=(60, 90), arrivals_per_iteration=seats / 4)
    simulator = Simulator(SimConfig(seats=seats, spec_tokens=7, token_budget=seats * 16, workload=workload))
    identities = simulator.identities("bench")
    pending: dict[Rank, list[Record]] = {rank: [] for rank in identities}
    digester = Digester(bytes(16))
    evidence: list[tuple[Identity, Evidence]] = []

    def flush() -> None:
        for rank, records in pending.items():
            if records:
                evidence.append((identities[rank], digest_records(records, identities[rank], digester)))
            pending[rank] = []

    for number, found in enumerate(simulator.iterate(), 1):
        for rank, records in found.items():
            pending[rank] += records
        if number % steps_per_frame == 0:
            flush()
        if number == steps:
            break
    flush()
    messages = [wire.encode_frame(wire.batch_of(who, part, 1.0)) for who, part in evidence]
    rows = sum(len(part.inputs.slot) for _, part in evidence if part.inputs is not None)
    return Load(list(identities.values()), messages, evidence, rows)


def cpu(call: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process during a call."""
    began = time.process_time()
    call()
    return time.process_time() - began


def decode(load: Load) -> None:
    for message in load.messages:
        frame = wire.decode_upward(message, Limits())
        wire.evidence_of(frame, Limits())  # type: ignore[arg-type]  # all are batches


def watch(load: Load) -> None:
    watching = Watch()
    for identity in load.identities:
        watching.hello(identity, 1)
    for identity, evidence in load.evidence:
        watching.take(identity.instance, identity.rank, evidence, 1.0, 1)


def settings(directory: Path) -> CollectorSettings:
    return CollectorSettings(
        "127.0.0.1", 0, directory, "t" * 20, 128 << 20, 8 << 30, 256 << 20, 4096, False, Limits()
    )


def through_the_door(load: Load, judged: Callable[[Taken, Watch], None]) -> int:
    """Decode, journal with its syncs, settle and acknowledge, then ``judged``; everything but the WebSocket.

    Returns the bytes of the journal that this leaves.
    """

    async def run(directory: Path) -> None:
        watching = Watch()
        left = len(load.identities) + len(load.messages)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def durable(group: Sequence[Taken], position: Position) -> None:
            nonlocal left
            try:
                for taken in group:
                    judged(taken, watching)
            except Exception as error:  # noqa: BLE001  # it is raised where the run is awaited
                if not done.done():
                    done.set_exception(error)
                return
            left -= len(group)
            if not left and not done.done():
                done.set_result(None)

        intake, session = Intake(settings(directory), durable), Session()
        intake.open()
        for message in (*load.hellos, *load.messages):
            await intake.room()
            if done.done():
                break
            intake.take(message, session)
            session.pending()
        try:
            await done
        finally:
            await asyncio.to_thread(intake.journal.close)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))
        return sum(path.stat().st_size for path in Path(directory).rglob("*.journal"))


def judge(taken: Taken, watching: Watch) -> None:
    identity = taken.stream.identity
    if isinstance(taken, BatchTaken):
        watching.take(identity.instance, identity.rank, taken.evidence, taken.margin_s, taken.t_ns)
    else:
        watching.hello(taken.identity, taken.t_ns)


def whole(load: Load, lives: int = 5) -> float:
    """CPU seconds that a real collector's process takes for the load sent over its WebSocket.

    It is sent as several engines' lives, one after the other, of which the first is not counted: what a process does
    once would weigh more than frames.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [
            Path(sys.executable).parent / "stagewatch",
            "collect",
            "--port",
            "0",
            "--data-dir",
            directory,
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "STAGEWATCH_TOKEN": "t" * 20}
        )  # our own command
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1].replace("http", "ws") + "/v1/ingest"
            header = {"Authorization": "Bearer " + "t" * 20}
            with connected(url, header) as socket:
                send_life(socket, load, "life-0")
                before = cpu_s(process.pid)
                for life in range(1, lives + 1):
                    send_life(socket, load, f"life-{life}")
                return (cpu_s(process.pid) - before) / lives
        finally:
            process.terminate()
            process.wait()


def connected(url: str, header: dict[str, str]) -> ClientConnection:
    """A connection to a collector that may still be starting."""
    for _ in range(100):
        with contextlib.suppress(InvalidStatus):
            return connect(url, additional_headers=header, compression=None, max_size=None)
        time.sleep(0.1)
    raise SystemExit("the collector does not get ready")


def send_life(socket: ClientConnection, load: Load, instance: str, pause_s: float = 0.0) -> None:
    """Send a whole engine's life, frame by frame, and wait until all of it is acknowledged."""
    for identity in load.identities:
        named = msgspec.structs.replace(identity, instance=instance)
        socket.send(wire.encode_frame(wire.Hello(wire.PROTOCOL, named)))
    wanted = {who.rank: part.next_seq for who, part in load.evidence}
    for message in load.messages:
        batch = msgspec.structs.replace(wire.decode_upward(message, Limits()), instance=instance)
        socket.send(wire.encode_frame(batch))
        if pause_s:
            time.sleep(pause_s)
    while wanted:
        frame = wire.decode_downward(socket.recv())  # type: ignore[arg-type]  # frames are bytes
        assert not isinstance(frame, wire.Refusal), frame
        if isinstance(frame, wire.Ack) and wanted.get(frame.rank, -1) == frame.next_seq:
            del wanted[frame.rank]


def copy_once(load: Load) -> None:
    for message in load.messages:
        bytearray(message)


def checksum(load: Load) -> None:
    for message in load.messages:
        zlib.crc32(message)


def compare_columns(load: Load) -> None:
    """Nine columns of the two ranks, aligned already."""
    for first, last in _pairs(load):
        for name in COMPARED:
            (getattr(first, name) != getattr(last, name)).any()


def _pairs(load: Load) -> Iterator[tuple[InputsBlock, InputsBlock]]:
    for (_, one), (_, other) in zip(load.evidence[::2], load.evidence[1::2], strict=False):
        if (
            one.inputs is not None
            and other.inputs is not None
            and len(one.inputs.slot) == len(other.inputs.slot)
        ):
            yield one.inputs, other.inputs


def main() -> None:
    """Measure and show."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument(
        "--seats", type=int, default=128, help="requests running at once; a step has half of them"
    )
    arguments.add_argument("--steps-per-frame", type=int, default=10)
    args = arguments.parse_args()
    load = make_load(args.steps, args.seats, args.steps_per_frame)
    size = sum(map(len, load.messages))
    parts: list[tuple[str, Callable[[], float]]] = [
        ("reference: copy the frames once", lambda: cpu(lambda: copy_once(load))),
        ("reference: CRC-32 of the frames", lambda: cpu(lambda: checksum(load))),
        ("reference: numpy compares 9 columns", lambda: cpu(lambda: compare_columns(load))),
        ("decode and validate", lambda: cpu(lambda: decode(load))),
        ("watch: align, check, correlate", lambda: cpu(lambda: watch(load))),
        (
            "door: decode, journal, acknowledge",
            lambda: cpu(lambda: through_the_door(load, lambda t, w: None)),
        ),
        ("door and watch, one process", lambda: cpu(lambda: through_the_door(load, judge))),
        ("whole: WebSocket, auth, door, watch", lambda: whole(load)),
    ]
    rows = []
    for name, measure in parts:
        seconds, spread = median_and_spread(measure, args.repeats)
        rows.append(
            {
                "part": name,
                "rows/s/core": load.rows / seconds if seconds else float("inf"),
                "us/frame": seconds / len(load.messages) * 1e6,
                "MB/s": size / seconds / 1e6 if seconds else float("inf"),
                "spread": f"{spread:.0%}",
            }
        )
    parameters = {
        "steps": args.steps,
        "rows per step": load.rows / args.steps / len(load.identities),
        "steps per frame": args.steps_per_frame,
        "frames": len(load.messages),
        "rows": load.rows,
        "wire bytes per row": size / load.rows,
        "journal bytes per row": through_the_door(load, lambda t, w: None) / load.rows,
    }
    show("collector", rows, parameters, args.json)


if __name__ == "__main__":
    main()
