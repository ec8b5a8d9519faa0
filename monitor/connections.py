"""Connections that say nothing: how many there may be, and for how long."""

import asyncio
import resource
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_BYTES_MAX: Final = 64 << 10
"""Longest head of a request; the parser itself would take a thousand times that from anybody."""
REQUEST_S: Final = 15.0
"""How long a connection may be between requests, or in the middle of one request's head."""


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # chosen by uvicorn when it is imported
    """Uvicorn's HTTP protocol, which would wait for the rest of a request's head for ever, and keep all of it."""

    _unanswered_bytes = 0
    """Received since the last request began or was answered."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to watch the connection."""
        super().connection_made(transport)
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


def allow_many_files() -> None:
    """As many open files as the system lets us have: each sidecar, reader and idle connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
