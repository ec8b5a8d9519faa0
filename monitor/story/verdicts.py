"""What a whole replay found: verdicts by kind, and incidents, worst first."""

from collections.abc import Sequence
from typing import Final

import msgspec

from stagewatch.monitor.engine import CONSISTENT, DIVERGED
from stagewatch.monitor.incidents import Report, Severity, report
from stagewatch.monitor.replay import Missing
from stagewatch.monitor.sources import Recordings
from stagewatch.monitor.text import Style, incident_text, wrapped
from stagewatch.monitor.watch import Watch

INDETERMINATE: Final = "INDETERMINATE"
_RANK: Final = {severity.word: int(severity) for severity in Severity}


class Summary(msgspec.Struct, frozen=True):
    """What ``replay`` prints as JSON: nothing in it differs from run to run, or from live to replay."""

    steps: int
    rows: int
    verdicts: dict[str, int]
    indeterminate: dict[str, int]
    """Rows of the INDETERMINATE verdict by reason."""
    incidents: list[Report]


def reports(watch: Watch) -> list[Report]:
    """The watch's incidents, worst first, without anything that differs from run to run."""
    found = [report(incident) for incident in watch.incidents()]
    return sorted(found, key=lambda i: (-_RANK[i.severity], i.instance, i.dp, i.first_bad_step, i.id))


def summary(watch: Watch, incidents: Sequence[Report]) -> Summary:
    """The watch's verdicts, beside the incidents that are to be told."""
    counts = {CONSISTENT: 0, DIVERGED: 0, INDETERMINATE: 0}
    reasons: dict[str, int] = {}
    for state in watch.states():
        for verdict, rows in state.verdicts.items():
            if verdict in counts:
                counts[verdict] += rows
            else:
                counts[INDETERMINATE] += rows
                reasons[verdict] = reasons.get(verdict, 0) + rows
    return Summary(watch.steps(), sum(counts.values()), counts, reasons, list(incidents))


def why_nothing(found: Summary) -> str:
    """Why no row was compared."""
    if not found.rows:
        return "no step is recorded: give recordings of a run that served requests"
    return f"{_reasons(found)}: give the recordings of all ranks of the same steps"


def _reasons(found: Summary) -> str:
    return ", ".join(
        f"{rows} {reason.replace('_', ' ')}" for reason, rows in sorted(found.indeterminate.items())
    )


def missing_text(missing: Missing, recordings: Recordings) -> list[str]:
    """What of the recordings could not be used, in lines."""
    told: list[str] = []
    if missing.damaged_bytes or missing.unreadable_entries:
        told.append(
            f"journal: {missing.damaged_bytes} bytes are torn or damaged and "
            f"{missing.unreadable_entries} entries cannot be read: left out"
        )
    return told + [why for source in recordings.sources for why in source.left_out()]


def summary_text(found: Summary, style: Style, *, names_engine: bool) -> str:
    """Every incident, then the verdicts."""
    lines: list[str] = []
    for each in found.incidents:
        lines += [incident_text(each, style, names_engine=names_engine), ""]
    counts = ", ".join(f"{rows} {verdict}" for verdict, rows in found.verdicts.items())
    lines.append(wrapped(f"{found.steps} steps, {found.rows} rows: {counts}.", style))
    if found.indeterminate:
        lines.append(wrapped(f"Not comparable: {_reasons(found)}.", style))
    severities = [each.severity for each in found.incidents]
    told = ", ".join(
        f"{severities.count(s.word)} {s.word}" for s in reversed(Severity) if s.word in severities
    )
    lines.append(wrapped(f"Incidents: {told or 'none'}.", style))
    return "\n".join(lines)
