"""A slice of a journal: what one engine's ranks said around some steps, as entries of a journal once more.

Frames that touch the steps are kept whole, at the time they arrived. Of those before, the records are kept of who took
and left which slot: they are few, and name the requests. Token values are taken out unless they are wanted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from stagewatch.agents import wire
from stagewatch.agents.errors import FrameError
from stagewatch.agents.evidence import EventBlock, Evidence
from stagewatch.agents.identity import Fingerprint, Identity, Rank
from stagewatch.agents.record import Kind
from stagewatch.agents.wire import Batch, Hello, Limits
from stagewatch.monitor.identities import fault_of
from stagewatch.monitor.journal import Carried, Entry, EntryKind, Header, SegmentReader, head_of, read_header
from stagewatch.monitor.pieces import BLOCKS, STEP_MAX, part_of
from stagewatch.monitor.redaction import without_tokens
from stagewatch.monitor.restoring import identity_of

STEPS_BEFORE: Final = 1024
STEPS_AFTER: Final = 256
"""Steps that go with an incident before the first and after the last that it names."""
SECRET_WORDS: Final = ("key", "token", "secret", "password", "credential", "auth")
_NEVER_SECRET: Final = ("digest_key", "spec_tokens")
"""A fingerprint that tells nothing of the key, and a count."""
LEFT_OUT: Final = "(left out)"
CUT: Final = "Stagewatch-Cut"
"""Header beside a slice over the API: 1 where records of the engine were left out, else 0."""
RAW_LEFT_OUT: Final = "Stagewatch-Raw-Left-Out"
"""Header: 1 where token values are in the journal and were not asked for, else 0."""
_SALT: Final = 0
"""A slice is made of entries that a decoder took, and its file is guarded as a whole."""
_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a journal is wanted."""

    deployment: str
    instance: str
    steps: tuple[int, int] = (0, STEP_MAX)
    """First and last, both included."""
    raw: bool = False
    """Token values, too."""


@dataclass(slots=True)
class Found:
    """What was met while a journal was sliced."""

    first_step: int = 0
    last_step: int = 0
    """Of the frames kept whole."""
    cut: bool = False
    """Whether any of the engine's records were left out."""
    has_raw: bool = False
    """Whether token values are in what was kept."""
    raw_left_out: bool = False
    identities: dict[Rank, Identity] = field(default_factory=dict)
    """The newest of each rank."""

    def touched(self, steps: NDArray[Any]) -> None:
        """Note the steps of a frame."""
        least = int(steps.min())
        self.first_step = min(self.first_step, least) if self.first_step else least
        self.last_step = max(self.last_step, int(steps.max()))


def sliced(paths: Iterable[Path], wanted: Wanted, found: Found) -> Iterator[bytes]:
    """The slice as the bytes of a segment, piece by piece. What cannot be read, or is gone meanwhile, is left out."""
    header = Header(2, _SALT, 0)
    yield header.encode()
    for path in paths:
        try:
            if read_header(path) is None:
                continue
            for entry in SegmentReader(path):
                for kept in _kept(entry, wanted, found):
                    yield head_of(kept.kind, kept.t_ns, kept.payload, header.seed) + kept.payload
        except FileNotFoundError:
            continue  # beyond what is kept, meanwhile


def _kept(entry: Entry, wanted: Wanted, found: Found) -> Iterator[Entry]:
    try:
        if entry.kind is EntryKind.BATCH:
            frame = wire.decode_upward(entry.payload, _LIMITS)
            if isinstance(frame, Batch) and frame.instance == wanted.instance:
                for payload in _frames(entry.payload, frame, wanted, found):
                    yield Entry(entry.kind, entry.t_ns, payload)
            return
        identity = identity_of(entry)
        if identity.instance != wanted.instance or fault_of(identity):
            return
        if identity.deployment != wanted.deployment:
            # Once the engine is forgotten anybody may take its name; what follows is another's.
            found.identities.pop(identity.rank, None)
            return
        shown = without_secrets(identity)
        found.identities[identity.rank] = shown
        yield Entry(entry.kind, entry.t_ns, _renamed(entry, shown))
    except FrameError:
        return  # replay leaves it out, too


def _renamed(entry: Entry, identity: Identity) -> bytes:
    if entry.kind is EntryKind.CARRIED:
        carried = msgspec.msgpack.decode(entry.payload, type=Carried)
        return msgspec.msgpack.encode(msgspec.structs.replace(carried, identity=identity))
    return wire.encode_frame(Hello(wire.PROTOCOL, identity))


def without_secrets(identity: Identity) -> Identity:
    """The same identity; settings whose names sound secret have lost their values."""

    def told(setting: Fingerprint) -> Fingerprint:
        name = setting.name.lower()
        is_secret = name not in _NEVER_SECRET and any(word in name for word in SECRET_WORDS)
        return Fingerprint(setting.name, LEFT_OUT) if is_secret else setting

    return msgspec.structs.replace(identity, config=tuple(map(told, identity.config)))


def _frames(encoded: bytes, frame: Batch, wanted: Wanted, found: Found) -> Iterator[bytes]:
    """What is kept of a batch, encoded. Raises FrameError."""
    identity = found.identities.get(frame.rank)
    if identity is None:
        return  # it never said hello: replay leaves it out, too
    evidence = wire.evidence_of(frame, _LIMITS)
    blocks = [block for name in BLOCKS if (block := getattr(evidence, name)) is not None]
    has_raw = any(_raw_columns(block) for block in blocks)
    if has_raw and not wanted.raw:
        evidence, found.raw_left_out = without_tokens(evidence), True
    steps = np.concatenate([np.zeros(0, np.int64), *(block.step for block in blocks)])
    steps = steps[steps > 0]
    first, last = wanted.steps
    is_within = first <= steps.max() and steps.min() <= last if len(steps) else first == 0
    if is_within:
        found.has_raw |= has_raw and wanted.raw
        if len(steps):
            found.touched(steps)
        yield encoded if wanted.raw or not has_raw else _encoded(frame, evidence, identity)
        return
    found.cut = True
    if not len(steps) or steps.max() < first:
        for part in _lasting(evidence):
            yield _encoded(frame, part, identity)


def _encoded(frame: Batch, evidence: Evidence, identity: Identity) -> bytes:
    return wire.encode_frame(wire.batch_of(identity, evidence, frame.margin_s))


def _raw_columns(block: Any) -> list[str]:
    """Columns of token values that hold any."""
    return [f.name for f in fields(block) if f.name.startswith("raw_") and len(getattr(block, f.name))]


def _lasting(evidence: Evidence) -> Iterator[Evidence]:
    """The records of binds and frees, in runs whose numbers follow one another."""
    events: EventBlock | None = evidence.events
    if events is None:
        return
    kept = np.sort(events.seq[np.isin(events.kind, (Kind.BIND, Kind.FREE))])
    for run in np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1):
        if len(run):
            part = part_of(evidence, int(run[0]), int(run[-1]) + 1, is_first=False)
            yield replace(part, node=None)
