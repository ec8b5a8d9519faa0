"""How much is called for a step must not grow with its rows: no per-row Python on a hot path.

What is counted is calls, Python's and built-in ones, as the interpreter tells a profiler: the same on every machine,
and whatever else it does. Wall time is measured by `make bench` and asserted nowhere.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from stagewatch.agents import wire
from stagewatch.agents.bodies import Inputs, Mask, Payload
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.identity import Fingerprint, Identity, Rank, Sizes
from stagewatch.agents.probe import Probe
from stagewatch.agents.record import Kind, Record
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.tail import Privacy, Tail
from stagewatch.monitor.watch import Watch

FEW, MANY = 4, 256
K = 7
STEPS = 40
STEPS_PER_FRAME = 10
DIGESTER = Digester(bytes(16))


class Calls:
    """How many calls were made."""

    count = 0


@contextmanager
def counted() -> Iterator[Calls]:
    """Count calls within."""
    found = Calls()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            found.count += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def identity(pp: int) -> Identity:
    return Identity(
        "d", "i", Rank(0, pp, 0), Sizes(1, 2, 1), "h", 1, "none", "0", "C", K, 1 << 20, 1 << 20, 1
    )


def step_of(number: int, rows: int) -> tuple[Inputs, Mask, Payload]:
    """One step in which every request decodes, all drafts are accepted, and counts follow from the step before."""
    place, width = np.arange(rows, dtype=np.int32), K + 1
    computed = np.full(rows, 100 + number * width, np.int32)
    last = (place + number) % 1000
    drafts = (np.arange(K, dtype=np.int32)[None, :] + last[:, None]).astype(np.int32)
    inputs = Inputs(
        tick=2 * number,
        graph_mode=0,
        spec_tokens=K,
        padded_tokens=0,
        request=place.astype(np.uint64) + np.uint64(1),
        slot=place,
        generation=np.zeros(rows, np.int32),
        mirror=computed,
        computed=computed,
        prefill_len=np.full(rows, 50, np.int32),
        scheduled=np.full(rows, width, np.int32),
        draft_count=np.full(rows, K, np.int32),
        cap=np.full(rows, 1 << 20, np.int32),
        last_sampled=last.astype(np.int32),
        draft_tokens=drafts,
        input_ids=np.concatenate([last[:, None], drafts], axis=1).astype(np.int32).reshape(-1),
        positions=(computed[:, None] + np.arange(width, dtype=np.int32)).astype(np.int32).reshape(-1),
        prefilling=np.zeros(rows, np.uint8),
    )
    sent = Payload(
        at=-1,
        skipped=0,
        request=inputs.request,
        slot=place,
        generation=inputs.generation,
        generation_now=inputs.generation,
        num_sampled=np.full(rows, width, np.int32),
        num_rejected=np.zeros(rows, np.int32),
        tokens=np.ones((rows, width), np.int32),
        draft_tokens=drafts,
        applied=np.ones(rows, np.uint8),
    )
    return inputs, Mask(0, 0, np.ones(rows, np.uint8), np.ones(rows, np.uint8)), sent


def of_probe(rows: int, directory: Path) -> float:
    """Calls of a step's records: inputs, mask and payload."""
    who = identity(1)
    probe = Probe(RingWriter(directory, who, 32 << 20), who, heartbeat_s=1e9)
    inputs, mask, sent = step_of(0, rows)
    engine = mask.engine.view(np.bool_)

    def step() -> None:
        probe.inputs(inputs)
        probe.mask(engine, engine, rows)
        probe.payload(Kind.SENT, probe.step, sent)

    step()
    with counted() as calls:
        for _ in range(STEPS):
            step()
    assert probe.armed
    return calls.count / STEPS


def of_sidecar(rows: int, directory: Path) -> float:
    """Calls for each step that is read from a ring into a frame."""
    of_probe(rows, directory)
    key = Fingerprint("digest_key", "test")
    tail = Tail(next(directory.glob("*.ring")), Privacy(DIGESTER, key, False, False))
    with counted() as calls:
        while tail.read(1 << 30):
            pass
    tail.close()
    return calls.count / STEPS


def evidence_of(rows: int) -> list[tuple[Identity, Evidence]]:
    """What both ranks recorded, in frames of several steps."""
    records: dict[int, list[Record]] = {0: [], 1: []}
    frames = []
    for number in range(STEPS):
        inputs, mask, sent = step_of(number, rows)
        for pp, payload in ((0, Kind.RECEIVED), (1, Kind.SENT)):
            own = records[pp]
            seq = number * 3
            own += [
                Record(Kind.INPUTS, seq, number + 1, seq, inputs),
                Record(Kind.MASK, seq + 1, number + 1, seq, mask),
                Record(payload, seq + 2, number + 1, seq, sent),
            ]
        if (number + 1) % STEPS_PER_FRAME == 0:
            for pp in (0, 1):
                frames.append((identity(pp), digest_records(records[pp], identity(pp), DIGESTER)))
                records[pp] = []
    return frames


def of_collector(rows: int, directory: Path) -> float:
    """Calls for each step of two ranks, from their frames' bytes to verdicts."""
    watch, limits = Watch(), wire.Limits()
    for pp in (0, 1):
        watch.hello(identity(pp), 1)
    frames = [wire.encode_frame(wire.batch_of(who, found, 1.0)) for who, found in evidence_of(rows)]
    with counted() as calls:
        for message in frames:
            batch = wire.decode_upward(message, limits)
            assert isinstance(batch, wire.Batch)
            watch.take(batch.instance, batch.rank, wire.evidence_of(batch, limits), 1.0, 1)
    assert watch.incidents() == []
    (state,) = watch.states()
    assert state.verdicts.get("CONSISTENT", 0) >= (STEPS - 1) * rows
    return calls.count / STEPS


# Calls for a step of three records; the collector's of two ranks. A fifth above what was counted with Python 3.11.
BOUNDS: dict[str, tuple[Callable[[int, Path], float], float]] = {
    "probe": (of_probe, 110),
    "sidecar": (of_sidecar, 240),
    "collector": (of_collector, 250),
}


@pytest.mark.parametrize("part", BOUNDS)
def test_calls_per_step_do_not_grow_with_its_rows(part: str, tmp_path: Path) -> None:
    """GIVEN steps of few and of many rows, WHEN a part handles them, THEN as much is called, and within its bound."""
    tmp_path.chmod(0o700)
    count, most = BOUNDS[part]
    found = {}
    for rows in (FEW, MANY):
        directory = tmp_path / str(rows)
        directory.mkdir(mode=0o700)
        count(rows, directory)  # what is made once is not counted
        for ring in directory.glob("*"):
            ring.unlink()
        found[rows] = count(rows, directory)
    assert found[FEW] <= most, found
    assert found[MANY] <= found[FEW] * 1.05, found
