"""Correlation: findings in, incidents out. One incident per request and cause.

Findings come in the order things happened, so the first one names the cause and what follows from it
joins the same incident. Severity only rises; when it does, the incident is dated at the step that raised it.
What was different is frozen at the first critical step: what happens to a broken request later says
nothing about the cause, and only moves ``last_bad_step``.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from stagewatch.monitor.checks.base import Finding
from stagewatch.monitor.incidents import Incident, Link, Severity, incident_id
from stagewatch.monitor.states import ChangeKind
from stagewatch.monitor.windows import Group

INCIDENTS_MAX: Final = 10_000
"""Incidents of one group kept open to further findings; beyond it the oldest are closed."""


@dataclass(slots=True)
class _Open:
    incident: Incident
    generation: int
    critical_step: int
    """Step of the first critical finding; 0 before."""
    absolved: bool
    told: set[tuple[str, Severity]]
    """What the chain says already: each check speaks once per severity."""


@dataclass(frozen=True, slots=True)
class Context:
    """What correlation knows beside the finding itself."""

    request_id: str
    last_good_step: int
    newest_step: int
    now_ns: int


class Correlator:
    """Incidents of one group of ranks."""

    def __init__(self, group: Group) -> None:
        self._group: Final = group
        self._open: OrderedDict[tuple[int, int | str], _Open] = OrderedDict()

    def is_critical(self, request: int, generation: int, step: int) -> bool:
        """Whether a request's incident is critical since a step before ``step``: nothing new can be learned."""
        found = self._open.get((request, generation))
        return found is not None and 0 < found.critical_step < step

    def touch(self, request: int, generation: int, step: int) -> None:
        """A critical request is still bad at ``step``."""
        found = self._open[(request, generation)]
        if step > found.incident.last_bad_step:
            found.incident = msgspec.structs.replace(found.incident, last_bad_step=step)

    def add(self, finding: Finding, context: Context) -> tuple[ChangeKind, Incident] | None:
        """Take a finding; return (kind of change, incident), or None where it only repeats what is known."""
        key: tuple[int, int | str] = (
            (finding.request, finding.generation) if finding.request else (0, finding.check)
        )
        found = self._open.get(key)
        if found is None:
            found = _Open(
                self._opened(finding, context),
                finding.generation,
                _critical(finding),
                finding.absolves,
                {(finding.check, finding.severity)},
            )
            self._open[key] = found
            if len(self._open) > INCIDENTS_MAX:
                self._open.popitem(last=False)
            return "opened", found.incident
        return self._joined(found, finding, context)

    def current(self) -> list[Incident]:
        """Every incident still open to findings, oldest first."""
        return [found.incident for found in self._open.values()]

    def _opened(self, finding: Finding, context: Context) -> Incident:
        group = self._group
        return Incident(
            id=incident_id(group.instance, group.dp, finding.check, context.request_id, finding.step),
            deployment=group.deployment,
            instance=group.instance,
            dp=group.dp,
            check=finding.check,
            severity=finding.severity,
            request=context.request_id,
            first_bad_step=finding.step,
            last_good_step=context.last_good_step,
            last_bad_step=finding.step,
            ranks=finding.ranks,
            blamed=finding.blamed,
            fields=finding.fields,
            chain=(Link(finding.step, finding.text),),
            values=finding.values,
            remedy=finding.remedy,
            latency_steps=context.newest_step - finding.step,
            first_bad_ns=finding.t_ns,
            raised_ns=context.now_ns,
        )

    def _joined(self, found: _Open, finding: Finding, context: Context) -> tuple[ChangeKind, Incident] | None:
        incident = found.incident
        if found.critical_step and finding.step > found.critical_step:
            if finding.step > incident.last_bad_step:
                found.incident = msgspec.structs.replace(incident, last_bad_step=finding.step)
            return None
        raised = finding.severity > incident.severity
        if found.absolved:
            finding = replace(finding, blamed=())
        chain = incident.chain
        if (finding.check, finding.severity) not in found.told:
            found.told.add((finding.check, finding.severity))
            chain = (*chain, Link(finding.step, finding.text))
        changes: dict[str, object] = {
            "chain": chain,
            "last_bad_step": max(incident.last_bad_step, finding.step),
        }
        if raised:
            changes |= {
                "severity": finding.severity,
                "first_bad_step": finding.step,
                "last_good_step": context.last_good_step,
                "ranks": finding.ranks,
                "blamed": finding.blamed,
                "fields": finding.fields,
                "values": finding.values,
                "latency_steps": context.newest_step - finding.step,
                "first_bad_ns": finding.t_ns,
                "raised_ns": context.now_ns,
            }
        elif finding.severity == incident.severity:
            blamed = _union(incident.blamed, finding.blamed)
            changes |= {
                "blamed": blamed,
                "ranks": blamed or _union(incident.ranks, finding.ranks),
                "fields": tuple(dict.fromkeys((*incident.fields, *finding.fields))),
                "values": (*incident.values, *(v for v in finding.values if v not in incident.values)),
            }
        changed = msgspec.structs.replace(incident, **changes)
        if changed == incident:
            return None
        found.incident = changed
        found.critical_step = found.critical_step or _critical(finding)
        return ("raised" if raised else "updated"), found.incident


def _critical(finding: Finding) -> int:
    return finding.step if finding.severity is Severity.CRITICAL else 0


def _union(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*one, *other}))
