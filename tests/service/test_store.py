"""The store: incidents grow and never shrink, however often they are told."""

import sqlite3
from pathlib import Path

import msgspec
import pytest

from stagewatch.monitor.incidents import Incident, Link, Severity
from stagewatch.monitor.store import EVENTS_KEPT, PAGE_MAX, Query, Store, StoreError, Told


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
        with pytest.raises(StoreError, match="schema 99, this build knows 2: upgrade stagewatch"):
            Store(path)

    def test_a_file_that_is_no_database_is_an_error_of_one_line(self, path: Path) -> None:
        path.write_bytes(b"not a database at all, but long enough to look at" * 100)
        with pytest.raises(StoreError, match="cannot be used: file is not a database") as caught:
            Store(path)
        assert "\n" not in str(caught.value)
