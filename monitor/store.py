"""Where incidents live: SQLite, one row an incident, and the numbered events of the event stream.

Incidents only grow, and the store holds to that: what says less than the row already there is left out.
So a journal may be replayed into the store any number of times, and no incident is lost or told twice.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from stagewatch.monitor.incidents import Incident, Report, Severity, Window, report
from stagewatch.monitor.retention import Span
from stagewatch.monitor.schema import StoreError, migrate

EVENTS_KEPT: Final = 10_000
PAGE_MAX: Final = 500
PINS_MAX: Final = 10_000
PIN_BEFORE_NS: Final = 60 * 10**9
PIN_AFTER_NS: Final = 30 * 10**9
"""Around the opening and the last change of an incident, the journal is kept for so long."""
SETTLED_NS: Final = 3600 * 10**9
"""An incident that did not change for so long is not expected to."""

_PRUNE: Final = """
    WITH ranked AS (SELECT changed_ns FROM incidents ORDER BY changed_ns DESC, number DESC)
    DELETE FROM incidents WHERE changed_ns < ?
        OR (changed_ns <= (SELECT changed_ns FROM ranked LIMIT 1 OFFSET ?) AND changed_ns < ?)
        OR changed_ns <= (SELECT changed_ns FROM ranked LIMIT 1 OFFSET ?)
    """


class Shown(Report, frozen=True):
    """An incident as the API shows it: the report, and what belongs to the live run alone."""

    number: int
    """Order of arrival in this store; newer is larger."""
    last_bad_step: int
    """The newest bad step when this was last told; later ones that change nothing else are not told."""
    latency_steps: int
    first_bad_ns: int
    raised_ns: int
    windows: tuple[Window, ...] = ()
    """What sidecars kept of it on their nodes, rank by rank; not told by the event stream, which is earlier."""


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
    deployments: frozenset[str] | None = None
    """The only ones to be seen; None for all."""


class Store:
    """Incidents in one file. Any thread may call; raises StoreError."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode=WAL")
            # What was told to people must not be untold by a power cut.
            self._db.execute("PRAGMA synchronous=FULL")
            migrate(self._db, path)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"incident store {path} cannot be used: {error}") from None

    def apply(self, incidents: Iterable[Incident], judged_ns: int = 0) -> list[Event]:
        """Store incidents, all or none; return an event for each that was new or grew.

        With ``judged_ns`` they are everything that was found in evidence that arrived before then.
        """
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    events = [event for found in incidents if (event := self._grow(found)) is not None]
                    if judged_ns:
                        self._db.execute(
                            "INSERT INTO facts VALUES ('judged_ns', ?)"
                            " ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)",
                            (judged_ns,),
                        )
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

    def get(self, incident_id: str, deployments: frozenset[str] | None = None) -> Shown | None:
        """One incident of the deployments that may be seen, all if None; or None."""
        condition, parameters = _only(deployments)
        rows = self._read(
            f"SELECT number, body FROM incidents WHERE id = ? AND {condition}",  # noqa: S608  # a literal and question marks
            (incident_id, *parameters),
        )
        if not rows:
            return None
        return msgspec.structs.replace(_shown(*rows[0]), windows=self._windows(incident_id))

    def find(self, query: Query) -> list[Shown]:
        """At most ``query.limit`` incidents, newest first."""
        condition, allowed = _only(query.deployments)
        conditions = [condition, "severity >= ?"]
        parameters: list[str | int] = [*allowed, int(query.severity)]
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

    def add_window(self, incident_id: str, window: Window) -> None:
        """Remember where a window of an incident lies, in place of what was known of that rank."""
        with self._lock:
            try:
                self._db.execute(
                    "INSERT OR REPLACE INTO windows VALUES (?, ?, ?)",
                    (incident_id, window.rank, msgspec.json.encode(window)),
                )
            except sqlite3.Error as error:
                raise StoreError(f"incident store cannot be written: {error}") from None

    def critical_since(self, since_ns: int) -> list[Incident]:
        """Critical incidents that changed since, newest first; at most `PAGE_MAX`."""
        rows = self._read(
            "SELECT number, body FROM incidents WHERE severity = ? AND changed_ns >= ?"
            " ORDER BY number DESC LIMIT ?",
            (int(Severity.CRITICAL), since_ns, PAGE_MAX),
        )
        found: list[Incident] = []
        for _, body in rows:
            with contextlib.suppress(msgspec.MsgspecError):
                found.append(msgspec.json.decode(body, type=Incident))
        return found

    def events_after(self, number: int, limit: int = 256) -> list[tuple[int, bytes]]:
        """(number, JSON) of the events after ``number``, oldest first."""
        return self._read(
            "SELECT number, body FROM events WHERE number > ? ORDER BY number LIMIT ?", (number, limit)
        )

    def judged_ns(self) -> int:
        """Everything found in evidence that arrived before this is here, or was removed since."""
        rows = self._read("SELECT value, NULL FROM facts WHERE name = 'judged_ns'", ())
        return int(rows[0][0]) if rows else 0

    def knows(self, incident_id: str) -> bool:
        """Whether an incident is here."""
        return bool(self._read("SELECT number, NULL FROM incidents WHERE id = ?", (incident_id,)))

    def pins(self) -> list[Span]:
        """When the evidence of the incidents arrived that are here, newest first: it is to be kept."""
        opened = "SELECT opened_ns, NULL FROM incidents ORDER BY changed_ns DESC LIMIT ?"
        changed = "SELECT changed_ns, NULL FROM incidents ORDER BY changed_ns DESC LIMIT ?"
        rows = self._read(opened, (PINS_MAX,)) + self._read(changed, (PINS_MAX,))
        return [Span(at - PIN_BEFORE_NS, at + PIN_AFTER_NS) for at, _ in rows]

    def prune(self, most: int, keep_s: float, now_ns: int) -> int:
        """Remove the incidents changed longest ago: beyond ``most``, or older than ``keep_s`` (0: any age).

        What changed within `SETTLED_NS` may still grow, and stays up to twice as many.
        """
        settled_ns = now_ns - SETTLED_NS
        oldest_ns = min(now_ns - int(keep_s * 1e9), settled_ns) if keep_s > 0 else 0
        with self._lock:
            try:
                before = self._db.total_changes  # a cursor does not count what begins with WITH
                self._db.execute(_PRUNE, (oldest_ns, most, settled_ns, 2 * most))
                removed = self._db.total_changes - before
                if removed:
                    self._db.execute("DELETE FROM windows WHERE incident NOT IN (SELECT id FROM incidents)")
                return removed
            except sqlite3.Error as error:
                raise StoreError(f"incident store cannot be written: {error}") from None

    def last_event(self) -> int:
        """Number of the newest event; 0 if there was none."""
        rows = self._read("SELECT coalesce(max(number), 0) FROM events", ())
        return int(rows[0][0])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _windows(self, incident_id: str) -> tuple[Window, ...]:
        rows = self._read("SELECT 0, body FROM windows WHERE incident = ? ORDER BY rank", (incident_id,))
        try:
            return tuple(msgspec.json.decode(body, type=Window) for _, body in rows)
        except msgspec.MsgspecError as error:
            raise StoreError(f"a window of incident {incident_id} cannot be read: {error}") from None

    def _read(self, statement: str, parameters: Sequence[str | int]) -> list[tuple[int, bytes]]:
        with self._lock:
            try:
                return self._db.execute(statement, parameters).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"incident store cannot be read: {error}") from None

    def _grow(self, incident: Incident) -> Event | None:
        body, weight, now_ns = msgspec.json.encode(incident), _weight(incident), time.time_ns()
        known = self._db.execute(
            "SELECT number, severity, weight, body FROM incidents WHERE id = ?", (incident.id,)
        ).fetchone()
        kind: Literal["opened", "raised", "updated"]
        if known is None:
            kind = "opened"
            number = self._db.execute(
                "INSERT INTO incidents (id, deployment, instance, check_name, severity, request, weight, body,"
                " opened_ns, changed_ns) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    incident.id,
                    incident.deployment,
                    incident.instance,
                    incident.check,
                    int(incident.severity),
                    incident.request,
                    weight,
                    body,
                    incident.raised_ns or now_ns,
                    now_ns,
                ),
            ).lastrowid
        else:
            number, severity, known_weight, known_body = known
            if weight < known_weight or body == known_body:
                return None
            kind = "raised" if incident.severity > severity else "updated"
            self._db.execute(
                "UPDATE incidents SET severity = ?, weight = ?, body = ?, changed_ns = ? WHERE number = ?",
                (int(incident.severity), weight, body, now_ns, number),
            )
        told = msgspec.json.encode(Told(kind, _show(int(number or 0), incident)))
        event = self._db.execute(
            "INSERT INTO events (kind, at_ns, body) VALUES (?, ?, ?)", (kind, now_ns, told)
        ).lastrowid
        return Event(int(event or 0), kind, told, incident)


def _only(deployments: frozenset[str] | None) -> tuple[str, tuple[str, ...]]:
    """The condition that leaves only these deployments, and its parameters."""
    if deployments is None:
        return "TRUE", ()
    return f"deployment IN ({', '.join('?' * len(deployments))})", tuple(sorted(deployments))


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
