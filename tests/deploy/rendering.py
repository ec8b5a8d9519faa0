"""Rendered manifests, made once."""

import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from launches import KUBERNETES

KUSTOMIZE_MAJOR_MIN = 5


def missing(why: str) -> NoReturn:
    """Skip, or fail where NEED_TOOLS says that everything must be there, as in CI."""
    (pytest.fail if os.environ.get("NEED_TOOLS") else pytest.skip)(why)


@cache
def kubectl_missing() -> str:
    """Why manifests cannot be rendered here; empty if they can."""
    if shutil.which("kubectl") is None:
        return "kubectl is missing: make setup-deploy"
    told = subprocess.run(["kubectl", "version", "--client", "-o", "json"], capture_output=True, text=True)
    version = json.loads(told.stdout).get("kustomizeVersion", "v0") if told.returncode == 0 else "v0"
    found = re.match(r"v(\d+)", version)
    if found is None or int(found[1]) < KUSTOMIZE_MAJOR_MIN:
        return f"kubectl's Kustomize is {version}, {KUSTOMIZE_MAJOR_MIN} is needed: kubectl 1.27 or later"
    return ""


@cache
def rendered(directory: Path) -> list[dict[str, Any]]:
    if why := kubectl_missing():
        missing(why)
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nothing deprecated
    return [resource for resource in yaml.safe_load_all(done.stdout) if resource]


def overlay_resources(name: str) -> list[dict[str, Any]]:
    return rendered(KUBERNETES / "overlays" / name)


def tool(name: str, package: str) -> str:
    """Where a tool is; skips where it is missing."""
    found = shutil.which(name)
    if found is None:
        missing(f"{name} is missing: `make setup-deploy` installs {package}")
    return found
