"""A collector fed by a real pipeline, and a real browser that looks at it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_site import CHROMIUM, Seen, Site, launched
from service_processes import CollectorProcess, SidecarProcess, killed_at_exit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.page)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason="Debian's chromium is not installed: make test-page"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    ring_dir = directory / "rings"
    collector = CollectorProcess(directory / "data")
    with killed_at_exit(collector):
        sidecar = SidecarProcess(ring_dir, collector.url, "--raw-tokens", token=collector.token)
        with killed_at_exit(sidecar):
            yield Site(directory, collector, ring_dir)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with launched() as started:
        yield started


@pytest.fixture
def seen(browser: Any, site: Site) -> Iterator[Seen]:
    """A fresh page on the site, not yet anywhere; no test may leave an error or a request off the origin behind."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(20_000)
    found = Seen(context.new_page(), site.collector.url)
    found.watch()
    yield found
    context.close()
    assert found.errors == []
    assert found.elsewhere == []
