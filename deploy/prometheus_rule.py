"""Wraps the alerts of dashboards/rendered for the Prometheus operator; a test asserts that the result is fresh.

`python deploy/prometheus_rule.py` writes deploy/kubernetes/components/monitoring/prometheusrule.yaml.
"""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "dashboards" / "rendered" / "prometheus-rules.yml"
TARGET = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "prometheusrule.yaml"


def prometheus_rule() -> str:
    """The custom resource, as text."""
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "stagewatch",
            "namespace": "stagewatch",
            "labels": {"app.kubernetes.io/part-of": "stagewatch"},
        },
        "spec": yaml.safe_load(RULES.read_text()),
    }
    head = "# Made by `python deploy/prometheus_rule.py`; edits here are lost.\n"
    return head + yaml.safe_dump(resource, sort_keys=False, width=110)


if __name__ == "__main__":
    TARGET.write_text(prometheus_rule())
