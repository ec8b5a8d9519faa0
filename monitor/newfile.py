"""Files that commands write for their caller: whole or not at all, and for nobody else."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def new_private_file(path: Path) -> Iterator[IO[bytes]]:
    """A file, mode 0600, that takes the place of ``path`` once its content is whole. Raises OSError.

    It is made under a name that nobody can have laid a link under, since directories may be anybody's.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            yield file
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
