"""The sidecar: finds the rings of a node, tails all of them, ships what they hold.

One event loop, four tasks: look for rings, read rings, ship frames, have windows frozen. Reading polls, since a
ring's writer must not be bothered with wake-ups: every `POLL_S_MIN` while records come, backing off to `POLL_S_MAX`
while none do.
"""

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Final

from stagewatch.agents.credentials import key_fingerprint, key_of_directory
from stagewatch.agents.digest import Digester
from stagewatch.agents.errors import RingError
from stagewatch.agents.health import Pulse
from stagewatch.agents.identity import Node
from stagewatch.agents.ring import check_directory
from stagewatch.agents.shipping import Destination, Shipper, TailKey
from stagewatch.agents.tail import Privacy, Tail
from stagewatch.agents.windowqueue import Windows
from stagewatch.agents.windows import Freezer

log = logging.getLogger("stagewatch.sidecar")

SCAN_S: Final = 0.5
POLL_S_MIN: Final = 0.002
POLL_S_MAX: Final = 0.05
PAUSE_PER_WORK: Final = 4.0
"""Seconds of pause for each second of CPU a round took; the pause is bounded by `POLL_S_MAX` all the same."""
GONE_S_MAX: Final = 60.0
"""A ring whose file was removed is kept in memory for so long while it waits to be acknowledged."""

FREEZE_DIR_NAME: Final = "frozen"


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """What a sidecar is told at start, checked."""

    ring_dir: Path
    destination: Destination
    key: bytes | None
    """The digest key; None for the one the sidecars of the ring directory share."""
    raw_tokens: bool
    pseudonymise: bool
    held_bytes: int
    """Bytes of unacknowledged frames held in memory, all ranks together."""
    drain_s: float
    """Seconds that an orderly end may wait for acknowledgements."""
    freeze_bytes: int = 0
    """Bytes of frozen windows kept on the node; 0 for none."""
    freeze_most: int = 16
    """Incidents whose windows are kept."""
    freeze_dir: Path | None = None
    """Where they are kept; None for a directory of the ring directory's."""
    health_file: Path | None = None
    """The file that shows the sidecar to be alive; see `stagewatch.agents.health`."""


@dataclass(slots=True)
class _Refused:
    message: str
    said: bool


class Sidecar:
    """All rings of one directory. `run` raises StagewatchError where the directory or key cannot be used."""

    def __init__(self, settings: SidecarSettings) -> None:
        self.tails: Final[dict[TailKey, Tail]] = {}
        self.records_removed = 0
        """Records of removed rings that nobody acknowledged in time."""
        self.records_unreadable = 0
        """Records of rings that raised an error of ours."""
        self._id: Final = token_hex(8)
        self._settings = settings
        self._windows = Windows(
            Freezer(
                settings.freeze_dir or settings.ring_dir / FREEZE_DIR_NAME,
                settings.freeze_bytes,
                settings.freeze_most,
            )
        )
        self._shipper = Shipper(
            settings.destination, self.tails, self._windows.ask if settings.freeze_bytes else None
        )
        self._refused: dict[Path, _Refused] = {}
        self._broken: set[Path] = set()
        """Rings that raised an error of ours while they were read: not tried again."""
        self._gone: dict[TailKey, float] = {}
        self._privacy: Privacy | None = None
        self._waiting_said = False
        self._pulse = Pulse(settings.health_file)

    @property
    def rings_refused(self) -> int:
        """Files in the directory that are no rings this build can read."""
        return len(self._refused) + len(self._broken)

    @property
    def node(self) -> Node:
        """What the collector is told of us with every batch."""
        return Node(
            self._id,
            self.records_removed,
            self.records_unreadable,
            self.rings_refused,
            self._windows.dropped,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Tail and ship until ``stop``, then ship what is left."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._scan_forever()),
                group.create_task(self._read_forever()),
                group.create_task(self._shipper.run()),
                group.create_task(self._windows.run(self._shipper.say)),
            ]
            group.create_task(self._end(stop, tasks))
        for tail in self.tails.values():
            tail.close()

    async def _end(self, stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
        await stop.wait()
        deadline = time.monotonic() + self._settings.drain_s
        while not all(tail.is_drained for tail in self.tails.values()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S_MIN)
        left = sum(tail.unacknowledged for tail in self.tails.values())
        if left:
            log.warning("ending with %d records unacknowledged: they stay in the rings", left)
        self._windows.end()
        for task in tasks:
            task.cancel()

    async def _scan_forever(self) -> None:
        while True:
            self.scan()
            self._pulse.beat()
            await asyncio.sleep(SCAN_S)

    def scan(self) -> None:
        """Look for rings that came or went. Raises StagewatchError for a directory that is unsafe."""
        directory = self._settings.ring_dir
        present = _rings_in(directory)
        if present is None:
            if not self._waiting_said:
                self._waiting_said = True
                log.info("waiting for ring directory %s", directory)
            present = set()
        else:
            self._waiting_said = False
            if self._privacy is None:
                self._privacy = self._windows.privacy = self._open_directory(directory)
        self._drop_gone()
        known = {tail.path for tail in self.tails.values() if tail.is_in_place}
        for path in self._refused.keys() - present:
            del self._refused[path]
        if self._privacy is not None:
            self._broken &= present
            for path in sorted(present - known - self._broken):
                self._try_ring(path, self._privacy)

    def _open_directory(self, directory: Path) -> Privacy:
        # Root reads rings of any user; anybody else only their own, where nobody else can plant a file.
        if os.geteuid() != 0:
            check_directory(directory)
        key = self._settings.key or key_of_directory(directory)
        return Privacy(
            Digester(key), key_fingerprint(key), self._settings.raw_tokens, self._settings.pseudonymise
        )

    def _try_ring(self, path: Path, privacy: Privacy) -> None:
        try:
            tail = Tail(path, privacy)
        except RingError as error:
            self._refuse(path, str(error))
            return
        key = (tail.identity.instance, tail.identity.rank)
        other = self.tails.get(key)
        if other is not None:
            tail.close()
            # Else the file was replaced, and what the old one held is still on its way.
            if other.path != path:
                self._refuse(path, f"ring {path.name} holds the same rank as {other.path.name}: remove one")
            return
        self._refused.pop(path, None)
        self.tails[key] = tail
        log.info("ring %s: %s %s", path.name, tail.identity.engine, tail.identity.engine_version)
        self._shipper.wake()

    def _refuse(self, path: Path, message: str) -> None:
        known = self._refused.get(path)
        if known is None or known.message != message:
            self._refused[path] = _Refused(message, said=False)
        elif not known.said:
            # Only at the second look: at the first its engine may still be making it.
            known.said = True
            log.warning("%s. It is left out; the other rings are not affected.", message)

    def _drop_gone(self) -> None:
        now = time.monotonic()
        for key, tail in list(self.tails.items()):
            if tail.is_in_place:
                self._gone.pop(key, None)
                continue
            since = self._gone.setdefault(key, now)
            if tail.is_drained or now - since > GONE_S_MAX:
                if tail.is_drained:
                    log.info("ring %s is gone, and everything in it was taken", tail.path.name)
                else:
                    self.records_removed += tail.unacknowledged
                    log.warning(
                        "ring %s was removed with %d records not taken", tail.path.name, tail.unacknowledged
                    )
                del self._gone[key], self.tails[key]
                tail.close()

    def _read(self, key: TailKey, tail: Tail) -> bool:
        try:
            return tail.read(self._settings.held_bytes // len(self.tails), self.node)
        except Exception:  # one ring whose content nobody foresaw must not cost the node its other ranks
            log.exception("ring %s cannot be read on: please report this", tail.path.name)
            self._broken.add(tail.path)
            self.records_unreadable += tail.unacknowledged
            self._gone.pop(key, None)
            del self.tails[key]
            tail.close()
            return False

    async def _read_forever(self) -> None:
        pause_s = POLL_S_MIN
        while True:
            busy = False
            began = time.thread_time()
            for key, tail in list(self.tails.items()):
                if self.tails.get(key) is not tail:
                    continue  # dropped while others were read
                if self._read(key, tail):
                    busy = True
                    self._shipper.wake()
                    await asyncio.sleep(0)
            # A frame of three steps costs little more than one of a single step: the dearer a round, the longer
            # the pause, and the more steps share the next one.
            spent_s = time.thread_time() - began
            pause_s = max(POLL_S_MIN, spent_s * PAUSE_PER_WORK) if busy else min(pause_s * 2, POLL_S_MAX)
            await asyncio.sleep(min(pause_s, POLL_S_MAX))


def _rings_in(directory: Path) -> set[Path] | None:
    """The files of a directory that are named like rings; None while there is no such directory."""
    try:
        return {path for path in directory.iterdir() if path.suffix == ".ring"}
    except OSError:
        return None
