"""A sidecar shows that it lives by touching a file; whoever asks judges by the file's age alone."""

import argparse
import asyncio
import os
import time
from pathlib import Path

import pytest

from stagewatch.agents.commands import health as command
from stagewatch.agents.errors import SettingsError
from stagewatch.agents.health import AGE_S_MAX, Pulse, age_s
from stagewatch.agents.shipping import Destination
from stagewatch.agents.sidecar import Sidecar, SidecarSettings


def asked(path: Path | None) -> int:
    return command.run(argparse.Namespace(health_file=path))


def aged(path: Path, seconds: float) -> Path:
    path.touch()
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def test_a_beat_makes_an_old_file_young(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # GIVEN a file that a sidecar touched too long ago
    path = aged(tmp_path / "alive", AGE_S_MAX + 60)
    assert asked(path) == 1
    assert "not alive: the sidecar last looked for rings 75 s ago" in capsys.readouterr().out
    # WHEN it touches it again
    Pulse(path).beat()
    # THEN it is alive
    assert asked(path) == 0
    assert age_s(path) < AGE_S_MAX


def test_only_its_user_may_touch_the_file(tmp_path: Path) -> None:
    Pulse(tmp_path / "alive").beat()
    assert (tmp_path / "alive").stat().st_mode & 0o777 == 0o600


def test_a_clock_that_was_set_back_kills_nobody(tmp_path: Path) -> None:
    assert asked(aged(tmp_path / "alive", -3600)) == 0


@pytest.mark.parametrize("given", [None, "nothing-there"])
def test_no_file_is_no_answer(tmp_path: Path, given: str | None) -> None:
    with pytest.raises(SettingsError, match="--health-file"):
        asked(tmp_path / given if given else None)


def test_a_file_that_cannot_be_touched_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pulse = Pulse(tmp_path / "no" / "such" / "alive")
    pulse.beat()
    pulse.beat()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"health file {tmp_path}/no/such/alive cannot be touched"
    ]


def test_a_running_sidecar_beats_while_it_waits_for_its_engine(tmp_path: Path) -> None:
    """GIVEN no ring directory yet and no collector WHEN the sidecar runs THEN it is alive all the same."""
    path = tmp_path / "alive"
    settings = SidecarSettings(
        ring_dir=tmp_path / "not-yet",
        destination=Destination("ws://127.0.0.1:1", "t" * 20),
        key=None,
        raw_tokens=False,
        pseudonymise=False,
        held_bytes=1 << 20,
        drain_s=0.0,
        health_file=path,
    )

    async def until_it_beat() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(Sidecar(settings).run(stop))
        async with asyncio.timeout(60):
            while not path.exists():
                await asyncio.sleep(0.01)
        stop.set()
        await running

    asyncio.run(until_it_beat())
    assert asked(path) == 0
