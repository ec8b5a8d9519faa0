"""A tail over a real ring: everything once, in order, with what was overwritten counted."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from service_records import KEY, append_note, append_steps, identity

from stagewatch.agents import wire
from stagewatch.agents.credentials import key_fingerprint
from stagewatch.agents.digest import Digester
from stagewatch.agents.errors import RingError
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.tail import Privacy, Tail

PRIVACY = Privacy(Digester(KEY), key_fingerprint(KEY), raw_tokens=False, pseudonymise=False)
PLENTY = 1 << 30


class Followed:
    """A ring and a tail of it."""

    def __init__(self, directory: Path, capacity: int = 1 << 20) -> None:
        directory.chmod(0o700)
        self.ring = RingWriter(directory, identity(), capacity)
        self.tail = Tail(self.ring.path, PRIVACY)

    def read_all(self) -> None:
        while self.tail.read(PLENTY):
            pass

    def frames(self) -> list[wire.Batch]:
        """Everything to be sent now."""
        found = []
        while (held := self.tail.unsent()) is not None:
            frame = wire.decode_upward(held.message, wire.Limits())
            assert isinstance(frame, wire.Batch)
            assert (held.first_seq, held.next_seq) == (frame.first_seq - frame.lost, frame.next_seq)
            found.append(frame)
        return found


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path)


def spans(frames: list[wire.Batch]) -> list[tuple[int, int, int]]:
    return [(frame.first_seq, frame.next_seq, frame.lost) for frame in frames]


def test_nothing_is_sent_before_the_welcome(followed: Followed) -> None:
    append_steps(followed.ring, 3)
    followed.read_all()
    assert followed.frames() == []
    followed.tail.welcome(0)
    assert spans(followed.frames()) == [(0, 3, 0)]
    assert followed.frames() == []


def test_what_is_acknowledged_is_let_go(followed: Followed) -> None:
    followed.tail.welcome(0)
    append_steps(followed.ring, 3)
    followed.read_all()
    followed.frames()
    assert (followed.tail.unacknowledged, followed.tail.is_drained) == (3, False)
    followed.tail.acknowledge(3)
    assert (followed.tail.held_bytes, followed.tail.unacknowledged, followed.tail.is_drained) == (0, 0, True)


def test_a_reconnect_sends_again_what_was_not_acknowledged(followed: Followed) -> None:
    followed.tail.welcome(0)
    for step in (1, 2, 3):
        append_steps(followed.ring, 1, step)
        followed.read_all()
    assert spans(followed.frames()) == [(0, 1, 0), (1, 2, 0), (2, 3, 0)]
    followed.tail.disconnected()
    assert followed.frames() == []
    followed.tail.welcome(1)
    assert spans(followed.frames()) == [(1, 2, 0), (2, 3, 0)]


def test_a_collector_that_is_elsewhere_is_followed_by_reading_the_ring_again(followed: Followed) -> None:
    followed.tail.welcome(0)
    append_steps(followed.ring, 6)
    followed.read_all()
    # another life of this sidecar had made a frame that ended at 4
    followed.tail.welcome(4)
    followed.read_all()
    assert spans(followed.frames()) == [(4, 6, 0)]
    # and now a collector that lost its disk
    followed.tail.welcome(0)
    followed.read_all()
    assert spans(followed.frames()) == [(0, 6, 0)]


def test_at_the_bound_it_stops_reading_and_what_is_overwritten_is_counted(tmp_path: Path) -> None:
    # GIVEN a small ring, and a tail that may hold one frame
    followed = Followed(tmp_path, capacity=1 << 16)
    followed.tail.welcome(0)
    append_steps(followed.ring, 3)
    assert followed.tail.read(1)
    # WHEN far more is written than the ring holds
    append_steps(followed.ring, 5000, first_step=4)
    assert not followed.tail.read(1)
    followed.tail.acknowledge(3)
    followed.read_all()
    # THEN the frames cover every number, and tell how many are missing
    followed.tail.disconnected()
    followed.tail.welcome(3)
    frames = followed.frames()
    assert frames[0].lost > 0
    assert [frame.lost for frame in frames[1:]] == [0] * (len(frames) - 1)
    assert frames[0].first_seq == 3 + frames[0].lost
    assert frames[-1].next_seq == 5003
    assert all(before.next_seq == after.first_seq for before, after in pairwise(frames))
    assert followed.tail.lost == frames[0].lost


def test_a_frame_refused_for_good_is_left_out_and_counted(followed: Followed) -> None:
    followed.tail.welcome(0)
    for step in (1, 2, 3):
        append_steps(followed.ring, 1, step)
        followed.read_all()
    followed.frames()
    followed.tail.acknowledge(1)
    followed.tail.condemn(2)
    followed.tail.disconnected()
    followed.tail.welcome(1)
    followed.read_all()
    assert spans(followed.frames()) == [(2, 3, 1)]


def test_a_large_record_does_not_drag_others_into_its_frame(followed: Followed) -> None:
    followed.tail.welcome(0)
    for _ in range(40):
        append_note(followed.ring, "x" * 200_000)
        followed.read_all()
    assert all(len(wire.encode_frame(frame)) < wire.Limits().frame_bytes for frame in followed.frames())


def test_the_identity_tells_the_key_apart_without_telling_it(followed: Followed) -> None:
    (shown,) = [part.value for part in followed.tail.identity.config if part.name == "digest_key"]
    assert shown == key_fingerprint(KEY).value
    assert shown != key_fingerprint(bytes(16)).value
    assert KEY.hex() not in shown


def test_the_identity_tells_whether_request_ids_are_pseudonyms(tmp_path: Path) -> None:
    """Ranks of which only some hide them have other keys for the same request: that is no divergence."""
    followed = Followed(tmp_path)
    hiding = Tail(followed.ring.path, replace(PRIVACY, pseudonymise=True))
    shown = [{f.name: f.value for f in tail.identity.config} for tail in (followed.tail, hiding)]
    assert [config["request_ids"] for config in shown] == ["plain", "pseudonyms"]


def test_a_file_that_is_no_ring_is_a_ring_error(tmp_path: Path) -> None:
    for content in (b"", b"short", b"\x00" * 100_000):
        path = tmp_path / "x.ring"
        path.write_bytes(content)
        with pytest.raises(RingError, match=r"ring x\.ring: "):
            Tail(path, PRIVACY)


def test_a_collector_that_has_more_than_there_is_is_told_once(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a rank whose stream somebody else ran ahead of would fall silent without a word."""
    append_steps(followed.ring, 3)
    followed.read_all()
    followed.tail.welcome(3)
    assert caplog.text == ""
    for _ in range(2):
        followed.tail.welcome(1 << 40)
    assert caplog.text.count("something else streamed this rank") == 1
