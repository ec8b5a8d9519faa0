"""What the deployment files start, in one shape, and the real command lines to hold it against.

A `Launch` is one process of ours, or one engine of ours to arm, wherever it was found: a rendered manifest, the
compose file, a unit, a container file.
"""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from stagewatch.agents import commands as agent_commands
from stagewatch.agents.commandline import commands_of
from stagewatch.agents.options import SECRETS, Parser, variable_of
from stagewatch.agents.settings import VARIABLES
from stagewatch.monitor import commands as monitor_commands

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
UNITS = DEPLOY / "systemd"
CONTAINERS = DEPLOY / "container"

PACKAGES = {"stagewatch": monitor_commands, "stagewatch-agent": agent_commands}


@dataclass(frozen=True)
class Launch:
    """One process: who, with which arguments, in which environment, seeing which mounts."""

    where: str
    program: str
    """`stagewatch`, `stagewatch-agent`, or `engine`."""
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: Mapping[str, Any] = field(default_factory=dict)
    """Path in the container: what is mounted there."""

    def __str__(self) -> str:
        return self.where

    @property
    def ours(self) -> dict[str, str]:
        return {name: value for name, value in self.environment.items() if name.startswith("STAGEWATCH_")}


class DeploymentError(AssertionError):
    """A deployment file says what the programs do not understand."""


class _Strict(Parser):
    def error(self, message: str) -> Any:
        raise DeploymentError(message)


def parsed(launch: Launch) -> argparse.Namespace:
    """What the program makes of a launch. Raises DeploymentError or SettingsError."""
    if not launch.arguments:
        raise DeploymentError(f"{launch.where}: no command")
    command, *rest = launch.arguments
    if command == "keep":  # hands its environment on to `ship`
        parse_command(launch.program, "keep", rest, {})
        command, rest = "ship", []
    return parse_command(launch.program, command, rest, launch.ours)


def parse_command(
    program: str, command: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> argparse.Namespace:
    """Parse as `stagewatch.agents.commandline.main` does, but for a variable that nothing reads."""
    package = PACKAGES[program]
    modules = dict(commands_of(package))
    if command not in modules:
        raise DeploymentError(f"{program} has no command {command!r}")
    parser = _Strict(prog=program)
    importlib.import_module(f"{package.__name__}.{modules[command]}").add_arguments(parser)
    known = {variable_of(action) for action in parser.options} | {secret.name for secret in SECRETS}
    if unknown := environment.keys() - known:
        raise DeploymentError(f"{program} {command} reads no {', '.join(sorted(unknown))}")
    parser.take_defaults_from(environment)
    return parser.parse_args(list(arguments))


def probe_variables() -> set[str]:
    return {variable.name for variable in VARIABLES}


# --- Kubernetes


def overlays() -> list[str]:
    return sorted(path.parent.name for path in (KUBERNETES / "overlays").glob("*/kustomization.yaml"))


def pod_templates(resources: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod that rendered resources lead to: its name and template."""
    for resource in resources:
        name = f"{resource['kind']}/{resource['metadata']['name']}"
        match resource["kind"]:
            case "StatefulSet" | "Deployment" | "DaemonSet" | "Job":
                yield name, resource["spec"]["template"]
            case "LeaderWorkerSet":
                templates = resource["spec"]["leaderWorkerTemplate"]
                for role in ("leaderTemplate", "workerTemplate"):
                    yield f"{name}.{role}", templates[role]


def containers(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def kubernetes_launches(overlay: str, resources: Sequence[Mapping[str, Any]]) -> Iterator[Launch]:
    maps = {r["metadata"]["name"]: r["data"] for r in resources if r["kind"] == "ConfigMap"}
    claims = {
        r["metadata"]["name"]: [c["metadata"]["name"] for c in r["spec"].get("volumeClaimTemplates", [])]
        for r in resources
        if r["kind"] == "StatefulSet"
    }
    for name, template in pod_templates(resources):
        volumes: dict[str, Any] = {v["name"]: v for v in template["spec"].get("volumes", [])}
        volumes |= {claim: {"claim": claim} for claim in claims.get(name.partition("/")[2], [])}
        for container in containers(template):
            environment: dict[str, str] = {}
            for source in container.get("envFrom", []):
                environment |= maps[source["configMapRef"]["name"]]
            for item in container.get("env", []):
                environment[item["name"]] = item.get("value", "from-the-pod")
            mounts = {m["mountPath"]: volumes[m["name"]] for m in container.get("volumeMounts", [])}
            where = f"{overlay}: {name}: {container['name']}"
            program = _program(container["image"])
            if program and "command" in container:
                continue  # copies the plugin; see test_kubernetes.py
            if program:
                yield Launch(where, program, tuple(container["args"]), environment, mounts)
            else:
                yield Launch(where, "engine", (), environment, mounts)


def _program(image: str) -> str:
    match image.rpartition("/")[2].partition(":")[0]:
        case "stagewatch-agent":
            return "stagewatch-agent"
        case "stagewatch-collector":
            return "stagewatch"
        case _:
            return ""


# --- Compose


@cache
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return loaded


def compose_launches() -> Iterator[Launch]:
    for name, service in compose()["services"].items():
        environment = {key: str(value) for key, value in service.get("environment", {}).items()}
        mounts = {}
        for volume in service.get("volumes", []):
            source, path, *_ = volume.split(":")
            mounts[path] = source
        mounts |= {f"/run/secrets/{secret}": f"secret {secret}" for secret in service.get("secrets", [])}
        program = _program(service["image"])
        if program and "entrypoint" in service:
            continue
        if program or any(key.startswith("STAGEWATCH_") for key in environment):
            yield Launch(
                f"compose: {name}", program or "engine", tuple(service["command"]), environment, mounts
            )


# --- systemd


def unit_entries(path: Path) -> list[tuple[str, str]]:
    """(key, value) of a unit file, in order, with comments and sections left out."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [
        (key, value)
        for line in lines
        if line and line[0] not in "#;["
        for key, _, value in [line.partition("=")]
    ]


SPECIFIERS = {"%S": "/var/lib", "%t": "/run", "%d": "/run/credentials", "%i": "vllm"}


def expanded(text: str) -> str:
    return re.sub(r"%.", lambda found: SPECIFIERS[found[0]], text)


def unit_launch(path: Path, env_file: Path) -> Launch:
    entries = unit_entries(path)
    environment = dict(unit_entries(env_file))
    for key, value in entries:
        if key == "Environment":
            name, _, given = value.partition("=")
            environment[name] = expanded(given)
    mounts: dict[str, Any] = {}
    for key, value in entries:
        if key == "LoadCredential":
            mounts[f"/run/credentials/{value.partition(':')[0]}"] = f"credential {value}"
        elif key in ("StateDirectory", "RuntimeDirectory"):
            mounts[f"{'/var/lib' if key == 'StateDirectory' else '/run'}/{expanded(value)}"] = key
    words = shlex.split(dict(entries)["ExecStart"])
    return Launch(path.name, Path(words[0]).name, tuple(words[1:]), environment, mounts)


def unit_launches() -> list[Launch]:
    return [
        unit_launch(UNITS / "stagewatch-collector.service", UNITS / "collector.env"),
        unit_launch(UNITS / "stagewatch-agent@.service", UNITS / "agent.env"),
    ]


# --- Container files


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of a container file, continued lines joined, comments left out."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(word, rest) for line in joined.splitlines() if line for word, _, rest in [line.partition(" ")]]


def container_launch(path: Path) -> Launch:
    """What an image starts by itself, with the settings that those who use it must give."""
    environment, entrypoint, command, volumes = {}, "", [], {}
    for word, rest in instructions(path):
        if word == "ENV":
            environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "ENTRYPOINT":
            entrypoint = yaml.safe_load(rest)[0]
        elif word == "CMD":
            command = yaml.safe_load(rest)
        elif word == "VOLUME":
            volumes = dict.fromkeys(yaml.safe_load(rest), "volume")
    return Launch(path.name, entrypoint, tuple(command), environment, volumes)


def container_launches() -> list[Launch]:
    return [container_launch(path) for path in sorted(CONTAINERS.glob("*.Dockerfile"))]
