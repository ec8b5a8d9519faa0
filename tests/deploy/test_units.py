"""systemd units: systemd's own verdict on them, and the lines that must not go."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launches import UNITS, unit_entries
from rendering import tool

FILES = sorted(UNITS.glob("*.service"))
EACH = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
EXPOSURE_MAX = 1.5
"""Of 10; systemd calls everything below 2 well protected."""


def placed(path: Path, directory: Path) -> Path:
    """The unit, its program replaced by one that is installed here."""
    text = re.sub(r"/opt/stagewatch/bin/[a-z-]+", shutil.which("true") or "/bin/true", path.read_text())
    target = directory / path.name.replace("@.", "@vllm.")
    target.write_text(text)
    return target


@EACH
def test_systemd_understands_every_line(path: Path, tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "systemd")
    done = subprocess.run(
        [analyze, "verify", "--man=no", placed(path, tmp_path)], capture_output=True, text=True
    )
    told = [line for line in done.stderr.splitlines() if path.name.partition("@")[0] in line]
    assert done.returncode == 0, done.stderr
    assert told == []


@EACH
def test_it_is_exposed_to_little(path: Path, tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "systemd")
    unit = placed(path, tmp_path)
    done = subprocess.run([analyze, "security", "--offline=true", unit], capture_output=True, text=True)
    [exposure] = re.findall(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    assert float(exposure) <= EXPOSURE_MAX


@EACH
def test_it_runs_as_a_user_of_its_own_or_the_engines(path: Path) -> None:
    entries = dict(unit_entries(path))
    assert entries["User"] in ("stagewatch", "%i")
    assert entries["NoNewPrivileges"] == "yes"
    assert entries["ProtectSystem"] == "strict"
    assert entries["CapabilityBoundingSet"] == ""
    assert entries["MemoryMax"]
    assert "SYSTEMD" not in path.read_text()


@EACH
def test_secrets_are_credentials_and_not_variables(path: Path) -> None:
    entries = unit_entries(path)
    assert [key for key, _ in entries if key == "LoadCredential"]
    assert not [value for _, value in entries if re.match(r"STAGEWATCH_(TOKEN|DIGEST_KEY)=", value)]


def test_the_sidecars_end_leaves_the_engines_rings_alone() -> None:
    """RemoveIPC=yes deletes what its user has in /dev/shm when the unit stops: the flight recorder."""
    assert dict(unit_entries(UNITS / "stagewatch-agent@.service"))["RemoveIPC"] == "no"
    assert dict(unit_entries(UNITS / "vllm.service.d" / "stagewatch.conf"))["RemoveIPC"] == "no"


def test_the_engine_comes_first() -> None:
    entries = dict(unit_entries(UNITS / "stagewatch-agent@.service"))
    assert int(entries["Nice"]) > 0
    assert int(entries["OOMScoreAdjust"]) > 0


def test_the_sidecars_stop_is_told_once() -> None:
    """`keep` hands SIGTERM on; a second one from systemd would end `ship` before what it holds is acknowledged."""
    assert dict(unit_entries(UNITS / "stagewatch-agent@.service"))["KillMode"] == "mixed"


def test_the_engine_does_not_depend_on_the_sidecar() -> None:
    entries = unit_entries(UNITS / "vllm.service.d" / "stagewatch.conf")
    assert ("Wants", "stagewatch-agent@vllm.service") in entries
    assert not {"Requires", "BindsTo", "After"} & {key for key, _ in entries}


def test_users_and_directories_are_those_of_the_units() -> None:
    users = set(re.findall(r"^u (\S+)", (UNITS / "stagewatch.sysusers").read_text(), re.MULTILINE))
    assert users == {"stagewatch", "vllm"}
    assert "d /dev/shm/stagewatch 0700 vllm vllm -" in (UNITS / "stagewatch.tmpfiles").read_text()
