"""Who may talk to the collector: holders of its tokens, for as long as they hold them.

Hashes are what is kept and what is compared, every one of them, in constant time. A token file is read again
when it changes, so tokens come and go without a restart, and `Leases` ends what was opened by one that went.
"""

import contextlib
import hmac
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stagewatch.agents.credentials import token_from_text
from stagewatch.agents.errors import SettingsError
from stagewatch.monitor.tokens import Grant, digest_of, new_token, read_grants, whole_grant

log = logging.getLogger("stagewatch.collector")

_SCHEME: Final = "bearer "
_HEADER_CHARACTERS_MAX: Final = 1024


class Authenticator:
    """Knows tokens by the `Authorization` headers they come in; from a file, or the one token given.

    Raises SettingsError for a file that cannot be used.
    """

    def __init__(self, token: str | Path) -> None:
        self._path = token if isinstance(token, Path) else None
        self._stamp: tuple[int, ...] = ()
        self._complaint = ""
        if self._path is None:
            self.grants: tuple[Grant, ...] = (whole_grant(token_from_text(str(token), "the token")),)
            """What tokens are good for now."""
        else:
            self._stamp = _stamp_of(self._path)
            self.grants = read_grants(self._path)

    def grant_of(self, authorization: str | None) -> Grant | None:
        """The rights of whoever sends this header; None for a stranger."""
        self.refresh()
        header = authorization or ""
        if len(header) > _HEADER_CHARACTERS_MAX or header[: len(_SCHEME)].lower() != _SCHEME:
            header = _SCHEME
        given = digest_of(header[len(_SCHEME) :])
        # To the end, whichever matches: how long it takes tells nothing about where.
        found = [grant for grant in self.grants if hmac.compare_digest(given, grant.digest)]
        return found[0] if found else None

    def refresh(self) -> None:
        """Read the file again if it changed.

        While it is gone or makes no sense, tokens stay what they were: it may be half written.
        """
        if self._path is None:
            return
        try:
            stamp = _stamp_of(self._path)
            if stamp == self._stamp:
                return
            self.grants = read_grants(self._path)
            self._stamp, self._complaint = stamp, ""
        except SettingsError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("%s; the tokens known before stay good", error)


@dataclass(slots=True, eq=False)
class Lease:
    """Something open that a token opened."""

    grant: Grant
    _end: Callable[[], None]
    revoked: bool = False
    """Whether the token is good for it no more."""

    def revoke(self) -> None:
        """End it."""
        self.revoked = True
        self._end()


class Leases:
    """Everything open, by the token that opened it."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._open: set[Lease] = set()

    @contextlib.contextmanager
    def held(self, grant: Grant, end: Callable[[], None]) -> Iterator[Lease]:
        """While this lasts, ``end`` is called once if the token goes or loses a right."""
        lease = Lease(grant, end)
        self._open.add(lease)
        try:
            yield lease
        finally:
            self._open.discard(lease)

    def count(self, grant: Grant) -> int:
        """How much a token has open."""
        return sum(lease.grant == grant for lease in self._open)

    def end_revoked(self) -> int:
        """End what was opened by tokens that are not what they were; return how many."""
        self._authenticator.refresh()
        known = set(self._authenticator.grants)
        gone = [lease for lease in self._open if lease.grant not in known and not lease.revoked]
        for lease in gone:
            lease.revoke()
        return len(gone)


def make_token(path: Path) -> None:
    """Put a new random token into ``path``, mode 0600, unless there is a file already."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        file.write(new_token() + "\n")
        file.flush()
        os.fsync(file.fileno())


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError as error:
        raise SettingsError(f"token file {path} cannot be read: {error.strerror}") from None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
