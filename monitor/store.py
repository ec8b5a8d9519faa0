"""Where incidents live: SQLite, one row an incident, and the numbered events of the event stream.

Incidents only grow, and the store holds to that: what says less than the row already there is left out.
So a journal may be replayed into the store any number of times, and no incident is lost or told twice.
"""

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.monitor.incidents import Incident, Report, Severity, report

EVENTS_KEPT: Final = 10_000
PAGE_MAX: Final = 500

_MIGRATIONS: Final = (
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
)
"""One script per schema version; `PRAGMA user_version` counts those applied."""


class StoreError(StagewatchError):
    """An incident store that cannot be opened, read or written."""


class Shown(Report, frozen=True):
    """An incident as the API shows it: the report, and what belongs to the live run alone."""

    number: int
    """Order of arrival in this store; newer is larger."""
    last_bad_step: int
    """The newest bad step when this was last told; later ones that change nothing else are not told."""
    latency_steps: int
    first_bad_ns: int
    raised_ns: int


class Told(msgspec.Struct, frozen=True):
    """The data of one event of the stream."""

    kind: Literal["opened", "raised", "updated"]
    incident: Shown


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the stream. ``number`` is its id there."""

    number: int
    kind: Literal["opened", "raised", "updated"]
    body: bytes
    """JSON of a `Told`."""
    incident: Incident


@dataclass(frozen=True, slots=True)
class Query:
    """Which incidents to list, newest first. Empty strings select everything."""

    deployment: str = ""
    instance: str = ""
    check: str = ""
    request: str = ""
    severity: Severity = Severity.NOTICE
    """The least."""
    before: int = 0
    """Only numbers below this; 0 for the newest page."""
    limit: int = 50


class Store:
    """Incidents in one file. Any thread may call; raises StoreError."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._migrate(path)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"incident store {path} cannot be used: {error}") from None

    def apply(self, incidents: Iterable[Incident]) -> list[Event]:
        """Store incidents, all or none; return an event for each that was new or grew."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    events = [event for found in incidents if (event := self._grow(found)) is not None]
                    if events:
                        self._db.execute(
                            "DELETE FROM events WHERE number <= ?", (events[-1].number - EVENTS_KEPT,)
                        )
                    self._db.execute("COMMIT")
                except BaseException:
                    self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StoreError(f"incident store cannot be written: {error}") from None
        return events

    def get(self, incident_id: str) -> Shown | None:
        """One incident, or None."""
        rows = self._read("SELECT number, body FROM incidents WHERE id = ?", (incident_id,))
        return _shown(*rows[0]) if rows else None

    def find(self, query: Query) -> list[Shown]:
        """At most ``query.limit`` incidents, newest first."""
        conditions = ["severity >= ?"]
        parameters: list[str | int] = [int(query.severity)]
        for column, wanted in (
            ("deployment", query.deployment),
            ("instance", query.instance),
            ("check_name", query.check),
            ("request", query.request),
        ):
            if wanted:
                conditions.append(f"{column} = ?")
                parameters.append(wanted)
        if query.before:
            conditions.append("number < ?")
            parameters.append(query.before)
        # One more than a page, so that whoever pages sees whether there is another.
        parameters.append(min(max(query.limit, 1), PAGE_MAX + 1))
        where = " AND ".join(conditions)
        return [
            _shown(*row)
            for row in self._read(
                f"SELECT number, body FROM incidents WHERE {where} ORDER BY number DESC LIMIT ?",  # noqa: S608  # columns are the literals above
                parameters,
            )
        ]

    def events_after(self, number: int, limit: int = 256) -> list[tuple[int, bytes]]:
        """(number, JSON) of the events after ``number``, oldest first."""
        return self._read(
            "SELECT number, body FROM events WHERE number > ? ORDER BY number LIMIT ?", (number, limit)
        )

    def last_event(self) -> int:
        """Number of the newest event; 0 if there was none."""
        rows = self._read("SELECT coalesce(max(number), 0) FROM events", ())
        return int(rows[0][0])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _read(self, statement: str, parameters: Sequence[str | int]) -> list[tuple[int, bytes]]:
        with self._lock:
            try:
                return self._db.execute(statement, parameters).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"incident store cannot be read: {error}") from None

    def _grow(self, incident: Incident) -> Event | None:
        body, weight = msgspec.json.encode(incident), _weight(incident)
        known = self._db.execute(
            "SELECT number, severity, weight, body FROM incidents WHERE id = ?", (incident.id,)
        ).fetchone()
        kind: Literal["opened", "raised", "updated"]
        if known is None:
            kind = "opened"
            number = self._db.execute(
                "INSERT INTO incidents (id, deployment, instance, check_name, severity, request, weight, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    incident.id,
                    incident.deployment,
                    incident.instance,
                    incident.check,
                    int(incident.severity),
                    incident.request,
                    weight,
                    body,
                ),
            ).lastrowid
        else:
            number, severity, known_weight, known_body = known
            if weight < known_weight or body == known_body:
                return None
            kind = "raised" if incident.severity > severity else "updated"
            self._db.execute(
                "UPDATE incidents SET severity = ?, weight = ?, body = ? WHERE number = ?",
                (int(incident.severity), weight, body, number),
            )
        told = msgspec.json.encode(Told(kind, _show(int(number or 0), incident)))
        event = self._db.execute(
            "INSERT INTO events (kind, at_ns, body) VALUES (?, ?, ?)", (kind, time.time_ns(), told)
        ).lastrowid
        return Event(int(event or 0), kind, told, incident)

    def _migrate(self, path: Path) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > len(_MIGRATIONS):
            raise StoreError(
                f"incident store {path}: schema {version}, this build knows {len(_MIGRATIONS)}: upgrade stagewatch"
            )
        for number, script in enumerate(_MIGRATIONS[version:], version + 1):
            self._db.executescript(f"BEGIN; {script} PRAGMA user_version = {number}; COMMIT;")


def _weight(incident: Incident) -> str:
    """How much an incident says, as a string that sorts: severity, then its last step, then its evidence."""
    told = sum(map(len, (incident.chain, incident.values, incident.ranks, incident.fields)))
    return f"{int(incident.severity)}.{incident.last_bad_step:020d}.{told:08d}"


def _show(number: int, incident: Incident) -> Shown:
    lasting = report(incident)
    return Shown(
        **{name: getattr(lasting, name) for name in Report.__struct_fields__},
        number=number,
        last_bad_step=incident.last_bad_step,
        latency_steps=incident.latency_steps,
        first_bad_ns=incident.first_bad_ns,
        raised_ns=incident.raised_ns,
    )


def _shown(number: int, body: bytes) -> Shown:
    try:
        return _show(number, msgspec.json.decode(body, type=Incident))
    except msgspec.MsgspecError as error:
        raise StoreError(f"incident {number} in the store cannot be read by this build: {error}") from None
