"""The live page in a real browser, before a collector that a real pipeline feeds."""

import re
from itertools import pairwise
from typing import Any

import pytest
from page_site import Seen, Site
from service_processes import CollectorProcess, wait_until

from stagewatch.agents.lab.engine import start_lab

VIEWS = ("", "#/incidents", "ENGINE", "ENGINE?zoom=requests", "ENGINE?zoom=slots", "INCIDENT")


@pytest.fixture(scope="module")
def faulty(site: Site) -> dict[str, Any]:
    """Critical incidents of a run with the founding fault, newest first, as the API tells them."""
    config, _ = site.run("old-mask")

    def critical() -> list[dict[str, Any]]:
        found = site.collector.get(f"/v1/incidents?instance={config.instance}&severity=critical")["incidents"]
        [engine] = site.collector.get(f"/v1/engines/{config.instance}")["engines"]
        return found if all(rank["ended"] for rank in engine["ranks"]) else []

    return {"instance": config.instance, "incidents": wait_until(critical, "the run's incidents are there")}


def where(view: str, faulty: dict[str, Any]) -> str:
    engine = f"#/engine/{faulty['instance']}/0"
    return view.replace("ENGINE", engine).replace("INCIDENT", f"#/incident/{faulty['incidents'][0]['id']}")


def shown_table(page: Any, name: str) -> list[list[str]]:
    """The table's texts, read in one go: the page may draw it anew at any moment between two questions."""
    rows = page.get_by_role("region", name=name).locator("tbody tr")
    found: list[list[str]] = rows.evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => cell.innerText))"
    )
    return found


class TestToken:
    def test_a_wrong_token_is_told_and_a_right_one_is_kept_in_this_tab_alone(
        self, seen: Seen, site: Site
    ) -> None:
        page = seen.page
        page.goto(seen.url)
        page.get_by_label("Bearer token").fill("wrong")
        page.get_by_role("button", name="Look").click()
        page.get_by_text("The collector does not know this token.").wait_for()
        page.get_by_label("Bearer token").fill(site.collector.token)
        page.get_by_role("button", name="Look").click()
        page.get_by_role("heading", name="Engines").wait_for()
        page.reload()
        page.get_by_role("heading", name="Engines").wait_for()
        assert site.collector.token not in page.url + page.content() + str(page.context.storage_state())
        page.get_by_role("button", name="Forget token").click()
        page.get_by_label("Bearer token").wait_for()
        assert page.evaluate("sessionStorage.length") == 0


class TestNothingYet:
    def test_the_empty_page_says_how_to_connect_an_engine_to_this_collector(
        self, browser: Any, tmp_path: Any
    ) -> None:
        collector = CollectorProcess(tmp_path / "data")
        try:
            context = browser.new_context()
            found = Seen(context.new_page(), collector.url)
            found.watch()
            found.enter(collector.token)
            found.page.get_by_text("No engine has reported yet").wait_for()
            text = found.page.get_by_role("main").inner_text()
            assert f"--collector {collector.url.replace('http', 'ws')} " in text
            context.close()
            assert found.errors + found.elsewhere == []
        finally:
            collector.kill()


class TestLive:
    def test_steps_stream_in_and_the_fault_appears_while_the_engine_runs(
        self, seen: Seen, site: Site
    ) -> None:
        page = seen.page
        config = site.config("old-mask", step_sleep_ms=60, seed=8)
        with start_lab(config) as lab:
            # GIVEN a run that has just begun, looked at from the overview on
            seen.enter(site.collector.token)
            page.get_by_role("link", name=config.instance).click()
            newest = page.get_by_label("Step", exact=True)
            # WHEN it goes on THEN the lattice does
            first = int(newest.get_attribute("max"))
            wait_until(lambda: int(newest.get_attribute("max")) > max(first, 3), "newer steps are shown")
            # AND the alarm is there before the engine has ended
            page.get_by_text("critical").first.wait_for()
            assert lab.running
            assert page.get_by_role("button", name="Live").get_attribute("aria-pressed") == "true"


class TestStory:
    def test_an_incident_shows_what_the_api_says(
        self, seen: Seen, site: Site, faulty: dict[str, Any]
    ) -> None:
        incident = faulty["incidents"][0]
        page = seen.page
        seen.enter(site.collector.token, f"#/incident/{incident['id']}")
        page.get_by_role("heading", name=incident["request"]).wait_for()
        fields = list(dict.fromkeys(value["field"] for value in incident["values"]))
        ranks = sorted({value["rank"] for value in incident["values"]})
        text = {(value["field"], value["rank"]): value["text"] for value in incident["values"]}
        assert shown_table(page, "Values at the first bad step") == [
            [name, *(text[name, rank] for rank in ranks)] for name in fields
        ]
        assert [item.inner_text() for item in page.locator("ol.chain li").all()] == [
            f"step {link['step']}: {link['text']}" for link in incident["chain"]
        ]
        facts = dict(shown_table(page, "Facts"))
        assert (facts["First bad step"], facts["Last good step"]) == (
            str(incident["first_bad_step"]),
            str(incident["last_good_step"]),
        )
        assert page.get_by_role("region", name="Remedy").inner_text().endswith(incident["remedy"])
        # WHEN one goes to where it happened THEN that step is shown, the request's row among those that differ
        page.get_by_role("link", name=str(incident["first_bad_step"]), exact=True).click()
        step = incident["first_bad_step"]
        [row] = wait_until(
            lambda: [
                row for row in shown_table(page, f"Rows of step {step}") if row[0] == incident["request"]
            ],
            "the row is there",
        )
        assert "differs" in row[3]
        assert row[4] == ", ".join(f"stage {rank}" for rank in incident["ranks"])

    def test_where_frozen_windows_lie_is_told(self, seen: Seen, site: Site, faulty: dict[str, Any]) -> None:
        incident = faulty["incidents"][0]

        def windows() -> list[dict[str, Any]]:
            found = site.collector.get(f"/v1/incidents/{incident['id']}")["windows"]
            return found if len(found) == len(incident["values"]) // len(incident["fields"]) else []

        told = [
            [
                each["rank"],
                each["host"],
                "none" if each["failure"] else f"{each['first_step']} to {each['last_step']}",
                each["failure"] or each["path"],
            ]
            for each in wait_until(windows, "each rank's sidecar has answered")
        ]
        seen.enter(site.collector.token, f"#/incident/{incident['id']}")
        wait_until(lambda: shown_table(seen.page, "Frozen windows") == told, "each rank's window is listed")

    def test_the_picture_agrees_with_the_verdicts(self, site: Site, faulty: dict[str, Any]) -> None:
        picture = site.collector.get(f"/v1/engines/{faulty['instance']}/picture?batches=true")
        [engine] = site.collector.get(f"/v1/engines/{faulty['instance']}")["engines"]
        differing = sum(1 for state in picture["marks"]["state"] if state & 1)
        assert differing == engine["verdicts"]["DIVERGED"]
        assert sum(picture["rows"]) == sum(engine["verdicts"].values())
        assert sum(1 for state in picture["marks"]["state"] if state & 2) == engine["rows_excluded"]


class TestKeyboard:
    def test_every_step_and_incident_is_reached_by_keys_and_has_an_address(
        self, seen: Seen, site: Site, faulty: dict[str, Any]
    ) -> None:
        page = seen.page
        seen.enter(site.collector.token, f"#/engine/{faulty['instance']}/0")
        lattice = page.locator("canvas[role=application]")
        every = site.collector.get(f"/v1/incidents?instance={faulty['instance']}&limit=500")["incidents"]
        steps = sorted({incident["first_bad_step"] for incident in every})
        [engine] = site.collector.get(f"/v1/engines/{faulty['instance']}")["engines"]
        newest = int(engine["compared_to"])
        page.get_by_role("region", name="Incidents").wait_for()
        wait_until(
            lambda: page.get_by_label("Step", exact=True).get_attribute("max") == str(newest), "all is shown"
        )
        lattice.focus()
        page.keyboard.press("Home")
        assert "step=1" in page.url
        page.keyboard.press("ArrowRight")
        assert "step=2" in page.url
        page.keyboard.press("End")
        assert "step=" not in page.url
        page.keyboard.press("ArrowLeft")
        assert f"step={newest - 1}" in page.url
        # the newest incident, and the one before it
        page.keyboard.press("End")
        page.keyboard.press("p")
        assert f"step={steps[-1]}" in page.url
        page.keyboard.press("p")
        assert f"step={steps[-2]}" in page.url
        page.keyboard.press("n")
        assert f"step={steps[-1]}" in page.url
        # an address that was kept shows the same again
        kept = page.url
        page.reload()
        page.get_by_text(re.compile(rf"^Step {steps[-1]}: ")).wait_for()
        assert page.url == kept
        # AND what begins there opens
        page.locator("canvas[role=application]").focus()
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="What to do").wait_for()
        shown = page.url.rpartition("/")[2]
        assert shown in [each["id"] for each in every if each["first_bad_step"] == steps[-1]]

    def test_what_follows_one_request_leaves_the_others_out(
        self, seen: Seen, site: Site, faulty: dict[str, Any]
    ) -> None:
        incident = faulty["incidents"][0]
        page = seen.page
        seen.enter(site.collector.token, f"#/engine/{faulty['instance']}/0?step={incident['first_bad_step']}")
        page.get_by_text(re.compile(rf"^Step {incident['first_bad_step']}: ")).wait_for()
        page.get_by_label("Request").fill(incident["request"])
        wait_until(
            lambda: (
                {row[0] for row in shown_table(page, f"Rows of step {incident['first_bad_step']}")}
                == {incident["request"]}
            ),
            "only its rows are listed",
        )
        assert f"request={incident['request']}" in page.url


class TestConnection:
    def test_a_collector_that_goes_away_is_told_and_found_again(self, browser: Any, tmp_path: Any) -> None:
        collector = CollectorProcess(tmp_path / "data")
        try:
            context = browser.new_context()
            page = context.new_page()
            found = Seen(page, collector.url)
            found.enter(collector.token)
            page.get_by_text("connected", exact=True).wait_for()
            collector.kill()
            page.get_by_text("connection lost, trying again").wait_for()
            collector = CollectorProcess(tmp_path / "data", port=collector.port)
            page.get_by_text("connected", exact=True).wait_for()
            page.get_by_text("No engine has reported yet").wait_for()
            context.close()
        finally:
            collector.kill()


class TestEverybody:
    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_axe_finds_nothing(
        self, seen: Seen, site: Site, faulty: dict[str, Any], view: str, scheme: str
    ) -> None:
        from axe_playwright_python.sync_playwright import Axe

        page = seen.page
        page.emulate_media(color_scheme=scheme)
        seen.enter(site.collector.token, where(view, faulty))
        page.locator("main table").first.wait_for()
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []

    def test_a_phone_shows_every_view_without_scrolling_sideways(
        self, browser: Any, site: Site, faulty: dict[str, Any]
    ) -> None:
        context = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True)
        found = Seen(context.new_page(), site.collector.url)
        found.enter(site.collector.token)
        for view in VIEWS:
            found.page.goto(f"{found.url}/{where(view, faulty)}")
            found.page.locator("main table").first.wait_for()
            assert found.page.evaluate("document.documentElement.scrollWidth") <= 360, view
        context.close()


class TestHostile:
    def test_a_request_id_is_text_whatever_it_is(
        self, seen: Seen, site: Site, faulty: dict[str, Any]
    ) -> None:
        # GIVEN an incident of a request whose id a client chose with care
        evil = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
        incident = {**faulty["incidents"][0], "request": evil}
        page = seen.page
        page.route("**/v1/incidents/*", lambda route: route.fulfill(json=incident))
        seen.enter(site.collector.token, f"#/incident/{incident['id']}")
        # THEN it is shown, and does nothing
        page.get_by_role("heading", name="What to do").wait_for()
        assert evil in page.get_by_role("heading", level=1).inner_text()
        assert page.locator("main img, main script").count() == 0
        assert page.title() != "taken"


class TestSlots:
    def test_slots_as_lanes_hold_who_ran_in_them_and_show_where_another_begins(
        self, seen: Seen, site: Site
    ) -> None:
        # GIVEN a run with fewer slots than requests
        page = seen.page
        config, _ = site.run(None, seats=3, seed=9)
        where = f"/v1/engines/{config.instance}"

        def ended() -> bool:
            [engine] = site.collector.get(where)["engines"]
            return all(rank["ended"] for rank in engine["ranks"])

        wait_until(ended, "the run has ended")
        picture = site.collector.get(f"{where}/picture?batches=true")
        batches, starts = picture["batches"], 0
        owners: dict[int, dict[int, str]] = {}
        for step, rows in zip(picture["step"], picture["rows"], strict=True):
            for row in range(starts, starts + rows):
                owner = picture["requests"][batches["request"][row]]
                owners.setdefault(batches["slot"][row], {})[step] = owner
            starts += rows
        shared = next(slot for slot, of_step in owners.items() if len(set(of_step.values())) > 1)
        second = list(dict.fromkeys(owners[shared].values()))[1]
        step = next(step for step, owner in owners[shared].items() if owner == second)
        # WHEN one zooms to slots, by the control THEN the address says so
        seen.enter(site.collector.token, f"#/engine/{config.instance}/0?step={step}")
        page.get_by_label("Lanes").select_option("by slot")
        wait_until(lambda: "zoom=slots" in page.url, "the address names the zoom")
        # AND the keyboard goes through the slots, in order, and says who has each
        lattice = page.get_by_role("application")
        lattice.focus()
        wait_until(
            lambda: page.evaluate("document.querySelector('.tall').clientHeight") >= 14 * len(owners), "lanes"
        )
        for key in ("ArrowUp", *["ArrowDown"] * sorted(owners).index(shared)):
            lattice.press(key)
        told = page.get_by_role("main").get_by_role("status").first
        wait_until(lambda: told.inner_text() == f"slot {shared}: {second}", "the slot's owner is told")
        # AND a line stands where the slot changed hands
        model = page.evaluate(
            """async (picture) => {
                 const { Model } = await import('/page/model.js');
                 const model = new Model();
                 model.take(picture, true);
                 return model.lanes(1, picture.step.at(-1), '', true).map((lane) =>
                   [lane.key, [...lane.cells].filter(([, cell]) => cell.begins).map(([step]) => step)]);
               }""",
            picture,
        )
        assert [slot for slot, _ in model] == sorted(owners)
        for slot, begins in model:
            changes = [
                step
                for (_, before), (step, after) in pairwise(sorted(owners[slot].items()))
                if before != after
            ]
            assert begins == changes

    def test_z_goes_from_ranks_to_requests_to_slots_and_back(
        self, seen: Seen, site: Site, faulty: dict[str, Any]
    ) -> None:
        page = seen.page
        seen.enter(site.collector.token, f"#/engine/{faulty['instance']}/0")
        lattice = page.get_by_role("application")
        for wanted in ("requests", "slots", "ranks"):
            lattice.press("z")
            wait_until(lambda w=wanted: page.get_by_label("Lanes").input_value() == w, f"lanes are {wanted}")


class TestLarge:
    def test_a_thousand_requests_on_64_ranks_are_all_drawn(
        self, seen: Seen, site: Site, faulty: dict[str, Any]
    ) -> None:
        # GIVEN a picture far larger than what a lab on two cores can feed
        page = seen.page
        steps, rows, ranks = 300, 1000, 64
        picture = {
            "revision": 1,
            "step": list(range(1, steps + 1)),
            "t_ms": [0] * steps,
            "rows": [rows] * steps,
            "differing": [[0] * ranks for _ in range(steps)],
            "uncompared": [],
            "requests": [f"request-{number:04}" for number in range(rows)],
            "marks": {name: [] for name in ("step", "row", "request", "slot", "state", "drift", "ranks")},
            "batches": {
                "request": list(range(rows)) * steps,
                "slot": list(range(rows)) * steps,
                "prefill": [0] * rows * steps,
            },
        }
        empty = {**picture, "step": [], "t_ms": [], "rows": [], "differing": [], "requests": []}
        empty["batches"] = {"request": [], "slot": [], "prefill": []}
        page.route(
            "**/picture?*",
            lambda route: route.fulfill(json=picture if "after=0" in route.request.url else empty),
        )
        seen.enter(site.collector.token, f"#/engine/{faulty['instance']}/0?zoom=requests")
        wait_until(
            lambda: page.evaluate("document.querySelector('.tall').clientHeight") > 10_000, "lanes for all"
        )
        # WHEN one scrolls through it THEN it is drawn, time after time
        page.evaluate("performance.clearMeasures('draw')")
        for y in range(0, 10_000, 500):
            page.locator(".lattice").evaluate("(lattice, y) => { lattice.scrollTop = y; }", y)
            page.evaluate("new Promise(requestAnimationFrame)")
        draws = page.evaluate("performance.getEntriesByName('draw').map((entry) => entry.duration)")
        assert len(draws) >= 10
        print(
            f"frames: {len(draws)}, median {sorted(draws)[len(draws) // 2]:.1f} ms, worst {max(draws):.1f} ms"
        )
