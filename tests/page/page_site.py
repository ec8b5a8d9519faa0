"""What the tests of the page look at, and what they look with."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service_processes import CollectorProcess

from stagewatch.agents.lab.engine import LabConfig, LabResult, start_lab
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.settings import ProbeSettings

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def launched() -> Iterator[Any]:
    """A headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@dataclass
class Seen:
    """A page, and everything it did that it should not have done."""

    page: Any
    url: str
    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def watch(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._heard)
        self.page.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        # The browser itself writes a line for every answer that is no success; those are the tests' own doing.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url + "/", "data:")):
            self.elsewhere.append(request.url)

    def enter(self, token: str, where: str = "") -> None:
        self.page.goto(f"{self.url}/{where}")
        self.page.get_by_label("Bearer token").fill(token)
        self.page.get_by_role("button", name="Look").click()
        self.page.locator("form.login").wait_for(state="detached")


@dataclass
class Site:
    """A collector with a sidecar, and what ran in front of it."""

    directory: Path
    collector: CollectorProcess
    ring_dir: Path

    def config(self, fault: str | None, **changes: Any) -> LabConfig:
        probe = ProbeSettings(self.ring_dir, "page", 8 << 20, 0.5, 0.0, 2, fixed_mask=False)
        settings: dict[str, Any] = {
            "seed": 7,
            "pp": 3,
            "spec_tokens": 7,
            "workload": Workload(
                requests=8, prompt_len=(8, 24), max_tokens=(24, 48), arrivals_per_iteration=0.3
            ),
            "probe": probe,
            "fault": Plan(fault) if fault else None,
        }
        return LabConfig(**{**settings, **changes})

    def run(self, fault: str | None, **changes: Any) -> tuple[LabConfig, LabResult]:
        config = self.config(fault, **changes)
        with start_lab(config) as lab:
            return config, lab.wait(100)
