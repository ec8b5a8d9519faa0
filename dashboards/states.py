"""Expressions that several dashboards and panels share."""

from typing import Final

from stagewatch.dashboards.panels import GREEN, ORANGE, RED
from stagewatch.dashboards.rules import BAD_S

STATES: Final = ((0, "in step", GREEN), (2, "at risk", ORANGE), (3, "desynchronised", RED))
"""Values of `state`, what they are called, and their colours."""


def state(by: str, selector: str, baseline: str) -> str:
    """3 while something critical was seen bad within `BAD_S`, 2 for a warning, 0 otherwise.

    ``baseline`` is a metric that has a series for whatever is to have a lane.
    """

    def bad(severity: str, value: int) -> str:
        found = f'stagewatch_trouble_last_timestamp_seconds{{{selector}, severity="{severity}"}}'
        return f"{value} * (time() - {found} < bool {BAD_S})"

    return f"max by ({by}) ({bad('critical', 3)} or {bad('warning', 2)} or 0 * {baseline}{{{selector}}})"


def share(part: str, whole: str, by: str = "") -> str:
    """A rate as a share of another; without a series where nothing happens."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} ({rate(part)}) / ({grouped} ({rate(whole)}) > 0)"


def rate(counter: str) -> str:
    """Per second, over the interval that Grafana finds fitting."""
    return f"rate({counter}[$__rate_interval])"
