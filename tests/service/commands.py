"""A command run in this process, and what came of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]


def command(main: Callable[[Sequence[str]], int], name: str, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command ``name`` of a program."""

    def run(*arguments: str | Path) -> Outcome:
        status = main([name, *map(str, arguments)])
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run
