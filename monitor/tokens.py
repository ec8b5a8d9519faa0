"""The collector's tokens: who may do what, for which deployments. Only hashes of them are kept.

A token file has one line a token, made by `stagewatch token` and edited with any editor::

    # name     scopes       deployments  hash
    sidecars   ingest       prod         sha256:9f86d0...
    grafana    read         prod,canary  sha256:60303a...
    operator   read,admin   *            sha256:fd61a0...

A file that holds nothing but one word is that token itself, good for everything: the short way for one machine
or for a secret that something else keeps. Hashes are plain SHA-256: the tokens we make have 256 random bits, which
no dictionary holds and no salt would help.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Final

from stagewatch.agents.credentials import read_secret_file, token_from_text
from stagewatch.agents.errors import SettingsError

TOKENS_MAX: Final = 1024
FILE_BYTES_MAX: Final = 1 << 20
HEADER: Final = "# name  scopes  deployments  hash"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")


class Scope(StrEnum):
    """What a token lets its holder do."""

    INGEST = "ingest"
    """Send evidence."""
    READ = "read"
    """Read incidents, engines, events and metrics."""
    ADMIN = "admin"
    """See who holds tokens and uses them."""


EVERYTHING: Final = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class Grant:
    """One token's rights."""

    name: str
    scopes: frozenset[Scope]
    deployments: frozenset[str] | None
    """None for every deployment, and for what belongs to none: the collector's own figures."""
    digest: bytes
    """SHA-256 of the token."""

    def covers(self, deployment: str) -> bool:
        """Whether it is good for a deployment."""
        return self.deployments is None or deployment in self.deployments

    def __repr__(self) -> str:
        """Without the hash, which is nobody's business."""
        return f"Grant({self.name})"


def digest_of(token: str) -> bytes:
    """What is kept of a token."""
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


def whole_grant(token: str) -> Grant:
    """The rights of a token that is good for everything."""
    return Grant("token", EVERYTHING, None, digest_of(token))


def new_token() -> str:
    """A token of 256 random bits."""
    return secrets.token_urlsafe(32)


def read_grants(path: Path) -> tuple[Grant, ...]:
    """The tokens of a file. Raises SettingsError, which shows nothing of what the file holds but names."""
    text = read_secret_file(path, "token file", 32, FILE_BYTES_MAX)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if _says_something(line)]
    if len(text.split()) <= 1:
        return (whole_grant(token_from_text(text, f"token file {path}")),)
    if len(lines) > TOKENS_MAX:
        raise SettingsError(f"token file {path} holds more than {TOKENS_MAX} tokens")
    grants = [_grant_of(line, f"token file {path}, line {number}") for number, line in lines]
    names = [grant.name for grant in grants]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise SettingsError(f"token file {path} names {twice} twice: give each token a name of its own")
    return tuple(grants)


def line_of(grant: Grant) -> str:
    """A grant as a line of a token file, without its end."""
    deployments = "*" if grant.deployments is None else ",".join(sorted(grant.deployments))
    scopes = ",".join(scope for scope in Scope if scope in grant.scopes)
    return f"{grant.name}  {scopes}  {deployments}  sha256:{grant.digest.hex()}"


def scopes_from(words: Iterable[str]) -> frozenset[Scope]:
    """Scopes by their words. Raises SettingsError."""
    known = {str(scope): scope for scope in Scope}
    found = list(words)
    if not found or not known.keys() >= set(found):
        raise SettingsError(f"scopes are some of {', '.join(known)}, separated by commas")
    return frozenset(known[word] for word in found)


def deployments_from(text: str) -> frozenset[str] | None:
    """Deployments as a token file spells them. Raises SettingsError."""
    if text == "*":
        return None
    names = text.split(",")
    if not all(_NAME.fullmatch(name) for name in names):
        raise SettingsError("deployments are * or names separated by commas")
    return frozenset(names)


def checked_name(name: str) -> str:
    """A token's name, if it can be one. Raises SettingsError."""
    if not _NAME.fullmatch(name):
        raise SettingsError("a token's name is 1 to 64 letters, digits, dots, dashes or underscores")
    return name


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _grant_of(line: str, where: str) -> Grant:
    words = line.split()
    if len(words) != 4:
        raise SettingsError(f"{where}: {len(words)} words, a token has 4: name, scopes, deployments, hash")
    name, scopes, deployments, hashed = words
    match = _HASH.fullmatch(hashed)
    if match is None:
        raise SettingsError(f"{where}: the fourth word is no hash: make the line with `stagewatch token`")
    try:
        return Grant(
            checked_name(name),
            scopes_from(scopes.split(",")),
            deployments_from(deployments),
            bytes.fromhex(match[1]),
        )
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None
