"""Pictures of the page for the README, from a real run: `make screenshots`.

Starts a collector, a sidecar and a three-stage lab pipeline, first sound, then with the founding fault.
"""

import argparse
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "service"))

from page_site import Seen, Site, launched
from PIL import Image
from service_processes import CollectorProcess, SidecarProcess, killed_at_exit, wait_until

from stagewatch.agents.lab.engine import start_lab

SIZE = {"width": 1120, "height": 640}
FRAMES = 40
FRAME_MS = 180


def animation(seen: Seen, site: Site, into: Path) -> str:
    """The lattice of a faulty run while it runs; returns the engine's instance."""
    page = seen.page
    config = site.config("old-mask", step_sleep_ms=120)
    frames = []
    with start_lab(config) as lab:
        page.goto(f"{seen.url}/#/")
        page.get_by_role("link", name=config.instance).first.click()
        page.locator("canvas[role=application]").wait_for()
        while lab.running and len(frames) < FRAMES:
            shot = Image.open(BytesIO(page.screenshot(clip={"x": 0, "y": 0, **SIZE})))
            frames.append(shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=64))
            page.wait_for_timeout(FRAME_MS)
        lab.wait(60)
    frames[0].save(into, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0, optimize=True)
    return config.instance


def pictures(seen: Seen, site: Site, instance: str, into: Path) -> None:
    """One picture a view."""
    page = seen.page
    incident = wait_until(
        lambda: site.collector.get(f"/v1/incidents?instance={instance}&severity=critical")["incidents"],
        "the fault was found",
    )[-1]
    for name, where in (
        ("page-engines", ""),
        ("page-engine", f"#/engine/{instance}/0?step={incident['first_bad_step']}"),
        ("page-requests", f"#/engine/{instance}/0?step={incident['first_bad_step']}&zoom=requests"),
        ("page-incident", f"#/incident/{incident['id']}"),
    ):
        page.goto(f"{seen.url}/{where}")
        page.locator("main table").first.wait_for()
        page.wait_for_timeout(1500)  # pictures have no condition to wait for: whatever is shown by then
        page.screenshot(path=into / f"{name}.png")


def main() -> None:
    """Run everything and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[2] / "docs" / "img")
    into = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        rings = Path(directory) / "rings"
        collector = CollectorProcess(Path(directory) / "data")
        with killed_at_exit(collector):
            sidecar = SidecarProcess(rings, collector.url, "--raw-tokens", token=collector.token)
            with killed_at_exit(sidecar), launched() as browser:
                site = Site(Path(directory), collector, rings)
                site.run(None, seed=3)
                page: Any = browser.new_page(viewport=SIZE)
                seen = Seen(page, collector.url)
                seen.enter(collector.token)
                pictures(seen, site, animation(seen, site, into / "page.gif"), into)
    print(f"written: {', '.join(sorted(path.name for path in into.glob('page*')))}")


if __name__ == "__main__":
    main()
