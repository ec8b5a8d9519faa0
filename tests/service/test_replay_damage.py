"""Replay of what was left after something went wrong: the sound part is compared, the rest is told."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from service_records import ROWS, append_steps, batch_message, hello, identity

from stagewatch.agents.digest import Digester
from stagewatch.agents.identity import Identity
from stagewatch.agents.ring import HEADER_SIZE, RingWriter
from stagewatch.monitor.cli import main
from stagewatch.monitor.journal import EntryKind, head_of
from stagewatch.monitor.replay import RingSource

TRACES = Path(__file__).parents[1] / "data" / "traces"


class Replayed:
    """`stagewatch replay --json` over one path."""

    def __init__(self, capsys: pytest.CaptureFixture[str], path: Path) -> None:
        self.status = main(["replay", "--json", str(path)])
        captured = capsys.readouterr()
        self.err = captured.err
        self.found: Any = json.loads(captured.out) if captured.out else None


def rings(directory: Path, steps: int = 20) -> list[RingWriter]:
    directory.chmod(0o700)
    made = [RingWriter(directory, identity(stage), 1 << 18) for stage in (0, 1)]
    for ring in made:
        append_steps(ring, steps)
    return made


def journal(directory: Path, *segments: list[tuple[EntryKind, bytes]]) -> list[Path]:
    """Segments of a collector's journal."""
    paths = [directory / f"{number:016d}.journal" for number in range(1, len(segments) + 1)]
    for path, entries in zip(paths, segments, strict=True):
        content = b"".join(head_of(kind, 1, payload) + payload for kind, payload in entries)
        path.write_bytes(b"STGWJRN1" + content)
    return paths


def batches(first: int, end: int, *ranks: Identity) -> list[tuple[EntryKind, bytes]]:
    return [(EntryKind.BATCH, batch_message(n, n + 1, rank)) for n in range(first, end) for rank in ranks]


FIRST, LAST = identity(0), identity(1)
HELLOS = [(EntryKind.HELLO, hello(FIRST)), (EntryKind.HELLO, hello(LAST))]


def test_a_ring_of_another_build_in_a_directory_is_left_out_and_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, _ = rings(tmp_path)
    content = bytearray(first.path.read_bytes())
    struct.pack_into("<I", content, 8, 99)
    (tmp_path / "foreign.dp0.pp0.tp0.ring").write_bytes(content)
    replayed = Replayed(capsys, tmp_path)
    assert (replayed.status, replayed.found["verdicts"]["CONSISTENT"]) == (0, 20 * ROWS)
    why = "ring foreign.dp0.pp0.tp0.ring: schema 99, this build reads 1: upgrade the sidecar"
    assert replayed.err == f"stagewatch: left out: {why}\n"
    # but not where it was asked for by name
    assert Replayed(capsys, tmp_path / "foreign.dp0.pp0.tp0.ring").err == f"stagewatch: {why}\n"


def test_two_rings_of_one_rank_are_told_apart_by_nobody(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, _ = rings(tmp_path)
    (tmp_path / "copy.ring").write_bytes(first.path.read_bytes())
    replayed = Replayed(capsys, tmp_path)
    assert replayed.status == 2
    assert f"{first.path} holds the same rank as {tmp_path / 'copy.ring'}: give one of them" in replayed.err


def test_damage_in_the_middle_of_a_ring_is_lost_there_and_nowhere_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, _ = rings(tmp_path)
    size = struct.unpack_from("<Q", first.path.read_bytes(), 72)[0] // 20
    with first.path.open("r+b") as file:
        file.seek(HEADER_SIZE + 10 * size + 40)
        file.write(b"\xff" * 8)
    spans = [
        (e.first_seq, e.next_seq, e.lost) for e in RingSource(first.path, Digester(bytes(16))).evidence()
    ]
    assert spans == [(0, 10, 0), (11, 20, 1)]
    replayed = Replayed(capsys, tmp_path)
    assert replayed.found["incidents"] == []
    assert replayed.found["verdicts"]["CONSISTENT"] == 19 * ROWS


def test_a_journal_damaged_in_the_middle_costs_what_was_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # GIVEN three segments, of whose second one entry is damaged, the first after the hellos
    paths = journal(
        tmp_path,
        [*HELLOS, *batches(0, 10, FIRST, LAST)],
        [*HELLOS, *batches(10, 20, FIRST, LAST)],
        [*HELLOS, *batches(20, 30, FIRST, LAST)],
    )
    sound = sum(len(head_of(kind, 1, payload) + payload) for kind, payload in HELLOS) + 8
    content = bytearray(paths[1].read_bytes())
    content[sound + 30] ^= 1
    paths[1].write_bytes(content)
    replayed = Replayed(capsys, tmp_path)
    # THEN what that entry held is not compared, and everything else is
    assert replayed.found["verdicts"]["CONSISTENT"] == 29 * ROWS
    assert replayed.found["verdicts"]["INDETERMINATE"] == ROWS
    assert replayed.found["incidents"] == []
    kind, payload = batches(10, 20, FIRST, LAST)[0]
    assert (
        f"journal: {len(head_of(kind, 1, payload) + payload)} bytes are torn or damaged and 0 entries cannot"
        in replayed.err
    )


def test_a_journal_without_its_first_hello_is_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    journal(tmp_path, [HELLOS[0], *batches(0, 5, FIRST, LAST), HELLOS[1], (EntryKind.BATCH, b"rubbish")])
    replayed = Replayed(capsys, tmp_path)
    assert replayed.found["incidents"] == []
    assert "0 bytes are torn or damaged and 6 entries cannot be read: left out" in replayed.err


def test_a_step_beyond_what_a_record_holds_is_told_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for path in TRACES.glob("good-*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        moved = [json.dumps({**line, "step": line["step"] + 2**63}) + "\n" for line in lines]
        (tmp_path / path.name).write_text("".join(moved))
    replayed = Replayed(capsys, tmp_path)
    assert (replayed.status, replayed.err.count("\n")) == (2, 1)
    assert "stay below 2**63" in replayed.err
