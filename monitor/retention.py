"""Which segments of the journal are kept.

The newest are kept up to a size and an age. Beyond that a segment stays only where it holds the time around an
incident: its evidence is pinned. Pins have a bound of their own, newest first; what goes in spite of one is counted.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Policy:
    """How the journal is cut up and how much of it is kept."""

    segment_bytes: int
    """Bytes at which a new segment begins."""
    segment_s: float
    """Age at which one does."""
    keep_bytes: int
    keep_s: float
    """0 for any age."""
    pin_bytes: int
    """Bytes of pinned segments kept beyond that."""


@dataclass(slots=True)
class Segment:
    """One file of the journal."""

    path: Path
    size: int
    began_ns: int
    ended_ns: int
    """Arrival of its first and last entry, about: nanoseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, nanoseconds since the epoch, that is not to be forgotten."""

    first_ns: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class Surplus:
    """What is to go."""

    unpinned: tuple[Segment, ...]
    pinned: tuple[Segment, ...]
    """Pinned, and beyond the bound on pins."""
    pinned_bytes: int
    """Bytes that stay only because they are pinned."""


def surplus(segments: Sequence[Segment], policy: Policy, spans: Iterable[Span], now_ns: int) -> Surplus:
    """What is to go of ``segments``, which are in order, oldest first. The newest one always stays."""
    pins = _Pins(spans)
    unpinned: list[Segment] = []
    over: list[Segment] = []
    kept_bytes = pinned_bytes = 0
    for segment in reversed(segments):
        kept_bytes += segment.size
        too_old = policy.keep_s > 0 and now_ns - segment.ended_ns > policy.keep_s * 1e9
        if segment is segments[-1] or (kept_bytes <= policy.keep_bytes and not too_old):
            continue
        if not pins.touch(segment):
            unpinned.append(segment)
        elif pinned_bytes + segment.size <= policy.pin_bytes:
            pinned_bytes += segment.size
        else:
            over.append(segment)
    return Surplus(tuple(reversed(unpinned)), tuple(reversed(over)), pinned_bytes)


class _Pins:
    """Spans, joined where they overlap, so that a segment is looked up among them at once."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._first: list[int] = []
        self._last: list[int] = []
        for span in sorted(spans, key=lambda span: span.first_ns):
            if self._last and span.first_ns <= self._last[-1]:
                self._last[-1] = max(self._last[-1], span.last_ns)
            else:
                self._first.append(span.first_ns)
                self._last.append(span.last_ns)

    def touch(self, segment: Segment) -> bool:
        at = bisect_right(self._first, segment.ended_ns) - 1
        return at >= 0 and self._last[at] >= segment.began_ns
