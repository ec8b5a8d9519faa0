"""Secrets a command is given: the bearer token and the digest key. They never appear in an error's text."""

import contextlib
import errno
import os
import secrets
import stat
from hashlib import blake2b
from pathlib import Path
from typing import Final

from stagewatch.agents.digest import KEY_SIZE
from stagewatch.agents.errors import SettingsError
from stagewatch.agents.identity import Fingerprint

KEY_FILE_NAME: Final = "digest.key"
_TOKEN_LENGTH_MIN: Final = 16
_TOKEN_LENGTH_MAX: Final = 512
_FILE_SIZE_MAX: Final = 4096


def given_token(path: Path | None, variable: str, way_out: str) -> str:
    """The token that a command was given, by a file or else by an environment variable.

    Raises SettingsError, with ``way_out`` where there is neither.
    """
    given = os.environ.get(variable)
    if path is not None:
        return read_token_file(path)
    if given:
        return token_from_text(given, variable)
    raise SettingsError(f"no token: {way_out}")


def read_token_file(path: Path) -> str:
    """The bearer token in ``path``. Raises SettingsError."""
    return token_from_text(read_secret_file(path, "token file", 32), f"token file {path}")


def token_from_text(text: str, source: str) -> str:
    """``text`` without surrounding white space, if it can be a token; ``source`` says where it is from."""
    token = text.strip()
    if not token:
        raise SettingsError(
            f"{source} is empty: put a token there, of at least {_TOKEN_LENGTH_MIN} characters"
        )
    if not _TOKEN_LENGTH_MIN <= len(token) <= _TOKEN_LENGTH_MAX:
        raise SettingsError(
            f"{source} holds {len(token)} characters: a token has {_TOKEN_LENGTH_MIN} to {_TOKEN_LENGTH_MAX}"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise SettingsError(f"{source} holds more than one word of printable ASCII, which no token is")
    return token


def read_key_file(path: Path) -> bytes:
    """The digest key in ``path``, as hex digits. Raises SettingsError."""
    return key_from_text(read_secret_file(path, "key file", KEY_SIZE), f"key file {path}")


def key_from_text(text: str, source: str) -> bytes:
    """The digest key that ``text`` spells in hex digits. Raises SettingsError."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_SIZE:
        raise SettingsError(
            f"{source} does not hold {2 * KEY_SIZE} hex digits: make one with `openssl rand -hex 16`"
        )
    return key


def key_of_directory(directory: Path) -> bytes:
    """The digest key that the sidecars of one node share by default: made on first use, mode 0600.

    Raises SettingsError where it can be neither read nor made.
    """
    path = directory / KEY_FILE_NAME
    # Made under another name and linked, so that nobody ever reads half a key.
    made = directory / f".{KEY_FILE_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    if not path.exists():
        try:
            fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(KEY_SIZE) + "\n")
            os.link(made, path)
        except FileExistsError:
            pass  # another sidecar was first, and its key is as good
        except OSError as error:
            raise SettingsError(
                f"digest key {path} cannot be made: {error.strerror}: give one by --key-file"
            ) from None
        finally:
            with contextlib.suppress(OSError):  # the error above tells more than one from here would
                made.unlink()
    return read_key_file(path)


def key_fingerprint(key: bytes) -> Fingerprint:
    """What ranks show of their key, so that ranks with different keys are never compared."""
    value = blake2b(b"stagewatch digest key", key=key, digest_size=8).hexdigest()
    return Fingerprint("digest_key", value)


def read_secret_file(path: Path, what: str, size: int, bytes_max: int = _FILE_SIZE_MAX) -> str:
    """What a file of secrets holds. Raises SettingsError, also where others can read or change the file.

    ``size`` is that of a fresh secret, in random bytes.
    """
    try:
        with path.open("rb") as file:
            check_private(os.fstat(file.fileno()), f"{what} {path}")
            content = file.read(bytes_max + 1)
    except OSError as error:
        way_out = f": make one with `openssl rand -hex {size}`" if error.errno == errno.ENOENT else ""
        raise SettingsError(f"{what} {path} cannot be read: {error.strerror}{way_out}") from None
    if len(content) > bytes_max:
        raise SettingsError(f"{what} {path} is longer than {bytes_max} bytes: that is something else")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise SettingsError(f"{what} {path} is not ASCII text") from None


def check_private(found: os.stat_result, shown: str) -> None:
    """Refuse a file of secrets that strangers can open. Raises SettingsError.

    A group may read it, because that is how containers are handed their secrets.
    """
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o027:
        done = "changed" if found.st_mode & 0o022 else "read"
        raise SettingsError(f"{shown} can be {done} by others: chmod 600 it")
