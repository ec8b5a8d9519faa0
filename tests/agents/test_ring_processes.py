"""The ring between processes: a writer at full speed, a writer that is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from foundation_records import body_of, identity, same

from stagewatch.agents.record import Kind, Record
from stagewatch.agents.ring import CAPACITY_MIN, RingReader, RingWriter, is_held

WRITER = """
    import sys
    from itertools import count
    from pathlib import Path
    from foundation_records import body_of, identity
    from stagewatch.agents.record import Kind
    from stagewatch.agents.ring import RingWriter

    directory, capacity, records = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    bodies = [(kind, body_of(kind, seed, rows=5 * seed)) for seed in range(5) for kind in Kind]
    writer = RingWriter(directory, identity(), capacity)
    print(writer.path, flush=True)
    for seq in range(records) if records else count():
        writer.append(*[bodies[seq % 50][0], seq, 7 * seq], bodies[seq % 50][1])
    writer.close()
"""
BODIES = [(kind, body_of(kind, seed, rows=5 * seed)) for seed in range(5) for kind in Kind]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def start(started: list[subprocess.Popen[str]], directory: Path, capacity: int, records: int) -> RingReader:
    """A writer in a process of its own, and a reader of its ring. Without a number of records it never ends."""
    arguments = [str(directory), str(capacity), str(records)]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    started.append(process)
    assert process.stdout is not None
    return RingReader(Path(process.stdout.readline().strip()))


def check(found: Record) -> None:
    """A record is whole: it holds what was written under its number."""
    kind, body = BODIES[found.seq % 50]
    assert (found.kind, found.step, found.t_ns) == (kind, found.seq, 7 * found.seq)
    assert same(found.body, body)


@pytest.mark.parametrize("capacity", [CAPACITY_MIN, 1 << 22], ids=["overrun", "deep"])
def test_a_reader_beside_a_writer_at_full_speed_sees_whole_records_in_order(
    started: list[subprocess.Popen[str]], tmp_path: Path, capacity: int
) -> None:
    records = 20_000
    reader = start(started, tmp_path, capacity, records)
    next_seq = read = 0
    over = False
    while not over:
        over = reader.closed  # looked at first, so that what came before it is still read
        for found in reader.read(records):
            check(found)
            assert found.seq >= next_seq
            next_seq = found.seq + 1
            read += 1
    # THEN every number was read or counted as lost, to the very last
    assert next_seq == records
    assert read + reader.lost == records


def test_a_killed_writer_leaves_everything_up_to_the_last_published_record(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    # GIVEN an engine that records without end
    reader = start(started, tmp_path, 1 << 20, 0)
    assert is_held(reader.path)
    seen: list[int] = []
    while len(seen) < 1000:
        seen += [found.seq for found in reader.read()]
    # WHEN it is killed
    os.killpg(started[0].pid, signal.SIGKILL)
    started[0].wait()
    # THEN its ring says whose it was, that it did not leave of its own accord, and what it did up to the end
    late = RingReader(reader.path)
    assert late.identity == identity()
    assert not late.closed
    assert is_held(late.path) is False
    found = list(late.read())
    for each in found:
        check(each)
    assert [each.seq for each in found] == list(range(late.lost, late.lost + len(found)))
    published = int.from_bytes(late.path.read_bytes()[80:88], "little")
    # The head is stored before the count, and the kill may have come in between.
    assert found[-1].seq + 1 in (published, published + 1)
    # AND the reader that had been there before comes to the same end
    seen += [each.seq for each in reader.read(1 << 20)]
    assert seen[-1] == found[-1].seq
    assert len(seen) + reader.lost == seen[-1] + 1


def test_readers_do_not_disturb_one_another(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, identity(), 1 << 20)
    readers = [RingReader(writer.path) for _ in range(3)]
    for seq, (kind, body) in enumerate(BODIES):
        writer.append(kind, seq, 7 * seq, body)
    seen: list[list[int]] = [[] for _ in readers]

    def follow(index: int) -> None:
        seen[index] = [found.seq for found in readers[index].read()]

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(len(readers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [list(range(50))] * 3
