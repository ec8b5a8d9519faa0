"""The compose file without an engine of Docker: read by the Compose specification's rules, and for what must be."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from launches import COMPOSE, compose
from rendering import tool

from stagewatch.monitor.tokens import read_grants

SERVICES: dict[str, Any] = compose()["services"]
HERE = COMPOSE.parent


def test_the_specification_allows_it() -> None:
    """Unknown keys and undeclared secrets fail."""
    compose_spec.PyOptions(apply_merge=True).from_yaml(COMPOSE.read_text()).validate()


@pytest.mark.parametrize("flaw", ["read_onyl: true", "secrets: [nobody]"])
def test_the_specification_would_refuse(flaw: str) -> None:
    text = f"services:\n  one:\n    image: some\n    {flaw}\n"
    with pytest.raises(ValueError, match=r"onyl|nobody"):
        compose_spec.PyCompose.from_yaml(text).validate()


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_has_rights_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "network_mode", "pid", "ipc", "cap_add", "devices"} & service.keys()
    assert int(service["user"].partition(":")[0]) > 0
    assert service.get("read_only") or name == "engine"
    assert ":" in service["image"] and not service["image"].endswith(":latest")
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_from_the_repository_is_there(name: str) -> None:
    for volume in SERVICES[name].get("volumes", []):
        source, _, mode = [*volume.split(":"), ""][:3]
        if not source.startswith("."):
            assert source in compose()["volumes"], volume
        else:
            assert (HERE / source).exists(), volume
            assert mode == "ro"


def test_engine_and_sidecar_share_memory_as_one_user() -> None:
    options = compose()["volumes"]["rings"]["driver_opts"]
    uid = re.search(r"uid=(\d+)", options["o"])
    assert options["type"] == "tmpfs"
    assert uid is not None
    assert {SERVICES[name]["user"].partition(":")[0] for name in ("engine", "sidecar")} == {uid[1]}
    assert "mode=0700" in options["o"]


def test_the_engine_waits_for_its_plugin() -> None:
    plugin, engine = SERVICES["plugin"], SERVICES["engine"]
    assert engine["depends_on"] == {"plugin": {"condition": "service_completed_successfully"}}
    *_, source, target = plugin["entrypoint"]
    assert source == f"{engine['environment']['PYTHONPATH']}/."
    assert f"plugin:{target.rstrip('/')}" in plugin["volumes"]
    assert f"plugin:{engine['environment']['PYTHONPATH']}:ro" in engine["volumes"]


def test_grafana_is_provisioned_with_every_dashboard_and_alert() -> None:
    mounts = {
        path: source
        for source, path, _ in (v.split(":") for v in SERVICES["grafana"]["volumes"] if v.count(":") == 2)
    }
    rendered = {path.name for path in (HERE.parents[1] / "dashboards" / "rendered").glob("*.json")}
    assert {Path(source).name for source in mounts.values() if source.endswith(".json")} == rendered
    [provider] = yaml.safe_load((HERE / "grafana" / "dashboards.yaml").read_text())["providers"]
    shown = {Path(path).name for path in mounts if path.startswith(provider["options"]["path"] + "/")}
    assert shown == rendered - {"grafana-alerts.json"}


def test_alerts_ask_the_data_source_that_is_provisioned() -> None:
    [source] = yaml.safe_load((HERE / "grafana" / "datasources.yaml").read_text())["datasources"]
    alerts = (HERE / "../../dashboards/rendered/grafana-alerts.json").read_text()
    asked = set(re.findall(r'"datasourceUid": "([^"]+)"', alerts)) - {"__expr__"}
    assert asked == {source["uid"]}
    name, _, port = source["url"].removeprefix("http://").partition(":")
    assert SERVICES[name]["ports"][0].endswith(f":{port}")


def test_grafana_has_no_default_password() -> None:
    given = SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"]
    assert given.removeprefix("/run/secrets/") in SERVICES["grafana"]["secrets"]


def test_prometheus_would_start(tmp_path: Path) -> None:
    """Debian's promtool reads the configuration, with the paths of the container mapped to files."""
    promtool = tool("promtool", "prometheus")
    rules = HERE / "../../dashboards/rendered/prometheus-rules.yml"
    (tmp_path / "token").write_text("x" * 20)
    text = (HERE / "prometheus.yml").read_text()
    text = text.replace("/etc/prometheus/rules/*.yml", str(rules.resolve()))
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/read.token", str(tmp_path / "token")))
    done = subprocess.run(
        [promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alertmanager_would_start() -> None:
    amtool = tool("amtool", "prometheus-alertmanager")
    done = subprocess.run([amtool, "check-config", HERE / "alertmanager.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files to other users needs root")
class TestSecrets:
    def made(self, tmp_path: Path) -> Path:
        script = tmp_path / "make-secrets"
        script.write_text((HERE / "make-secrets").read_text())
        script.chmod(0o755)
        environment = {**os.environ, "STAGEWATCH": str(Path(sys.executable).parent / "stagewatch")}
        subprocess.run([script], check=True, env=environment, capture_output=True)
        assert (
            subprocess.run([script], env=environment, capture_output=True).returncode == 1
        )  # never over others
        return tmp_path / "secrets"

    def test_each_is_for_the_one_user_who_reads_it(self, tmp_path: Path) -> None:
        secrets = self.made(tmp_path)
        for name, given in compose()["secrets"].items():
            found = (secrets / Path(given["file"]).name).stat()
            readers = {s["user"].partition(":")[0] for s in SERVICES.values() if name in s.get("secrets", [])}
            assert readers == {str(found.st_uid)}
            assert found.st_mode & 0o777 == 0o400
        assert secrets.stat().st_mode & 0o777 == 0o700

    def test_the_collector_takes_them_for_what_they_are(self, tmp_path: Path) -> None:
        grants = {
            grant.name: {str(scope) for scope in grant.scopes}
            for grant in read_grants(self.made(tmp_path) / "tokens")
        }
        assert grants == {"sidecar": {"ingest"}, "prometheus": {"read"}, "operator": {"read", "admin"}}
