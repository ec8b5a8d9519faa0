"""A sidecar's look at its directory: whatever happens to one ring there, the others go on."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from service_records import KEY, append_note, append_steps, identity

from stagewatch.agents import tail as tail_module
from stagewatch.agents.identity import Rank
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.shipping import Destination
from stagewatch.agents.sidecar import Sidecar, SidecarSettings
from stagewatch.agents.tail import Tail
from stagewatch.agents.wire import decode_upward


class Node:
    """A ring directory with one ring in it, and a sidecar that never connects."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700)
        self.ring = RingWriter(directory, identity(), 1 << 18)
        nowhere = Destination("ws://127.0.0.1:1", "t" * 20)
        self.sidecar = Sidecar(SidecarSettings(directory, nowhere, KEY, False, False, 1 << 20, 0.0))
        self.sidecar.scan()

    @property
    def tails(self) -> list[Tail]:
        return list(self.sidecar.tails.values())

    def read_all(self) -> None:
        for key, tail in list(self.sidecar.tails.items()):
            while self.sidecar._read(key, tail):
                pass

    def acknowledge_all(self) -> None:
        for tail in self.tails:
            tail.welcome(0)
            tail.acknowledge(tail.read_seq)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "rings")


def test_a_ring_that_is_cut_off_while_it_is_read_does_not_kill(node: Node) -> None:
    """Memory beyond the end of a file is a SIGBUS."""
    append_steps(node.ring, 5)
    node.read_all()
    os.truncate(node.ring.path, 0)
    node.read_all()
    assert node.tails[0].margin_s() == -1.0
    node.acknowledge_all()
    node.sidecar.scan()
    node.sidecar.scan()
    assert (node.tails, node.sidecar.rings_refused) == ([], 1)


def test_a_copy_of_a_ring_is_left_out(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(node.ring.path, node.directory / "a-copy.ring")
    (node.directory / "a-copy.ring").chmod(0o600)
    for _ in range(4):
        node.sidecar.scan()
    assert [tail.path for tail in node.tails] == [node.ring.path]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "ring a-copy.ring holds the same rank as life-1.dp0.pp0.tp0.ring: remove one. "
        "It is left out; the other rings are not affected."
    ]


def test_a_ring_that_is_replaced_is_followed_once_the_old_one_is_taken(node: Node) -> None:
    append_steps(node.ring, 5)
    node.read_all()
    old = node.tails[0]
    node.ring.path.unlink()
    again = RingWriter(node.directory, msgspec.structs.replace(identity(), started_ns=2), 1 << 18)
    node.sidecar.scan()
    assert node.tails == [old]
    node.acknowledge_all()
    node.sidecar.scan()
    (new,) = node.tails
    assert (new.path, new.identity.started_ns) == (again.path, 2)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_directory, make_link, make_pipe])
def test_what_is_no_ring_is_refused_and_a_ring_beside_it_taken(
    node: Node, make: Callable[[Path], None]
) -> None:
    make(node.directory / "x.ring")
    RingWriter(node.directory, identity(1), 1 << 18)
    node.sidecar.scan()
    assert {rank for _, rank in node.sidecar.tails} == {Rank(0, 0, 0), Rank(0, 1, 0)}
    assert node.sidecar.rings_refused == 1


def test_a_directory_that_goes_and_comes_back_is_waited_for(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shutil.rmtree(node.directory)
    node.directory.write_text("not a directory")
    node.sidecar.scan()
    assert f"waiting for ring directory {node.directory}" in caplog.text
    node.directory.unlink()
    node.directory.mkdir(mode=0o700)
    RingWriter(node.directory, identity(0, "life-2"), 1 << 18)
    node.sidecar.scan()
    assert [instance for instance, _ in node.sidecar.tails] == ["life-2"]


def test_a_ring_nobody_foresaw_costs_only_itself(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a ring whose content raises in our own code THEN the others are read, and it is not tried again."""
    RingWriter(node.directory, identity(1), 1 << 18)
    node.sidecar.scan()
    broken = node.sidecar.tails["life-1", Rank(0, 0, 0)]

    def fails(held_bytes_max: int) -> bool:
        raise ZeroDivisionError(held_bytes_max)

    monkeypatch.setattr(broken, "read", fails)
    node.read_all()
    node.sidecar.scan()
    assert [rank for _, rank in node.sidecar.tails] == [Rank(0, 1, 0)]
    assert node.sidecar.rings_refused == 1


def test_a_frame_no_collector_takes_is_left_out_and_counted(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the collector would break off the connection over it, each time anew."""
    append_steps(node.ring, 3)
    node.read_all()
    monkeypatch.setattr(tail_module, "FRAME_BYTES_MAX", 20_000)
    append_note(node.ring, "x" * 30_000)
    node.read_all()
    append_steps(node.ring, 2, first_step=4)
    node.read_all()
    (tail,) = node.tails
    tail.welcome(0)
    spans = []
    while (held := tail.unsent()) is not None:
        frame = msgspec.to_builtins(decode_upward(held.message, tail_module.wire.Limits()))
        spans.append((frame["first_seq"], frame["next_seq"], frame["lost"]))
    assert spans == [(0, 3, 0), (4, 6, 1)]
    assert tail.lost == 1
