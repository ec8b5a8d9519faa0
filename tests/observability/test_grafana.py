"""`stagewatch grafana`, against a server that keeps state and refuses as Grafana is documented to."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from grafana_server import TOKEN, GrafanaServer

from stagewatch.dashboards.rules import RULES
from stagewatch.monitor.cli import main
from stagewatch.monitor.grafana import policy
from stagewatch.monitor.grafana.diff import REDACTED, difference

WEBHOOK = "https://hooks.example/secret-path"
MAIL = ("--contact-email", "oncall@example.org")


@pytest.fixture
def server() -> Iterator[GrafanaServer]:
    with closing(GrafanaServer()) as made:
        yield made


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWATCH_GRAFANA_TOKEN", TOKEN)
    monkeypatch.delenv("STAGEWATCH_GRAFANA_WEBHOOK", raising=False)


def grafana(server: GrafanaServer, action: str, *options: str) -> int:
    return main(["grafana", action, "--grafana-url", server.url, *options])


class TestApply:
    def test_everything_is_there_afterwards(self, server: GrafanaServer) -> None:
        assert grafana(server, "apply", *MAIL, "--prometheus-url", "http://prom:9090") == 0
        assert set(server.folders) == {"stagewatch"}
        assert server.sources["stagewatch-prometheus"]["url"] == "http://prom:9090"
        assert set(server.boards) == {"stagewatch-overview", "stagewatch-engine", "stagewatch-health"}
        assert {each["meta"]["folderUid"] for each in server.boards.values()} == {"stagewatch"}
        assert {rule["title"] for rule in server.rules.values()} == {rule.name for rule in RULES}
        assert [c["settings"] for c in server.contacts.values()] == [{"addresses": "oncall@example.org"}]
        assert [route["receiver"] for route in server.policy["routes"]] == ["stagewatch", "pagers"]

    def test_again_changes_nothing(self, server: GrafanaServer, capsys: pytest.CaptureFixture[str]) -> None:
        grafana(server, "apply", *MAIL)
        before, server.writes = server.state(), []
        capsys.readouterr()
        assert grafana(server, "apply", *MAIL) == 0
        assert (server.state(), server.writes) == (before, [])
        assert {line.rsplit(" ", 1)[1] for line in capsys.readouterr().out.splitlines()} == {"unchanged"}

    def test_what_was_changed_by_hand_is_brought_back(self, server: GrafanaServer) -> None:
        grafana(server, "apply", *MAIL)
        wanted = server.state()
        server.edited("stagewatch-overview")["panels"].pop()
        del server.rules["stagewatch-drops"]
        server.contacts["stagewatch-contact"]["settings"] = {"addresses": "somebody@example.org"}
        server.writes = []
        grafana(server, "apply", *MAIL)
        assert len(server.writes) == 3
        found = server.state()
        found[2]["stagewatch-overview"]["dashboard"]["version"] = 1
        assert found == wanted

    @pytest.mark.parametrize("knows_keep_firing", [True, False])
    def test_what_grafana_says_in_its_own_words_is_no_change(
        self, server: GrafanaServer, capsys: pytest.CaptureFixture[str], knows_keep_firing: bool
    ) -> None:
        """GIVEN a release that respells dashboards, or one that knows no `keep_firing_for`."""
        server.respells_boards, server.knows_keep_firing = True, knows_keep_firing
        grafana(server, "apply", *MAIL)
        before, server.writes = server.state(), []
        capsys.readouterr()
        assert grafana(server, "apply", *MAIL) == 0
        assert (server.state(), server.writes) == (before, [])
        assert {line.rsplit(" ", 1)[1] for line in capsys.readouterr().out.splitlines()} == {"unchanged"}
        # AND what somebody changed there is seen all the same
        server.edited("stagewatch-health")["panels"].pop()
        server.rules["stagewatch-drops"]["for"] = "9m"
        grafana(server, "apply", *MAIL)
        assert len(server.writes) == 2

    def test_who_may_not_read_versions_has_dashboards_written_again(
        self, server: GrafanaServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        server.respells_boards = True
        grafana(server, "apply")
        server.forbidden = {"dashboards:write"}
        capsys.readouterr()
        assert grafana(server, "apply", "--dry-run") == 0
        assert "dashboard stagewatch: overview: would be updated" in capsys.readouterr().out

    def test_a_dashboard_that_was_moved_comes_back(self, server: GrafanaServer) -> None:
        grafana(server, "apply")
        server.boards["stagewatch-overview"]["meta"]["folderUid"] = "elsewhere"
        assert grafana(server, "apply") == 0
        assert server.boards["stagewatch-overview"]["meta"]["folderUid"] == "stagewatch"

    def test_a_dry_run_writes_nothing_and_shows_what_would_change(
        self, server: GrafanaServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert grafana(server, "apply", "--dry-run", *MAIL) == 0
        assert server.writes == []
        assert "folder stagewatch: would be created" in capsys.readouterr().out
        grafana(server, "apply", *MAIL)
        server.rules["stagewatch-drops"]["for"] = "9m"
        server.writes = []
        capsys.readouterr()
        grafana(server, "apply", "--dry-run", *MAIL)
        told = capsys.readouterr().out
        changed = [line.replace(" ", "") for line in told.splitlines() if line.strip()[:1] in "+-"]
        assert server.writes == []
        assert changed == ['-"for":"9m",', '+"for":"0s",']

    def test_an_existing_data_source_is_used_and_none_made(self, server: GrafanaServer) -> None:
        grafana(server, "apply", "--data-source", "own")
        assert server.sources == {}
        queried = {query["datasourceUid"] for rule in server.rules.values() for query in rule["data"]}
        assert queried == {"own", "__expr__"}

    def test_links_lead_where_the_operator_says(self, server: GrafanaServer) -> None:
        grafana(
            server,
            "apply",
            "--docs-url",
            "https://docs.example/s",
            "--collector-url",
            "https://watch.example/",
        )
        rule = server.rules["stagewatch-drops"]
        assert rule["annotations"]["runbook_url"] == "https://docs.example/s/alerts/drops.md"
        variables = server.boards["stagewatch-overview"]["dashboard"]["templating"]["list"]
        (collector,) = [each for each in variables if each["name"] == "collector"]
        assert collector["query"] == "https://watch.example"

    def test_without_anybody_to_tell_routing_stays_as_it_is(self, server: GrafanaServer) -> None:
        before = server.state()[6]
        grafana(server, "apply")
        assert (server.policy, server.contacts) == (before, {})

    def test_a_folder_that_somebody_makes_at_the_same_moment_is_used(self, server: GrafanaServer) -> None:
        server.race_folder = True
        assert grafana(server, "apply") == 0
        assert len(server.boards) == 3

    def test_what_the_api_provisioned_stays_so(self, server: GrafanaServer) -> None:
        grafana(server, "apply", *MAIL)
        for rule in server.rules.values():
            rule["provenance"] = "api"
        server.rules["stagewatch-drops"]["for"] = "9m"
        assert grafana(server, "apply", *MAIL) == 0
        assert {rule["provenance"] for rule in server.rules.values()} == {"api"}


class TestRefusals:
    def refused(self, server: GrafanaServer, capsys: pytest.CaptureFixture[str], *options: str) -> str:
        assert grafana(server, "apply", *options) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert TOKEN not in error
        return error

    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize(
        "permission",
        ["folders:create", "datasources:create", "dashboards:create", "alert.provisioning:write"],
    )
    def test_a_missing_permission_is_named(
        self, server: GrafanaServer, capsys: pytest.CaptureFixture[str], permission: str, named: bool
    ) -> None:
        server.forbidden, server.names_permissions = {permission}, named
        assert permission in self.refused(server, capsys, *MAIL)

    def test_after_the_permission_is_given_the_rest_is_done(self, server: GrafanaServer) -> None:
        server.forbidden = {"alert.provisioning:write"}
        assert grafana(server, "apply", *MAIL) == 2
        server.forbidden = set()
        assert grafana(server, "apply", *MAIL) == 0
        assert len(server.rules) == len(RULES)

    def test_a_token_that_is_not_known(
        self, server: GrafanaServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAGEWATCH_GRAFANA_TOKEN", "x" * 40)
        assert "does not know the token" in self.refused(server, capsys)

    def test_a_name_that_is_taken(self, server: GrafanaServer, capsys: pytest.CaptureFixture[str]) -> None:
        server.sources["other"] = {"uid": "other", "name": "stagewatch Prometheus"}
        assert "there is one already" in self.refused(server, capsys)
        server.sources = {}
        server.contacts["other"] = {"uid": "other", "name": "stagewatch", "type": "email", "settings": {}}
        assert "another contact point has that name" in self.refused(server, capsys, *MAIL)

    def test_what_a_file_provisioned_is_left_alone(
        self, server: GrafanaServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        grafana(server, "apply")
        server.boards["stagewatch-overview"]["meta"]["provisioned"] = True
        assert "provisioned from a file" in self.refused(server, capsys)
        server.boards["stagewatch-overview"]["meta"]["provisioned"] = False
        server.rules["stagewatch-drops"]["provenance"] = "file"
        assert "provisioned from a file" in self.refused(server, capsys)

    def test_a_data_source_that_a_file_provisioned_is_used_as_it_is_or_not_at_all(
        self, server: GrafanaServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        grafana(server, "apply")
        server.sources["stagewatch-prometheus"]["readOnly"] = True
        assert grafana(server, "apply") == 0
        error = self.refused(server, capsys, "--prometheus-url", "http://elsewhere:9090")
        assert "data source stagewatch Prometheus: provisioned from a file" in error

    def test_nobody_answers(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["grafana", "apply", "--grafana-url", "http://127.0.0.1:1"]) == 2
        assert "cannot be reached" in capsys.readouterr().err

    @pytest.mark.parametrize("url", ["nowhere", "ftp://x", "http://u:hidden@x", "http://x?token=hidden"])
    def test_what_is_no_address(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["grafana", "apply", "--grafana-url", url]) == 2
        error = capsys.readouterr().err
        assert "--grafana-url" in error
        assert "hidden" not in error

    def test_no_token(
        self, server: GrafanaServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("STAGEWATCH_GRAFANA_TOKEN")
        assert "--grafana-token-file" in self.refused(server, capsys)


class TestSecrets:
    def test_the_token_may_be_in_a_file(
        self, server: GrafanaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("STAGEWATCH_GRAFANA_TOKEN")
        path = tmp_path / "token"
        path.write_text(TOKEN + "\n")
        path.chmod(0o600)
        assert grafana(server, "apply", "--grafana-token-file", str(path)) == 0

    def test_a_webhooks_address_is_applied_and_never_shown(
        self, server: GrafanaServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("STAGEWATCH_GRAFANA_WEBHOOK", WEBHOOK)
        assert grafana(server, "apply", "--dry-run") == 0
        assert grafana(server, "apply") == 0
        assert server.contacts["stagewatch-contact"]["settings"] == {"url": WEBHOOK}
        told = capsys.readouterr()
        assert "secret-path" not in told.out + told.err
        assert TOKEN not in told.out + told.err


class TestRemove:
    def others(self, server: GrafanaServer) -> None:
        server.folders["theirs"] = {"uid": "theirs", "title": "theirs"}
        server.contacts["theirs"] = {"uid": "theirs", "name": "pagers", "type": "email", "settings": {}}
        board = {
            "dashboard": {"uid": "theirs", "title": "Theirs", "version": 1},
            "meta": {"folderUid": "theirs"},
        }
        server.boards["theirs"] = board

    @pytest.mark.parametrize("options", [MAIL, ()])
    def test_exactly_what_was_made_is_gone(self, server: GrafanaServer, options: tuple[str, ...]) -> None:
        self.others(server)
        before = server.state()
        grafana(server, "apply", *options)
        assert grafana(server, "remove") == 0
        after = server.state()
        assert after[:4] + after[5:] == before[:4] + before[5:]

    def test_again_finds_nothing(self, server: GrafanaServer, capsys: pytest.CaptureFixture[str]) -> None:
        assert grafana(server, "remove") == 0
        assert server.writes == []
        assert {line.rsplit(" ", 1)[1] for line in capsys.readouterr().out.splitlines()} == {"absent"}

    def test_a_dry_run_removes_nothing(self, server: GrafanaServer) -> None:
        grafana(server, "apply", *MAIL)
        before = server.state()
        assert grafana(server, "remove", "--dry-run") == 0
        assert server.state() == before

    def test_a_folder_with_what_others_put_there_stays(
        self, server: GrafanaServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Grafana deletes a folder with everything in it."""
        grafana(server, "apply")
        self.others(server)
        server.boards["theirs"]["meta"]["folderUid"] = "stagewatch"
        assert grafana(server, "remove") == 0
        assert "theirs" in server.boards
        assert "kept (it holds what others put there: Theirs)" in capsys.readouterr().out


class TestPolicy:
    OTHERS: tuple[dict[str, Any], ...] = (
        {"receiver": "pagers", "object_matchers": [["team", "=", "db"]], "routes": [{"receiver": "x"}]},
        {"receiver": "stagewatch", "object_matchers": [["team", "=", "other"]]},
    )

    def test_a_merge_adds_one_route_and_leaves_the_others_as_they_are(self) -> None:
        tree = {"receiver": "default", "group_by": ["alertname"], "routes": [*self.OTHERS]}
        made = policy.merged(tree)
        assert made == {**tree, "routes": [policy.route(), *self.OTHERS]}
        assert policy.merged(made) == made
        assert policy.without(made) == tree

    def test_a_tree_without_routes_gets_its_first(self) -> None:
        assert policy.merged({"receiver": "default"})["routes"] == [policy.route()]

    def test_what_others_added_to_our_route_stays(self) -> None:
        own = {**policy.route(), "repeat_interval": "4h", "group_by": []}
        (route,) = policy.merged({"receiver": "d", "routes": [own, own]})["routes"]
        assert route == {**policy.route(), "repeat_interval": "4h"}


class TestDiff:
    def test_what_grafana_adds_is_no_difference(self) -> None:
        assert difference({"a": 1, "id": 7, "b": [{"c": 2, "version": 3}]}, {"a": 1, "b": [{"c": 2}]}) == []

    def test_what_grafana_leaves_out_because_it_is_empty_is_none(self) -> None:
        assert difference({"a": 1}, {"a": 1, "continue": False, "routes": []}) == []
        assert difference({"a": 1}, {"a": 1, "continue": True})

    def test_what_is_missing_is_one(self) -> None:
        assert difference({"b": [1]}, {"b": [1, 2]})

    def test_a_secret_that_is_not_shown_is_taken_to_be_the_same(self) -> None:
        assert difference({"url": REDACTED}, {"url": "x"}) == []
