"""The rules as Prometheus and Grafana load them."""

import re
from collections.abc import Sequence
from typing import Any, Final

from stagewatch.dashboards.rules import RULES, Rule

DATA_SOURCE_UID: Final = "stagewatch-prometheus"
FOLDER: Final = "stagewatch"
GROUP: Final = "stagewatch"
INTERVAL: Final = "15s"
DOCS: Final = "docs/"
"""Where runbooks are, unless told otherwise: a path within the source."""
_PROMETHEUS_VALUE: Final = re.compile(r"\{\{ \$value \| (humanizePercentage|humanizeDuration) \}\}")


def prometheus_rules(rules: Sequence[Rule] = RULES, docs: str = DOCS) -> dict[str, Any]:
    """A Prometheus rule file."""
    return {
        "groups": [
            {
                "name": GROUP,
                "interval": INTERVAL,
                "rules": [
                    {
                        "alert": rule.name,
                        "expr": rule.expression,
                        "for": rule.wait,
                        "keep_firing_for": rule.hold,
                        "labels": labels(rule),
                        "annotations": annotations(rule, docs),
                    }
                    for rule in rules
                ],
            }
        ]
    }


def grafana_rules(rules: Sequence[Rule] = RULES, docs: str = DOCS) -> dict[str, Any]:
    """A file of Grafana's provisioning (apiVersion 1)."""
    group = {
        "orgId": 1,
        "name": GROUP,
        "folder": FOLDER,
        "interval": INTERVAL,
        "rules": [grafana_rule(rule, docs) for rule in rules],
    }
    return {"apiVersion": 1, "groups": [group]}


def grafana_rule(rule: Rule, docs: str = DOCS, data_source: str = DATA_SOURCE_UID) -> dict[str, Any]:
    """One rule as Grafana's provisioning API takes it. The query gives what is wrong; any number of it is a reason."""
    query = {
        "refId": "A",
        "relativeTimeRange": {"from": 600, "to": 0},
        "datasourceUid": data_source,
        "model": {"refId": "A", "expr": rule.expression, "instant": True, "range": False},
    }
    condition = {
        "refId": "C",
        "relativeTimeRange": {"from": 0, "to": 0},
        "datasourceUid": "__expr__",
        "model": {"refId": "C", "type": "math", "expression": "is_number($A)"},
    }
    return {
        "uid": f"stagewatch-{rule.slug}",
        "title": rule.name,
        "condition": "C",
        "data": [query, condition],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": rule.wait,
        "keepFiringFor": rule.hold,
        "labels": labels(rule),
        "annotations": {key: _for_grafana(text) for key, text in annotations(rule, docs).items()},
        "isPaused": False,
    }


def labels(rule: Rule) -> dict[str, str]:
    """What alerts are routed by."""
    return {"severity": rule.severity, "team": "stagewatch"}


def annotations(rule: Rule, docs: str) -> dict[str, str]:
    """What people read."""
    return {
        "summary": rule.summary,
        "description": rule.description,
        "runbook_url": f"{docs.rstrip('/')}/{rule.runbook}",
    }


def _for_grafana(text: str) -> str:
    """Grafana's ``$value`` is a text; a query's number is in ``$values``."""
    return _PROMETHEUS_VALUE.sub(r"{{ \1 $values.A.Value }}", text).replace(
        "{{ $value }}", "{{ $values.A.Value }}"
    )
