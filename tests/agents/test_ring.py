"""The ring within one process: wrap-around, overrun, damage, and how every number is accounted for."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from foundation_records import body_of, decoding, identity, note, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagewatch.agents.errors import RingError
from stagewatch.agents.record import HEAD_SIZE, Bind, Kind, Note, encode
from stagewatch.agents.ring import CAPACITY_MIN, HEADER_SIZE, RecordTooLongError, RingReader, RingWriter

TAIL, HEAD, WRITTEN, CLOSED = 64, 72, 80, 88
reused_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

Ring = Callable[..., RingWriter]


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    made = 0

    def make(capacity: int = CAPACITY_MIN) -> RingWriter:
        nonlocal made
        made += 1
        return RingWriter(tmp_path / "rings", identity(instance=f"life-{made}"), capacity)

    return make


def write(writer: RingWriter, count: int, size: int = 0) -> None:
    for _ in range(count):
        seq = writer.records_written
        writer.append(Kind.NOTE, seq, seq, note(seq, size))


def seqs(reader: RingReader, limit: int = 1 << 20) -> list[int]:
    """Numbers of the records read, each checked to hold what was written under it."""
    found = list(reader.read(limit))
    for each in found:
        assert isinstance(each.body, Note)
        assert each.body.text.startswith(f"{each.seq}:")
    return [each.seq for each in found]


def patch(path: Path, at: int, layout: str, *values: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack(layout, *values))


def word(path: Path, at: int) -> int:
    with path.open("rb") as file:
        file.seek(at)
        return int.from_bytes(file.read(8), "little")


class TestReading:
    def test_every_kind_comes_back_in_order(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        bodies = [(kind, body_of(kind, seed)) for seed in range(3) for kind in Kind]
        for kind, body in bodies:
            writer.append(kind, 7, 8, body)
        found = list(reader.read())
        assert [(each.kind, each.seq, each.step, each.t_ns) for each in found] == [
            (kind, seq, 7, 8) for seq, (kind, _) in enumerate(bodies)
        ]
        assert all(same(each.body, body) for each, (_, body) in zip(found, bodies, strict=True))

    def test_a_reader_sees_only_what_is_new_and_no_more_than_asked(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 5)
        assert seqs(reader, 2) == [0, 1]
        assert seqs(reader) == [2, 3, 4]
        assert seqs(reader) == []
        write(writer, 1)
        assert seqs(reader) == [5]
        assert reader.lost == 0

    def test_a_reader_knows_whose_ring_it_is(self, ring: Ring) -> None:
        assert RingReader(ring().path).identity == identity(instance="life-1")

    def test_margin_tells_bytes_read_written_and_left(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 3)
        size = len(encode(Kind.NOTE, 0, 0, 0, note(0)))
        margin = reader.margin()
        assert (margin.bytes_behind, margin.bytes_written) == (3 * size, 3 * size)
        assert margin.bytes_free == margin.capacity - 3 * size == CAPACITY_MIN - 3 * size
        seqs(reader)
        assert reader.margin().bytes_behind == 0
        assert reader.margin().bytes_free == CAPACITY_MIN

    def test_margin_of_a_reader_that_was_overtaken(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 10_000)
        margin = reader.margin()
        assert margin.bytes_behind <= CAPACITY_MIN
        assert margin.bytes_free == CAPACITY_MIN - margin.bytes_behind

    def test_rewind_reads_what_is_present_again(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 10_000)
        first, lost = seqs(reader), reader.lost
        reader.rewind()
        assert (seqs(reader), reader.lost) == (first, lost)


class TestWrappingRound:
    @pytest.mark.parametrize("left", range(0, 264, 8))
    def test_at_every_alignment(self, ring: Ring, left: int) -> None:
        # GIVEN a ring whose last record ends `left` bytes before the end of the area
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 14, 4000)
        room = CAPACITY_MIN - word(writer.path, HEAD) - left
        filler = room - len(encode(Kind.NOTE, 0, 0, 0, note(14)))
        write(writer, 1, filler)
        assert word(writer.path, HEAD) == CAPACITY_MIN - left
        assert seqs(reader) == list(range(15))
        # WHEN records of more than one size follow, THEN none is lost or split
        write(writer, 3)
        write(writer, 2, 3000)
        assert seqs(reader) == list(range(15, 20))
        assert reader.lost == 0

    @reused_directory
    @given(st.lists(st.tuples(st.integers(0, 15_000), st.integers(0, 3)), min_size=1, max_size=60))
    def test_whatever_the_sizes_all_numbers_are_accounted_for(
        self, tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, int]]
    ) -> None:
        writer = RingWriter(tmp_path_factory.mktemp("r"), identity(), CAPACITY_MIN)
        reader = RingReader(writer.path)
        found: list[int] = []
        for size, reads in plan:
            write(writer, 1, size)
            found += seqs(reader, reads)
        found += seqs(reader)
        assert found == sorted(set(found))
        assert found[-1] == writer.records_written - 1
        assert len(found) + reader.lost == writer.records_written
        writer.path.unlink()

    def test_a_record_as_long_as_allowed(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        longest = CAPACITY_MIN // 4 - len(encode(Kind.NOTE, 0, 0, 0, Note("")))
        for step in range(9):
            writer.append(Kind.NOTE, step, 0, Note("x" * longest))
            assert [each.seq for each in reader.read()] == [step]

    def test_a_longer_one_is_refused_and_costs_nothing(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 2)
        with pytest.raises(RecordTooLongError, match="enlarge the ring"):
            writer.append(Kind.NOTE, 0, 0, Note("x" * (CAPACITY_MIN // 4)))
        write(writer, 1)
        assert seqs(reader) == [0, 1, 2]

    def test_a_record_that_cannot_be_encoded_leaves_the_ring_sound(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 2)
        for broken in (Bind(2**70, 0, 0, 0, 0, ""), None):
            with pytest.raises(Exception, match=r"range|format requires|NoneType"):
                writer.append(Kind.BIND, 0, 0, broken)  # type: ignore[arg-type]
        write(writer, 1)
        assert seqs(reader) == [0, 1, 2]


class TestOverrun:
    def test_what_was_overwritten_before_the_reader_came_is_lost(self, ring: Ring) -> None:
        writer = ring()
        write(writer, 5000)
        reader = RingReader(writer.path)
        found = seqs(reader)
        assert found == list(range(found[0], 5000))
        assert reader.lost == found[0] > 0

    def test_what_was_overwritten_while_the_reader_slept_is_lost_and_counted_exactly(
        self, ring: Ring
    ) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 10)
        assert seqs(reader) == list(range(10))
        write(writer, 5000)
        found = seqs(reader)
        assert found == list(range(found[0], 5010))
        assert reader.lost == found[0] - 10 > 0

    def test_a_full_ring_keeps_nearly_all_it_has_room_for(self, ring: Ring) -> None:
        writer = ring(1 << 20)
        write(writer, 20_000, 100)
        size = len(encode(Kind.NOTE, 0, 0, 0, note(10_000, 100)))
        found = seqs(RingReader(writer.path))
        # One landmark may be given up early, and a gap may lie at the end.
        assert len(found) * size > (1 << 20) * 0.99

    def test_records_that_go_round_while_being_iterated(self, ring: Ring) -> None:
        # GIVEN a reader in the middle of an iteration
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 100)
        iteration = reader.read()
        assert next(iteration).seq == 0
        # WHEN the writer goes round, more than once
        write(writer, 7000)
        rest = [each.seq for each in iteration]
        # THEN the iteration goes on with what is left
        assert rest == list(range(rest[0], 7100))
        assert reader.lost == rest[0] - 1


class TestTheEnd:
    def test_closing_says_that_nothing_more_will_come(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 1)
        assert not reader.closed
        writer.close()
        assert reader.closed
        assert seqs(reader) == [0]

    def test_nothing_is_written_after_it(self, ring: Ring) -> None:
        writer = ring()
        writer.close()
        with pytest.raises(RingError, match="is closed"):
            write(writer, 1)
        writer.close()
        assert seqs(RingReader(writer.path)) == []


class TestDamage:
    """Damage by others stops neither end, is skipped, and is counted."""

    def starts(self, count: int, size: int = 0) -> list[int]:
        """File offsets of the first records that `write` makes of one size, and of the end."""
        sizes = [len(encode(Kind.NOTE, seq, seq, seq, note(seq, size))) for seq in range(count)]
        return [HEADER_SIZE + sum(sizes[:index]) for index in range(count + 1)]

    @pytest.mark.parametrize("at", [0, 2, 4, 8, 12, 32, HEAD_SIZE])
    def test_a_damaged_record_is_skipped_and_counted(self, ring: Ring, at: int) -> None:
        writer = ring()
        write(writer, 10)
        patch(writer.path, self.starts(10)[4] + at, "<H", 0xA5A5)
        reader = RingReader(writer.path)
        assert seqs(reader) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert reader.lost == 1

    def test_several_in_a_row(self, ring: Ring) -> None:
        writer = ring()
        write(writer, 10)
        starts = self.starts(10)
        for at in range(starts[3], starts[6], 8):
            patch(writer.path, at, "<Q", 0xA5A5A5A5A5A5A5A5)
        reader = RingReader(writer.path)
        assert seqs(reader) == [0, 1, 2, 6, 7, 8, 9]
        assert reader.lost == 3

    def test_a_record_that_became_zeros_is_no_gap(self, ring: Ring) -> None:
        writer = ring()
        write(writer, 10)
        patch(writer.path, self.starts(10)[4], "<Q", 0)
        reader = RingReader(writer.path)
        assert seqs(reader) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert reader.lost == 1

    def test_nor_once_the_writer_has_gone_round(self, ring: Ring) -> None:
        # GIVEN a ring that wrapped, so that a gap is possible behind every position
        writer = ring()
        write(writer, 18, 4000)
        tail = word(writer.path, TAIL)
        # WHEN the first record present becomes zeros
        first = next(RingReader(writer.path).read()).seq
        patch(writer.path, HEADER_SIZE + tail, "<Q", 0)
        # THEN it alone is lost, not all up to the end of the area
        reader = RingReader(writer.path)
        assert seqs(reader) == list(range(first + 1, 18))

    def test_a_number_that_is_impossible_where_it_stands(self, ring: Ring) -> None:
        # Believed, it would make every later record one that was read before.
        writer = ring()
        write(writer, 3)
        start = self.starts(3)[1]
        forged = encode(Kind.NOTE, 2**40, 1, 1, note(1))
        with writer.path.open("r+b") as file:
            file.seek(start)
            file.write(forged)
        reader = RingReader(writer.path)
        assert seqs(reader) == [0, 2]
        assert reader.lost == 1

    def test_the_last_record_is_counted_although_none_follows(self, ring: Ring) -> None:
        writer = ring()
        write(writer, 10)
        patch(writer.path, self.starts(10)[9] + HEAD_SIZE, "<B", 0xFF)
        reader = RingReader(writer.path)
        assert seqs(reader) == list(range(9))
        assert reader.lost == 1
        write(writer, 2)
        assert seqs(reader) == [10, 11]
        assert reader.lost == 1

    def test_a_gap_that_became_something_else(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 15, 4000)
        assert seqs(reader) == list(range(15))
        gap_at = HEADER_SIZE + word(writer.path, HEAD)
        write(writer, 1, 6000)
        patch(writer.path, gap_at, "<Q", 0xA5A5A5A5A5A5A5A5)
        assert seqs(reader) == [15]
        assert reader.lost == 0

    def test_a_record_planted_in_the_text_of_a_damaged_one_is_not_taken_for_one(self, ring: Ring) -> None:
        # GIVEN a text that is a whole record, which whoever chooses request ids can compute
        planted = next(
            data
            for t_ns in range(10_000)
            if (data := encode(Kind.NOTE, 2, 2, t_ns, Note("2:planted"))).isascii()
        )
        writer = ring()
        write(writer, 1)
        at = word(writer.path, HEAD)
        writer.append(Kind.NOTE, 1, 1, Note(planted.decode() + "x" * 9))
        write(writer, 2)
        # WHEN the record that holds it is damaged elsewhere
        patch(writer.path, HEADER_SIZE + at + HEAD_SIZE + len(planted), "<B", 0)
        # THEN the record that really follows is read
        reader = RingReader(writer.path)
        assert [getattr(each.body, "text", "") for each in reader.read()] == ["0:", "2:", "3:"]
        assert reader.lost == 1

    def test_the_writer_does_not_care(self, ring: Ring) -> None:
        # GIVEN a full ring whose whole area somebody scribbled over
        writer = ring()
        write(writer, 2000)
        for pattern in (b"\0", b"\xff", b"WS\x0a\0\x08\0\0\0", np.random.default_rng(1).bytes(64)):
            with writer.path.open("r+b") as file:
                file.seek(HEADER_SIZE)
                file.write((pattern * CAPACITY_MIN)[:CAPACITY_MIN])
                file.seek(TAIL)
                file.write(b"\xff" * 24)
            # WHEN the writer goes on, THEN nothing is raised and the ring is whole again
            write(writer, 2000)
            reader = RingReader(writer.path)
            found = seqs(reader)
            assert found == list(range(found[0], writer.records_written))

    @pytest.mark.parametrize(
        "cursors",
        [
            (0, 2**64 - 1, 0),
            (0, 2**62, 0),
            (2**64 - 8, 2**64 - 8, 0),
            (8, 0, 0),
            (0, 3, 0),
            (0, CAPACITY_MIN + 8, 0),
            (2**40, 2**40 + 800, 5),
            (0, 960, 2**60),
        ],
        ids=str,
    )
    def test_damaged_cursors_heal_with_the_next_record(self, ring: Ring, cursors: tuple[int, ...]) -> None:
        # GIVEN a reader at the end of a ring
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 10)
        assert seqs(reader) == list(range(10))
        # WHEN it reads while the cursors are damaged, and again once the writer has stored them anew
        patch(writer.path, TAIL, "<QQQ", *cursors)
        wrong = seqs(reader)
        write(writer, 5000)
        found = seqs(reader)
        # THEN each number has been read or lost, once
        assert wrong == []
        assert found == list(range(found[0], 5010))
        assert reader.lost == found[0] - 10

    def test_a_head_farther_away_than_the_area_is_long_is_not_searched_for(self, ring: Ring) -> None:
        # An empty area holds nothing that would end the search before the head: 2 ** 62 bytes of it.
        writer = ring()
        patch(writer.path, HEAD, "<Q", 2**62)
        assert seqs(RingReader(writer.path)) == []

    def test_a_reader_thrown_ahead_comes_back(self, ring: Ring) -> None:
        writer = ring()
        reader = RingReader(writer.path)
        write(writer, 10)
        seqs(reader, 5)
        head, written = word(writer.path, HEAD), word(writer.path, WRITTEN)
        patch(writer.path, TAIL, "<QQQ", 2**40, 2**40, written)
        assert seqs(reader) == []
        patch(writer.path, TAIL, "<QQQ", 0, head, written)
        assert seqs(reader) == [5, 6, 7, 8, 9]
        assert reader.lost == 0


class TestWithRows:
    def test_a_step_of_any_size_that_fits(self, ring: Ring) -> None:
        writer = ring(1 << 20)
        reader = RingReader(writer.path)
        for rows in (0, 1, 64, 256, 1024):
            body = decoding(rows, rows=rows, drafts=7)
            writer.append(Kind.INPUTS, rows, 0, body)
            [found] = reader.read()
            assert same(found.body, body)
