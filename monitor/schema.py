"""The incident store's schema, version by version."""

import sqlite3
from pathlib import Path
from typing import Final

from stagewatch.agents.errors import StagewatchError

MIGRATIONS: Final = (
    """
    CREATE TABLE incidents (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        deployment TEXT NOT NULL,
        instance TEXT NOT NULL,
        check_name TEXT NOT NULL,
        severity INTEGER NOT NULL,
        request TEXT NOT NULL,
        weight TEXT NOT NULL,
        body BLOB NOT NULL
    ) STRICT;
    CREATE INDEX incidents_by_engine ON incidents (deployment, instance, number);
    CREATE TABLE events (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        at_ns INTEGER NOT NULL,
        body BLOB NOT NULL
    ) STRICT;
    """,
    """
    ALTER TABLE incidents ADD COLUMN opened_ns INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE incidents ADD COLUMN changed_ns INTEGER NOT NULL DEFAULT 0;
    UPDATE incidents SET opened_ns = CASE WHEN json_valid(CAST(body AS TEXT))
        THEN coalesce(CAST(json_extract(CAST(body AS TEXT), '$.raised_ns') AS INTEGER), 0) ELSE 0 END;
    UPDATE incidents SET changed_ns = opened_ns;
    CREATE INDEX incidents_by_change ON incidents (changed_ns);
    CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
    """,
    """
    CREATE TABLE windows (
        incident TEXT NOT NULL,
        rank TEXT NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (incident, rank)
    ) STRICT;
    """,
)
"""One script per schema version; `PRAGMA user_version` counts those applied."""


class StoreError(StagewatchError):
    """An incident store that cannot be opened, read or written."""


def migrate(database: sqlite3.Connection, path: Path) -> None:
    """Bring a store of any earlier version up to this build's, each step all or nothing. Raises StoreError."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StoreError(
            f"incident store {path}: schema {version}, this build knows {len(MIGRATIONS)}: upgrade stagewatch"
        )
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        database.executescript(f"BEGIN; {script} PRAGMA user_version = {number}; COMMIT;")
