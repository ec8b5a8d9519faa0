"""A Grafana of the tests: keeps state and refuses as Grafana's HTTP API is documented to.

Documented, not confirmed: nothing here was compared with a running Grafana.
"""

import json
import re
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

TOKEN = "glsa_" + "t" * 40
PREFIX = "/grafana/api"


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class GrafanaServer:
    """State by kind and uid. ``forbidden`` are permissions that the token lacks."""

    def __init__(self) -> None:
        self.folders: dict[str, Any] = {}
        self.sources: dict[str, Any] = {}
        self.boards: dict[str, Any] = {}
        self.rules: dict[str, Any] = {}
        self.intervals: dict[tuple[str, str], int] = {}
        self.contacts: dict[str, Any] = {}
        self.policy: dict[str, Any] = {
            "receiver": "grafana-default-email",
            "group_by": ["grafana_folder", "alertname"],
            "routes": [{"receiver": "pagers", "object_matchers": [["team", "=", "db"]], "continue": True}],
        }
        self.forbidden: set[str] = set()
        self.names_permissions = True
        self.organisation = 7
        self.knows_keep_firing = True
        """Grafana 12 and later."""
        self.respells_boards = False
        """Gives dashboards back as its own schema has them."""
        self.versions: dict[str, list[dict[str, Any]]] = {}
        self.race_folder = False
        """Somebody else makes the folder between our look and our write."""
        self.writes: list[str] = []
        self.authorizations: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _handle(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size) or b"null")
                try:
                    status, answer = outer.answer(self.command, self.path, body, dict(self.headers))
                except RefusedError as refused:
                    status, answer = refused.status, {"message": refused.message}
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815  # the library's names

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/grafana"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def state(self) -> Any:
        return deepcopy(
            (self.folders, self.sources, self.boards, self.rules, self.intervals, self.contacts, self.policy)
        )

    def need(self, permission: str) -> None:
        if permission in self.forbidden:
            tail = f" Permissions needed: {permission}" if self.names_permissions else ""
            raise RefusedError(403, f"You'll need additional permissions to perform this action.{tail}")

    def answer(self, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        parts = urlsplit(path)
        self.authorizations.append(headers.get("Authorization", ""))
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401, "Invalid API key")
        if not parts.path.startswith(PREFIX):
            raise RefusedError(404, "Not found")
        if method != "GET":
            self.writes.append(f"{method} {parts.path.removeprefix(PREFIX)}")
        query = {key: value[0] for key, value in parse_qs(parts.query).items()}
        editable = headers.get("X-Disable-Provenance") == "true"
        for pattern, handler in self.ROUTES.items():
            found = re.fullmatch(
                f"{method} {pattern}".replace("{}", "([^/]+)"), f"{method} {parts.path.removeprefix(PREFIX)}"
            )
            wanted = getattr(self, f"{handler}_{method.lower()}", None)
            if found and wanted:
                return wanted(*found.groups(), body=body, query=query, editable=editable)
        raise RefusedError(404, "Not found")

    ROUTES: ClassVar = {
        "/folders": "folders",
        "/folders/{}": "folder",
        "/datasources": "sources",
        "/datasources/uid/{}": "source",
        "/dashboards/db": "boards",
        "/dashboards/uid/{}": "board",
        "/dashboards/uid/{}/versions": "versions",
        "/search": "search",
        "/v1/provisioning/alert-rules": "rules",
        "/v1/provisioning/alert-rules/{}": "rule",
        "/v1/provisioning/folder/{}/rule-groups/{}": "group",
        "/v1/provisioning/contact-points": "contacts",
        "/v1/provisioning/contact-points/{}": "contact",
        "/v1/provisioning/policies": "policies",
    }

    # ---- folders

    def folder_get(self, uid: str, **_: Any) -> tuple[int, Any]:
        self.need("folders:read")
        if uid not in self.folders:
            raise RefusedError(404, "folder not found")
        return 200, self.folders[uid]

    def folders_post(self, body: Any, **_: Any) -> tuple[int, Any]:
        self.need("folders:create")
        made = {"uid": body["uid"], "title": body["title"], "version": 1}
        if self.race_folder:
            self.folders[body["uid"]] = made
        if body["uid"] in self.folders:
            raise RefusedError(412, "the folder has been changed by someone else")
        if any(folder["title"] == body["title"] for folder in self.folders.values()):
            raise RefusedError(409, "a folder with that name already exists")
        self.folders[body["uid"]] = made
        return 200, made

    def folder_delete(self, uid: str, query: dict[str, str], **_: Any) -> tuple[int, Any]:
        self.need("folders:delete")
        if any(rule["folderUID"] == uid for rule in self.rules.values()):
            raise RefusedError(400, "folder contains alert rules")
        for board in [key for key, each in self.boards.items() if each["meta"]["folderUid"] == uid]:
            del self.boards[board]  # Grafana deletes what is in it
        del self.folders[uid]
        return 200, {"message": "Folder deleted"}

    # ---- data sources

    def source_get(self, uid: str, **_: Any) -> tuple[int, Any]:
        self.need("datasources:read")
        if uid not in self.sources:
            raise RefusedError(404, "Data source not found")
        return 200, self.sources[uid]

    def sources_post(self, body: Any, **_: Any) -> tuple[int, Any]:
        self.need("datasources:create")
        if any(body["name"] == source["name"] for source in self.sources.values()):
            raise RefusedError(409, "data source with the same name already exists")
        self.sources[body["uid"]] = {"id": len(self.sources) + 1, "version": 1, "basicAuth": False, **body}
        return 200, {"message": "Datasource added"}

    def source_put(self, uid: str, body: Any, **_: Any) -> tuple[int, Any]:
        self.need("datasources:write")
        self.sources[uid] |= body | {"version": self.sources[uid]["version"] + 1}
        return 200, {"message": "Datasource updated"}

    def source_delete(self, uid: str, **_: Any) -> tuple[int, Any]:
        self.need("datasources:delete")
        del self.sources[uid]
        return 200, {"message": "Data source deleted"}

    # ---- dashboards

    def board_get(self, uid: str, **_: Any) -> tuple[int, Any]:
        self.need("dashboards:read")
        if uid not in self.boards:
            raise RefusedError(404, "Dashboard not found")
        found = deepcopy(self.boards[uid])
        if self.respells_boards:
            found["dashboard"]["schemaVersion"] = 42
            found["dashboard"].pop("style", None)
        return 200, found

    def versions_get(self, uid: str, **_: Any) -> tuple[int, Any]:
        self.need("dashboards:write")
        return 200, {"versions": self.versions[uid][::-1]}

    def edited(self, uid: str, message: str = "") -> dict[str, Any]:
        """A dashboard as somebody saves it anew, to be changed."""
        board: dict[str, Any] = self.boards[uid]["dashboard"]
        board["version"] += 1
        self.versions[uid].append({"version": board["version"], "message": message})
        return board

    def boards_post(self, body: Any, **_: Any) -> tuple[int, Any]:
        board = body["dashboard"]
        known = self.boards.get(board["uid"])
        self.need("dashboards:write" if known else "dashboards:create")
        if body["folderUid"] not in self.folders:
            raise RefusedError(404, "folder not found")
        if known and known["meta"].get("provisioned"):
            raise RefusedError(400, "Cannot save provisioned dashboard")
        if known and not body.get("overwrite"):
            raise RefusedError(412, "The dashboard has been changed by someone else")
        version = known["dashboard"]["version"] + 1 if known else 1
        self.boards[board["uid"]] = {
            "dashboard": {
                **board,
                "id": known["dashboard"]["id"] if known else len(self.boards) + 1,
                "version": version,
            },
            "meta": {"folderUid": body["folderUid"], "provisioned": False},
        }
        saved = {"version": version, "message": body.get("message", "")}
        self.versions.setdefault(board["uid"], []).append(saved)
        return 200, {"uid": board["uid"], "status": "success", "version": version}

    def board_delete(self, uid: str, **_: Any) -> tuple[int, Any]:
        self.need("dashboards:delete")
        del self.boards[uid]
        return 200, {"message": "Dashboard deleted"}

    def search_get(self, query: dict[str, str], **_: Any) -> tuple[int, Any]:
        wanted = query.get("folderUIDs") or query.get("folderUids") or ""
        return 200, [
            {"uid": uid, "title": each["dashboard"]["title"]}
            for uid, each in self.boards.items()
            if each["meta"]["folderUid"] in wanted.split(",")
        ]

    # ---- rules

    def rules_get(self, **_: Any) -> tuple[int, Any]:
        self.need("alert.provisioning:read")
        return 200, [self.rule_as_told(rule) for rule in self.rules.values()]

    def rule_delete(self, uid: str, **_: Any) -> tuple[int, Any]:
        self.need("alert.provisioning:write")
        self.rules.pop(uid, None)
        return 200, {}

    def group_get(self, folder: str, group: str, **_: Any) -> tuple[int, Any]:
        self.need("alert.provisioning:read")
        rules = [r for r in self.rules.values() if (r["folderUID"], r["ruleGroup"]) == (folder, group)]
        if not rules:
            raise RefusedError(404, "rule group not found")
        interval = self.intervals[folder, group]
        told = [self.rule_as_told(rule) for rule in rules]
        return 200, {"title": group, "folderUid": folder, "interval": interval, "rules": told}

    def rule_as_told(self, rule: dict[str, Any]) -> dict[str, Any]:
        """As `ProvisionedAlertRule` of Grafana's source has it; its `AlertQuery` fills in what a query leaves open."""
        told = {**deepcopy(rule), "orgID": self.organisation, "notification_settings": None, "record": None}
        for query in told["data"]:
            query.setdefault("queryType", "")
            query["model"] = {"intervalMs": 1000, "maxDataPoints": 43200, **query["model"]}
        if not self.knows_keep_firing:
            del told["keep_firing_for"]
        for name in ("annotations", "labels", "provenance"):
            if not told[name]:
                del told[name]
        return told

    def group_put(self, folder: str, group: str, body: Any, editable: bool, **_: Any) -> tuple[int, Any]:
        """Replaces the group as a whole; who gives provenance up is refused."""
        self.need("alert.provisioning:write")
        if folder not in self.folders:
            raise RefusedError(404, "folder does not exist")
        provenance = "" if editable else "api"
        for rule in body["rules"]:
            known = self.rules.get(rule["uid"])
            if known and (known["folderUID"], known["ruleGroup"]) != (folder, group):
                raise RefusedError(409, "rule uid is used in another group")
            if known and known["provenance"] and known["provenance"] != provenance:
                raise RefusedError(
                    409, f"cannot change provenance from '{known['provenance']}' to '{provenance}'"
                )
        self.rules = {
            uid: r for uid, r in self.rules.items() if (r["folderUID"], r["ruleGroup"]) != (folder, group)
        }
        for number, rule in enumerate(body["rules"]):
            self.rules[rule["uid"]] = {**rule, "id": number, "updated": "now", "provenance": provenance}
        self.intervals[folder, group] = body["interval"]
        return 200, body

    # ---- contact points and policies

    def contacts_get(self, query: dict[str, str], **_: Any) -> tuple[int, Any]:
        self.need("alert.provisioning:read")
        return 200, [c for c in self.contacts.values() if query.get("name", c["name"]) == c["name"]]

    def contacts_post(self, body: Any, editable: bool, **_: Any) -> tuple[int, Any]:
        self.need("alert.provisioning:write")
        if body["uid"] in self.contacts:
            raise RefusedError(409, "uid is taken")
        self.contacts[body["uid"]] = {**body, "provenance": "" if editable else "api"}
        return 202, body

    def contact_put(self, uid: str, body: Any, editable: bool, **_: Any) -> tuple[int, Any]:
        self.need("alert.provisioning:write")
        self.contacts[uid] = {**body, "provenance": "" if editable else "api"}
        return 202, {"message": "contactpoint updated"}

    def contact_delete(self, uid: str, **_: Any) -> tuple[int, Any]:
        self.need("alert.provisioning:write")
        name = self.contacts[uid]["name"]
        if any(route["receiver"] == name for route in self.policy.get("routes", [])):
            raise RefusedError(409, "contact point is used by a notification policy")
        del self.contacts[uid]
        return 202, {"message": "contactpoint deleted"}

    def policies_get(self, **_: Any) -> tuple[int, Any]:
        self.need("alert.provisioning:read")
        return 200, route_as_told(self.policy)

    def policies_put(self, body: Any, editable: bool, **_: Any) -> tuple[int, Any]:
        """Replaces the whole tree; every receiver must exist."""
        self.need("alert.provisioning:write")
        names = {c["name"] for c in self.contacts.values()} | {"grafana-default-email", "pagers"}
        if not all(route["receiver"] in names for route in body.get("routes", [])):
            raise RefusedError(400, "invalid object specification: receiver does not exist")
        self.policy = body if editable else {**body, "provenance": "api"}
        return 202, {"message": "policies updated"}


def route_as_told(route: dict[str, Any]) -> dict[str, Any]:
    """As `Route` of Grafana's source has it: what is empty, false or nought is left out."""
    told = {name: value for name, value in route.items() if value}
    if "routes" in told:
        told["routes"] = [route_as_told(each) for each in told["routes"]]
    return told
