"""`stagewatch demo` as its user meets it: it ends whole, however it ends, and fits the terminal."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_processes import BIN, Stage, wait_until

from stagewatch.monitor.commands.demo import went_critical
from stagewatch.monitor.demo_stage import DemoError, DemoStage

TOLD_TO_END_BY_ITS_OWN_START = """
import os, signal, subprocess, sys, tempfile
from stagewatch.monitor.cli import main

start, make = subprocess.Popen.__init__, tempfile.mkdtemp

def start_and_be_told(self, arguments, **options):
    start(self, arguments, **options)
    if sys.argv[1] in arguments:
        os.kill(os.getpid(), signal.SIGTERM)

def make_and_tell(*arguments, **options):
    print(made := make(*arguments, **options), file=sys.stderr)
    return made

subprocess.Popen.__init__, tempfile.mkdtemp = start_and_be_told, make_and_tell
sys.exit(main(["demo"]))
"""
"""The last directory it makes, the rings', is the last line it prints."""


def processes_with(variable: str) -> Iterator[tuple[int, list[str]]]:
    """(pid, command line) of the processes whose environment has ``variable``, as NAME=VALUE."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name), (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue  # it ended while we looked, or is another user's


class TestEnding:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    def test_a_demo_that_is_ended_takes_its_processes_and_files_along(
        self, stage: Stage, tmp_path: Path, number: signal.Signals
    ) -> None:
        # GIVEN a demo whose collector, sidecar and pipeline run
        (tmp_path / "temporary").mkdir()
        mark = f"TMPDIR={tmp_path / 'temporary'}"
        demo = stage.process(BIN / "stagewatch", "demo", "--step-ms", "200", TMPDIR=mark.partition("=")[2])

        def ring_dir() -> Path | None:
            lines = [line for _, line in processes_with(mark)]
            if not any("stagewatch.agents.lab.driver" in line for line in lines):
                return None
            return next((Path(line[line.index("--ring-dir") + 1]) for line in lines if "ship" in line), None)

        rings = wait_until(ring_dir, "pipeline and sidecar run")
        assert rings.is_dir()
        # WHEN it alone is told to end, as a supervisor or a closed terminal does
        os.kill(demo.pid, number)
        # THEN nothing of it is left
        assert demo.status() == 128 + number
        wait_until(lambda: not list(processes_with(mark)), "no process is left")
        assert not rings.exists()
        assert list((tmp_path / "temporary").iterdir()) == []
        assert "Traceback" not in demo.output

    @pytest.mark.parametrize("started", ["collect", "ship", "stagewatch.agents.lab.driver"])
    def test_a_signal_that_comes_just_after_a_process_was_started_ends_that_one_too(
        self, stage: Stage, tmp_path: Path, started: str
    ) -> None:
        # GIVEN a demo that is told to end before it has noted the process it has just started
        (tmp_path / "temporary").mkdir()
        mark = f"TMPDIR={tmp_path / 'temporary'}"
        script = tmp_path / "demo.py"
        script.write_text(TOLD_TO_END_BY_ITS_OWN_START)
        # WHEN
        demo = stage.process(sys.executable, script, started, TMPDIR=mark.partition("=")[2])
        # THEN
        assert demo.status() == 128 + signal.SIGTERM
        assert list(processes_with(mark)) == []
        assert list((tmp_path / "temporary").iterdir()) == []
        assert not Path(demo.output.strip().splitlines()[-1]).exists()

    def test_a_part_that_cannot_start_is_told_by_its_own_words(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        # GIVEN no room for a collector: its data directory is a file
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        stage = DemoStage()
        (stage.directory / "data").touch()
        # WHEN it is started THEN the error holds what the collector said, since its log goes with it
        with pytest.raises(DemoError, match=r"the collector did not start: stagewatch: .*data"), stage:
            pytest.fail("it started")
        assert list(tmp_path.iterdir()) == []


class TestTelling:
    def test_a_request_fed_something_else_whose_text_stayed_the_same_is_explained(self) -> None:
        assert went_critical(["r0", "r1", "r3"], ["r1"]) == (
            "3 requests went critical; of these r0 and r3 were fed wrong inputs, too, but their text came out the same."
        )
        assert went_critical(["r1"], ["r1"]) == "1 request went critical."

    @pytest.mark.slow
    def test_the_fault_is_caught_within_50_columns_and_without_colour(self, stage: Stage) -> None:
        demo = stage.process(BIN / "stagewatch", "demo", "--step-ms", "0", COLUMNS="50", NO_COLOR="1")
        assert demo.status() == 0
        assert max(map(len, demo.output.splitlines())) <= 50
        assert "\x1b" not in demo.output
