"""The stream to the collector: one WebSocket for all ranks of a node, kept up whatever happens.

Every irregularity has the same cure: close, connect again, say hello for each rank, and go on from where the
collector says it is. While there is no connection the tails read on into their bounds, and then the rings keep.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException

from stagewatch.agents import wire
from stagewatch.agents.credentials import read_token_file
from stagewatch.agents.errors import FrameError, SettingsError
from stagewatch.agents.identity import Rank
from stagewatch.agents.tail import Tail
from stagewatch.agents.tls import NO_TLS_FILES, ClientTls, told
from stagewatch.agents.wire import Ack, Freeze, Frozen, Hello, Refusal, Welcome

log = logging.getLogger("stagewatch.sidecar")

RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 10.0
SETTLED_S: Final = 30.0
"""A connection that served for so long makes up for the times we were out of step before it."""
ANSWER_BYTES_MAX: Final = 1 << 20

ANSWERS_MAX: Final = 1024

TailKey = tuple[str, Rank]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where frames go, and what opens the door."""

    url: str
    token: str | Path
    """The token itself, or the file that holds it, read at each connection."""
    tls: ClientTls = NO_TLS_FILES
    """Read at each connection, too."""

    def current_token(self) -> str:
        """The token, now. Raises SettingsError."""
        return read_token_file(self.token) if isinstance(self.token, Path) else self.token


def ingest_url(text: str) -> str:
    """The URL of the collector's door, from what an operator writes. Raises SettingsError."""
    parts = urlsplit(text)
    schemes = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise SettingsError(f"--collector {text!r} is no address: write ws://HOST:PORT or wss://HOST:PORT")
    if parts.username or parts.query or parts.fragment:
        raise SettingsError("--collector carries more than an address: give the token by --token-file")
    path = parts.path.rstrip("/") or "/v1/ingest"
    return urlunsplit((schemes[parts.scheme], parts.netloc, path, "", ""))


def is_exposed(url: str) -> bool:
    """Whether the token would cross a network in clear."""
    parts = urlsplit(url)
    if parts.scheme == "wss" or parts.hostname == "localhost":
        return False
    try:
        return not ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True


class Shipper:
    """Sends the tails' frames and hands them the answers. ``tails`` may change at any time."""

    def __init__(
        self,
        destination: Destination,
        tails: Mapping[TailKey, Tail],
        on_freeze: Callable[[Tail, Freeze], None] | None = None,
    ) -> None:
        self._destination = destination
        self._tails = tails
        self._on_freeze = on_freeze
        """Who freezes windows; None where nobody does, and the collector is not to ask."""
        self._answers: deque[bytes] = deque(maxlen=ANSWERS_MAX)
        """What was frozen, still to be said. Lost with the connection: the collector asks again on the next."""
        self._wake = asyncio.Event()
        self._greeted: set[Tail] = set()
        """Whose hello was said on this connection. A ring that is replaced is another tail of the same rank."""
        self._state = ""
        self._retry_s = RETRY_S_MIN
        self._out_of_step = 0
        """Connections given up since the last that served long, because the collector was elsewhere than we."""
        self._connected_at = 0.0

    def say(self, frozen: Frozen) -> None:
        """Answer a `Freeze`."""
        self._answers.append(wire.encode_frame(frozen))
        self._wake.set()

    def wake(self) -> None:
        """There are new tails or frames."""
        self._wake.set()

    async def run(self) -> None:
        """Connect, ship, connect again; until cancelled."""
        while True:
            self._say(await self._ship_once())
            for tail in self._tails.values():
                tail.disconnected()
            self._greeted.clear()
            self._answers.clear()
            # Full jitter: many sidecars must not come back to a restarted collector all at once.
            await asyncio.sleep(random.uniform(0.2, 1.0) * self._retry_s)  # noqa: S311
            self._retry_s = min(self._retry_s * 2, RETRY_S_MAX)

    async def _ship_once(self) -> str:
        """Ship over one connection until it ends; return why."""
        why = "the collector closed the connection"
        lost: list[BaseException] = []
        try:
            token = self._destination.current_token()
            async with connect(
                self._destination.url,
                ssl=self._destination.tls.context() if self._destination.url.startswith("wss:") else None,
                additional_headers={"Authorization": f"Bearer {token}"},
                compression=None,
                max_size=ANSWER_BYTES_MAX,
                user_agent_header="stagewatch-agent",
                create_connection=_noting(lost),
            ) as connection:
                self._connected_at = time.monotonic()
                self._say("connected", logging.INFO)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._send(connection))
                    group.create_task(self._receive(connection))
        except* (OSError, TimeoutError, WebSocketException, SettingsError, _Reconnect) as errors:
            # What TLS says of the end tells more than that it ended, which is all that the rest is about.
            why = next(filter(None, map(told, lost)), "") or _told(errors)
        return why

    async def _send(self, connection: ClientConnection) -> None:
        while True:
            self._wake.clear()
            busy = False
            for tail in list(self._tails.values()):
                if tail not in self._greeted:
                    self._greeted.add(tail)
                    hello = Hello(wire.PROTOCOL, tail.identity, self._on_freeze is not None)
                    await connection.send(wire.encode_frame(hello))
                held = tail.unsent()
                if held is not None:
                    busy = True
                    await connection.send(held.message)
            while self._answers:
                busy = True
                await connection.send(self._answers.popleft())
            if not busy:
                await self._wake.wait()

    async def _receive(self, connection: ClientConnection) -> None:
        async for message in connection:
            try:
                self._answer(
                    wire.decode_downward(message if isinstance(message, bytes) else message.encode())
                )
            except FrameError as error:
                raise _Reconnect(f"the collector's answer is no frame of ours: {error}") from None
            self._wake.set()
        raise _Reconnect("the collector closed the connection")

    def _answer(self, frame: wire.Downward | None) -> None:
        if frame is None:
            return  # what only later builds know is not meant for us
        tail = self._tails.get((frame.instance, frame.rank)) if frame.rank is not None else None
        if isinstance(frame, Refusal):
            self._refused(frame, tail)
        elif tail is not None and isinstance(frame, Welcome):
            # Two sidecars on one ring push each other aside: each time they wait for longer.
            self._retry_s = min(RETRY_S_MIN * 2.0 ** min(self._out_of_step, 10), RETRY_S_MAX)
            tail.welcome(frame.next_seq)
        elif tail is not None and isinstance(frame, Ack):
            tail.acknowledge(frame.next_seq)
        elif tail is not None and isinstance(frame, Freeze) and self._on_freeze is not None:
            self._on_freeze(tail, frame)

    def _refused(self, refusal: Refusal, tail: Tail | None) -> None:
        if tail is None:
            raise _Reconnect(f"the collector refused a frame: {refusal.reason}")
        if not tail.welcomed:
            if tail.refused != refusal.reason:
                log.warning(
                    "rank %s of %s is refused: %s", tail.identity.rank, tail.identity.instance, refusal.reason
                )
            tail.refused = refusal.reason  # the others go on; it is greeted again at the next connection
            if refusal.retry_s >= 0:
                asyncio.get_running_loop().call_later(
                    max(refusal.retry_s, RETRY_S_MIN), self._greet_again, tail
                )
            return
        if refusal.next_seq >= 0:
            log.warning("rank %s: frame left out, it was refused: %s", tail.identity.rank, refusal.reason)
            tail.condemn(refusal.next_seq)
        self._out_of_step = 0 if time.monotonic() - self._connected_at > SETTLED_S else self._out_of_step + 1
        hint = "; does another sidecar read the same rings?" if self._out_of_step > 1 else ""
        raise _Reconnect(f"out of step with the collector{hint}")

    def _greet_again(self, tail: Tail) -> None:
        if not tail.welcomed:
            self._greeted.discard(tail)
            self._wake.set()

    def _say(self, state: str, level: int = logging.WARNING) -> None:
        """Tell a change of state, once."""
        if state != self._state:
            self._state = state
            told = (
                state if level < logging.WARNING else f"not connected: {state}; the rings keep what they can"
            )
            if self._out_of_step > 2 and state.startswith(
                ("connected", "out of step")
            ):  # said, and back and forth
                level = logging.DEBUG
            log.log(level, "collector %s: %s", self._destination.url, told)


def _noting(lost: list[BaseException]) -> type[ClientConnection]:
    """Connections that note in ``lost`` why they ended: the peer's last word is what it has against our certificate."""

    class Noting(ClientConnection):
        def connection_lost(self, exc: Exception | None) -> None:
            if exc is not None:
                lost.append(exc)
            super().connection_lost(exc)

    return Noting


class _Reconnect(Exception):  # noqa: N818  # not a fault to report but a way out of the connection
    """The connection is to be given up and made anew."""


def _told(error: BaseException) -> str:
    if of_tls := told(error):
        return of_tls
    match error:
        case InvalidStatus(response=response) if response.status_code == 401:
            return "it refuses our token: compare --token-file on both sides"
        case InvalidStatus(response=response) if response.status_code in (429, 503):
            return f"it is not ready for us (HTTP {response.status_code})"
        case InvalidStatus(response=response):
            return f"HTTP {response.status_code}: is it a stagewatch collector?"
        case InvalidHandshake():
            return "what answers there speaks no WebSocket; if it is a TLS port, write wss://"
        case OSError(strerror=str(text)):
            return text
        case TimeoutError():
            return "it does not answer"
        case BaseExceptionGroup(exceptions=(first, *_)):
            return _told(first)
        case _:
            return str(error) or type(error).__name__
