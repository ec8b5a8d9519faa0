"""``python -m stagewatch.dashboards``: write everything in `rendered/` anew; a test asserts that it is fresh."""

import json
from pathlib import Path
from typing import Any, Final

import yaml
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from stagewatch.dashboards import engine, health, overview
from stagewatch.dashboards.alerts import grafana_rules, prometheus_rules
from stagewatch.dashboards.panels import Layout, incidents_annotation

DIRECTORY: Final = Path(__file__).parent / "rendered"
_HEAD: Final = "# Made by `python -m stagewatch.dashboards`; edits here are lost.\n"


def rendered() -> dict[str, str]:
    """Every file by its name."""
    return {
        "overview.json": _json(_dashboard(overview.overview(), overview.SELECTOR)),
        "engine.json": _json(_dashboard(engine.engine(), engine.SELECTOR)),
        "health.json": _json(_dashboard(health.health(), "")),
        "grafana-alerts.json": _json(grafana_rules()),
        "prometheus-rules.yml": _HEAD + yaml.safe_dump(prometheus_rules(), sort_keys=False, width=110),
    }


def _dashboard(made: build.Dashboard, selector: str) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    layout = Layout()
    for number, panel in enumerate(shown["panels"], 1):
        panel["id"] = number
        place = panel["gridPos"]
        panel["gridPos"] = layout.place(place["w"], place["h"]).to_json()
    if selector:
        shown["annotations"] = {"list": [incidents_annotation(selector)]}
    return shown


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write the files."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, text in rendered().items():
        (DIRECTORY / name).write_text(text)


if __name__ == "__main__":
    main()
