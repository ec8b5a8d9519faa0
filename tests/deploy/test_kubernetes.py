"""The manifests without a cluster: rendered, checked against Kubernetes' own schemas, and for what must never be.

Custom resources have no schema there; `crds` holds small ones, written by hand from the public API references:
LeaderWorkerSet v1 (kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go), ServiceMonitor and
PrometheusRule v1 (prometheus-operator, Documentation/api-reference/api.md).
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from crds import SCHEMAS
from launches import DEPLOY, KUBERNETES, containers, overlays, pod_templates
from rendering import kubectl_missing, overlay_resources, rendered

from stagewatch.monitor.app import create_app

VERSIONS = ("1.29", kubernetes_validate.latest_version())
"""The first with native sidecars on by default, and the latest that is known."""

pytestmark = pytest.mark.skipif(bool(kubectl_missing()), reason=kubectl_missing() or "rendered")


def pods() -> list[tuple[str, dict[str, Any]]]:
    if kubectl_missing():
        return []
    return [
        (f"{overlay}: {name}", template)
        for overlay in overlays()
        for name, template in pod_templates(overlay_resources(overlay))
    ]


PODS = pytest.mark.parametrize("template", [pod for _, pod in pods()], ids=[name for name, _ in pods()])


def resources_of(overlay: str, kind: str) -> list[dict[str, Any]]:
    return [found for found in overlay_resources(overlay) if found["kind"] == kind]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", overlays())
def test_kubernetes_would_take_it(overlay: str, version: str) -> None:
    for resource in overlay_resources(overlay):
        if resource["kind"] in SCHEMAS:
            jsonschema.validate(resource, SCHEMAS[resource["kind"]])
        else:
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("overlay", overlays())
def test_pods_of_custom_resources_are_checked_as_pods(overlay: str) -> None:
    for _, template in pod_templates(resources_of(overlay, "LeaderWorkerSet")):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, VERSIONS[0], strict=True)


class TestPodSecurityRestricted:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, and a little more."""

    @PODS
    def test_the_pod(self, template: dict[str, Any]) -> None:
        spec = template["spec"]
        for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            assert not spec.get(name)
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # else a service's variables are taken for settings
        assert spec["serviceAccountName"] != "default"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        assert all(volume.keys() - {"name"} <= allowed for volume in spec.get("volumes", []))

    @PODS
    def test_each_container(self, template: dict[str, Any]) -> None:
        for container in containers(template):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security.get("privileged")
            assert security.get("runAsUser", 1) > 0
            assert not any("hostPort" in port for port in container.get("ports", []))
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert not container["image"].endswith(":latest")
            assert ":" in container["image"]
            if "stagewatch" in container["image"]:
                assert security["readOnlyRootFilesystem"] is True

    @pytest.mark.parametrize("overlay", overlays())
    def test_the_namespace_enforces_it(self, overlay: str) -> None:
        [namespace] = resources_of(overlay, "Namespace")
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"

    @pytest.mark.parametrize("overlay", overlays())
    def test_service_accounts_mount_no_token_and_nothing_has_rights(self, overlay: str) -> None:
        for account in resources_of(overlay, "ServiceAccount"):
            assert account["automountServiceAccountToken"] is False
        assert not any("Role" in resource["kind"] for resource in overlay_resources(overlay))

    @pytest.mark.parametrize("overlay", overlays())
    def test_no_secret_is_in_the_manifests(self, overlay: str) -> None:
        assert not resources_of(overlay, "Secret")


def engine_pods() -> list[tuple[str, dict[str, Any]]]:
    return [(name, pod) for name, pod in pods() if any(c["name"] == "vllm" for c in containers(pod))]


ENGINE_PODS = pytest.mark.parametrize(
    "template", [pod for _, pod in engine_pods()], ids=[name for name, _ in engine_pods()]
)


class TestTheEngineComesFirst:
    @ENGINE_PODS
    def test_the_sidecar_is_native_and_nothing_restarts_it_from_outside(
        self, template: dict[str, Any]
    ) -> None:
        """A probe would restart it, which recreates a LeaderWorkerSet's group, or take its engine out of service."""
        plugin, sidecar = template["spec"]["initContainers"]
        assert (plugin["name"], sidecar["name"]) == ("stagewatch-plugin", "stagewatch-sidecar")
        assert sidecar["restartPolicy"] == "Always"
        assert not [key for key in sidecar if key.endswith("Probe")]
        assert sidecar["args"] == ["keep"]

    @ENGINE_PODS
    def test_rings_are_in_memory_of_the_engines_own_user(self, template: dict[str, Any]) -> None:
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["stagewatch-rings"]["emptyDir"]["medium"] == "Memory"
        for container in containers(template):
            assert "runAsUser" not in container["securityContext"]  # the pod's, for all of them

    @ENGINE_PODS
    def test_missing_secrets_keep_no_engine_from_starting(self, template: dict[str, Any]) -> None:
        secrets = [volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume]
        assert {secret["secretName"] for secret in secrets} == {"stagewatch-ingest", "stagewatch-key"}
        assert all(secret["optional"] for secret in secrets)

    @ENGINE_PODS
    def test_the_engine_sees_no_secret_of_ours(self, template: dict[str, Any]) -> None:
        [engine] = [container for container in containers(template) if container["name"] == "vllm"]
        secret = {volume["name"] for volume in template["spec"]["volumes"] if "secret" in volume}
        assert not secret & {mount["name"] for mount in engine["volumeMounts"]}

    @ENGINE_PODS
    def test_secrets_can_be_read_by_those_who_read_them_and_nobody_else(
        self, template: dict[str, Any]
    ) -> None:
        """The programs refuse secrets that others can read, and the files are root's, for their group."""
        for volume in template["spec"]["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
        _, sidecar = template["spec"]["initContainers"]
        assert sidecar["securityContext"]["runAsGroup"] == 0

    @ENGINE_PODS
    def test_the_plugin_is_copied_or_left_out_but_does_not_fail(
        self, template: dict[str, Any], tmp_path: Path
    ) -> None:
        plugin, _ = template["spec"]["initContainers"]
        [line] = plugin["args"]
        source, target = tmp_path / "from", tmp_path / "to"
        target.mkdir()
        here = line.replace("/opt/stagewatch-plugin", str(source)).replace("/plugin/", f"{target}/")
        missing = subprocess.run([*plugin["command"], here], capture_output=True, text=True)
        assert missing.returncode == 0
        assert "will not be watched" in missing.stdout
        (source / "stagewatch").mkdir(parents=True)
        assert subprocess.run([*plugin["command"], here]).returncode == 0
        assert (target / "stagewatch").is_dir()


class TestTheCollectorsDoor:
    @pytest.mark.parametrize("overlay", overlays())
    def test_service_policy_and_monitor_meet_at_its_port(self, overlay: str) -> None:
        [collector] = [
            r for r in resources_of(overlay, "StatefulSet") if "collector" in r["metadata"]["name"]
        ]
        labels = collector["spec"]["template"]["metadata"]["labels"]
        [container] = collector["spec"]["template"]["spec"]["containers"]
        [port] = container["ports"]
        [service] = [
            r
            for r in resources_of(overlay, "Service")
            if r["metadata"]["name"] == collector["spec"]["serviceName"]
        ]
        assert service["spec"]["selector"].items() <= labels.items()
        assert service["spec"]["ports"][0]["targetPort"] == port["name"]
        [config] = resources_of(overlay, "ConfigMap")[:1]
        assert (
            config["data"]["STAGEWATCH_PORT"]
            == str(port["containerPort"])
            == str(service["spec"]["ports"][0]["port"])
        )
        [policy] = resources_of(overlay, "NetworkPolicy")
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        assert policy["spec"]["ingress"][0]["ports"] == [{"port": port["name"], "protocol": "TCP"}]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert policy["spec"]["egress"] == []
        [monitor] = resources_of(overlay, "ServiceMonitor")
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]

    @pytest.mark.parametrize("overlay", overlays())
    def test_everything_is_where_the_namespace_is(self, overlay: str) -> None:
        named = {
            r["metadata"].get("namespace") for r in overlay_resources(overlay) if r["kind"] != "Namespace"
        }
        assert named == {"stagewatch"}

    @ENGINE_PODS
    def test_engines_are_let_in(self, template: dict[str, Any]) -> None:
        [policy] = resources_of("collector", "NetworkPolicy")
        allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        assert allowed.items() <= template["metadata"]["labels"].items()

    def test_probes_and_scrapes_ask_for_what_is_served(self) -> None:
        served = _paths()
        [collector] = resources_of("collector", "StatefulSet")
        [container] = collector["spec"]["template"]["spec"]["containers"]
        asked = {container[key]["httpGet"]["path"] for key in container if key.endswith("Probe")}
        [monitor] = resources_of("collector", "ServiceMonitor")
        asked |= {endpoint["path"] for endpoint in monitor["spec"]["endpoints"]}
        assert asked == {"/healthz", "/readyz", "/metrics"}
        assert asked <= served

    def test_the_disk_holds_what_is_kept(self) -> None:
        [collector] = resources_of("collector", "StatefulSet")
        [claim] = collector["spec"]["volumeClaimTemplates"]
        [config] = resources_of("collector", "ConfigMap")
        size = claim["spec"]["resources"]["requests"]["storage"]
        assert int(size.removesuffix("Gi")) << 30 >= int(config["data"]["STAGEWATCH_KEEP_BYTES"]) + (1 << 30)


def _paths() -> set[str]:
    """What the application serves, from its OpenAPI document; none of it is started."""

    class _Nobody:
        def __getattr__(self, name: str) -> Any:
            return _Nobody()

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return _Nobody()

    return set(create_app(_Nobody()).openapi()["paths"])  # type: ignore[arg-type]  # no collector is needed


class TestSecrets:
    FILES = ("tokens", "ingest.token", "read.token", "digest.key")

    def test_without_files_nothing_is_rendered(self, tmp_path: Path) -> None:
        """There is no default to forget."""
        done = subprocess.run(
            ["kubectl", "kustomize", str(self._overlay(tmp_path))], capture_output=True, text=True
        )
        assert done.returncode != 0

    def test_files_become_the_secrets_that_the_others_name(self, tmp_path: Path) -> None:
        overlay = self._overlay(tmp_path)
        for name in self.FILES:
            (tmp_path / "kubernetes" / "components" / "secrets" / name).write_text("x" * 32)
        made = {r["metadata"]["name"]: set(r["data"]) for r in rendered(overlay) if r["kind"] == "Secret"}
        assert made == {
            "stagewatch-tokens": {"tokens"},
            "stagewatch-ingest": {"token"},
            "stagewatch-read": {"token"},
            "stagewatch-key": {"key"},
        }
        named = {
            volume["secret"]["secretName"]
            for _, pod in pods()
            for volume in pod["spec"].get("volumes", [])
            if "secret" in volume
        }
        [monitor] = resources_of("collector", "ServiceMonitor")
        credentials = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
        assert named | {credentials["name"]} == made.keys() | {
            "stagewatch-tls"
        }  # cert-manager makes that one
        assert credentials["key"] in made[credentials["name"]]

    def test_git_never_takes_them(self) -> None:
        ignored = (KUBERNETES / "components" / "secrets" / ".gitignore").read_text().split()
        assert {"tokens", "*.token", "*.key"} <= set(ignored)

    def _overlay(self, tmp_path: Path) -> Path:
        shutil.copytree(KUBERNETES, tmp_path / "kubernetes", ignore=shutil.ignore_patterns(*self.FILES))
        overlay = tmp_path / "kubernetes" / "overlays" / "with-secrets"
        overlay.mkdir()
        (overlay / "kustomization.yaml").write_text(
            yaml.safe_dump({"resources": ["../statefulset"], "components": ["../../components/secrets"]})
        )
        return overlay


def test_the_prometheus_rule_is_fresh() -> None:
    """`python deploy/prometheus_rule.py` makes it from the alerts."""
    spec = importlib.util.spec_from_file_location("prometheus_rule", DEPLOY / "prometheus_rule.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.prometheus_rule()
