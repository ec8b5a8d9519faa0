"""Incidents: what stagewatch tells people. One per request and cause, dated at its first bad step."""

import enum
from hashlib import blake2b

import msgspec


class Severity(enum.IntEnum):
    """How bad an incident is; it only ever rises."""

    NOTICE = 1
    """Something that a sound engine does not do, so far without consequence."""
    WARNING = 2
    """The request runs on with state that is about to be, or may be, wrong."""
    CRITICAL = 3
    """Ranks hold or feed different values: what this request says from here on is not the model's."""

    @property
    def word(self) -> str:
        """The severity as people, labels and JSON spell it."""
        return self.name.lower()


class Link(msgspec.Struct, frozen=True):
    """One event of the chain that led to an incident."""

    step: int
    text: str


class Value(msgspec.Struct, frozen=True):
    """What one rank held or fed in one field at the first bad step."""

    rank: int
    field: str
    text: str
    """A count, a digest in hex, or raw tokens where the operator opted in."""


class Window(msgspec.Struct, frozen=True):
    """What a sidecar kept of what a ring held around an incident: a dump, on the sidecar's node."""

    rank: str
    host: str
    path: str
    """Empty where there is none."""
    first_step: int
    last_step: int
    failure: str = ""
    """Why there is none."""


class Incident(msgspec.Struct, frozen=True):
    """One request (or engine) and one cause. Steps are ordinals; ranks are numbers in engine order.

    A rank's number is ``(dp * pp_size + pp) * tp_size + tp``.
    """

    id: str
    deployment: str
    instance: str
    dp: int
    check: str
    severity: Severity
    request: str
    """Request id; empty where the cause belongs to no request."""
    first_bad_step: int
    last_good_step: int
    """The last step at which the request was compared and found consistent; 0 if there was none."""
    last_bad_step: int
    ranks: tuple[int, ...]
    """Ranks whose evidence disagrees."""
    blamed: tuple[int, ...]
    """Ranks found wrong by the rules of blame; empty where undecided."""
    fields: tuple[str, ...]
    chain: tuple[Link, ...]
    values: tuple[Value, ...]
    remedy: str
    latency_steps: int
    """Steps between the first bad step and the newest step known when the incident reached this severity."""
    first_bad_ns: int
    """Wall clock of the first bad step on the first rank to record it, nanoseconds since the epoch."""
    raised_ns: int
    """Wall clock when the incident reached this severity; 0 in a replay."""


def incident_id(instance: str, dp: int, check: str, request: str, step: int) -> str:
    """Identifier of an incident: equal for the same evidence, live and in replay. 16 hex digits."""
    text = f"{instance}\n{dp}\n{check}\n{request}\n{step}"
    return blake2b(text.encode(), digest_size=8).hexdigest()


class Report(msgspec.Struct, frozen=True):
    """An incident as the outputs show it: without what depends on the moment, so that replay equals live."""

    id: str
    check: str
    severity: str
    request: str
    first_bad_step: int
    last_good_step: int
    ranks: tuple[int, ...]
    blamed: tuple[int, ...]
    fields: tuple[str, ...]
    chain: tuple[Link, ...]
    values: tuple[Value, ...]
    remedy: str
    instance: str
    dp: int
    deployment: str


def report(incident: Incident) -> Report:
    """The lasting part of an incident."""
    return Report(
        **{name: getattr(incident, name) for name in Report.__struct_fields__ if name != "severity"},
        severity=incident.severity.word,
    )
