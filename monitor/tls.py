"""The collector's end of TLS: a context whose files are read again when they change."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.tls import load_identity, trust

_NO_GOOD_CERTIFICATE: Final = frozenset({"PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED"})

log = logging.getLogger("stagewatch.collector")


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What the collector shows, and whom it lets connect."""

    cert: Path
    """Its certificate, with its chain."""
    key: Path | None
    """Its private key; None if it is in the same file."""
    client_ca: Path | None
    """Whoever must have signed the certificate of everyone who connects; None if nobody needs one."""

    def context(self) -> ssl.SSLContext:
        """A context of the files as they are now. Raises SettingsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.sslobject_class = _Telling
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        load_identity(context, self.cert, self.key, "--tls-cert", "--tls-key")
        if self.client_ca is not None:
            trust(context, self.client_ca, "--tls-client-ca")
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def stamp(self) -> tuple[tuple[int, ...], ...]:
        """What changes when a file does. Raises OSError."""
        paths = [path for path in (self.cert, self.key, self.client_ca) if path is not None]
        return tuple((s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino) for s in (p.stat() for p in paths))


class _Telling(ssl.SSLObject):
    """Lets a peer know why it is refused: asyncio would drop the connection with OpenSSL's alert still unsent."""

    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Go on with the handshake; a failure is raised at the next call, after what is to be sent was."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason not in _NO_GOOD_CERTIFICATE:
                raise
            self._failure = error
            raise ssl.SSLWantReadError from None


class RenewedContext(ssl.SSLContext):
    """Makes each new connection with the files as they are; connections that are open keep what they have.

    Files that cannot be used are told once, and those known before stay in use: a renewal may be half done.
    Raises SettingsError where that is so from the start.
    """

    def __new__(cls, files: ServerTls) -> Self:
        """A context; the one inside is what counts."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self._current = files.context()
        self._stamp = files.stamp()

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection, as asyncio does."""
        self._refresh()
        return self._current.wrap_bio(*args, **kwargs)

    def _refresh(self) -> None:
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._current = self._files.context()
            log.info("TLS: the certificate files changed and were read again")
        except (SettingsError, OSError) as error:
            log.warning("TLS: %s; the certificate known before stays in use", error)
