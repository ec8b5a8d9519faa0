"""What else can go wrong with a data directory, on real processes: in one line, or without a wrong verdict."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_processes import BIN, CollectorProcess, Process, SidecarProcess, killed_at_exit, wait_until
from service_records import ROWS, append_steps, identity, journalled_seqs

from stagewatch.agents.ring import RingWriter
from stagewatch.monitor.journal import segments_in

SMALL_SEGMENTS = ("--segment-bytes", "65536")


@pytest.fixture
def ring_dir(tmp_path: Path) -> Path:
    path = tmp_path / "rings"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def filled(tmp_path: Path, ring_dir: Path) -> Iterator[Path]:
    """The data directory of a collector that ended in order after 600 steps of two ranks, in many segments."""
    data_dir = tmp_path / "data"
    collector = CollectorProcess(data_dir, *SMALL_SEGMENTS)
    sidecar = SidecarProcess(ring_dir, collector.url, token=collector.token)
    with killed_at_exit(collector, sidecar):
        writers = [RingWriter(ring_dir, identity(stage), 8 << 20) for stage in (0, 1)]
        for first in range(1, 601, 50):
            for ring in writers:
                append_steps(ring, 50, first_step=first)
            upto = first + 49
            wait_until(lambda upto=upto: collector.last_step("life-1.1") >= upto, f"step {upto}")  # type: ignore[misc]
        assert sidecar.end() == 0
        assert collector.end() == 0
    assert len(segments_in(data_dir / "journal")) >= 3
    yield data_dir


def test_a_segment_damaged_in_the_middle_says_what_is_lost_and_accuses_nobody(filled: Path) -> None:
    # GIVEN a journal with damage in the middle, and no checkpoint that would make reading it needless
    (filled / "checkpoint").unlink()
    path = segments_in(filled / "journal")[1]
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = os.urandom(200)
    path.write_bytes(content)
    # WHEN the collector starts
    collector = CollectorProcess(filled)
    with killed_at_exit(collector):
        # THEN it says so, keeps the rest, and what cannot be compared is no verdict against anybody
        assert "bytes are damaged: what they held is left out" in collector.output
        assert collector.metric("stagewatch_journal_damaged_bytes") > 0
        compared = "stagewatch_rows_compared_total"
        assert collector.metric(compared, verdict="diverged") == 0
        assert collector.metric(compared, verdict="indeterminate", reason="gap") > 0
        assert 400 * ROWS < collector.metric(compared, verdict="consistent") < 600 * ROWS
        assert collector.get("/v1/incidents")["incidents"] == []
        assert collector.end() == 0


def test_two_collectors_never_write_one_journal(filled: Path, tmp_path: Path) -> None:
    collector = CollectorProcess(filled)
    with killed_at_exit(collector):
        command = [BIN / "stagewatch", "collect", "--port", "0", "--data-dir", filled]
        second = Process(command, tmp_path / "second.log", STAGEWATCH_TOKEN="t" * 43)
        with killed_at_exit(second):
            assert second.status() == 2
        assert "is used by another collector" in second.output
        # AND a stopped one still has it, and gives it up only by its end
        collector.signal(signal.SIGSTOP)
        third = Process(command, tmp_path / "third.log", STAGEWATCH_TOKEN="t" * 43)
        with killed_at_exit(third):
            assert third.status() == 2
        collector.signal(signal.SIGCONT)
        assert collector.end() == 0


def test_an_old_format_is_read_and_a_newer_one_refused_in_one_line(filled: Path, tmp_path: Path) -> None:
    path = segments_in(filled / "journal")[0]
    path.write_bytes(b"STGWJRN7" + path.read_bytes()[8:])
    process = Process(
        [BIN / "stagewatch", "collect", "--port", "0", "--data-dir", filled],
        tmp_path / "log",
        STAGEWATCH_TOKEN="t" * 43,
    )
    with killed_at_exit(process):
        assert process.status() == 2
    (line,) = process.output.splitlines()
    assert line.endswith("version 7, this build reads 1 to 2: upgrade stagewatch")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_while_it_starts_it_starts_again(filled: Path, tmp_path: Path, seed: int) -> None:
    """Reading back, a migration, the first segment, the first checkpoint: none may be half done for good."""
    draw = random.Random(seed)
    for number in range(6):
        if draw.random() < 0.5:
            (filled / "checkpoint").unlink(missing_ok=True)
        process = Process(
            [BIN / "stagewatch", "collect", "--port", "0", "--data-dir", filled, *SMALL_SEGMENTS],
            tmp_path / f"{number}.log",
        )
        with killed_at_exit(process):
            time.sleep(draw.uniform(0.3, 2.5))
        assert "Traceback" not in process.output
    collector = CollectorProcess(filled)
    with killed_at_exit(collector):
        assert collector.metric("stagewatch_rows_compared_total", verdict="diverged") == 0
        assert collector.last_step("life-1.0") == 600
        assert collector.end() == 0
    assert list(journalled_seqs(filled).values()) == [list(range(600))] * 2


@pytest.mark.slow
def test_killed_while_old_segments_go_it_takes_nothing_twice(tmp_path: Path, ring_dir: Path) -> None:
    data_dir, draw = tmp_path / "data", random.Random(5)
    options = (*SMALL_SEGMENTS, "--keep-bytes", "262144", "--pin-bytes", "0")
    collector = CollectorProcess(data_dir, *options)
    sidecar = SidecarProcess(ring_dir, collector.url, token=collector.token)
    with killed_at_exit(sidecar):
        ring = RingWriter(ring_dir, identity(stages=1), 16 << 20)
        for round_number in range(5):
            with killed_at_exit(collector):
                append_steps(ring, 300, first_step=300 * round_number + 1)
                time.sleep(draw.uniform(0.2, 1.0))
            collector = CollectorProcess(data_dir, *options, port=collector.port)
        with killed_at_exit(collector):
            wait_until(lambda: collector.last_step("life-1.0") == 1500, "1500 steps are taken")
            assert collector.ranks()["life-1.0"]["lost_records"] == 0
            assert sidecar.end() == 0
            assert collector.end() == 0
    (seqs,) = journalled_seqs(data_dir).values()
    assert seqs == list(range(seqs[0], 1500))
