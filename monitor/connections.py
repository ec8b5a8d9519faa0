"""Connections that say nothing: how many there may be, and for how long."""

import asyncio
import resource
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

REQUEST_S: Final = 15.0
"""How long a connection may be between requests, or in the middle of one request's head."""


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # chosen by uvicorn when it is imported
    """Uvicorn's HTTP protocol, which would wait for the rest of a request's head for ever."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to watch the connection."""
        super().connection_made(transport)
        self._watch(None)

    def _watch(self, before: Any) -> None:
        """Look whether a request came since ``before`` was the last."""
        self._watching = self.loop.call_later(REQUEST_S, self._look, before)

    def _look(self, before: Any) -> None:
        transport = self.transport
        if transport.is_closing() or transport.get_protocol() is not self:
            return  # over, or a WebSocket by now
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if not is_answering and self.cycle is before:
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
