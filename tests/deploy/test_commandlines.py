"""Every flag, variable, path and port in the deployment files, against the real command lines and settings."""

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from launches import (
    COMPOSE,
    CONTAINERS,
    UNITS,
    DeploymentError,
    Launch,
    compose,
    compose_launches,
    container_launches,
    instructions,
    kubernetes_launches,
    overlays,
    parsed,
    probe_variables,
    unit_entries,
    unit_launches,
)
from rendering import kubectl_missing, missing, overlay_resources

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.settings import RING_DIR, ProbeSettings
from stagewatch.agents.shipping import ingest_url


def gathered() -> list[Launch]:
    found = [*compose_launches(), *unit_launches()]
    if not kubectl_missing():
        for overlay in overlays():
            found += kubernetes_launches(overlay, overlay_resources(overlay))
    return found


LAUNCHES = gathered()
OURS = [launch for launch in LAUNCHES if launch.program != "engine"]
ENGINES = [launch for launch in LAUNCHES if launch.program == "engine"]
SHIPS = [launch for launch in OURS if launch.program == "stagewatch-agent"]
COLLECTORS = [launch for launch in OURS if launch.program == "stagewatch"]


def under_a_mount(path: Any, launch: Launch) -> Any:
    """What is mounted at or above a path; None where it is the read-only image's own."""
    for parent in (PurePosixPath(path), *PurePosixPath(path).parents):
        if str(parent) in launch.mounts:
            return launch.mounts[str(parent)]
    return None


def test_there_is_something_to_check() -> None:
    if why := kubectl_missing():
        missing(why)
    places = {launch.where.split(":")[0] for launch in LAUNCHES}
    assert places == {*overlays(), "compose", "stagewatch-collector.service", "stagewatch-agent@.service"}
    assert len(SHIPS) == 1 + 1 + 2 + 2  # compose, systemd, StatefulSets, leader and worker
    assert len(COLLECTORS) == 1 + 1 + len(overlays())
    assert len(ENGINES) == 1 + 2 + 2


@pytest.mark.parametrize("launch", [*OURS, *container_launches()], ids=str)
def test_the_programs_understand_it(launch: Launch) -> None:
    parsed(launch)


@pytest.mark.parametrize("launch", ENGINES, ids=str)
def test_engines_are_armed_by_variables_that_the_probe_reads(launch: Launch) -> None:
    assert launch.ours.keys() <= probe_variables()
    settings = ProbeSettings.from_environment(launch.environment)
    assert settings is not None
    assert launch.environment["PYTHONPATH"] in launch.mounts


@pytest.mark.parametrize(
    ("where", "flaw"), [("compose", {"STAGEWATCH_COLECTOR": "x"}), ("compose", {"--prot": "1"})]
)
def test_a_misspelt_name_is_found(where: str, flaw: dict[str, str]) -> None:
    """The checks above can fail: on a variable that nothing reads, and on a flag that there is not."""
    launch = next(launch for launch in COLLECTORS if launch.where.startswith(where))
    (name, value), *_ = flaw.items()
    flawed = (
        replace(launch, arguments=(*launch.arguments, name, value))
        if name.startswith("--")
        else replace(launch, environment={**launch.environment, name: value})
    )
    with pytest.raises((DeploymentError, SettingsError), match=name.lstrip("-")):
        parsed(flawed)


class TestSidecars:
    @pytest.mark.parametrize("launch", SHIPS, ids=str)
    def test_each_is_kept_and_shows_its_health(self, launch: Launch) -> None:
        assert launch.arguments == ("keep",)
        assert parsed(launch).health_file is not None

    @pytest.mark.parametrize("launch", SHIPS, ids=str)
    def test_each_looks_where_its_engine_writes(self, launch: Launch) -> None:
        pod = launch.where.rpartition(": ")[0]
        if launch.where.endswith(".service"):
            [given] = [
                value.partition("=")[2]
                for key, value in unit_entries(UNITS / "vllm.service.d" / "stagewatch.conf")
                if key == "Environment"
            ]
            assert str(parsed(launch).ring_dir) == given
            assert given in (UNITS / "stagewatch.tmpfiles").read_text().split()
            return
        [engine] = [engine for engine in ENGINES if engine.where.rpartition(": ")[0] == pod]
        assert str(parsed(launch).ring_dir) == engine.environment[RING_DIR]
        shared = under_a_mount(engine.environment[RING_DIR], engine)
        assert shared is not None
        assert under_a_mount(parsed(launch).ring_dir, launch) == shared

    @pytest.mark.parametrize("launch", SHIPS, ids=str)
    def test_each_writes_and_reads_where_something_is_mounted(self, launch: Launch) -> None:
        args = parsed(launch)
        assert under_a_mount(args.health_file, launch) is not None
        assert "ingest" in str(under_a_mount(args.token_file, launch))
        assert "key" in str(under_a_mount(args.key_file, launch))

    @pytest.mark.parametrize("launch", SHIPS, ids=str)
    def test_each_reaches_its_collector(self, launch: Launch) -> None:
        address = urlsplit(ingest_url(parsed(launch).collector))
        [collector] = {parsed(each).port for each in COLLECTORS}
        assert address.port == collector
        if launch.where.startswith("compose"):
            assert address.hostname in compose()["services"]
        elif not launch.where.endswith(".service"):
            overlay = launch.where.partition(":")[0]
            services = [
                f"{found['metadata']['name']}.{found['metadata']['namespace']}.svc"
                for found in overlay_resources(overlay)
                if found["kind"] == "Service"
                and {"port": address.port}.items() <= found["spec"]["ports"][0].items()
            ]
            assert address.hostname in services


class TestCollectors:
    @pytest.mark.parametrize("launch", COLLECTORS, ids=str)
    def test_each_listens_beyond_itself_with_tokens(self, launch: Launch) -> None:
        args = parsed(launch)
        assert args.host == "0.0.0.0"  # noqa: S104  # in its own network or behind the operator's
        assert "tokens" in str(under_a_mount(args.token_file, launch))
        assert not args.open_metrics

    @pytest.mark.parametrize("launch", COLLECTORS, ids=str)
    def test_each_writes_to_its_own_disk(self, launch: Launch) -> None:
        assert under_a_mount(parsed(launch).data_dir, launch) is not None


class TestTls:
    """Where the collector speaks TLS nothing else may speak to it in clear, and all must be able to check it."""

    @pytest.mark.parametrize("launch", SHIPS, ids=str)
    def test_each_sidecar_speaks_as_its_collector_does(self, launch: Launch) -> None:
        place = launch.where.partition(":")[0]
        beside = "stagewatch-collector.service" if launch.where.endswith(".service") else f"{place}:"
        [collector] = [each for each in COLLECTORS if each.where.startswith(beside)]
        speaks_tls = parsed(collector).tls_cert is not None
        assert (urlsplit(parsed(launch).collector).scheme == "wss") == speaks_tls
        assert (parsed(launch).tls_ca is not None) == speaks_tls
        if speaks_tls:
            assert under_a_mount(parsed(launch).tls_ca, launch) is not None
            assert under_a_mount(parsed(collector).tls_key, collector) is not None

    @pytest.mark.parametrize("overlay", overlays())
    def test_probes_and_prometheus_too(self, overlay: str) -> None:
        resources = overlay_resources(overlay)
        [collector] = [c for c in COLLECTORS if c.where.startswith(f"{overlay}:")]
        scheme = "https" if parsed(collector).tls_cert else "http"
        [monitor] = [r for r in resources if r["kind"] == "ServiceMonitor"]
        assert monitor["spec"]["endpoints"][0].get("scheme", "http") == scheme
        [template] = [
            r for r in resources if r["kind"] == "StatefulSet" and "collector" in r["metadata"]["name"]
        ]
        [container] = template["spec"]["template"]["spec"]["containers"]
        probes = [
            container[key]["httpGet"].get("scheme", "HTTP") for key in container if key.endswith("Probe")
        ]
        assert probes == [scheme.upper()] * 3


class TestContainerFiles:
    def test_the_collectors_data_and_port(self) -> None:
        launch = next(each for each in container_launches() if each.program == "stagewatch")
        args = parsed(launch)
        assert str(args.data_dir) in launch.mounts
        words = dict(instructions(CONTAINERS / "collector.Dockerfile"))
        assert words["EXPOSE"] == str(args.port)

    def test_the_agents_paths_are_those_that_the_others_mount(self) -> None:
        launch = next(each for each in container_launches() if each.program == "stagewatch-agent")
        for each in SHIPS:
            if not each.where.endswith(".service"):
                assert parsed(launch).ring_dir == parsed(each).ring_dir
                assert parsed(launch).health_file == parsed(each).health_file


def test_prometheus_scrapes_the_collector_with_a_token_that_is_there() -> None:
    config = yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text())
    ours, engine = config["scrape_configs"]
    services = compose()["services"]
    assert ours["static_configs"][0]["targets"] == [
        f"collector:{services['collector']['environment']['STAGEWATCH_PORT']}"
    ]
    assert PurePosixPath(ours["authorization"]["credentials_file"]).name in services["prometheus"]["secrets"]
    [target] = engine["static_configs"][0]["targets"]
    assert services["engine"]["ports"][0].rpartition(":")[2] == target.partition(":")[2]
