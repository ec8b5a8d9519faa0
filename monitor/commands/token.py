"""`stagewatch token`: make a token for a collector."""

import argparse
import os
import secrets
import sys
from pathlib import Path

from stagewatch.agents.errors import SettingsError
from stagewatch.monitor.tokens import (
    HEADER,
    Grant,
    checked_name,
    deployments_from,
    digest_of,
    line_of,
    new_token,
    read_grants,
    scopes_from,
)

HELP = "make a token for a collector: the secret is shown once, its hash goes into the token file"
EPILOG = (
    "The collector takes up the change within a second or two. To take a token away, delete its line; what it holds "
    "open is closed. The secret alone is written to standard output, so it can be redirected to a file."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("name", help="what to call the token in the file: who will hold it")
    parser.add_argument("--token-file", type=Path, help="the collector's file of tokens, made if need be")
    parser.add_argument(
        "--scopes",
        default="read",
        help="what it is good for, separated by commas: ingest for sidecars, read for people and Prometheus, admin "
        "for seeing who holds tokens",
    )
    parser.add_argument(
        "--deployments", default="*", help="which deployments it is good for, separated by commas; * for all"
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace the token of this name, which is good no more from then on",
    )


def run(args: argparse.Namespace) -> int:
    """Write the hash, show the secret."""
    path: Path | None = args.token_file
    if path is None:
        raise SettingsError("--token-file is missing: give the file that the collector is given")
    secret = new_token()
    grant = Grant(
        checked_name(args.name),
        scopes_from(args.scopes.split(",")),
        deployments_from(args.deployments),
        digest_of(secret),
    )
    write_file(path, with_grant(_content(path), grant, path, replace=args.replace))
    print(secret, flush=True)
    print(f"stagewatch: {path} has the hash; the token itself is kept nowhere else", file=sys.stderr)
    return 0


def with_grant(content: str, grant: Grant, path: Path, *, replace: bool) -> str:
    """The content of a token file with one more grant, or another in place of its namesake's."""
    lines = content.splitlines() or [HEADER]
    places = [i for i, line in enumerate(lines) if line.split()[:1] == [grant.name]]
    if places and not replace:
        raise SettingsError(f"token file {path} has a token {grant.name}: give another name, or --replace")
    if places:
        lines[places[0]] = line_of(grant)
    else:
        lines.append(line_of(grant))
    return "\n".join(lines) + "\n"


def write_file(path: Path, content: str) -> None:
    """Put ``content`` in place of the file at once, mode 0600. Raises SettingsError."""
    path = path.resolve()  # a link stays one
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                found = path.stat()
                made.chmod(found.st_mode & 0o7777)
                if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                    os.chown(made, found.st_uid, found.st_gid)
            made.replace(path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SettingsError(f"token file {path} cannot be written: {error.strerror}") from None


def _content(path: Path) -> str:
    """What the file holds, empty if there is none; a file that holds one bare token is another thing."""
    if not path.exists() or not path.stat().st_size:
        return ""
    grants = read_grants(path)
    text = path.read_text()
    if len(text.split()) == 1 and grants:
        raise SettingsError(f"token file {path} holds one token itself: give another file for hashes")
    return text
