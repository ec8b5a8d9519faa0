"""Every rule against made-up series, by promtool: it fires, ends, and stays silent where it should.

Times are those of the rules as committed, nothing is sped up.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from stagewatch.dashboards.__main__ import DIRECTORY
from stagewatch.dashboards.rules import RULES

pytestmark = [
    pytest.mark.observability,
    pytest.mark.skipif(
        shutil.which("promtool") is None, reason="promtool is not installed: apt install prometheus"
    ),
]
RULE_FILE = DIRECTORY / "prometheus-rules.yml"
E = 'deployment="d",engine="e",dp="0"'
R0, R1 = f'{E},stage="0",tp="0"', f'{E},stage="1",tp="0"'


@dataclass(frozen=True)
class Case:
    """Series in promtool's notation, a value each 15 s, and how many alerts fire at which minute."""

    rule: str
    what: str
    series: dict[str, str]
    firing: dict[str, int]


def trouble(severity: str, check: str = "draft-block") -> str:
    return f'stagewatch_trouble_last_timestamp_seconds{{{E},check="{check}",severity="{severity}",stage="0"}}'


def age(labels: str) -> str:
    return f"stagewatch_rank_heartbeat_age_seconds{{{labels}}}"


def case(rule: str, what: str, series: dict[str, str], **firing: int) -> Case:
    return Case(
        f"Stagewatch{rule}", what, series, {time.removeprefix("at_"): count for time, count in firing.items()}
    )


# 4 values are a minute. `_xN` repeats the last value N times more.
BAD_FOR_A_MINUTE = "0+15x4 60x80"
ROWS = "stagewatch_rows_compared_total"
CASES = (
    case(
        "Desynchronised",
        "goes on while it is bad, ends seven minutes after, once",
        {trouble("critical"): BAD_FOR_A_MINUTE},
        at_30s=1,
        at_2m=1,
        at_7m=1,
        at_9m=0,
    ),
    case("Desynchronised", "a warning is no divergence", {trouble("warning"): "0+15x20"}, at_3m=0),
    case(
        "Desynchronised",
        "a stall has an alert of its own",
        {trouble("critical", "stall"): "0+15x20"},
        at_3m=0,
    ),
    case(
        "Desynchronised",
        "what was long over when the collector came back",
        {trouble("critical"): "_x16 10x40"},
        at_6m=0,
    ),
    case("AboutToDiverge", "while it is seen", {trouble("warning"): "0+15x20"}, at_3m=1),
    case(
        "AboutToDiverge",
        "silent ranks are told elsewhere",
        {trouble("warning", "rank-silent"): "0+15x20"},
        at_3m=0,
    ),
    case(
        "EngineWedged",
        "as long as it is stuck",
        {f"stagewatch_engine_wedged{{{E}}}": "0x4 1x8 0x20"},
        at_30s=0,
        at_2m=1,
        at_6m=0,
    ),
    case(
        "RowsExcluded",
        "the first row counts",
        {f"stagewatch_rows_excluded_total{{{E}}}": "0x4 1x80"},
        at_30s=0,
        at_2m=1,
        at_20m=0,
    ),
    case(
        "RankUnarmed",
        "one rank of two",
        {f"stagewatch_rank_armed{{{R0}}}": "1x20", f"stagewatch_rank_armed{{{R1}}}": "0x20"},
        at_30s=0,
        at_3m=1,
    ),
    case("RankSilent", "while another is heard", {age(R0): "1x40", age(R1): "0+15x40"}, at_30s=0, at_4m=1),
    case("RankSilent", "not where the whole engine is", {age(R0): "0+15x40", age(R1): "0+15x40"}, at_4m=0),
    case(
        "RankSilent",
        "not where it is not armed",
        {age(R0): "1x40", age(R1): "0+15x40", f"stagewatch_rank_armed{{{R1}}}": "0x40"},
        at_4m=0,
    ),
    case("RankSilent", "not for a hiccup", {age(R0): "1x40", age(R1): "0 15 30 45 1x20"}, at_2m=0, at_4m=0),
    case(
        "RankMissing",
        "of a running engine",
        {f"stagewatch_ranks_missing{{{E}}}": "1x60", age(R0): "1x60"},
        at_4m=0,
        at_6m=1,
    ),
    case(
        "RankMissing",
        "a start takes a while",
        {f"stagewatch_ranks_missing{{{E}}}": "1x12 0x60", age(R0): "1x60"},
        at_6m=0,
    ),
    case("EngineSilent", "killed", {age(R0): "0+15x40", age(R1): "0+15x40"}, at_1m=0, at_4m=1),
    case(
        "EngineSilent",
        "ended in good order: its series end",
        {age(R0): "0 15 30 _x40", age(R1): "0 15 30 _x40"},
        at_4m=0,
    ),
    case(
        "EngineSilent",
        "a collector that comes back",
        {age(R0): "1x4 _x8 120 1x20", age(R1): "1x4 _x8 120 1x20"},
        at_4m=0,
    ),
    case(
        "Indeterminate",
        "one row in ten",
        {
            f'{ROWS}{{{E},verdict="consistent",reason=""}}': "0+90x60",
            f'{ROWS}{{{E},verdict="indeterminate",reason="gap"}}': "0+10x60",
        },
        at_4m=0,
        at_9m=1,
    ),
    case(
        "Indeterminate",
        "a step at a restart",
        {
            f'{ROWS}{{{E},verdict="consistent",reason=""}}': "0+1000x60",
            f'{ROWS}{{{E},verdict="indeterminate",reason="gap"}}': "0x20 64x40",
        },
        at_9m=0,
    ),
    case(
        "EvidenceLost",
        "the first record counts",
        {f'stagewatch_records_dropped_total{{{R0},place="ring",reason="overwritten"}}': "0x4 1x80"},
        at_30s=0,
        at_2m=1,
        at_14m=0,
    ),
    case(
        "EvidenceLost",
        "what was gone before the sidecar came",
        {f'stagewatch_records_dropped_total{{{R0},place="ring",reason="overwritten"}}': "500x20"},
        at_3m=0,
    ),
    case(
        "RingMarginLow",
        "for more than a minute",
        {f"stagewatch_ring_margin_seconds{{{R0}}}": "60x4 2x20"},
        at_1m=0,
        at_4m=1,
    ),
    case(
        "RingMarginLow",
        "an idle engine has none",
        {f"stagewatch_ring_margin_seconds{{{R0}}}": "60x4 _x20"},
        at_4m=0,
    ),
    case(
        "ProbeCostly",
        "two milliseconds a step",
        {
            f"stagewatch_probe_time_seconds_total{{{R0}}}": "0+2x80",
            f"stagewatch_probe_steps_total{{{R0}}}": "0+1000x80",
        },
        at_9m=0,
        at_12m=1,
    ),
    case(
        "ProbeCostly",
        "fifty microseconds a step",
        {
            f"stagewatch_probe_time_seconds_total{{{R0}}}": "0+0.05x80",
            f"stagewatch_probe_steps_total{{{R0}}}": "0+1000x80",
        },
        at_12m=0,
    ),
    case(
        "CollectorDown",
        "for two minutes",
        {'up{job="stagewatch",instance="c"}': "1x4 0x20"},
        at_2m=0,
        at_4m=1,
    ),
    case("CollectorDown", "a restart", {'up{job="stagewatch",instance="c"}': "1x4 0x4 1x20"}, at_4m=0),
    case(
        "JournalFailing",
        "until it can be written",
        {'stagewatch_journal_failing{instance="c"}': "0x4 1x8 0x20"},
        at_1m=0,
        at_3m=1,
        at_6m=0,
    ),
    case(
        "Refused",
        "again and again",
        {'stagewatch_ingest_refused_total{instance="c",reason="forbidden"}': "0+1x60"},
        at_30s=0,
        at_6m=1,
    ),
    case(
        "Refused",
        "now and then",
        {'stagewatch_ingest_refused_total{instance="c",reason="forbidden"}': "0x10 3x60"},
        at_6m=0,
    ),
    case(
        "Drops",
        "the first counts",
        {'stagewatch_drops_total{instance="c",place="events",reason="slow_reader"}': "0x4 1x90"},
        at_30s=0,
        at_2m=1,
        at_20m=0,
    ),
    case(
        "Drops",
        "what the operator's own bounds remove in the course of time",
        {
            'stagewatch_drops_total{instance="c",place="store",reason="pruned"}': "0x4 1x30 7x60",
            'stagewatch_drops_total{instance="c",place="streams",reason="forgotten"}': "0x4 1x90",
            'stagewatch_drops_total{instance="c",place="windows",reason="dropped"}': "0x4 5x90",
        },
        at_2m=0,
        at_20m=0,
    ),
    case(
        "InternalErrors",
        "the first counts",
        {'stagewatch_internal_errors_total{instance="c",place="watch"}': "0x4 1x90"},
        at_30s=0,
        at_2m=1,
    ),
    case("RingsRefused", "that stay", {'stagewatch_rings_refused{instance="c"}': "1x40"}, at_1m=0, at_4m=1),
    case(
        "RingsRefused",
        "an engine that is making its ring",
        {'stagewatch_rings_refused{instance="c"}': "1x2 0x40"},
        at_4m=0,
    ),
)


def test_the_file_is_sound() -> None:
    subprocess.run(["promtool", "check", "rules", RULE_FILE], check=True, capture_output=True)


def test_every_rule_is_seen_firing_and_seen_silent() -> None:
    fires = {each.rule for each in CASES if any(each.firing.values())}
    silent = {each.rule for each in CASES if not all(each.firing.values())}
    assert fires == silent == {rule.name for rule in RULES}


@pytest.mark.parametrize("each", CASES, ids=lambda each: f"{each.rule}: {each.what}")
def test_a_rule_fires_when_it_should_and_only_then(each: Case, tmp_path: Path) -> None:
    tests = {
        "rule_files": [str(RULE_FILE)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in each.series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{each.rule}", alertstate="firing"}}) or vector(0)',
                        "eval_time": time,
                        "exp_samples": [{"labels": "{}", "value": count}],
                    }
                    for time, count in each.firing.items()
                ],
            }
        ],
    }
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump(tests))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
