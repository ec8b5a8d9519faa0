"""Incidents in the collector's log: one line each, for whoever reads logs and nothing else."""

import logging
from collections.abc import Iterable
from typing import Final

from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.store import Event

LINES_MAX: Final = 20
"""Lines written for incidents that come at once; the rest are counted in one more."""

log = logging.getLogger("stagewatch")


def log_incidents(events: Iterable[Event]) -> None:
    """Write what was opened or raised, at warning or above."""
    told = [e.incident for e in events if e.kind != "updated" and e.incident.severity >= Severity.WARNING]
    for incident in told[:LINES_MAX]:
        log.warning("%s", line_of(incident))
    if len(told) > LINES_MAX:
        log.warning("and %d more incidents: see /v1/incidents", len(told) - LINES_MAX)


def line_of(incident: Incident) -> str:
    """One incident in one line. Request ids come from clients, so they are quoted."""
    about = f"request {incident.request!a}" if incident.request else "the whole engine"
    wrong = (
        f"rank {', '.join(map(str, incident.blamed))} is wrong" if incident.blamed else "no rank is blamed"
    )
    return (
        f"{incident.severity.word} {incident.check}: {about} of engine {incident.instance}, "
        f"first bad step {incident.first_bad_step}, {wrong} (incident {incident.id})"
    )
