"""Connections that say nothing, or do not listen: how many there may be, and for how long."""

import asyncio
import resource
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Response
from websockets.server import ServerProtocol

from stagewatch.monitor.headers import SECURITY_HEADERS

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as _Http
else:
    _Http = asyncio.Protocol  # what it is mixed into brings the rest

HEAD_BYTES_MAX: Final = 64 << 10
"""Longest head of a request; the parser itself would take a thousand times that from anybody."""
REQUEST_S: Final = 15.0
"""How long a connection may be between requests, or in the middle of one request's head."""
STALLED_S: Final = 30.0
"""How long a peer for which more waits than the system holds may take nothing of it."""
CONNECTIONS_MAX: Final = 16_384
"""Connections of all kinds; each may be one that only holds its place for `REQUEST_S`."""
FILES_RESERVED: Final = 256
"""Open files left for other things than connections."""
FRAGMENTS_MAX: Final = 1024
"""Pieces that one message may come in. Their bytes are limited elsewhere, but a piece may have none."""
_AT_ONCE: Final = struct.pack("ii", 1, 0)
"""On, and no second: how `SO_LINGER` spells it."""
_SECURITY: Final = "".join(f"{name}: {value}\r\n" for name, value in SECURITY_HEADERS.items())
_TOO_MANY: Final = (
    "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\nConnection: close\r\nContent-Length: 0\r\n"
    f"{_SECURITY}\r\n"
).encode()
_NO_REQUEST: Final = (
    "HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: 16\r\n{_SECURITY}\r\nno HTTP request\n"
).encode()


class _Stall:
    """Cuts a connection while too much waits for its peer, and nothing of it is taken."""

    def __init__(self) -> None:
        self._due: asyncio.TimerHandle | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        """More waits than may; or the last of it, and nobody will ask again."""
        if self._due is None:
            self._watch(loop, transport)

    def end(self) -> None:
        """Enough was taken, or the peer is gone."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _watch(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        waiting = transport.get_write_buffer_size()
        self._due = loop.call_later(STALLED_S, self._look, loop, transport, waiting)

    def _look(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, before: int) -> None:
        if transport.get_write_buffer_size() >= before:
            _cut(transport)
        else:
            self._watch(loop, transport)


def _cut(transport: asyncio.Transport) -> None:
    """End a connection now. An ordinary end would have the system keep, and try to send, what nobody takes."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()


class Impatient(_Http):
    """Either of uvicorn's HTTP protocols, less patient.

    They would wait for ever for the rest of a request's head, keep all of it, and wait for ever for an answer's taker.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall = _Stall()

    _unanswered_bytes = 0
    """Received since the last request began or was answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin to watch the connection."""
        super().connection_made(transport)
        if len(self.connections) > connections_max():
            self.transport.write(_TOO_MANY)
            self.transport.close()
        self._watch(None)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and give up a peer whose request has no end."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before or self._is_answering:
            self._unanswered_bytes = 0
            return
        self._unanswered_bytes += len(data)
        if self._unanswered_bytes > HEAD_BYTES_MAX:
            self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self, before: Any) -> None:
        """Look whether a request came since ``before`` was the last."""
        self._watching = self.loop.call_later(REQUEST_S, self._look, before)

    def _look(self, before: Any) -> None:
        transport = self.transport
        if transport.get_protocol() is not self:
            return  # a WebSocket by now
        if transport.is_closing():
            self._stall.begin(self.loop, transport)
        elif not self._is_answering and self.cycle is before:
            transport.abort()
            return
        self._watch(self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; where another one is being answered, there is no room for words."""
        if not self._is_answering:
            self.transport.write(_NO_REQUEST)
        self.transport.close()

    def pause_writing(self) -> None:
        """More waits for the peer than may."""
        super().pause_writing()
        self._stall.begin(self.loop, self.transport)

    def resume_writing(self) -> None:
        """It took enough of it."""
        super().resume_writing()
        self._stall.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        self._watching.cancel()
        self._stall.end()
        super().connection_lost(exc)


class ImpatientProtocol(Impatient, AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # chosen by uvicorn when imported
    """With the parser that is installed."""


class _Handshake(ServerProtocol):
    """The rules of a WebSocket, with the headers of every answer where they say no."""

    def send_response(self, response: Response) -> None:
        """Send the answer to a handshake."""
        for name, value in SECURITY_HEADERS.items():
            if name not in response.headers:
                response.headers[name] = value
        super().send_response(response)


class FrugalWebSocket(WebSocketsSansIOProtocol):
    """Uvicorn's WebSocket, less generous.

    It would take a message in pieces without number, text, and pings from a peer that does not take the answers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall = _Stall()
        # Without extensions: nothing can be inflated against us.
        self.conn = _Handshake(max_size=self.config.ws_max_size, logger=self.logger)

    def pause_writing(self) -> None:
        """More waits for the peer than may: whoever does not read is not read from, for it may want answers."""
        super().pause_writing()
        self.transport.pause_reading()
        self._stall.begin(self.loop, self.transport)

    def resume_writing(self) -> None:
        """It took enough of it."""
        super().resume_writing()
        self._stall.end()
        if not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """The next message. Uvicorn reads on once it was taken; we only from whoever reads."""
        message = await super().receive()
        if not self.writable.is_set() and not self.disconnected:
            self.transport.pause_reading()
        return message

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        self._stall.end()
        super().connection_lost(exc)

    def handle_text(self, event: Frame) -> None:
        """Refuse text: frames are bytes."""
        self._give_up(CloseCode.UNSUPPORTED_DATA, "frames are binary")

    def handle_cont(self, event: Frame) -> None:
        """Take the next piece of a message, if there are not too many."""
        if len(self.frames) >= FRAGMENTS_MAX:
            self._give_up(CloseCode.POLICY_VIOLATION, f"more than {FRAGMENTS_MAX} pieces")
            return
        super().handle_cont(event)

    def _give_up(self, code: int, why: str) -> None:
        if not self.close_sent:
            self.conn.fail(code, why)
            self.handle_parser_exception()


def connections_max() -> int:
    """Connections that may be open at once: as many as there are files for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(CONNECTIONS_MAX, max(files - FILES_RESERVED, FILES_RESERVED))


def allow_many_files() -> None:
    """As many open files as the system lets us have: each sidecar, reader and idle connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
