"""The wire: what is sent is what arrives, any Arrow library reads it, and hostile bytes are FrameErrors."""

import random
from dataclasses import fields, replace

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from service_records import KEY, batch, identity, inputs, records

from stagewatch.agents import wire
from stagewatch.agents.blocks import EventBlock
from stagewatch.agents.bodies import Bind, Collective, Mask, Payload
from stagewatch.agents.digest import Digester
from stagewatch.agents.errors import FrameError
from stagewatch.agents.evidence import Evidence, digest_records
from stagewatch.agents.record import Kind, Record
from stagewatch.agents.wire import COLUMNS, Limits

ROWS = 3


def payload(width: int, drafts: int) -> Payload:
    column = np.arange(ROWS, dtype=np.int32)
    return Payload(
        at=-1,
        skipped=0,
        request=column.astype(np.uint64),
        slot=column,
        generation=column,
        generation_now=column,
        num_sampled=np.ones(ROWS, np.int32),
        num_rejected=column * 0,
        tokens=np.arange(ROWS * width, dtype=np.int32).reshape(ROWS, width),
        draft_tokens=np.arange(ROWS * drafts, dtype=np.int32).reshape(ROWS, drafts),
        applied=np.ones(ROWS, np.uint8),
    )


def every_kind(raw: bool) -> Evidence:
    bodies = [
        (Kind.BIND, Bind(0, 1, 10, 100, 7, "request-ü")),
        (Kind.INPUTS, inputs(1, ROWS)),
        (Kind.INPUTS, inputs(2, 0)),
        (Kind.MASK, Mask(0, 1, np.ones(ROWS, np.uint8), np.zeros(ROWS, np.uint8))),
        (Kind.SENT, payload(4, 3)),
        (Kind.SENT, payload(1, 0)),
        (Kind.RECEIVED, payload(4, 3)),
        (Kind.CONSUMED, payload(4, 3)),
        (Kind.COLLECTIVE, Collective(1, 2**40, 2, "pp broadcast int64")),
    ]
    found = [Record(kind, seq, seq, seq, body) for seq, (kind, body) in enumerate(bodies)]
    return digest_records(found, identity(), Digester(KEY), raw=raw)


def assert_same(one: Evidence, other: Evidence) -> None:
    for part in fields(Evidence):
        left, right = getattr(one, part.name), getattr(other, part.name)
        if left is None or isinstance(left, int):
            assert left == right
            continue
        assert type(left) is type(right)
        for column in fields(left):
            expected, actual = getattr(left, column.name), getattr(right, column.name)
            if column.name == "text":
                assert expected == actual
            else:
                np.testing.assert_array_equal(expected, actual)
                assert expected.dtype == actual.dtype, column.name


def there_and_back(evidence: Evidence) -> Evidence:
    message = wire.encode_frame(wire.batch_of(identity(), evidence, 1.0))
    frame = wire.decode_upward(message, Limits())
    assert isinstance(frame, wire.Batch)
    return wire.evidence_of(frame, Limits())


@pytest.mark.parametrize("raw", [False, True])
def test_evidence_arrives_as_it_was_sent(raw: bool) -> None:
    evidence = every_kind(raw)
    assert_same(evidence, there_and_back(evidence))


def schema_of(block_type: type) -> pa.Schema:
    def arrow(column: wire.Column) -> pa.DataType:
        if column.dtype is None:
            return pa.string()
        item = pa.from_numpy_dtype(column.dtype)
        return pa.list_(pa.field("item", item, nullable=False)) if column.listed else item

    return pa.schema([pa.field(column.name, arrow(column), nullable=False) for column in COLUMNS[block_type]])


@pytest.mark.parametrize("raw", [False, True])
def test_an_arrow_library_reads_what_we_write(raw: bool) -> None:
    evidence = every_kind(raw)
    for name, data in wire.batch_of(identity(), evidence, 1.0).parts.items():
        block = getattr(evidence, name)
        found = pa.ipc.read_record_batch(pa.py_buffer(data), schema_of(type(block)))
        found.validate(full=True)
        assert found.num_rows == len(block.seq)
        for column in COLUMNS[type(block)]:
            values = found.column(column.name)
            content = values.flatten() if column.listed else values
            assert content.to_pylist() == list(getattr(block, column.name))


@pytest.mark.parametrize("raw", [False, True])
def test_we_read_what_an_arrow_library_writes(raw: bool) -> None:
    evidence = every_kind(raw)
    frame = wire.batch_of(identity(), evidence, 1.0)
    parts = {
        name: pa.ipc.read_record_batch(pa.py_buffer(data), schema_of(type(getattr(evidence, name))))
        .serialize()
        .to_pybytes()
        for name, data in frame.parts.items()
    }
    assert parts != frame.parts  # Arrow lays it out in its own way
    assert_same(evidence, wire.evidence_of(msgspec.structs.replace(frame, parts=parts), Limits()))


def test_a_compressed_batch_is_not_inflated() -> None:
    frame = batch(0, 3)
    found = pa.ipc.read_record_batch(pa.py_buffer(frame.parts["inputs"]), schema_of(wire.InputsBlock))
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, found.schema, options=options) as writer:
        writer.write_batch(found)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    data = reader.read_next_message().serialize().to_pybytes()
    with pytest.raises(FrameError, match="compressed, which is not taken"):
        wire.evidence_of(msgspec.structs.replace(frame, parts={"inputs": data}), Limits())


class TestHostile:
    @pytest.mark.parametrize("seed", range(8))
    def test_damage_is_a_frame_error_or_harmless(self, seed: int) -> None:
        # GIVEN frames of every kind, damaged in a few bytes, cut, or lengthened
        draw = random.Random(seed)
        message = wire.encode_frame(wire.batch_of(identity(), every_kind(raw=seed % 2 == 1), 1.0))
        refused = 0
        for _ in range(400):
            damaged = bytearray(message)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(damaged))
                match draw.randrange(4):
                    case 0:
                        damaged[at] = draw.randrange(256)
                    case 1:
                        damaged[at] ^= 1 << draw.randrange(8)
                    case 2:
                        damaged[at : at + 8] = draw.choice([b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f"])
                    case _:
                        del damaged[at : at + draw.randint(1, 64)]
            # THEN nothing but a FrameError comes of it, and what is taken has its promised shape
            try:
                frame = wire.decode_upward(bytes(damaged), Limits())
                if isinstance(frame, wire.Batch):
                    evidence = wire.evidence_of(frame, Limits())
            except FrameError as error:
                refused += 1
                assert "\n" not in str(error)
                continue
            for name in ("inputs", "mask", "sent", "received", "consumed"):
                block = getattr(evidence, name)
                if block is not None:
                    rows = int(block.rows.sum())
                    for column in COLUMNS[type(block)]:
                        if column.listed and not column.name.startswith("raw_"):
                            assert len(getattr(block, column.name)) == rows
        assert refused > 100

    def test_a_frame_over_the_limit_is_not_looked_at(self) -> None:
        message = wire.encode_frame(batch(0, 10))
        with pytest.raises(FrameError, match=f"frame of {len(message)} bytes exceeds 1000"):
            wire.decode_upward(message, Limits(frame_bytes=1000))

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            (Limits(steps_per_frame=9), "frame part inputs: 10 steps exceed 9"),
            (Limits(rows_per_frame=39), "frame part inputs: 40 rows exceed 39"),
        ],
    )
    def test_more_than_is_believed_is_refused(self, limits: Limits, message: str) -> None:
        with pytest.raises(FrameError, match=message):
            wire.evidence_of(batch(0, 10), limits)

    def test_a_long_text_is_refused(self) -> None:
        found = [Record(Kind.BIND, 0, 1, 1, Bind(0, 1, 1, 1, 1, "x" * 100))]
        frame = wire.batch_of(identity(), digest_records(found, identity(), Digester(KEY)), 1.0)
        with pytest.raises(FrameError, match="frame part events: a text exceeds 99 characters"):
            wire.evidence_of(frame, Limits(text_bytes=99))

    def test_rows_that_do_not_follow_their_counts_are_refused(self) -> None:
        evidence = digest_records(records(0, 3), identity(), Digester(KEY))
        assert evidence.inputs is not None
        frame = wire.batch_of(identity(), evidence, 1.0)
        # the same lists, under other row counts
        lying = wire._encode_block(evidence.inputs)
        rows = evidence.inputs.rows.tobytes()
        at = lying.index(rows)
        for wrong in (rows[::-1], b"\xff" * len(rows)):
            damaged = lying[:at] + wrong + lying[at + len(rows) :]
            with pytest.raises(FrameError, match="frame part inputs: "):
                wire.evidence_of(msgspec.structs.replace(frame, parts={"inputs": damaged}), Limits())

    def test_a_frame_must_hold_each_record_it_covers(self) -> None:
        frame = batch(0, 5)
        for change in ({"next_seq": 6}, {"first_seq": 1}, {"first_seq": 1, "next_seq": 6}):
            with pytest.raises(FrameError, match="does not hold each of them once"):
                wire.evidence_of(msgspec.structs.replace(frame, **change), Limits())

    def test_an_unknown_part_names_the_way_out(self) -> None:
        frame = msgspec.structs.replace(batch(0, 1), parts={"novelty": b""})
        with pytest.raises(FrameError, match="'novelty' is unknown to this build: upgrade the collector"):
            wire.evidence_of(frame, Limits())


def test_events_without_text_still_count() -> None:
    block = every_kind(raw=False).events
    assert isinstance(block, EventBlock)
    without = replace(block, text=[""] * len(block.text))
    evidence = replace(every_kind(raw=False), events=without)
    assert_same(evidence, there_and_back(evidence))
