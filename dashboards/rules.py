"""The alert rules: one list, rendered for Prometheus and for Grafana by `stagewatch.dashboards.alerts`.

Every expression gives a series for what is wrong and nothing where all is well. Labels tell what an alert is about
and never change while it lasts, so an alert fires once; ``wait`` keeps a passing doubt from firing, ``hold`` keeps it
from coming and going. Each rule has a page in ``docs/alerts``.
"""

from dataclasses import dataclass
from typing import Final, Literal

_ENGINE: Final = "deployment, engine, dp"
_RANK: Final = f"{_ENGINE}, stage, tp"
BAD_S: Final = 120
"""Something bad that was last seen longer ago is over."""
_ABOUT_ENGINE: Final = "engine {{ $labels.engine }} of {{ $labels.deployment }}, replica {{ $labels.dp }}"
_ABOUT_RANK: Final = "Stage {{ $labels.stage }}, tp {{ $labels.tp }}, of " + _ABOUT_ENGINE


@dataclass(frozen=True, slots=True)
class Rule:
    """One alert."""

    name: str
    expression: str
    """PromQL that Prometheus 2.42 understands."""
    severity: Literal["critical", "warning"]
    summary: str
    """One line, with Prometheus's template variables."""
    description: str
    wait: str = "0s"
    """How long it must hold before it fires."""
    hold: str = "5m"
    """How long it goes on firing after it last held."""

    @property
    def slug(self) -> str:
        """Name of its page in the docs, and part of its uid in Grafana."""
        words = "".join(f"-{c.lower()}" if c.isupper() else c for c in self.name.removeprefix("Stagewatch"))
        return words.lstrip("-")

    @property
    def runbook(self) -> str:
        """Its page, below the documentation's address."""
        return f"alerts/{self.slug}.md"


RULES: Final = (
    Rule(
        "StagewatchDesynchronised",
        f"max by ({_ENGINE}, check, stage) (time() - "
        f'stagewatch_trouble_last_timestamp_seconds{{severity="critical", check!="stall"}}) < {BAD_S}',
        "critical",
        f"Ranks disagree: {{{{ $labels.check }}}}, stage {{{{ $labels.stage }}}}, {_ABOUT_ENGINE}",
        "Stages hold or feed different values: what the requests concerned say from here on is not the model's. "
        "`stage` is the one blamed.",
    ),
    Rule(
        "StagewatchEngineWedged",
        "stagewatch_engine_wedged == 1",
        "critical",
        f"Stuck: {_ABOUT_ENGINE}",
        "Ranks wait for one another in a collective that one of them will not enter. Only a restart helps.",
        hold="1m",
    ),
    Rule(
        "StagewatchAboutToDiverge",
        f"max by ({_ENGINE}, check, stage) (time() - "
        'stagewatch_trouble_last_timestamp_seconds{severity="warning", check!~"rank-silent|rank-unarmed"}'
        f") < {BAD_S}",
        "warning",
        f"{{{{ $labels.check }}}}: state may be wrong in {_ABOUT_ENGINE}",
        "Something happened that a sound engine does not do, and the request goes on with what came of it.",
    ),
    Rule(
        "StagewatchRowsExcluded",
        f"sum by ({_ENGINE}) (increase(stagewatch_rows_excluded_total[10m])) > 0",
        "warning",
        f"The broadcast mask drops decoding rows in {_ABOUT_ENGINE}",
        "The engine runs the faulty mask of vLLM 0.23 to 0.29. Most rows dropped are never missed; the next may be.",
    ),
    Rule(
        "StagewatchRankUnarmed",
        f"min by ({_RANK}) (stagewatch_rank_armed) == 0",
        "warning",
        f"{_ABOUT_RANK} is not watched",
        "The rank's probe took itself out or never armed: nothing of this engine is compared.",
        wait="1m",
    ),
    Rule(
        "StagewatchRankSilent",
        f"(max by ({_RANK}) (stagewatch_rank_heartbeat_age_seconds) > 30 "
        f"and on ({_ENGINE}) min by ({_ENGINE}) (stagewatch_rank_heartbeat_age_seconds) < 15) "
        f"unless on ({_RANK}) stagewatch_rank_armed == 0",
        "warning",
        f"{_ABOUT_RANK} is silent while others are heard",
        "The worker is stopped or dead, or its sidecar cannot reach the collector. Nothing is compared meanwhile.",
        wait="30s",
    ),
    Rule(
        "StagewatchRankMissing",
        f"max by ({_ENGINE}) (stagewatch_ranks_missing) > 0 "
        f"and on ({_ENGINE}) min by ({_ENGINE}) (stagewatch_rank_heartbeat_age_seconds) < 60",
        "warning",
        f"{{{{ $value }}}} ranks were never heard of in {_ABOUT_ENGINE}",
        "A worker without the plugin, or a node without a sidecar: nothing of this engine is compared.",
        wait="5m",
    ),
    Rule(
        "StagewatchEngineSilent",
        f"min by ({_ENGINE}) (stagewatch_rank_heartbeat_age_seconds) > 60",
        "warning",
        f"Nothing is heard any more of {_ABOUT_ENGINE}",
        "It did not say that it ends: it was killed, or its sidecars cannot reach the collector.",
        wait="1m",
    ),
    Rule(
        "StagewatchIndeterminate",
        f'sum by ({_ENGINE}) (rate(stagewatch_rows_compared_total{{verdict="indeterminate"}}[5m])) '
        f"/ sum by ({_ENGINE}) (rate(stagewatch_rows_compared_total[5m])) > 0.01",
        "warning",
        f"{{{{ $value | humanizePercentage }}}} of the rows cannot be compared in {_ABOUT_ENGINE}",
        "Evidence is missing or contradicts itself, so divergence in these rows goes unseen.",
        wait="5m",
    ),
    Rule(
        "StagewatchEvidenceLost",
        f"sum by ({_RANK}, place, reason) (increase(stagewatch_records_dropped_total[5m])) > 0",
        "warning",
        f"{_ABOUT_RANK}: records lost in the {{{{ $labels.place }}}}, {{{{ $labels.reason }}}}",
        "Records were recorded, or should have been, and were never compared.",
    ),
    Rule(
        "StagewatchRingMarginLow",
        f"min by ({_RANK}) (stagewatch_ring_margin_seconds) < 5",
        "warning",
        f"{_ABOUT_RANK}: its ring will be overrun in {{{{ $value | humanizeDuration }}}}",
        "The sidecar falls behind the engine: soon records will be lost. Past incidents cannot be dumped for long.",
        wait="1m",
    ),
    Rule(
        "StagewatchProbeCostly",
        f"sum by ({_RANK}) (rate(stagewatch_probe_time_seconds_total[5m])) "
        f"/ sum by ({_RANK}) (rate(stagewatch_probe_steps_total[5m])) > 0.001",
        "warning",
        f"{_ABOUT_RANK}: the probe takes {{{{ $value | humanizeDuration }}}} of a step",
        "More than a millisecond of host time a step: the engine pays for being watched.",
        wait="10m",
    ),
    Rule(
        "StagewatchCollectorDown",
        'up{job="stagewatch"} == 0',
        "critical",
        "The collector at {{ $labels.instance }} does not answer",
        "Nobody watches. The rings keep the last minutes, and what was acknowledged is in its journal.",
        wait="2m",
        hold="1m",
    ),
    Rule(
        "StagewatchJournalFailing",
        "stagewatch_journal_failing == 1",
        "critical",
        "The journal of the collector at {{ $labels.instance }} cannot be written",
        "Nothing is acknowledged, so sidecars wait and rings will be overrun: the disk is full or broken.",
        wait="30s",
        hold="1m",
    ),
    Rule(
        "StagewatchRefused",
        "sum by (instance, reason) (increase(stagewatch_ingest_refused_total[10m])) > 5",
        "warning",
        "Refused again and again: {{ $labels.reason }}",
        "Sidecars or readers are turned away: a wrong token, another version, or more of them than are allowed.",
        wait="1m",
    ),
    Rule(
        "StagewatchDrops",
        # What the operator's own bounds remove in the course of time is counted, and nobody is called for it.
        "sum by (instance, place, reason) "
        '(increase(stagewatch_drops_total{reason!~"pruned|forgotten|dropped"}[10m])) > 0',
        "warning",
        "Left out at the {{ $labels.place }}: {{ $labels.reason }}",
        "stagewatch itself had to leave something out.",
    ),
    Rule(
        "StagewatchInternalErrors",
        "sum by (instance, place) (increase(stagewatch_internal_errors_total[10m])) > 0",
        "warning",
        "An error of stagewatch's own, in the {{ $labels.place }}",
        "Part of the evidence was not judged, or an incident not stored: please report what the log says.",
    ),
    Rule(
        "StagewatchRingsRefused",
        "max by (instance) (stagewatch_rings_refused) > 0",
        "warning",
        "{{ $value }} ring files cannot be read",
        "A rank records into a ring that its sidecar cannot read: another version, or a copy of another ring.",
        wait="2m",
    ),
)
