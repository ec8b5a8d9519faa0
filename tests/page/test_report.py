"""`stagewatch export html` in a real browser: one file that fetches nothing, runs nothing and says what replay says."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_site import Seen
from recorded import TRACES, Recorded, founding_fault, record

from stagewatch.monitor.cli import main

HOSTILE = (
    "</code></table><script>document.title='owned'</script><img src=http://127.0.0.1:9/x onerror=alert(1)>"
)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(founding_fault(), tmp_path_factory.mktemp("report"))


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Export a recording and open the file; nothing may be fetched, nor an error be told."""
    contexts = []

    def open_report(*sources: Path, **settings: Any) -> Any:
        file = tmp_path / "report.html"
        assert main(["export", "html", *map(str, sources), "-o", str(file), "--force"]) == 0
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        contexts.append(context)
        seen = Seen(context.new_page(), file.as_uri())
        seen.watch()
        fetched: list[str] = []
        seen.page.on("request", lambda request: fetched.append(request.url))
        seen.page.goto(file.as_uri())
        assert (seen.errors, fetched) == ([], [file.as_uri()])
        return seen.page

    yield open_report
    for context in contexts:
        context.close()


def cells(page: Any, region: str) -> list[list[str]]:
    rows = page.get_by_role("region", name=region, exact=True).locator("tbody tr")
    found: list[list[str]] = rows.evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => cell.innerText))"
    )
    return found


class TestReport:
    def test_it_tells_each_incident_as_the_live_watch_did(self, opened: Any, faulty: Recorded) -> None:
        page = opened(faulty.journal)
        assert [row[:4] for row in cells(page, "Incidents")] == [
            [i.severity, i.request, i.check, str(i.first_bad_step)] for i in faulty.live
        ]
        worst = faulty.live[0]
        assert worst.severity == "critical"
        section = page.locator(f"#i{worst.id}")
        assert section.locator("ol li").all_inner_texts() == [
            f"step {link.step}: {link.text}" for link in worst.chain
        ]
        ranks = sorted({value.rank for value in worst.values})
        text = {(value.field, value.rank): value.text for value in worst.values}
        assert cells(page, f"Values of {worst.id} at its first bad step") == [
            [field, *(text.get((field, rank), "") for rank in ranks)]
            for field in dict.fromkeys(value.field for value in worst.values)
        ]
        assert worst.remedy in section.inner_text()

    def test_it_shows_where_the_ranks_part_as_replay_does(
        self, opened: Any, faulty: Recorded, capsys: pytest.CaptureFixture[str]
    ) -> None:
        worst = faulty.live[0]
        page = opened(faulty.journal)
        capsys.readouterr()
        main(["replay", str(faulty.journal), "show", worst.id, "--json"])
        story = json.loads(capsys.readouterr().out)
        assert cells(page, f"First divergence of {worst.id}") == [
            [side["field"], str(side["rank"]), side["last_equal"], side["first_different"]]
            for side in story["divergence"]["sides"]
        ]
        assert story["fixed_mask"]["why"] in page.locator(f"#i{worst.id}").inner_text()

    def test_the_lattice_shows_a_difference_where_it_began(self, opened: Any, faulty: Recorded) -> None:
        worst = faulty.live[0]
        page = opened(faulty.journal)
        titles = page.locator(f"#i{worst.id} svg title").evaluate_all(
            "all => all.map(each => each.textContent)"
        )
        assert any(
            title.startswith(f"step {worst.first_bad_step}: differs from the last stage") for title in titles
        )
        assert f"step {worst.last_good_step}: agrees with the last stage" in titles
        assert page.locator(f"#i{worst.id} svg .mark").count() == 1
        dropped = (
            f"step {worst.chain[0].step}: agrees with the last stage, a row was dropped from the broadcast"
        )
        assert titles.count(dropped) == 4, "the four ranks of the earlier stages miss it"

    def test_a_link_leads_from_the_list_to_the_incident(self, opened: Any, faulty: Recorded) -> None:
        page = opened(faulty.journal)
        page.get_by_role("region", name="Incidents", exact=True).get_by_role("link").first.click()
        assert page.url.endswith(f"#i{faulty.live[0].id}")

    def test_a_sound_recording_says_so(self, opened: Any) -> None:
        page = opened(*TRACES.glob("good-*"))
        assert "Incidents: none." in page.locator("main").inner_text()


class TestSafety:
    def test_a_hostile_request_id_stays_text(self, opened: Any, tmp_path: Path) -> None:
        for rank in (0, 1):
            path = tmp_path / f"old-mask.rank{rank}.jsonl"
            [found] = TRACES.glob(f"old-mask*.rank{rank}.jsonl")
            shutil.copy(found, path)
            path.write_text(path.read_text().replace("1-b83a22bb", HOSTILE.replace('"', "'")))
        page = opened(*tmp_path.glob("old-mask.rank*"))
        assert cells(page, "Incidents")[0][1] == HOSTILE
        assert page.locator("script, img").count() == 0
        assert page.title().startswith("stagewatch: old-mask.rank")

    def test_its_policy_allows_no_script_and_no_request(self, opened: Any, faulty: Recorded) -> None:
        """Even what would be put into the page later: were escaping ever to fail, nothing would come of it."""
        page = opened(faulty.journal)
        assert page.evaluate(
            """() => new Promise(resolve => {
                 const told = [];
                 document.addEventListener('securitypolicyviolation', event => {
                   told.push(event.effectiveDirective); if (told.length === 2) resolve(told.sort());
                 });
                 const script = document.createElement('script'); script.textContent = 'window.ran = 1';
                 const image = document.createElement('img'); image.src = 'http://127.0.0.1:9/x';
                 document.body.append(script, image);
               })"""
        ) == ["img-src", "script-src-elem"]
        assert page.evaluate("window.ran") is None


class TestReading:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_axe_finds_nothing(self, scheme: str, opened: Any, faulty: Recorded) -> None:
        from axe_playwright_python.sync_playwright import Axe

        # axe runs as a script, which the report's policy would refuse.
        page = opened(faulty.journal, color_scheme=scheme, bypass_csp=True)
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["help"]) for each in found] == []

    def test_on_a_narrow_screen_nothing_but_tables_and_pictures_scrolls_sideways(
        self, opened: Any, faulty: Recorded
    ) -> None:
        page = opened(faulty.journal, viewport={"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == 360
