"""Who may talk to the collector: holders of its bearer token.

Only a hash of the token is kept in memory, and hashes are what is compared, in constant time. A token file
is read again when it changes, so a token is rotated without a restart.
"""

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Final

from stagewatch.agents.credentials import read_token_file, token_from_text
from stagewatch.agents.errors import SettingsError

_SCHEME: Final = "bearer "


class Authenticator:
    """Checks `Authorization` headers against the token of a file or a given one.

    Raises SettingsError for a file that cannot be read or holds no token.
    """

    def __init__(self, token: str | Path) -> None:
        self._path = token if isinstance(token, Path) else None
        self._stamp: tuple[int, int, int] | None = None
        self._digest = b""
        if self._path is None:
            self._digest = _digest(token_from_text(str(token), "the token"))
        else:
            self._load(self._path)

    def allows(self, authorization: str | None) -> bool:
        """Whether the value of an `Authorization` header carries the token."""
        self._reload_if_changed()
        header = authorization or ""
        given = header[len(_SCHEME) :] if header[: len(_SCHEME)].lower() == _SCHEME else ""
        return hmac.compare_digest(_digest(given), self._digest)

    def _reload_if_changed(self) -> None:
        if self._path is None:
            return
        try:
            if _stamp_of(self._path) != self._stamp:
                self._load(self._path)
        except (OSError, SettingsError):
            return  # gone, or half written: the token known stays good until a whole one is there

    def _load(self, path: Path) -> None:
        token = read_token_file(path)
        self._digest = _digest(token)
        self._stamp = _stamp_of(path)


def make_token(path: Path) -> None:
    """Put a new random token into ``path``, mode 0600, unless there is a file already."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    with os.fdopen(fd, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _stamp_of(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape")).digest()
