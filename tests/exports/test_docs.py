"""docs/replay.md says what the commands really say, and its examples run."""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest

from stagewatch.monitor.cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replay.md").read_text()
CONSOLES = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the recorded traces, and their Parquet export."""
    directory = tmp_path_factory.mktemp("docs")
    (directory / "traces").symlink_to(ROOT / "tests" / "data" / "traces")
    return directory


@pytest.fixture(autouse=True)
def in_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    monkeypatch.setenv("COLUMNS", "80")


def said(command: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(shlex.split(command)[1:])
    return out.getvalue()


def follows(excerpt: list[str], out: str) -> bool:
    """Whether the parts between lines of dots come in that order, each in one piece."""
    at = 0
    for part in re.split(r"^\.\.\.\n", "".join(f"{line}\n" for line in excerpt), flags=re.MULTILINE):
        found = out.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


@pytest.mark.parametrize("console", CONSOLES, ids=[console.split("\n")[0][13:40] for console in CONSOLES])
def test_a_command_says_what_the_page_shows(console: str, here: Path) -> None:
    lines = console.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    for at, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        command = lines[at][2:] + (" --force" if " export " in lines[at] else "")
        out = said(command)
        assert follows(lines[at + 1 : end], out), out


@pytest.mark.parametrize("code, shown", EXAMPLES, ids=[code.split()[1] for code, _ in EXAMPLES])
def test_an_example_prints_what_the_page_shows(
    code: str, shown: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (here / "stagewatch-parquet").exists():
        assert said("stagewatch export parquet traces")
    exec(compile(code, os.fspath(ROOT / "docs" / "replay.md"), "exec"), {})  # noqa: S102  # the project's own page
    assert capsys.readouterr().out == shown


def test_all_three_libraries_have_an_example() -> None:
    assert {code.split()[1] for code, _ in EXAMPLES} == {"duckdb", "polars", "pandas"}
