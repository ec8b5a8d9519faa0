"""The data directory: what is believed before anything is put into it."""

import os
import stat
from pathlib import Path

from stagewatch.agents.errors import SettingsError


def check_data_directory(directory: Path) -> None:
    """Refuse a directory whose files somebody else could replace. Raises SettingsError, and OSError if there is none.

    A group may write there, as volumes of containers let theirs; root may own it, and links to it, for the same
    reason. Anybody else who could redirect or exchange it is a stranger.
    """
    trusted = (0, os.geteuid())
    link = directory.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in trusted:
        raise SettingsError(
            f"data directory {directory} is a symbolic link of uid {link.st_uid}: name the directory it points to"
        )
    found = directory.stat()
    if found.st_uid not in trusted:
        raise SettingsError(
            f"data directory {directory} belongs to uid {found.st_uid}, not to this process: choose another"
        )
    if found.st_mode & 0o002:
        raise SettingsError(f"data directory {directory} can be written by everybody: chmod 700 it")
