"""What is to be in Grafana: made from what `stagewatch.dashboards` renders and from where things are."""

import json
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

FOLDER_UID: Final = "stagewatch"
FOLDER_TITLE: Final = "stagewatch"
DATA_SOURCE_UID: Final = "stagewatch-prometheus"
CONTACT_UID: Final = "stagewatch-contact"
BOARDS: Final = ("overview", "engine", "health")
GROUP: Final = "stagewatch"
INTERVAL_S: Final = 15
DOCS: Final = "docs/"
"""What runbook links begin with where nothing else is said, as rendered."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are, as the operator says."""

    prometheus_url: str
    """For a data source of our own; empty with `data_source_uid`."""
    data_source_uid: str
    """An existing data source to use; empty to make one."""
    collector_url: str
    """For links to the live page; empty to leave what is rendered."""
    docs_url: str
    """For links to runbooks; empty to leave what is rendered."""
    email: str
    webhook: str
    """Whom to tell of alerts, by mail or webhook; both empty: whoever the notification policy says."""

    @property
    def source(self) -> str:
        """The data source's uid."""
        return self.data_source_uid or DATA_SOURCE_UID

    @property
    def tells_somebody(self) -> bool:
        """Whether a contact point of our own is made."""
        return bool(self.email or self.webhook)


def data_source(places: Places) -> Json:
    """Prometheus, asked by Grafana's server."""
    return {
        "uid": DATA_SOURCE_UID,
        "name": "stagewatch Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": places.prometheus_url,
        "isDefault": False,
        "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
    }


def boards(places: Places) -> list[Json]:
    """The dashboards."""
    made = []
    for name in BOARDS:
        board = _rendered(f"{name}.json")
        for variable in board["templating"]["list"]:
            if variable["name"] == "datasource":
                variable["current"] = {"selected": True, "text": places.source, "value": places.source}
            if variable["name"] == "collector" and places.collector_url:
                url = places.collector_url.rstrip("/")
                variable["query"] = url
                variable["current"] = {"selected": True, "text": url, "value": url}
        made.append(board)
    return made


def fingerprint(board: Json) -> str:
    """Tells one content of a dashboard from another."""
    return sha256(json.dumps(board, sort_keys=True).encode()).hexdigest()[:16]


def rule_group(places: Places) -> Json:
    """The alert rules, as the provisioning API takes a group of them."""
    (group,) = _rendered("grafana-alerts.json")["groups"]
    rules = []
    for rule in group["rules"]:
        for query in rule["data"]:
            if query["datasourceUid"] == DATA_SOURCE_UID:
                query["datasourceUid"] = places.source
        if places.docs_url:
            runbook = rule["annotations"]["runbook_url"].removeprefix(DOCS)
            rule["annotations"]["runbook_url"] = f"{places.docs_url.rstrip('/')}/{runbook}"
        # Files say keepFiringFor, the API keep_firing_for.
        rule["keep_firing_for"] = rule.pop("keepFiringFor")
        rules.append(rule | {"folderUID": FOLDER_UID, "ruleGroup": GROUP, "orgID": 1})
    return {"title": GROUP, "folderUid": FOLDER_UID, "interval": INTERVAL_S, "rules": rules}


def contact_point(places: Places) -> Json:
    """Whom to tell."""
    kind, settings = (
        ("email", {"addresses": places.email}) if places.email else ("webhook", {"url": places.webhook})
    )
    return {
        "uid": CONTACT_UID,
        "name": "stagewatch",
        "type": kind,
        "settings": settings,
        "disableResolveMessage": False,
    }


def _rendered(name: str) -> Json:
    text = files("stagewatch.dashboards").joinpath("rendered", name).read_text()
    found: Json = json.loads(text)
    return found
