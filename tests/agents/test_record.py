"""The record: bytes that come back as what went in, or not at all."""

import struct
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from foundation_records import bodies, body_of, decoding, same, sealed
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from stagewatch.agents import layout
from stagewatch.agents.errors import RecordError
from stagewatch.agents.record import (
    BODIES,
    COLUMNS_MAX,
    HEAD_SIZE,
    SIZE_MAX,
    Bind,
    Extent,
    Inputs,
    Kind,
    Mask,
    Note,
    Payload,
    Record,
    decode,
    encode,
    request_key,
    size_of,
)

every_kind = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name.lower())
any_record = st.sampled_from(list(Kind)).flatmap(lambda kind: st.tuples(st.just(kind), bodies(kind)))


class TestRoundTrip:
    @settings(deadline=None)
    @given(any_record, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
    def test_every_kind_and_shape_comes_back(self, made: Any, seq: int, step: int, t_ns: int) -> None:
        kind, body = made
        data = encode(kind, seq, step, t_ns, body)
        assert same(decode(data), Record(kind, seq, step, t_ns, body))
        assert len(data) == size_of(body)
        assert len(data) % 8 == 0

    @every_kind
    @pytest.mark.parametrize(
        "shape",
        [
            {"rows": 0, "width": 0, "drafts": 0},
            {"rows": 0, "width": 8, "drafts": 7},
            {"rows": 3, "width": 1, "drafts": 0},
            {"rows": 1, "width": 0, "drafts": 15},
            {"rows": 1024, "width": 16, "drafts": 15},
        ],
        ids=str,
    )
    def test_the_edges_of_the_shapes(self, kind: Kind, shape: dict[str, int]) -> None:
        body = body_of(kind, **shape)
        assert same(decode(encode(kind, 1, 2, 3, body)).body, body)

    @pytest.mark.parametrize("text", ["", "ä", "漢字 🙂", "a\0b", "x" * 100_000, "line\nline"])
    def test_any_text(self, text: str) -> None:
        assert decode(encode(Kind.NOTE, 0, 0, 0, Note(text))).body == Note(text)

    def test_a_lone_surrogate_is_spelled_out(self) -> None:
        # A client can send such a request id; it must not cost the rank its recorder.
        body = Bind(1, 1, 1, 1, request_key("r\ud800"), "r\ud800")
        assert decode(encode(Kind.BIND, 0, 0, 0, body)).body == replace(body, request_id="r\\ud800")

    def test_tokens_wider_than_32_bits_wrap(self) -> None:
        wide = np.array([2**31, -(2**63), 2**32 + 5, -1], np.int64)
        body = replace(decoding(rows=4), last_sampled=wide, slot=wide)
        found = decode(encode(Kind.INPUTS, 0, 0, 0, body)).body
        assert isinstance(found, Inputs)
        assert found.last_sampled.tolist() == [-(2**31), 0, 5, -1]
        assert found.slot.tolist() == [-(2**31), 0, 5, -1]
        assert found.last_sampled.dtype == np.int32

    def test_columns_of_any_memory_layout(self) -> None:
        body = body_of(Kind.INPUTS, rows=4, drafts=3)
        assert isinstance(body, Inputs)
        scattered = replace(
            body,
            slot=np.repeat(body.slot, 2)[::2],
            draft_tokens=np.asfortranarray(body.draft_tokens),
            request=body.request[::-1].copy()[::-1],
            mirror=body.mirror.astype(">i4"),
        )
        assert encode(Kind.INPUTS, 1, 2, 3, scattered) == encode(Kind.INPUTS, 1, 2, 3, body)

    def test_a_mask_of_booleans(self) -> None:
        body = Mask(0, 0, np.array([True, False]), np.array([False, True]))
        found = decode(encode(Kind.MASK, 0, 0, 0, body)).body
        assert same(found, Mask(0, 0, np.array([1, 0], np.uint8), np.array([0, 1], np.uint8)))

    def test_request_keys_use_all_64_bits(self) -> None:
        body = Bind(0, 0, 0, 0, 2**64 - 1, "r")
        assert decode(encode(Kind.BIND, 0, 0, 0, body)).body == body

    def test_arrays_are_safe_from_the_writer_and_from_readers(self) -> None:
        # GIVEN a record decoded from memory that its writer shares
        body = decoding()
        shared = bytearray(encode(Kind.INPUTS, 0, 0, 0, body))
        found = decode(memoryview(shared)).body
        # WHEN the writer goes on
        shared[:] = bytes(len(shared))
        # THEN the record still says what it said, and nobody can change it
        assert same(found, body)
        assert isinstance(found, Inputs)
        with pytest.raises(ValueError, match="read-only"):
            found.slot[0] = 1

    def test_what_follows_a_record_is_left_alone(self) -> None:
        data = encode(Kind.NOTE, 5, 0, 0, Note("x"))
        assert decode(data + b"anything").seq == 5
        assert decode(memoryview(bytearray(data + b"anything"))).seq == 5


class TestRefusalToDecode:
    """Whatever `encode` cannot have written whole is a RecordError, and nothing else."""

    @every_kind
    def test_every_truncation(self, kind: Kind) -> None:
        data = encode(kind, 1, 2, 3, body_of(kind))
        for size in range(len(data)):
            with pytest.raises(RecordError):
                decode(data[:size])
            with pytest.raises(RecordError):
                decode(memoryview(bytearray(data[:size])))

    @every_kind
    def test_every_flipped_bit(self, kind: Kind) -> None:
        data = bytearray(encode(kind, 1, 2, 3, body_of(kind)))
        for bit in range(8 * len(data)):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(RecordError):
                decode(bytes(data))
            data[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(data)).seq == 1

    @pytest.mark.parametrize(
        ("at", "layout", "value", "said"),
        [
            pytest.param(2, "<B", 0, "kind 0 is unknown", id="kind-0"),
            pytest.param(2, "<B", 99, "kind 99 is unknown", id="kind-99"),
            pytest.param(3, "<B", 3, "does not hold what its head announces", id="scalars"),
            pytest.param(4, "<I", 0, "claims 0 bytes", id="size-0"),
            pytest.param(4, "<I", 100, "claims 100 bytes", id="size-unaligned"),
            pytest.param(4, "<I", SIZE_MAX + 8, "claims", id="size-too-large"),
            pytest.param(12, "<I", 2**32 - 1, "does not hold", id="rows"),
            pytest.param(16, "<I", 1, "does not hold", id="a-width-where-inputs-have-none"),
            pytest.param(20, "<I", 2**32 - 1, "does not hold", id="drafts"),
            pytest.param(28, "<I", 8, "does not hold", id="text-where-inputs-have-none"),
            pytest.param(32, "<Q", 2**63, "63 bits", id="seq"),
            pytest.param(40, "<Q", 2**64 - 1, "63 bits", id="step"),
            pytest.param(48, "<Q", 2**63, "63 bits", id="time"),
        ],
    )
    def test_a_head_that_lies_under_a_checksum_that_fits(
        self, at: int, layout: str, value: int, said: str
    ) -> None:
        data = bytearray(encode(Kind.INPUTS, 1, 2, 3, decoding()))
        struct.pack_into(layout, data, at, value)
        with pytest.raises(RecordError, match=said):
            decode(sealed(data))

    def test_rows_of_a_kind_that_has_none(self) -> None:
        data = bytearray(encode(Kind.FREE, 1, 2, 3, body_of(Kind.FREE)))
        struct.pack_into("<I", data, 12, 7)
        with pytest.raises(RecordError, match="does not hold what its head announces"):
            decode(sealed(data))

    def test_text_in_the_padding_of_a_kind_that_has_none(self) -> None:
        data = bytearray(encode(Kind.MASK, 1, 2, 3, body_of(Kind.MASK, rows=3)))
        struct.pack_into("<I", data, 28, 2)
        with pytest.raises(RecordError, match="does not hold what its head announces"):
            decode(sealed(data))

    @pytest.mark.parametrize("at", [16, 20], ids=["width", "drafts"])
    def test_more_columns_than_there_may_be_although_no_row_has_them(self, at: int) -> None:
        data = bytearray(encode(Kind.SENT, 1, 2, 3, body_of(Kind.SENT, rows=0)))
        struct.pack_into("<I", data, at, COLUMNS_MAX)
        assert decode(sealed(data)).seq == 1
        struct.pack_into("<I", data, at, COLUMNS_MAX + 1)
        with pytest.raises(RecordError, match="does not hold what its head announces"):
            decode(sealed(data))

    @pytest.mark.parametrize("change", [[5, 4, 4, 4], [-4, 12, 4, 4], [2**31 - 1, 2**31 - 1, 0, 18]])
    def test_scheduled_counts_that_do_not_add_up(self, change: list[int]) -> None:
        body = replace(decoding(rows=4, drafts=3), scheduled=np.array(change, np.int32))
        with pytest.raises(RecordError, match="do not add up"):
            decode(encode(Kind.INPUTS, 0, 0, 0, body))

    def test_text_that_is_not_utf8(self) -> None:
        data = bytearray(encode(Kind.NOTE, 0, 0, 0, Note("ab")))
        data[HEAD_SIZE] = 0xFF
        with pytest.raises(RecordError, match="not UTF-8"):
            decode(sealed(data))

    @settings(deadline=None)
    @given(st.binary(max_size=400))
    def test_any_bytes(self, data: bytes) -> None:
        with pytest.raises(RecordError):
            decode(data)

    @settings(deadline=None)
    @given(any_record, st.data())
    def test_any_change_under_a_checksum_that_fits(self, made: Any, data: st.DataObject) -> None:
        # WHEN any head fields say anything, THEN it is a record or a RecordError, and takes no memory.
        kind, body = made
        forged = bytearray(encode(kind, 1, 2, 3, body))
        for _ in range(data.draw(st.integers(1, 3))):
            at = data.draw(st.integers(0, len(forged) // 4 - 1)) * 4
            value = data.draw(st.sampled_from([0, 1, 7, 8, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1))
            struct.pack_into("<I", forged, at, value)
        try:
            found = decode(sealed(forged))
        except RecordError:
            return
        held = sum(
            getattr(found.body, field.name).nbytes
            for field in fields(found.body)
            if isinstance(getattr(found.body, field.name), np.ndarray)
        )
        assert held <= len(forged)


class TestRefusalToEncode:
    def test_a_column_of_one_element_is_not_stretched_over_the_rows(self) -> None:
        body = replace(decoding(rows=4), slot=np.zeros(1, np.int32))
        with pytest.raises(ValueError, match="expected"):
            encode(Kind.INPUTS, 0, 0, 0, body)

    @pytest.mark.parametrize("shape", [(5, 3), (3, 4), (15,)], ids=str)
    def test_a_table_of_another_shape(self, shape: tuple[int, ...]) -> None:
        # Also one with as many elements, whose rows would be cut elsewhere.
        body = body_of(Kind.SENT, rows=3, width=5)
        assert isinstance(body, Payload)
        with pytest.raises((ValueError, IndexError)):
            encode(Kind.SENT, 0, 0, 0, replace(body, num_sampled=np.zeros(shape, np.int32)))
        if shape != (3, 4):
            with pytest.raises((ValueError, IndexError)):
                encode(Kind.SENT, 0, 0, 0, replace(body, tokens=np.zeros(shape, np.int32)))

    def test_more_columns_than_a_reader_believes(self) -> None:
        with pytest.raises(ValueError, match="expected"):
            encode(Kind.SENT, 0, 0, 0, body_of(Kind.SENT, rows=1, width=COLUMNS_MAX + 1))

    def test_a_number_too_wide_for_the_head(self) -> None:
        with pytest.raises(struct.error):
            encode(Kind.BIND, 0, 0, 0, Bind(2**70, 0, 0, 0, 0, "r"))


class TestSchema:
    """The declarations in `bodies` and the layout in `record` are one."""

    @every_kind
    def test_every_kind_declares_its_fields_in_order(self, kind: Kind) -> None:
        body_type = BODIES[kind]
        declared = [*body_type.SCALARS, *(name for name, _, _ in body_type.COLUMNS)]
        text = [body_type.TEXT] if body_type.TEXT else []
        assert [field.name for field in fields(body_type)] == declared + text

    @every_kind
    def test_every_column_is_aligned(self, kind: Kind) -> None:
        # With an odd number of rows, so that a column out of order would lie askew.
        body = body_of(kind, rows=3, width=1, drafts=1)
        data = encode(kind, 0, 0, 0, body)
        at = HEAD_SIZE
        for name, item, _ in body.COLUMNS:
            column = getattr(body, name)
            assert at % column.itemsize == 0
            assert column.itemsize == {"u8": 8, "i4": 4, "u1": 1}[item]
            assert data[at : at + column.nbytes] == column.tobytes()
            at += column.nbytes

    def test_fields_that_do_not_follow_the_declaration_are_refused(self) -> None:
        class Astray(msgspec.Struct):
            SCALARS: ClassVar = ("slot",)
            COLUMNS: ClassVar = ()
            TEXT: ClassVar = None
            other: int

        with pytest.raises(TypeError, match="do not follow"):
            layout.Schema(Astray)  # type: ignore[arg-type]

    def test_columns_that_would_lie_askew_are_refused(self) -> None:
        class Askew(msgspec.Struct):
            SCALARS: ClassVar = ()
            COLUMNS: ClassVar = (("flags", "u1", Extent.ROW), ("request", "u8", Extent.ROW))
            TEXT: ClassVar = None
            flags: Any
            request: Any

        with pytest.raises(TypeError, match="widest first"):
            layout.Schema(Askew)  # type: ignore[arg-type]

    def test_request_keys_are_stable(self) -> None:
        # Ranks on different hosts, and journals of different days, are joined by them.
        assert request_key("1-b83a22bb") == int.from_bytes(
            __import__("hashlib").blake2b(b"1-b83a22bb", digest_size=8).digest(), "little"
        )
        assert request_key("a") != request_key("b")
