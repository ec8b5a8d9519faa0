"""Connections that say nothing: how many there may be, and for how long."""

import asyncio
import resource
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from stagewatch.monitor.headers import SECURITY_HEADERS

HEAD_BYTES_MAX: Final = 64 << 10
"""Longest head of a request; the parser itself would take a thousand times that from anybody."""
REQUEST_S: Final = 15.0
"""How long a connection may be between requests, or in the middle of one request's head."""
CONNECTIONS_MAX: Final = 16_384
"""Connections of all kinds; each may be one that only holds its place for `REQUEST_S`."""
FILES_RESERVED: Final = 256
"""Open files left for other things than connections."""
FRAGMENTS_MAX: Final = 1024
"""Pieces that one message may come in. Their bytes are limited elsewhere, but a piece may have none."""
_REFUSED_HEAD: Final = "".join(
    [
        "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\nConnection: close\r\nContent-Length: 0\r\n",
        *(f"{name}: {value}\r\n" for name, value in SECURITY_HEADERS.items()),
        "\r\n",
    ]
).encode()


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # chosen by uvicorn when it is imported
    """Uvicorn's HTTP protocol, which would wait for the rest of a request's head for ever, and keep all of it."""

    _unanswered_bytes = 0
    """Received since the last request began or was answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to watch the connection."""
        super().connection_made(transport)
        if len(self.connections) > connections_max():
            self.transport.write(_REFUSED_HEAD)
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
        if transport.is_closing() or transport.get_protocol() is not self:
            return  # over, or a WebSocket by now
        if not self._is_answering and self.cycle is before:
            transport.abort()
            return
        self._watch(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        self._watching.cancel()
        super().connection_lost(exc)


class FrugalWebSocket(WebSocketsSansIOProtocol):
    """Uvicorn's WebSocket, which would take a message in pieces without number, and text that is none."""

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
