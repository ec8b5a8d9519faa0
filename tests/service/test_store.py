"""The store: incidents grow and never shrink, however often they are told."""

import sqlite3
from pathlib import Path

import msgspec
import pytest

from stagewatch.monitor.incidents import Incident, Link, Severity, Window
from stagewatch.monitor.retention import Span
from stagewatch.monitor.schema import MIGRATIONS, StoreError
from stagewatch.monitor.store import (
    EVENTS_KEPT,
    PAGE_MAX,
    PIN_AFTER_NS,
    PIN_BEFORE_NS,
    Query,
    Store,
    Told,
)


def incident(
    number: int = 1, severity: Severity = Severity.NOTICE, last: int = 5, **changes: object
) -> Incident:
    made = Incident(
        id=f"{number:016x}",
        deployment="prod",
        instance="life-1",
        dp=0,
        check="excluded-row",
        severity=severity,
        request=f"request-{number}",
        first_bad_step=5,
        last_good_step=4,
        last_bad_step=last,
        ranks=(0,),
        blamed=(),
        fields=("mask",),
        chain=(Link(5, "dropped"),),
        values=(),
        remedy="upgrade",
        latency_steps=1,
        first_bad_ns=100,
        raised_ns=200,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "incidents.sqlite3"


@pytest.fixture
def store(path: Path) -> Store:
    return Store(path)


class TestGrowth:
    def test_an_incident_is_opened_raised_and_updated(self, store: Store) -> None:
        told = [
            incident(),
            incident(last=6),
            incident(severity=Severity.CRITICAL, last=6),
            incident(severity=Severity.CRITICAL, last=7),
        ]
        events = [event for found in told for event in store.apply([found])]
        assert [(event.number, event.kind) for event in events] == [
            (1, "opened"),
            (2, "updated"),
            (3, "raised"),
            (4, "updated"),
        ]
        shown = store.get(incident().id)
        assert shown is not None
        assert (shown.severity, shown.last_bad_step, shown.number) == ("critical", 7, 1)

    def test_a_replay_of_its_history_tells_nothing_anew(self, store: Store) -> None:
        history = [
            incident(),
            incident(severity=Severity.WARNING),
            incident(severity=Severity.CRITICAL, last=9),
        ]
        store.apply(history)
        before = store.get(incident().id)
        assert store.apply(history) == []
        assert store.get(incident().id) == before

    def test_it_survives_a_restart(self, store: Store, path: Path) -> None:
        store.apply([incident(1), incident(2)])
        found = store.find(Query())
        store.close()
        again = Store(path)
        assert again.find(Query()) == found
        assert again.last_event() == 2

    def test_all_or_none_of_a_group_is_stored(self, store: Store) -> None:
        unstorable = incident(2, deployment=None)
        with pytest.raises(StoreError):
            store.apply([incident(1), unstorable])
        assert store.find(Query()) == []


class TestFind:
    def test_newest_first_in_pages(self, store: Store) -> None:
        store.apply([incident(number) for number in range(1, 8)])
        first = store.find(Query(limit=3))
        assert [found.number for found in first] == [7, 6, 5]
        assert [found.number for found in store.find(Query(limit=3, before=5))] == [4, 3, 2]

    def test_the_largest_page_shows_that_there_is_more(self, store: Store) -> None:
        """Whoever pages asks for one more than the page."""
        store.apply([incident(number) for number in range(1, PAGE_MAX + 3)])
        assert len(store.find(Query(limit=PAGE_MAX + 1))) == PAGE_MAX + 1
        assert len(store.find(Query(limit=PAGE_MAX + 100))) == PAGE_MAX + 1

    def test_an_incident_of_another_build_is_a_store_error(self, store: Store, path: Path) -> None:
        store.apply([incident(1)])
        with sqlite3.connect(path) as other:
            other.execute("UPDATE incidents SET body = CAST('{}' AS BLOB)")
        with pytest.raises(StoreError, match="incident 1 in the store cannot be read by this build"):
            store.find(Query())

    @pytest.mark.parametrize(
        ("query", "numbers"),
        [
            (Query(severity=Severity.WARNING), [3, 2]),
            (Query(deployment="test"), [3]),
            (Query(instance="life-2"), [2]),
            (Query(check="position-drift"), [2]),
            (Query(request="request-1"), [1]),
            (Query(request="' OR 1=1 --"), []),
        ],
    )
    def test_filters(self, store: Store, query: Query, numbers: list[int]) -> None:
        store.apply(
            [
                incident(1),
                incident(2, Severity.WARNING, instance="life-2", check="position-drift"),
                incident(3, Severity.CRITICAL, deployment="test"),
            ]
        )
        assert [found.number for found in store.find(query)] == numbers


class TestEvents:
    def test_they_carry_the_incident_and_resume_by_number(self, store: Store) -> None:
        store.apply([incident(1), incident(2)])
        ((number, body),) = store.events_after(1)
        told = msgspec.json.decode(body, type=Told)
        assert (number, told.kind, told.incident.request) == (2, "opened", "request-2")

    def test_the_oldest_go(self, store: Store) -> None:
        store.apply([incident(number) for number in range(1, EVENTS_KEPT + 11)])
        assert store.events_after(0, 1)[0][0] == 11


class TestFile:
    def test_it_is_private(self, store: Store, path: Path) -> None:
        assert path.stat().st_mode & 0o777 == 0o600

    def test_a_newer_schema_is_refused_with_the_way_out(self, store: Store, path: Path) -> None:
        store.close()
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
        with pytest.raises(StoreError, match="schema 99, this build knows 3: upgrade stagewatch"):
            Store(path)

    def test_a_file_that_is_no_database_is_an_error_of_one_line(self, path: Path) -> None:
        path.write_bytes(b"not a database at all, but long enough to look at" * 100)
        with pytest.raises(StoreError, match="cannot be used: file is not a database") as caught:
            Store(path)
        assert "\n" not in str(caught.value)


def at_schema(path: Path, version: int) -> sqlite3.Connection:
    """A store as a build with so many migrations made it."""
    database = sqlite3.connect(path, isolation_level=None)
    for number, script in enumerate(MIGRATIONS[:version], 1):
        database.executescript(f"BEGIN; {script} PRAGMA user_version = {number}; COMMIT;")
    return database


class TestWindows:
    WINDOW = Window("dp0.pp0.tp0", "node-1", "/dev/shm/stagewatch/frozen/x", 3, 9)  # noqa: S108  # a path to be told

    def test_an_incident_names_where_they_lie_after_a_restart_too(self, store: Store, path: Path) -> None:
        store.apply([incident(7)])
        store.add_window(incident(7).id, self.WINDOW)
        store.close()
        shown = Store(path).get(incident(7).id)
        assert shown is not None
        assert shown.windows == (self.WINDOW,)

    def test_a_rank_has_one_and_the_newest_is_told(self, store: Store) -> None:
        store.apply([incident(7)])
        again = msgspec.structs.replace(self.WINDOW, path="/elsewhere")
        other = msgspec.structs.replace(self.WINDOW, rank="dp0.pp1.tp0", path="", failure="the disk is full")
        for window in (other, self.WINDOW, again):
            store.add_window(incident(7).id, window)
        shown = store.get(incident(7).id)
        assert shown is not None
        assert shown.windows == (again, other)

    def test_recent_critical_incidents_are_found(self, store: Store) -> None:
        critical = [incident(number, Severity.CRITICAL) for number in (1, 2)]
        store.apply([*critical, incident(3)])
        assert store.critical_since(0) == critical[::-1]
        assert store.critical_since(1 << 62) == []


class TestMigrations:
    @pytest.mark.parametrize("version", range(len(MIGRATIONS)))
    def test_every_earlier_schema_is_brought_up_with_what_it_holds(self, path: Path, version: int) -> None:
        # GIVEN a store of an earlier build with an incident in it
        database = at_schema(path, version)
        if version >= 1:
            body = msgspec.json.encode(incident(7))
            database.execute(
                "INSERT INTO incidents (id, deployment, instance, check_name, severity, request, weight, body)"
                " VALUES (?, 'prod', 'life-1', 'excluded-row', 1, 'request-7', '', ?)",
                (incident(7).id, body),
            )
        if version >= 2:
            database.execute("UPDATE incidents SET opened_ns = 200")
        database.close()
        # WHEN this build opens it, twice
        Store(path).close()
        store = Store(path)
        # THEN it is there, pinned by the time it told, and grows on
        assert [found.request for found in store.find(Query())] == (["request-7"] if version else [])
        if version:
            assert Span(200 - PIN_BEFORE_NS, 200 + PIN_AFTER_NS) in store.pins()
            assert [e.kind for e in store.apply([incident(7, Severity.CRITICAL)])] == ["raised"]

    def test_a_body_of_another_build_does_not_keep_the_store_shut(self, path: Path) -> None:
        database = at_schema(path, 1)
        database.execute(
            "INSERT INTO incidents (id, deployment, instance, check_name, severity, request, weight, body)"
            " VALUES ('x', '', '', '', 1, '', '', CAST('no json' AS BLOB))"
        )
        database.close()
        assert Store(path).pins() == [Span(-PIN_BEFORE_NS, PIN_AFTER_NS)] * 2

    def test_a_migration_that_was_interrupted_is_made_again(self, path: Path) -> None:
        """SQLite's own transactions are DDL, too: whatever the moment, the schema is the old or the new one."""
        at_schema(path, 1).close()
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("BEGIN")
        database.execute("ALTER TABLE incidents ADD COLUMN opened_ns INTEGER NOT NULL DEFAULT 0")
        database.close()  # as a killed process leaves it: nothing was committed
        assert Store(path).apply([incident()])[0].kind == "opened"


HOUR = 3600 * 10**9


class TestPrune:
    def filled(self, path: Path, *ages_h: float) -> Store:
        store = Store(path)
        store.apply([incident(number) for number in range(1, len(ages_h) + 1)])
        with sqlite3.connect(path) as database:
            for number, age_h in enumerate(ages_h, 1):
                database.execute(
                    "UPDATE incidents SET changed_ns = ? WHERE number = ?",
                    (int((1000 - age_h) * HOUR), number),
                )
        return store

    def left(self, store: Store, most: int, keep_h: float = 0) -> list[int]:
        store.prune(most, keep_h * 3600, 1000 * HOUR)
        return [found.number for found in store.find(Query())]

    def test_those_changed_longest_ago_go(self, path: Path) -> None:
        store = self.filled(path, 5, 9, 3, 7)
        assert self.left(store, 2) == [3, 1]
        assert [store.prune(most, 0, 1000 * HOUR) for most in (2, 1, 1)] == [0, 1, 0]

    def test_those_too_old_go_though_there_is_room(self, path: Path) -> None:
        assert self.left(self.filled(path, 5, 9, 3, 7), 100, 6) == [3, 1]

    def test_what_may_still_grow_stays(self, path: Path) -> None:
        assert self.left(self.filled(path, 5, 0.9, 0.5, 0.1), 2) == [4, 3, 2]

    def test_but_not_beyond_twice_the_bound(self, path: Path) -> None:
        assert self.left(self.filled(path, 0.5, 0.4, 0.3, 0.2, 0.1), 2) == [5, 4, 3, 2]

    def test_pins_follow(self, path: Path) -> None:
        store = self.filled(path, 5, 9)
        assert self.left(store, 1) == [1]
        assert {(span.last_ns - PIN_AFTER_NS) for span in store.pins()} == {200, 995 * HOUR}


class TestJudged:
    def test_it_only_advances_and_survives(self, store: Store, path: Path) -> None:
        assert store.judged_ns() == 0
        store.apply([incident(1)], 50)
        store.apply([incident(2)], 40)
        store.close()
        assert Store(path).judged_ns() == 50

    def test_it_does_not_advance_with_what_could_not_be_stored(self, store: Store) -> None:
        with pytest.raises(StoreError):
            store.apply([incident(1), incident(2, deployment=None)], 50)
        assert store.judged_ns() == 0
