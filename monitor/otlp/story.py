"""An incident as OpenTelemetry tells it: one log event, and a trace of the steps around its first bad one.

The ids of a trace and its spans follow from the incident's id, so log event, trace and the exemplars of the latency
histogram point to one another without knowing of each other. What ranks held, digests or raw, is in neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from statistics import median
from typing import Final

from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from stagewatch.agents.identity import Rank
from stagewatch.monitor.incidentlog import line_of
from stagewatch.monitor.incidents import Incident, Severity
from stagewatch.monitor.states import StepSeen

EVENT_NAME: Final = "stagewatch.incident"
SCOPE: Final = InstrumentationScope("stagewatch")
STEP_NS_MIN: Final = 1000
"""Shown length of a step of which nothing is known but its beginning."""
_SEVERITIES: Final = {
    Severity.NOTICE: SeverityNumber.INFO2,
    Severity.WARNING: SeverityNumber.WARN,
    Severity.CRITICAL: SeverityNumber.ERROR2,
}
"""As OpenTelemetry maps syslog's notice, warning and critical (logs data model, appendix B)."""

Attributes = dict[str, str | bool | int | tuple[int, ...] | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Told:
    """An incident to be told, with what surrounds it."""

    incident: Incident
    engine: str
    """The engine's name: ``vllm``, ``lab``; empty if unknown."""
    steps: tuple[StepSeen, ...] = ()


def request_context(incident: Incident) -> SpanContext:
    """Where the incident's request span is found."""
    return SpanContext(
        int.from_bytes(_hashed(16, "trace", incident.id)),
        _span_id(incident, "request"),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def context_of(incident: Incident) -> Context:
    """The context in which measurements and log events about the incident are made."""
    return trace.set_span_in_context(trace.NonRecordingSpan(request_context(incident)))


def log_record(told: Told, resource: Resource) -> ReadableLogRecord:
    """The incident as a log event."""
    incident = told.incident
    record = LogRecord(
        timestamp=incident.raised_ns or incident.first_bad_ns or None,
        context=context_of(incident),
        severity_text=incident.severity.word,
        severity_number=_SEVERITIES[incident.severity],
        body=line_of(incident),
        attributes={**attributes_of(told), "stagewatch.remedy": incident.remedy},
        event_name=EVENT_NAME,
    )
    return ReadableLogRecord(record, resource, SCOPE)


def spans(told: Told, resource: Resource) -> list[ReadableSpan]:
    """The incident's trace: its request, in it one lane per rank, in each lane its steps."""
    incident, own = told.incident, request_context(told.incident)
    lanes: dict[Rank, list[StepSeen]] = {}
    for seen in told.steps:
        lanes.setdefault(seen.rank, []).append(seen)
    made: list[ReadableSpan] = []
    for rank, steps in sorted(lanes.items()):
        made += _lane(incident, own, rank, sorted(steps, key=lambda seen: seen.step), resource)
    begins = [span.start_time for span in made if span.start_time is not None]
    ends = [span.end_time for span in made if span.end_time is not None]
    start = min(begins, default=incident.first_bad_ns or incident.raised_ns)
    request = ReadableSpan(
        f"request {incident.check}" if incident.request else f"engine {incident.check}",
        own,
        resource=resource,
        attributes=attributes_of(told),
        events=_chain(incident, told.steps, start),
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, line_of(incident))
        if incident.severity > Severity.NOTICE
        else Status(),
        start_time=start,
        end_time=max([*ends, incident.raised_ns, start]),
        instrumentation_scope=SCOPE,
    )
    return [request, *made]


def attributes_of(told: Told) -> Attributes:
    """What both the event and the request span say. The request's id is under the name that vLLM's traces use."""
    incident = told.incident
    found: Attributes = {
        "error.type": incident.check,
        "stagewatch.incident.id": incident.id,
        "stagewatch.check": incident.check,
        "stagewatch.severity": incident.severity.word,
        "stagewatch.deployment": incident.deployment,
        "stagewatch.engine": incident.instance,
        "stagewatch.dp": incident.dp,
        "stagewatch.step.first_bad": incident.first_bad_step,
        "stagewatch.step.last_good": incident.last_good_step,
        "stagewatch.ranks": incident.ranks,
        "stagewatch.ranks.blamed": incident.blamed,
        "stagewatch.fields": incident.fields,
        "stagewatch.chain": tuple(f"step {link.step}: {link.text}" for link in incident.chain),
    }
    if told.engine:
        found["gen_ai.provider.name"] = told.engine
    if incident.request:
        found["gen_ai.request.id"] = incident.request
    return found


def _lane(
    incident: Incident, request: SpanContext, rank: Rank, steps: Sequence[StepSeen], resource: Resource
) -> list[ReadableSpan]:
    def span(
        name: str, context: SpanContext, parent: SpanContext, start: int, end: int, attributes: Attributes
    ) -> ReadableSpan:
        wrong = Status(StatusCode.ERROR) if attributes.get("stagewatch.bad") else Status()
        return ReadableSpan(
            name,
            context,
            parent,
            resource,
            attributes,
            status=wrong,
            start_time=start,
            end_time=end,
            instrumentation_scope=SCOPE,
        )

    gaps = [max(after.t_ns - before.t_ns, STEP_NS_MIN) for before, after in pairwise(steps)]
    lengths = [*gaps, int(median(gaps)) if gaps else STEP_NS_MIN]
    place: Attributes = {
        "stagewatch.dp": rank.dp,
        "stagewatch.stage": rank.pp,
        "stagewatch.tp": rank.tp,
    }
    lane = _within(request, _span_id(incident, f"{rank}"))
    end = steps[-1].t_ns + lengths[-1]
    made = [span(f"rank {rank}", lane, request, steps[0].t_ns, end, place)]
    for seen, length in zip(steps, lengths, strict=True):
        bad: Attributes = {"stagewatch.bad": True} if seen.step == incident.first_bad_step else {}
        made.append(
            span(
                f"step {seen.step}",
                _within(request, _span_id(incident, f"{rank} {seen.step}")),
                lane,
                seen.t_ns,
                seen.t_ns + length,
                {**place, "stagewatch.step": seen.step, "stagewatch.rows": seen.rows, **bad},
            )
        )
    return made


def _chain(incident: Incident, steps: Sequence[StepSeen], start: int) -> tuple[Event, ...]:
    """The chain of cause, each link when its step began."""
    began: dict[int, int] = {}
    for seen in steps:
        began[seen.step] = min(seen.t_ns, began.get(seen.step, seen.t_ns))
    return tuple(
        Event(link.text, {"stagewatch.step": link.step}, began.get(link.step, start))
        for link in incident.chain
    )


def _within(request: SpanContext, span_id: int) -> SpanContext:
    return SpanContext(request.trace_id, span_id, is_remote=False, trace_flags=request.trace_flags)


def _span_id(incident: Incident, what: str) -> int:
    # An incident that rises is told again: the same trace, other spans.
    return int.from_bytes(_hashed(8, "span", incident.id, incident.severity.word, what))


def _hashed(size: int, *parts: str) -> bytes:
    digest = blake2b("\n".join(parts).encode(), digest_size=size).digest()
    return digest if any(digest) else b"\x01" * size  # all zeros is no id
