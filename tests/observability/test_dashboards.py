"""Dashboards and rules as committed: fresh, complete, and readable by whoever is on call."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagewatch.dashboards.__main__ import DIRECTORY, rendered
from stagewatch.dashboards.rules import RULES, Rule
from stagewatch.monitor.instruments import INSTRUMENTS

DOCS = Path(__file__).parents[2] / "docs"
BOARDS = ("overview.json", "engine.json", "health.json")
SUFFIXES = ("_bucket", "_sum", "_count")


def panels() -> list[Any]:
    return [
        pytest.param(panel, id=f"{board}-{panel['title']}")
        for board in BOARDS
        for panel in json.loads((DIRECTORY / board).read_text())["panels"]
    ]


def metrics_in(expression: str) -> set[str]:
    found = set(re.findall(r"\bstagewatch_[a-z0-9_]+", expression))
    for suffix in SUFFIXES:
        found = {name.removesuffix(suffix) if name.endswith(suffix) else name for name in found}
    return found


KNOWN = {item.prometheus_name for item in INSTRUMENTS}


def test_what_is_committed_is_what_the_code_makes() -> None:
    """`python -m stagewatch.dashboards` (or `make docs`) writes it anew."""
    assert {path.name: path.read_text() for path in DIRECTORY.iterdir()} == rendered()


@pytest.mark.parametrize("panel", panels())
def test_a_panel_has_a_question_to_answer_a_unit_and_only_metrics_that_there_are(panel: Any) -> None:
    assert len(panel["description"]) > 20
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in panel["targets"]:
        assert metrics_in(target["expr"]) <= KNOWN


def test_every_metric_is_on_some_dashboard() -> None:
    shown = {
        name
        for value in panels()
        for target in value.values[0]["targets"]
        for name in metrics_in(target["expr"])
    }
    shown |= metrics_in((DIRECTORY / "prometheus-rules.yml").read_text())
    assert KNOWN - shown == {"stagewatch_engines_watched"}, "shown by counting the engines' own series"


@pytest.mark.parametrize("board", BOARDS)
def test_panels_do_not_overlap(board: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DIRECTORY / board).read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("board", ["overview.json", "engine.json"])
def test_incidents_are_marked_at_their_first_bad_step(board: str) -> None:
    (annotation,) = json.loads((DIRECTORY / board).read_text())["annotations"]["list"]
    assert annotation["useValueForTime"] == "on"
    assert "stagewatch_trouble_first_timestamp_seconds" in annotation["expr"]


def test_the_overview_leads_to_the_page_and_to_the_incidents_of_the_engine() -> None:
    text = (DIRECTORY / "overview.json").read_text()
    assert "${collector}/#/engine/" in text
    assert "${collector}/v1/incidents?instance=" in text


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
class TestRules:
    def test_it_asks_for_metrics_that_there_are(self, rule: Rule) -> None:
        assert metrics_in(rule.expression) <= KNOWN

    def test_it_has_a_page_that_says_what_it_means_and_what_to_do(self, rule: Rule) -> None:
        page = (DOCS / rule.runbook).read_text()
        assert page.startswith(f"# {rule.name}\n")
        for heading in ("## What it means", "## What to do", "## When it is silent"):
            assert heading in page

    def test_it_neither_flaps_nor_carries_a_value_in_its_labels(self, rule: Rule) -> None:
        (group,) = yaml.safe_load((DIRECTORY / "prometheus-rules.yml").read_text())["groups"]
        (found,) = [each for each in group["rules"] if each["alert"] == rule.name]
        assert found["keep_firing_for"]
        assert "{{" not in json.dumps(found["labels"])
        assert found["annotations"]["runbook_url"].endswith(f"{rule.slug}.md")

    def test_grafana_gets_the_same(self, rule: Rule) -> None:
        (group,) = json.loads((DIRECTORY / "grafana-alerts.json").read_text())["groups"]
        (found,) = [each for each in group["rules"] if each["title"] == rule.name]
        assert found["data"][0]["model"]["expr"] == rule.expression
        assert (found["for"], found["keepFiringFor"]) == (rule.wait, rule.hold)
        assert "$value " not in json.dumps(found["annotations"])


def test_no_page_is_left_over_and_the_index_names_them_all() -> None:
    pages = {path.name for path in (DOCS / "alerts").glob("*.md")} - {"README.md"}
    assert pages == {f"{rule.slug}.md" for rule in RULES}
    index = (DOCS / "alerts" / "README.md").read_text()
    assert all(f"[{rule.name}]({rule.slug}.md)" in index for rule in RULES)
