"""What `stagewatch grafana` does, step by step: each looks, says what differs, and, unless told only to look, acts."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from grafana_client.api import GrafanaApi

from stagewatch.monitor.grafana import policy, wanted
from stagewatch.monitor.grafana.api import ConflictError, GrafanaError, asked, found
from stagewatch.monitor.grafana.diff import difference
from stagewatch.monitor.grafana.wanted import Json, Places

Action = Literal["created", "updated", "unchanged", "removed", "absent", "kept"]
_RULES: Final = "alert.provisioning:write"
_READ: Final = "alert.provisioning:read"


@dataclass(frozen=True, slots=True)
class Done:
    """What was done, or would be, with one thing."""

    what: str
    action: Action
    diff: tuple[str, ...] = ()
    why: str = ""


class Grafana:
    """One Grafana. With ``dry`` nothing is written. Raises GrafanaError."""

    def __init__(self, api: GrafanaApi, places: Places, *, dry: bool) -> None:
        self._api = api
        self._places = places
        self._dry = dry

    # ---- apply

    def apply(self) -> Iterator[Done]:
        """Bring everything to what is wanted; again changes nothing."""
        yield self._folder()
        if not self._places.data_source_uid:
            yield self._data_source()
        for board in wanted.boards(self._places):
            yield self._board(board)
        yield self._rules()
        if self._places.tells_somebody:
            yield self._contact()
            yield self._policy(policy.merged)

    def _folder(self) -> Done:
        what = "folder stagewatch"

        def look() -> Any:
            return self._api.folder.get_folder(wanted.FOLDER_UID)

        there = found(look, what, "folders:read")
        if there is None:
            try:
                return self._write(
                    what,
                    None,
                    {"title": wanted.FOLDER_TITLE},
                    lambda: self._api.folder.create_folder(wanted.FOLDER_TITLE, wanted.FOLDER_UID),
                    "folders:create",
                )
            except ConflictError:
                there = found(look, what, "folders:read")  # somebody else made it just now
                if there is None:
                    raise
        return Done(what, "unchanged")

    def _data_source(self) -> Done:
        what, source = "data source stagewatch Prometheus", wanted.data_source(self._places)
        there = found(
            lambda: self._api.datasource.get_datasource_by_uid(wanted.DATA_SOURCE_UID),
            what,
            "datasources:read",
        )
        if there is None:
            return self._write(
                what,
                None,
                source,
                lambda: self._api.datasource.create_datasource(source),
                "datasources:create",
            )
        if there.get("readOnly") and difference(there, source):
            raise GrafanaError(
                f"{what}: provisioned from a file, which alone may change it: give it by --data-source as it is, "
                "or take it out of the file first"
            )
        return self._write(
            what,
            there,
            source,
            lambda: self._api.datasource.update_datasource_by_uid(wanted.DATA_SOURCE_UID, source),
            "datasources:write",
        )

    def _board(self, board: Json) -> Done:
        what = f"dashboard {board['title']}"
        there = found(lambda: self._api.dashboard.get_dashboard(board["uid"]), what, "dashboards:read")
        if there is not None and there.get("meta", {}).get("provisioned"):
            raise GrafanaError(f"{what}: it was provisioned from a file: remove the file first")
        elsewhere = there is not None and there.get("meta", {}).get("folderUid") != wanted.FOLDER_UID
        message = f"stagewatch grafana apply {wanted.fingerprint(board)}"
        differs = there is not None and not elsewhere and difference(there["dashboard"], board)
        # Newer releases give a dashboard back in their own words; but each save is a version with its message.
        if differs and self._last_saved_as(board["uid"]) == message:
            return Done(what, "unchanged")
        body = {
            "dashboard": board,
            "folderUid": wanted.FOLDER_UID,
            "overwrite": True,
            "message": message,
        }
        return self._write(
            what,
            None if there is None else there["dashboard"] if not elsewhere else {},
            board,
            lambda: self._api.dashboard.update_dashboard(body),
            "dashboards:create" if there is None else "dashboards:write",
            is_new=there is None,
        )

    def _last_saved_as(self, uid: str) -> str:
        """The message of a dashboard's newest version; empty if Grafana does not tell."""
        try:
            told = found(
                lambda: self._api.dashboard_versions.get_dashboard_versions_by_uid(uid),
                f"versions of dashboard {uid}",
                "dashboards:write",
            )
        except GrafanaError:
            return ""  # then what it says is compared
        versions = told.get("versions") if isinstance(told, dict) else told
        newest: Json = max(versions or [], key=lambda each: int(each.get("version", 0)), default={})
        return str(newest.get("message", ""))

    def _rules(self) -> Done:
        what, group = "alert rules", wanted.rule_group(self._places)
        calls = self._api.alertingprovisioning
        there = found(lambda: calls.get_rule_group(wanted.FOLDER_UID, wanted.GROUP), what, _READ)
        if there is not None and not there.get("rules"):
            there = None
        editable = not _is_provisioned(there.get("rules", []) if there else [], what)
        return self._write(
            what,
            there,
            group if there is None else _comparable(group, there["rules"]),
            lambda: calls.update_rule_group(
                wanted.FOLDER_UID, wanted.GROUP, group, disable_provenance=editable
            ),
            _RULES,
        )

    def _contact(self) -> Done:
        what, point, calls = (
            "contact point stagewatch",
            wanted.contact_point(self._places),
            self._api.alertingprovisioning,
        )
        there = self._contact_there(what)
        if there is None:
            return self._write(
                what, None, point, lambda: calls.create_contactpoint(point, disable_provenance=True), _RULES
            )
        editable = not _is_provisioned([there], what)
        return self._write(
            what,
            there,
            point,
            lambda: calls.update_contactpoint(wanted.CONTACT_UID, point, disable_provenance=editable),
            _RULES,
        )

    def _contact_there(self, what: str) -> Json | None:
        """Ours. Raises GrafanaError if another one has the name: Grafana would join the two."""
        calls = self._api.alertingprovisioning
        points = asked(lambda: calls.get_contactpoints(policy.RECEIVER), what, _READ) or []
        others = [point for point in points if point.get("uid") != wanted.CONTACT_UID]
        if others:
            raise GrafanaError(f"{what}: another contact point has that name: rename it")
        return next(iter(points), None)

    def _policy(self, change: Callable[[policy.Tree], policy.Tree]) -> Done:
        what, calls = "notification policy", self._api.alertingprovisioning
        tree = asked(calls.get_notification_policy_tree, what, _READ)
        changed = change(tree)
        editable = not _is_provisioned([tree], what)
        return self._write(
            what,
            tree,
            changed,
            lambda: calls.set_notification_policy_tree(_writable(changed), disable_provenance=editable),
            _RULES,
        )

    def _write(
        self,
        what: str,
        there: Any,
        want: Any,
        call: Callable[[], Any],
        permission: str,
        *,
        is_new: bool | None = None,
    ) -> Done:
        lines = tuple(difference(there, want))
        if there is not None and not lines:
            return Done(what, "unchanged")
        if not self._dry:
            asked(call, what, permission)
        is_new = there is None if is_new is None else is_new
        return Done(what, "created" if is_new else "updated", lines)

    # ---- remove

    def remove(self) -> Iterator[Done]:
        """Take away what `apply` made, and nothing else."""
        calls = self._api.alertingprovisioning
        tree = asked(calls.get_notification_policy_tree, "notification policy", _READ)
        if any(policy.is_ours(route) for route in tree.get("routes") or []):
            done = self._policy(policy.without)
            yield Done(done.what, "removed", done.diff)
        else:
            yield Done("notification policy", "absent")
        what = "contact point stagewatch"
        yield self._delete(
            what, self._contact_there(what), lambda: calls.delete_contactpoint(wanted.CONTACT_UID), _RULES
        )
        yield from self._remove_rules()
        for board in wanted.boards(self._places):
            yield self._remove_board(board)
        what = "data source stagewatch Prometheus"
        source = found(
            lambda: self._api.datasource.get_datasource_by_uid(wanted.DATA_SOURCE_UID),
            what,
            "datasources:read",
        )
        yield self._delete(
            what,
            source,
            lambda: self._api.datasource.delete_datasource_by_uid(wanted.DATA_SOURCE_UID),
            "datasources:delete",
        )
        yield self._remove_folder()

    def _remove_rules(self) -> Iterator[Done]:
        ours = {rule["uid"] for rule in wanted.rule_group(self._places)["rules"]}
        calls = self._api.alertingprovisioning
        there = asked(calls.get_alertrules_all, "alert rules", _READ) or []
        gone = sorted(rule["uid"] for rule in there if rule["uid"] in ours)
        for uid in gone:
            yield self._delete(f"alert rule {uid}", uid, partial(calls.delete_alertrule, uid), _RULES)
        if not gone:
            yield Done("alert rules", "absent")

    def _remove_board(self, board: Json) -> Done:
        what = f"dashboard {board['title']}"
        there = found(lambda: self._api.dashboard.get_dashboard(board["uid"]), what, "dashboards:read")
        return self._delete(
            what, there, lambda: self._api.dashboard.delete_dashboard(board["uid"]), "dashboards:delete"
        )

    def _remove_folder(self) -> Done:
        """Only if it is empty: Grafana removes a folder with everything in it."""
        what = "folder stagewatch"
        there = found(lambda: self._api.folder.get_folder(wanted.FOLDER_UID), what, "folders:read")
        if there is not None:
            held = self._held_by_others()
            if held:
                return Done(what, "kept", why=f"it holds what others put there: {', '.join(held)}")
        return self._delete(
            what, there, lambda: self._api.folder.delete_folder(wanted.FOLDER_UID), "folders:delete"
        )

    def _held_by_others(self) -> list[str]:
        ours = {board["uid"] for board in wanted.boards(self._places)}
        ours |= {rule["uid"] for rule in wanted.rule_group(self._places)["rules"]}
        boards = asked(
            lambda: self._api.search.search_dashboards(folder_uids=[wanted.FOLDER_UID]),
            "folder stagewatch",
            "folders:read",
        )
        rules = asked(self._api.alertingprovisioning.get_alertrules_all, "alert rules", _READ) or []
        rules = [rule for rule in rules if rule.get("folderUID") == wanted.FOLDER_UID]
        return sorted(each["title"] for each in [*(boards or []), *rules] if each["uid"] not in ours)

    def _delete(self, what: str, there: Any, call: Callable[[], Any], permission: str) -> Done:
        if there is None:
            return Done(what, "absent")
        if not self._dry:
            asked(call, what, permission)
        return Done(what, "removed")


def _comparable(group: Json, there: list[Json]) -> Json:
    """What of a group of rules can differ: the organisation is the token's, and old releases know no hold."""
    left_out = {"orgID"} | (
        {"keep_firing_for"} if not any("keep_firing_for" in rule for rule in there) else set()
    )
    rules = [{key: value for key, value in rule.items() if key not in left_out} for rule in group["rules"]]
    return {**group, "rules": rules}


def _is_provisioned(objects: list[Json], what: str) -> bool:
    """Whether the API made them and the UI may not change them; then neither may a write that gives that up."""
    provenances = {each.get("provenance") or "" for each in objects}
    if "file" in provenances:
        raise GrafanaError(
            f"{what}: provisioned from a file, which alone may change it: take them out of the file first"
        )
    return "api" in provenances


def _writable(tree: policy.Tree) -> policy.Tree:
    """What is read of a tree and must not be written."""
    shown: policy.Tree = json.loads(json.dumps(tree))
    shown.pop("provenance", None)
    return shown
