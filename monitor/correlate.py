"""Correlation: findings in, incidents out. One incident per request and cause.

Findings come in the order things happened, so the first one names the cause and what follows from it
joins the same incident. Severity only rises; when it does, the incident is dated at the step that raised it.
What was different is frozen at the first critical step: what happens to a broken request later says
nothing about the cause, and only moves ``last_bad_step``.

A cause that is no single request's (a batch that differs, a call that never returns) is one incident of the
engine. Requests that it harms afterwards are named in its chain. And where one cause breaks hundreds of requests at
once, those beyond `FLOOD_MAX` share an incident that counts them.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from stagewatch.monitor.checks.base import Finding
from stagewatch.monitor.incidents import Incident, Link, Severity, incident_id
from stagewatch.monitor.states import ChangeKind
from stagewatch.monitor.windows import Group

INCIDENTS_MAX: Final = 10_000
"""Incidents of one group kept open to further findings; beyond it the oldest are closed."""
ALIASES_MAX: Final = 50_000
HARMED_TOLD_MAX: Final = 8
"""Requests named in the chain of an incident that is no single request's."""
FLOOD_MAX: Final = 200
"""Incidents of one check and severity that may open within `FLOOD_STEPS`; more share one."""
FLOOD_STEPS: Final = 256
FLOODED_MAX: Final = 100_000

Key = tuple[int, int | str]


@dataclass(slots=True)
class _Open:
    incident: Incident
    opened_step: int
    critical_step: int
    """Step of the first critical finding; 0 before."""
    absolved: bool
    of_step: bool
    """Whether it tells of its step, so that other checks' views of that step belong to it."""
    told: set[tuple[str, Severity]]
    """What the chain says already: each check speaks once per severity."""
    harmed: set[Key] = field(default_factory=set)
    """Requests named in the chain, where the incident is no single request's."""


@dataclass(frozen=True, slots=True)
class Context:
    """What correlation knows beside the finding itself."""

    request_id: str
    last_good_step: Callable[[], int]
    newest_step: int
    now_ns: int


class Correlator:
    """Incidents of one group of ranks."""

    def __init__(self, group: Group) -> None:
        self._group: Final = group
        self._open: OrderedDict[Key, _Open] = OrderedDict()
        self._alias: OrderedDict[Key, _Open] = OrderedDict()
        """Requests and checks whose findings belong to another's incident."""
        self._opened: dict[tuple[str, Severity], deque[int]] = {}
        """Steps of the newest incidents of each check and severity."""
        self._flooded: OrderedDict[tuple[Key, Severity], None] = OrderedDict()

    def is_critical(self, request: int, life: int, step: int) -> bool:
        """Whether a request's incident is critical since a step before ``step``: nothing new can be learned."""
        key = (request, life)
        found = self._find(key)
        if found is None or not 0 < found.critical_step < step:
            return False
        return bool(found.incident.request) or key in found.harmed or len(found.harmed) >= HARMED_TOLD_MAX

    def touch(self, request: int, life: int, step: int) -> Incident | None:
        """A critical request is still bad at ``step``; return its incident."""
        found = self._find((request, life))
        if found is None or not found.critical_step:
            return None
        if step > found.incident.last_bad_step:
            found.incident = msgspec.structs.replace(found.incident, last_bad_step=step)
        return found.incident

    def incident_of(self, finding: Finding) -> Incident | None:
        """The incident that a finding opened, joined or repeats; None where only a flood's shared one counts it."""
        found = self._find((finding.request, finding.life) if finding.request else (0, finding.check))
        return None if found is None else found.incident

    def add(self, finding: Finding, context: Context) -> tuple[ChangeKind, Incident] | None:
        """Take a finding; return (kind of change, incident), or None where it only repeats what is known."""
        key: Key = (finding.request, finding.life) if finding.request else (0, finding.check)
        found = self._find(key)
        if found is None and not finding.request:
            found = self._same_step(key, finding)
        if found is not None:
            self._cover(finding, found)
            return self._joined(found, key, finding, context)
        if finding.request and self._floods(key, finding):
            return self._flood(key, finding, context)
        found = self._new(finding, context)
        self._open[key] = found
        if len(self._open) > INCIDENTS_MAX:
            self._open.popitem(last=False)
        self._cover(finding, found)
        return "opened", found.incident

    def current(self) -> list[Incident]:
        """Every incident still open to findings, oldest first."""
        order = sorted(self._open.values(), key=lambda found: (found.opened_step, found.incident.id))
        return [found.incident for found in order]

    # ---- which incident

    def _find(self, key: Key) -> _Open | None:
        return self._open.get(key) or self._alias.get(key)

    def _same_step(self, key: Key, finding: Finding) -> _Open | None:
        """The engine's incident of the same step: two checks see one cause."""
        if not finding.of_step:
            return None
        for (request, _), found in self._open.items():
            if not request and found.of_step and found.incident.last_bad_step == finding.step:
                self._name_alias(key, found)
                return found
        return None

    def _cover(self, finding: Finding, found: _Open) -> None:
        for covered in finding.covers:
            if covered not in self._open:
                self._name_alias(covered, found)

    def _name_alias(self, key: Key, found: _Open) -> None:
        self._alias[key] = found
        if len(self._alias) > ALIASES_MAX:
            self._alias.popitem(last=False)

    # ---- floods

    def _floods(self, key: Key, finding: Finding) -> bool:
        if (key, finding.severity) in self._flooded:
            return True
        steps = self._opened.setdefault((finding.check, finding.severity), deque(maxlen=FLOOD_MAX))
        if len(steps) == FLOOD_MAX and steps[0] > finding.step - FLOOD_STEPS:
            return True
        steps.append(finding.step)
        return False

    def _flood(self, key: Key, finding: Finding, context: Context) -> tuple[ChangeKind, Incident] | None:
        shared: Key = (0, f"{finding.check} {finding.severity.word}")
        known = (key, finding.severity) in self._flooded
        found = self._open.get(shared)
        opened = found is None
        if found is None:
            whole = replace(finding, request=0, life=0, values=())
            found = self._new(whole, replace(context, request_id="", last_good_step=lambda: 0))
            found.of_step = False  # it stands for requests, not for what the engine did
            self._open[shared] = found
        if not known:
            self._flooded[key, finding.severity] = None
            if len(self._flooded) > FLOODED_MAX:
                self._flooded.popitem(last=False)
            found.harmed.add(key)
            if finding.absolves:
                # Else what follows from it would be told as if it had a cause of its own, and somebody be blamed.
                self._name_alias(key, found)
        agreed = tuple(rank for rank in found.incident.blamed if rank in finding.blamed)
        found.incident = msgspec.structs.replace(
            found.incident,
            blamed=agreed,
            ranks=agreed or _union(found.incident.ranks, finding.ranks),
            last_bad_step=max(found.incident.last_bad_step, finding.step),
            chain=(
                found.incident.chain[0],
                Link(
                    found.incident.first_bad_step,
                    f"and so {len(found.harmed)} more requests than are told one by one",
                ),
            ),
        )
        if known:
            return None
        return ("opened" if opened else "updated"), found.incident

    # ---- what it says

    def _new(self, finding: Finding, context: Context) -> _Open:
        return _Open(
            self._incident(finding, context),
            finding.step,
            _critical(finding),
            finding.absolves,
            finding.of_step,
            {(finding.check, finding.severity)},
        )

    def _incident(self, finding: Finding, context: Context) -> Incident:
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
            last_good_step=context.last_good_step(),
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

    def _joined(
        self, found: _Open, key: Key, finding: Finding, context: Context
    ) -> tuple[ChangeKind, Incident] | None:
        incident = found.incident
        if finding.request and not incident.request:
            return self._harmed(found, key, finding, context)
        if found.critical_step and finding.step > found.critical_step:
            if finding.step > incident.last_bad_step:
                found.incident = msgspec.structs.replace(incident, last_bad_step=finding.step)
            return None
        raised = finding.severity > incident.severity
        if found.absolved:
            finding = replace(finding, blamed=())
        elif finding.check != incident.check and not finding.request:
            # Another check's view of what the engine did at this step: the first one named the cause.
            finding = replace(finding, blamed=incident.blamed, ranks=incident.ranks)
        chain = incident.chain
        if (finding.check, finding.severity) not in found.told:
            found.told.add((finding.check, finding.severity))
            chain = (*chain, Link(finding.step, finding.text))
        changes: dict[str, Any] = {
            "chain": chain,
            "last_bad_step": max(incident.last_bad_step, finding.step),
        }
        if raised:
            changes |= {
                "severity": finding.severity,
                "first_bad_step": finding.step,
                "last_good_step": context.last_good_step(),
                "ranks": finding.ranks,
                "blamed": finding.blamed,
                "fields": finding.fields,
                "values": finding.values,
                "latency_steps": context.newest_step - finding.step,
                "first_bad_ns": finding.t_ns,
                "raised_ns": context.now_ns,
            }
            if finding.check != incident.check and not finding.request:
                changes |= {
                    "first_bad_step": incident.first_bad_step,
                    "last_good_step": incident.last_good_step,
                }
        elif finding.severity == incident.severity:
            blamed = _union(incident.blamed, finding.blamed)
            changes |= {
                "blamed": blamed,
                "ranks": blamed or _union(incident.ranks, finding.ranks),
            }
            if finding.step == incident.first_bad_step:
                changes |= {
                    "fields": tuple(dict.fromkeys((*incident.fields, *finding.fields))),
                    "values": (*incident.values, *(v for v in finding.values if v not in incident.values)),
                }
        changed = msgspec.structs.replace(incident, **changes)
        if changed == incident:
            return None
        found.incident = changed
        found.critical_step = found.critical_step or _critical(finding)
        return ("raised" if raised else "updated"), found.incident

    def _harmed(
        self, found: _Open, key: Key, finding: Finding, context: Context
    ) -> tuple[ChangeKind, Incident] | None:
        """A request suffers from what the whole engine did: say so, and blame nobody anew."""
        incident = found.incident
        changes: dict[str, Any] = {"last_bad_step": max(incident.last_bad_step, finding.step)}
        raised = finding.severity > incident.severity
        if raised:
            changes |= {"severity": finding.severity, "raised_ns": context.now_ns}
        if key not in found.harmed and len(found.harmed) < HARMED_TOLD_MAX:
            found.harmed.add(key)
            link = Link(finding.step, f"request {context.request_id}: {finding.text}")
            changes["chain"] = (*incident.chain, link)
        changed = msgspec.structs.replace(incident, **changes)
        if changed == incident:
            return None
        found.incident = changed
        found.critical_step = found.critical_step or _critical(finding)
        if raised:
            return "raised", changed
        return ("updated", changed) if "chain" in changes else None


def _critical(finding: Finding) -> int:
    return finding.step if finding.severity is Severity.CRITICAL else 0


def _union(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*one, *other}))
