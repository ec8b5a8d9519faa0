"""Records of a sound engine, for tests that care about transport and not about what the records say."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from stagewatch.agents import wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.record import Inputs, Kind, Note, Record, request_key
from stagewatch.agents.ring import RingWriter
from stagewatch.monitor.journal import Carried, Entry, EntryKind, read_journal

KEY = bytes(range(16))
ROWS, DRAFTS = 4, 3


def identity(stage: int = 0, instance: str = "life-1", stages: int = 2, host: str = "node") -> Identity:
    return Identity(
        deployment="test",
        instance=instance,
        rank=Rank(0, stage, 0),
        sizes=Sizes(1, stages, 1),
        host=host,
        pid=1,
        engine="none",
        engine_version="1",
        variant="C",
        spec_tokens=DRAFTS,
        vocab_size=1000,
        max_model_len=100_000,
        started_ns=1,
    )


def inputs(step: int, rows: int = ROWS) -> Inputs:
    """Rows that decode, each step two scheduler ticks after the last, accepting every draft."""
    width = DRAFTS + 1
    computed = np.full(rows, 10 + (step - 1) * width, np.int32)
    column = np.arange(rows, dtype=np.int32)
    last = ((step * 7 + column) % 1000).astype(np.int32)
    drafts = ((step * 11 + column[:, None] * 5 + np.arange(DRAFTS)) % 1000).astype(np.int32)
    return Inputs(
        tick=2 * step,
        graph_mode=0,
        spec_tokens=DRAFTS,
        padded_tokens=0,
        request=np.array([request_key(f"request-{row}") for row in range(rows)], np.uint64),
        slot=column,
        generation=np.ones(rows, np.int32),
        mirror=computed,
        computed=computed,
        prefill_len=np.full(rows, 10, np.int32),
        scheduled=np.full(rows, width, np.int32),
        draft_count=np.full(rows, DRAFTS, np.int32),
        cap=np.full(rows, 100_000, np.int32),
        last_sampled=last,
        draft_tokens=drafts,
        input_ids=np.concatenate([last[:, None], drafts], axis=1).reshape(-1),
        positions=(computed[:, None] + np.arange(width, dtype=np.int32)).reshape(-1),
        prefilling=np.zeros(rows, np.uint8),
    )


def records(first: int, end: int) -> list[Record]:
    """Records numbered ``first`` to ``end - 1``: inputs of step number + 1."""
    return [Record(Kind.INPUTS, seq, seq + 1, seq * 1000, inputs(seq + 1)) for seq in range(first, end)]


def batch(first: int, end: int, who: Identity | None = None, lost: int = 0) -> wire.Batch:
    who = who or identity()
    return wire.batch_of(who, digest_records(records(first, end), who, Digester(KEY), lost=lost), -1.0)


def hello(who: Identity | None = None) -> bytes:
    return wire.encode_frame(wire.Hello(wire.PROTOCOL, who or identity()))


def batch_message(first: int, end: int, who: Identity | None = None, lost: int = 0) -> bytes:
    return wire.encode_frame(batch(first, end, who, lost))


def append_steps(ring: RingWriter, count: int, first_step: int = 1, wrong_token: int = 0) -> None:
    """Append whole steps; ``wrong_token`` is added to what each row feeds and holds."""
    for step in range(first_step, first_step + count):
        body = inputs(step)
        if wrong_token:
            body = msgspec.structs.replace(
                body, input_ids=body.input_ids + wrong_token, last_sampled=body.last_sampled + wrong_token
            )
        ring.append(Kind.INPUTS, step, time.time_ns(), body)


def append_note(ring: RingWriter, text: str) -> None:
    ring.append(Kind.NOTE, 0, time.time_ns(), Note(text))


def journalled_seqs(data_dir: Path) -> dict[str, list[int]]:
    """Per rank, the numbers of all records in a collector's journal, in journal order."""
    found: dict[str, list[int]] = {}
    for block_rank, seqs in _batches(read_journal(data_dir / "journal")):
        found.setdefault(block_rank, []).extend(seqs)
    return found


def lost_records(data_dir: Path) -> int:
    """Records that the frames of a journal declare lost."""
    return sum(
        frame.lost
        for entry in read_journal(data_dir / "journal")
        if entry.kind is EntryKind.BATCH
        and isinstance(frame := wire.decode_upward(entry.payload, wire.Limits()), wire.Batch)
    )


def carried_in(entries: list[Entry]) -> list[Carried]:
    return [msgspec.msgpack.decode(e.payload, type=Carried) for e in entries if e.kind is EntryKind.CARRIED]


def _batches(entries: Iterator[Entry]) -> Iterator[tuple[str, list[int]]]:
    for entry in entries:
        if entry.kind is not EntryKind.BATCH:
            continue
        frame = wire.decode_upward(entry.payload, wire.Limits())
        assert isinstance(frame, wire.Batch)
        evidence = wire.evidence_of(frame, wire.Limits())
        blocks = (
            getattr(evidence, name) for name in ("inputs", "mask", "sent", "received", "consumed", "events")
        )
        seqs = sorted(int(seq) for block in blocks if block is not None for seq in block.seq)
        yield f"{frame.instance}.{frame.rank}", seqs
