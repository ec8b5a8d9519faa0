"""Ring files that are not to be trusted: each gets its one line. And hostile bytes, which get nowhere."""

import os
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from foundation_records import identity, note
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewatch.agents.errors import RingError
from stagewatch.agents.identity import Rank
from stagewatch.agents.record import MAGIC, SCHEMA, Kind, encode
from stagewatch.agents.ring import (
    CAPACITY_MAX,
    CAPACITY_MIN,
    HEADER_SIZE,
    RingReader,
    RingWriter,
    check_directory,
    is_held,
)

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the owner of files")


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A sound ring with a few records."""
    writer = RingWriter(tmp_path / "rings", identity(), CAPACITY_MIN)
    for seq in range(5):
        writer.append(Kind.NOTE, seq, 0, note(seq))
    return writer.path


def changed(path: Path, at: int, data: bytes) -> Path:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    return path


def said(action: Callable[[], object]) -> str:
    """The message of the RingError that ``action`` raises, which is one line."""
    with pytest.raises(RingError) as caught:
        action()
    assert str(caught.value).splitlines() == [str(caught.value)]
    return str(caught.value)


class TestFilesThatAreNoRing:
    @pytest.mark.parametrize(
        ("at", "data", "expected"),
        [
            pytest.param(0, b"NOTARING", "not a stagewatch ring", id="magic"),
            pytest.param(0, bytes(8), "its engine is still making it", id="half-made"),
            pytest.param(8, struct.pack("<I", SCHEMA + 1), "upgrade the sidecar", id="newer-schema"),
            pytest.param(
                8, struct.pack("<I", SCHEMA - 1), "upgrade the engine's stagewatch", id="older-schema"
            ),
            pytest.param(12, struct.pack("<I", 4096), "do not match its header", id="header-size"),
            pytest.param(16, struct.pack("<Q", 2**63), "do not match its header", id="capacity"),
            pytest.param(24, struct.pack("<I", 2**32 - 1), "damaged header", id="identity-size"),
            pytest.param(24, struct.pack("<I", 0), "damaged identity", id="no-identity"),
            pytest.param(128, b"\xff\xfe", "damaged identity", id="identity"),
        ],
    )
    def test_a_header_that_says_something_else(
        self, whole: Path, at: int, data: bytes, expected: str
    ) -> None:
        assert expected in said(lambda: RingReader(changed(whole, at, data)))

    @pytest.mark.parametrize(
        ("size", "expected"),
        [
            (0, "empty"),
            (100, "shorter than a header"),
            (HEADER_SIZE, "cut off"),
            (HEADER_SIZE + CAPACITY_MIN - 1, "cut off"),
            (HEADER_SIZE + CAPACITY_MIN + 8, "cut off"),
            (HEADER_SIZE + CAPACITY_MAX + 8, "longer than any ring"),
        ],
    )
    def test_a_file_of_another_length(self, whole: Path, size: int, expected: str) -> None:
        os.truncate(whole, size)
        assert expected in said(lambda: RingReader(whole))

    def test_an_area_too_small_for_a_ring(self, whole: Path) -> None:
        # Sound in itself, but every position would be taken modulo 0.
        os.truncate(whole, HEADER_SIZE)
        changed(whole, 16, struct.pack("<Q", 0))
        assert "capacity of 0 bytes" in said(lambda: RingReader(whole))

    def test_an_identity_nested_deeper_than_the_decoder_goes(self, whole: Path) -> None:
        nested = b'{"x":' + b"[" * 8000
        changed(whole, 24, struct.pack("<I", len(nested)))
        assert "damaged identity" in said(lambda: RingReader(changed(whole, 128, nested)))

    def test_what_is_no_file_of_ours(self, whole: Path) -> None:
        link, pipe = whole.with_name("link.ring"), whole.with_name("pipe.ring")
        link.symlink_to(whole)
        os.mkfifo(pipe)
        assert "cannot be opened" in said(lambda: RingReader(link))
        assert "not a regular file" in said(lambda: RingReader(pipe))  # and does not wait for a writer
        assert "not a regular file" in said(lambda: RingReader(whole.parent))
        assert "No such file" in said(lambda: RingReader(whole.with_name("none.ring")))

    def test_a_file_that_others_can_write(self, whole: Path) -> None:
        whole.chmod(0o620)
        assert "chmod 600" in said(lambda: RingReader(whole))

    @as_root
    def test_a_file_of_somebody_else(self, whole: Path) -> None:
        with open_to_nobody(whole) as path:
            path.chmod(0o644)
            assert "belongs to uid 0" in said_as(NOBODY, lambda: RingReader(path))
            # Root's sidecar reads the rings of an engine that runs as somebody else.
            os.chown(path, NOBODY, NOBODY)
            RingReader(path).close()


class TestDirectoriesAndFilesToBeMade:
    def test_the_ring_and_its_directory_are_ours_alone(self, whole: Path) -> None:
        assert stat.S_IMODE(whole.stat().st_mode) == 0o600
        assert stat.S_IMODE(whole.parent.stat().st_mode) == 0o700

    def test_a_rank_claimed_twice(self, whole: Path) -> None:
        message = said(lambda: RingWriter(whole.parent, identity(), CAPACITY_MIN))
        assert "claims the same rank" in message
        assert RingReader(whole).identity == identity()

    def test_a_symbolic_link_in_the_ring_s_place(self, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        (tmp_path / identity().ring_name).symlink_to(elsewhere)
        said(lambda: RingWriter(tmp_path, identity(), CAPACITY_MIN))
        assert not elsewhere.exists()

    @pytest.mark.parametrize("capacity", [0, CAPACITY_MIN - 1, CAPACITY_MAX + 1])
    def test_a_capacity_out_of_bounds(self, tmp_path: Path, capacity: int) -> None:
        assert "capacity" in said(lambda: RingWriter(tmp_path, identity(), capacity))

    @pytest.mark.parametrize("instance", ["../up", "/etc/passwd", "a/b", "a\0b", "a\nb"])
    def test_an_instance_that_cannot_name_a_file(self, tmp_path: Path, instance: str) -> None:
        assert "cannot name a ring" in said(
            lambda: RingWriter(tmp_path, identity(instance=instance), CAPACITY_MIN)
        )
        assert list(tmp_path.iterdir()) == []

    def test_an_instance_longer_than_a_file_name(self, tmp_path: Path) -> None:
        assert "cannot be created" in said(
            lambda: RingWriter(tmp_path, identity(instance="x" * 300), CAPACITY_MIN)
        )

    def test_an_identity_too_long_for_the_header(self, tmp_path: Path) -> None:
        assert "does not fit" in said(
            lambda: RingWriter(tmp_path, identity(variant="x" * HEADER_SIZE), CAPACITY_MIN)
        )
        assert list(tmp_path.iterdir()) == []

    def test_directories_that_are_not_ours_alone(self, tmp_path: Path) -> None:
        file, link, dangling, shared = (tmp_path / name for name in ("file", "link", "dangling", "shared"))
        file.touch()
        link.symlink_to(tmp_path)
        dangling.symlink_to(tmp_path / "nowhere")
        shared.mkdir()
        shared.chmod(0o777)
        assert "is not a directory" in said(lambda: check_directory(file))
        assert "symbolic link" in said(lambda: check_directory(link))
        assert "not a directory" in said(lambda: check_directory(dangling))
        assert "chmod 700" in said(lambda: check_directory(shared))
        shared.chmod(0o770)
        assert "chmod 700" in said(lambda: check_directory(shared))
        assert "cannot be made" in said(lambda: check_directory(file / "below"))

    @as_root
    def test_a_directory_of_somebody_else(self, tmp_path: Path) -> None:
        os.chown(tmp_path, NOBODY, NOBODY)
        assert f"belongs to uid {NOBODY}" in said(lambda: check_directory(tmp_path))

    @as_root
    def test_a_directory_that_cannot_be_written(self, whole: Path) -> None:
        with open_to_nobody(whole) as path:
            os.chown(path.parent, NOBODY, NOBODY)
            path.parent.chmod(0o500)
            made = identity(instance="other")
            message = said_as(NOBODY, lambda: RingWriter(path.parent, made, CAPACITY_MIN))
            assert "Permission denied" in message

    def test_a_full_file_system_refuses_before_the_engine_depends_on_it(self, small_tmpfs: Path) -> None:
        directory = small_tmpfs / "rings"
        RingWriter(directory, identity(), CAPACITY_MIN)
        message = said(lambda: RingWriter(directory, identity(instance="second"), 1 << 20))
        assert "No space left on device" in message
        assert [path.name for path in directory.iterdir()] == [identity().ring_name]


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", where], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


class open_to_nobody:  # noqa: N801  # used as a function
    """A directory that another user can enter, with the ring moved there."""

    def __init__(self, ring: Path) -> None:
        self._ring = ring
        self._directory = tempfile.TemporaryDirectory()

    def __enter__(self) -> Path:
        directory = Path(self._directory.name)
        directory.chmod(0o755)
        return self._ring.rename(directory / self._ring.name)

    def __exit__(self, *_: object) -> None:
        self._directory.cleanup()


def said_as(uid: int, action: Callable[[], object]) -> str:
    """What `said` gives in a process of another user."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.seteuid(uid)
            os.write(writer, said(action).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


class TestLiveness:
    def test_a_ring_is_held_as_long_as_its_writer_means_to_write(self, tmp_path: Path) -> None:
        writer = RingWriter(tmp_path, identity(), CAPACITY_MIN)
        assert is_held(writer.path) is True
        assert is_held(writer.path) is True  # asking changes nothing
        writer.close()
        assert is_held(writer.path) is False

    def test_a_writer_that_is_dropped_holds_nothing(self, tmp_path: Path) -> None:
        path = RingWriter(tmp_path, identity(), CAPACITY_MIN).path
        assert is_held(path) is False


AREA = 1 << 16
lengths = st.integers(0, 300) | st.integers(0, 20_000)
words = st.sampled_from([0, 1, 8, 96, AREA - 8, AREA, AREA + 8, 2**32, 2**63, 2**64 - 1]) | st.integers(
    0, 2**64 - 1
)
planted = encode(Kind.NOTE, 2**40, 0, 0, note(0))
fillings = st.sampled_from(
    [
        bytes(8),
        b"\xff" * 8,
        struct.pack("<HBBI", MAGIC, 10, 0, 96),
        struct.pack("<HBBI", MAGIC, 10, 0, AREA // 4),
        struct.pack("<HBBI", MAGIC, 10, 0, 2**32 - 8),
        struct.pack("<HBBI", 0, 0, 0, 8),
        planted,
        planted[: len(planted) // 2],
    ]
)


class TestHostileBytes:
    """Nothing in a ring file makes a reader raise anything but a RingError at opening, hang, or lose count."""

    @settings(deadline=None, max_examples=300)
    @given(
        written=st.lists(lengths, max_size=20),
        cursors=st.none() | st.tuples(words, words, words, words),
        filling=st.none() | st.tuples(st.integers(0, AREA // 8), st.integers(0, AREA // 8), fillings),
        patches=st.lists(
            st.tuples(st.integers(0, HEADER_SIZE + AREA - 1), st.binary(min_size=1)), max_size=4
        ),
    )
    def test_reading_ends_and_accounts_for_every_number(
        self,
        written: list[int],
        cursors: tuple[int, ...] | None,
        filling: tuple[int, int, bytes] | None,
        patches: list[tuple[int, bytes]],
    ) -> None:
        with tempfile.TemporaryDirectory() as directory:
            writer = RingWriter(Path(directory), identity(rank=Rank(0, 1, 0)), AREA)
            for seq, size in enumerate(written):
                if size < AREA // 4 - 200:
                    writer.append(Kind.NOTE, seq, 0, note(seq, size))
            content = bytearray(writer.path.read_bytes())
            if filling is not None:
                first, end, pattern = min(filling[:2]), max(filling[:2]), filling[2]
                span = 8 * (end - first)
                at = HEADER_SIZE + 8 * first
                content[at : at + span] = (pattern * (span // len(pattern) + 1))[:span]
            for at, data in patches:
                content[at : at + len(data)] = data[: len(content) - at]
            if cursors is not None:
                struct.pack_into("<QQQQ", content, 64, *cursors)
            writer.path.write_bytes(content)
            try:
                reader = RingReader(writer.path)
            except RingError as error:
                assert "\n" not in str(error)
                return
            found = [each.seq for each in reader.read()]
            assert found == sorted(set(found))
            assert len(found) <= AREA // 96
            last = found[-1] if found else -1
            assert reader.lost >= last + 1 - len(found)
            margin = reader.margin()
            assert 0 <= margin.bytes_free <= margin.capacity
            assert 0 <= margin.bytes_behind <= margin.capacity
            reader.close()

    def test_an_area_of_nothing_but_record_starts_is_searched_once(self, tmp_path: Path) -> None:
        # GIVEN 512 Ki record starts, each of which claims the longest record there may be
        capacity = 4 << 20
        writer = RingWriter(tmp_path, identity(), capacity)
        lie = struct.pack("<HBBI", MAGIC, 10, 0, capacity // 4) * (capacity // 8)
        changed(writer.path, HEADER_SIZE, lie)
        changed(writer.path, 72, struct.pack("<QQ", capacity, 7))
        # THEN the search ends, having copied no more than a few times the area
        reader = RingReader(writer.path)
        assert list(reader.read()) == []
        assert reader.lost == 7
