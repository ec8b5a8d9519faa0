"""The doctor on installed releases, as a user runs it: with the engine's Python, without starting the engine."""

import json
import subprocess

import msgspec
import pytest
import runs
from runs import find_python

from stagewatch.agents.commands import doctor as command
from stagewatch.agents.doctor import Examination

COMMAND = "import sys; from stagewatch.agents.cli import main; sys.exit(main(sys.argv[1:]))"


def doctor(version: str = "", fault: str = "", *options: str) -> tuple[int, str]:
    """Exit status and standard output."""
    command = [find_python(version), "-c", COMMAND, "doctor", *options]
    done = subprocess.run(
        command,
        env=runs.engine_environment(2, fault=fault),
        capture_output=True,
        text=True,
        timeout=runs.RUN_LIMIT_S,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("version", "fault", "status", "variant", "mask", "reachable"),
    [
        ("", "", 0, "C", "sound", "yes"),
        ("", "old-mask", 1, "C", "faulty", "yes"),
        ("0.30", "", 0, "B", "sound", "yes"),
        ("0.29", "", 1, "A2", "faulty", "no"),
    ],
    ids=["0.32.0", "0.32.0 with the old mask patched in", "0.30.0", "0.29.0"],
)
def test_verdict(version: str, fault: str, status: int, variant: str, mask: str, reachable: str) -> None:
    found_status, output = doctor(version, fault, "--json")
    found = json.loads(output)
    assert (found_status, found["variant"], found["mask"]) == (status, variant, mask)
    answers = {exposure["name"]: exposure["answer"] for exposure in found["exposures"]}
    assert answers["pipeline-with-speculation-reachable"] == reachable
    assert answers["no-async-scheduling-cadence"] == "yes"
    assert answers["drafts-not-relayed"] == ("yes" if variant == "A2" else "no")
    table = command.table(msgspec.json.decode(output, type=Examination))
    assert max(map(len, table.splitlines())) <= 80
