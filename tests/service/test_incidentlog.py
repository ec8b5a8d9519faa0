"""Incidents in the collector's log."""

import logging

import msgspec
import pytest
from test_store import incident

from stagewatch.monitor.incidentlog import LINES_MAX, log_incidents
from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.store import Event


def event(found: Incident, kind: str = "opened") -> Event:
    return Event(1, kind, b"", found)  # type: ignore[arg-type]  # the kinds are plain strings here


def lines(caplog: pytest.LogCaptureFixture, *events: Event) -> list[str]:
    with caplog.at_level(logging.INFO, "stagewatch"):
        log_incidents(events)
    return [record.getMessage() for record in caplog.records]


def made(severity: Severity, **fields: object) -> Incident:
    return msgspec.structs.replace(incident(), severity=severity, **fields)


def test_a_warning_or_worse_is_one_line_that_names_request_step_and_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = made(Severity.CRITICAL, request="r1", first_bad_step=32, blamed=(0,))
    (line,) = lines(caplog, event(told))
    assert line.startswith(
        f"critical {told.check}: request 'r1' of engine {told.instance}, first bad step 32, rank 0"
    )
    assert told.id in line


def test_notices_and_mere_updates_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog, event(made(Severity.NOTICE)), event(made(Severity.CRITICAL), "updated")) == []


def test_a_hostile_request_id_stays_in_its_line(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines(caplog, event(made(Severity.WARNING, request="a\ncritical: all is well\x1b[2J")))
    assert "\n" not in line
    assert "\x1b" not in line


def test_a_flood_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    told = lines(caplog, *[event(made(Severity.CRITICAL))] * (LINES_MAX + 7))
    assert (len(told), told[-1]) == (LINES_MAX + 1, "and 7 more incidents: see /v1/incidents")
