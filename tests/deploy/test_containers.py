"""Container files: nothing builds them here, so they are linted, and what they say is checked against the project."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from launches import CONTAINERS, KUBERNETES, ROOT, compose, instructions

FILES = sorted(CONTAINERS.glob("*.Dockerfile"))
EACH = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_there_are_two() -> None:
    assert [path.name for path in FILES] == ["agent.Dockerfile", "collector.Dockerfile"]


@EACH
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([Path(sys.executable).parent / "hadolint", path], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


@EACH
def test_the_base_is_slim_and_pinned_by_a_tag(path: Path) -> None:
    [base] = [rest for word, rest in instructions(path) if word == "ARG" and rest.startswith("BASE=")]
    found = re.fullmatch(r"BASE=python:(\d+\.\d+)-slim-[a-z]+", base)
    assert found is not None
    assert f"Programming Language :: Python :: {found[1]}" in PROJECT["classifiers"]
    assert [rest for word, rest in instructions(path) if word == "FROM"] == ["${BASE} AS build", "${BASE}"]


@EACH
def test_it_runs_as_a_user_without_name_or_rights(path: Path) -> None:
    [user] = [rest for word, rest in instructions(path) if word == "USER"]
    assert all(int(part) > 0 for part in user.split(":"))


@EACH
def test_the_version_is_the_packages(path: Path) -> None:
    versions = {rest for word, rest in instructions(path) if word == "ARG" and rest.startswith("VERSION=")}
    assert versions == {f"VERSION={PROJECT['version']}"}
    images = [service["image"] for service in compose()["services"].values() if "build" in service]
    assert {image.partition(":")[2] for image in images} == {PROJECT["version"]}
    for kustomization in KUBERNETES.rglob("kustomization.yaml"):
        for image in yaml.safe_load(kustomization.read_text()).get("images", []):
            assert image["newTag"] == PROJECT["version"], kustomization


@EACH
def test_it_copies_what_is_there_and_ignores_the_rest(path: Path) -> None:
    copied = {
        source
        for word, rest in instructions(path)
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    assert {package.partition(".")[2].partition(".")[0] for package in _packages()} <= copied
    assert copied >= {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().split("\n")
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert "*" in ignored


@EACH
def test_it_installs_extras_that_exist(path: Path) -> None:
    [extras] = re.findall(r"'\.\[([a-z,]+)\]'", path.read_text())
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


@EACH
def test_it_has_a_health_check_and_labels_and_no_secret(path: Path) -> None:
    text = path.read_text()
    words = [word for word, _ in instructions(path)]
    assert words.count("HEALTHCHECK") == 1
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in text
    assert "STAGEWATCH_TOKEN" not in text
    assert "STAGEWATCH_DIGEST_KEY" not in text


def _packages() -> list[str]:
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    return found
