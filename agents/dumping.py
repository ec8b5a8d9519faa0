"""Dumping rings: all that they hold now, digested as a sidecar would, into one file; and what they say of their end."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from stagewatch.agents import wire
from stagewatch.agents.credentials import KEY_FILE_NAME, key_fingerprint, read_key_file
from stagewatch.agents.digest import Digester
from stagewatch.agents.dumpfile import DumpWriter, batch_entry, hello_entry
from stagewatch.agents.errors import RingError
from stagewatch.agents.evidence import Block, Evidence
from stagewatch.agents.identity import Identity
from stagewatch.agents.probe import Health
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import RingReader, is_held
from stagewatch.agents.tail import Privacy, Tail
from stagewatch.agents.wire import Limits

SUFFIX: Final = ".ring"
_LIMITS: Final = Limits()
_HELD_MAX: Final = 1 << 62
"""A dump holds one frame at a time, so the sidecar's bound does not apply."""


class RingSummary(msgspec.Struct, frozen=True):
    """What one ring holds, and how its engine left it."""

    ring: str
    instance: str
    rank: str
    engine: str
    state: str
    """``running``, ``ended``, ``killed``, or ``not running`` where the file system has no locks."""
    records: int
    lost: int
    """Records overwritten or damaged before this dump was made."""
    first_step: int
    last_step: int
    """0 where no step is held."""
    last_ns: int
    """Wall clock of the newest record, nanoseconds since the epoch."""
    rows: int
    """Rows of the last step."""
    last_call: str
    """Group, operation and dtype of the last collective entered; empty if none is held."""
    health: str
    """``armed``, or why the probe is not; empty without a heartbeat."""


def rings_of(paths: Iterable[Path]) -> list[Path]:
    """The rings that files and directories stand for, each once. Raises RingError where there is none."""
    found: dict[Path, Path] = {}
    for path in paths:
        try:
            inside = sorted(p for p in path.iterdir() if p.suffix == SUFFIX) if path.is_dir() else [path]
        except OSError as error:
            raise RingError(f"{path}: cannot be read: {error.strerror}") from None
        if not inside:
            raise RingError(f"{path}: holds no ring (NAME{SUFFIX}): give the engine's ring directory")
        found |= {each.absolute(): each for each in inside}
    return list(found.values())


def key_beside(rings: Sequence[Path]) -> bytes | None:
    """The digest key that the sidecars of the rings' directory use; None where none was made. Makes none."""
    for directory in dict.fromkeys(path.absolute().parent for path in rings):
        path = directory / KEY_FILE_NAME
        if path.exists():
            return read_key_file(path)
    return None


def privacy_of(key: bytes, *, raw_tokens: bool, pseudonymise: bool) -> Privacy:
    """What may leave the node, under ``key``, of `digest.KEY_SIZE` bytes."""
    return Privacy(Digester(key), key_fingerprint(key), raw_tokens, pseudonymise)


def dump(rings: Sequence[Path], privacy: Privacy, writer: DumpWriter) -> tuple[list[RingSummary], list[str]]:
    """Write what the rings hold; return a summary each, and why others were left out.

    A ring that is the only one asked for raises its RingError. Two rings of one rank raise RingError.
    """
    summaries: list[RingSummary] = []
    left_out: list[str] = []
    ranks: dict[tuple[str, object], Path] = {}
    for path in rings:
        try:
            tail = Tail(path, privacy)
        except RingError as error:
            if len(rings) == 1:
                raise
            left_out.append(str(error))
            continue
        with contextlib.closing(tail):
            key = (tail.identity.instance, tail.identity.rank)
            if key in ranks:
                raise RingError(f"{path} holds the same rank as {ranks[key]}: give one of them")
            ranks[key] = path
            summaries.append(_dump_one(len(summaries), tail, writer))
    if not summaries:
        raise RingError(f"none of {len(rings)} rings can be read: {left_out[0]}")
    return summaries, left_out


def _dump_one(stream: int, tail: Tail, writer: DumpWriter) -> RingSummary:
    state = _state(tail.path)
    writer.write(hello_entry(stream, tail.identity))
    seen = _Seen()
    tail.welcome(0)
    # A running engine writes on, more slowly than we read: this ends where we catch up with it.
    while tail.read(_HELD_MAX):
        held = tail.unsent()
        if held is None:
            continue
        writer.write(batch_entry(stream, held.message))
        seen.note(held.message)
        tail.acknowledge(held.next_seq)
    return seen.summary(tail, state)


def _state(path: Path) -> str:
    with contextlib.closing(RingReader(path)) as reader:
        if reader.closed:
            return "ended"
    held = is_held(path)
    return "not running" if held is None else "running" if held else "killed"


@dataclass(slots=True)
class _Seen:
    """What went by of one ring."""

    records: int = 0
    first_step: int = 0
    last_step: int = 0
    rows: int = 0
    last_ns: int = 0
    last_call: str = ""
    health: str = ""

    def note(self, message: bytes) -> None:
        frame = wire.decode_upward(message, _LIMITS)
        if not isinstance(frame, wire.Batch):
            return
        found = wire.evidence_of(frame, _LIMITS)
        self.records += found.next_seq - found.first_seq
        for block in _blocks(found):
            self.last_ns = max(self.last_ns, int(block.t_ns.max(initial=0)))
        inputs, events = found.inputs, found.events
        if inputs is not None and len(inputs.step):
            self.first_step = self.first_step or int(inputs.step[0])
            self.last_step, self.rows = int(inputs.step[-1]), int(inputs.rows[-1])
        if events is not None:
            for at in np.flatnonzero(events.kind == Kind.COLLECTIVE)[-1:]:
                self.last_call = events.text[at]
            for at in np.flatnonzero(events.kind == Kind.HEARTBEAT)[-1:]:
                self.health = _health(events.text[at])

    def summary(self, tail: Tail, state: str) -> RingSummary:
        identity: Identity = tail.identity
        return RingSummary(
            tail.path.name,
            identity.instance,
            str(identity.rank),
            f"{identity.engine} {identity.engine_version}".strip(),
            state,
            self.records,
            tail.lost,
            self.first_step,
            self.last_step,
            self.last_ns,
            self.rows,
            self.last_call,
            self.health,
        )


def _blocks(found: Evidence) -> Iterator[Block]:
    for block in (found.inputs, found.mask, found.sent, found.received, found.consumed, found.events):
        if block is not None:
            yield block


def _health(text: str) -> str:
    try:
        health = msgspec.json.decode(text, type=Health)
    except msgspec.MsgspecError:
        return "its heartbeat cannot be read"
    return "armed" if health.armed else health.reason
