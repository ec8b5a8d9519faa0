"""What `stagewatch replay` tells beside incidents: requests, steps, two ranks, the fixed mask; and how it tells it."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Command, command
from recorded import TRACES, Recorded, founding_fault, record
from simulated import Run

from stagewatch.agents.record import Inputs, Kind, Payload
from stagewatch.monitor.cli import main
from stagewatch.monitor.progress import ProgressBar
from stagewatch.monitor.story.whatif import AGREED, HARMLESS, NO_CHANGE

OLD_MASK = "old-mask-pp2-eagle7"


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(main, "replay", capsys)


@pytest.fixture(scope="module")
def run() -> Run:
    return founding_fault()


@pytest.fixture(scope="module")
def recorded(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(run, tmp_path_factory.mktemp("stories"))


class TestRequest:
    def test_every_life_has_every_step_in_order(self, replay: Command, run: Run, recorded: Recorded) -> None:
        names = {request for request, _ in run.rows}
        assert len(run.rows) > len(names), "no request was preempted"
        for name in (
            sorted(names)[:6] + [name for name in names if sum(n == name for n, _ in run.rows) > 1][:2]
        ):
            [story] = replay(recorded.rings, "request", name, "--json").json
            told = [[step["step"] for step in life["steps"]] for life in story["lives"] if life["steps"]]
            assert told == sorted(
                [step for _, step, _ in rows] for (n, _), rows in run.rows.items() if n == name
            )
            ends = [life["end"] for life in story["lives"] if life["steps"]]
            assert ends[:-1] == ["preempted"] * (len(ends) - 1)

    def test_what_a_step_accepted_and_rejected_is_what_the_last_stage_sent(
        self, replay: Command, run: Run, recorded: Recorded
    ) -> None:
        name = "r14"
        [story] = replay(recorded.rings, "request", name, "--json").json
        told = {s["step"]: (s["sampled"], s["rejected"]) for life in story["lives"] for s in life["steps"]}
        last = max(run.records)
        sent = {
            each.step: (int(each.body.num_sampled[row]), int(each.body.num_rejected[row]))
            for each in run.records[last]
            if each.kind is Kind.SENT and isinstance(each.body, Payload)
            for row, key in enumerate(each.body.request.tolist())
            if run.names[key] == name
        }
        assert {step: told[step] for step in sent} == sent

    def test_an_excluded_step_is_told(self, replay: Command) -> None:
        [story] = replay(TRACES, "request", "1-b83a22bb", "--engine", OLD_MASK, "--json").json
        [life] = story["lives"]
        assert [step["step"] for step in life["steps"] if step["excluded"]] == [31, 32, 33]
        assert (life["admitted_after"], life["prompt_len"], life["cap"]) == (2, 3, 43)

    @pytest.mark.parametrize(
        "request_id, why",
        [
            ("nobody", "no request nobody in the recordings: they hold "),
            ("r1", "request r1 ran no step that is wanted: widen --step or --engine"),
        ],
    )
    def test_one_that_is_not_there_is_told_in_a_line(
        self, request_id: str, why: str, replay: Command, recorded: Recorded
    ) -> None:
        outcome = replay(recorded.rings, "request", request_id, "--step", "100000:")
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)
        assert outcome.err.startswith(f"stagewatch: {why}")


class TestFixedMask:
    def test_under_it_the_ranks_would_have_agreed_on_every_request_that_was_harmed(
        self, replay: Command, recorded: Recorded
    ) -> None:
        harmed = [i for i in recorded.live if i.severity == "critical"]
        answered = 0
        for incident in harmed:
            found = replay(recorded.rings, "show", incident.id, "--json").json["fixed_mask"]
            if "broadcast nothing at all" in found["why"]:
                continue
            assert found["answer"] == AGREED
            answered += 1
            assert {value["rank"] for value in found["values"]} == {0, 1, 2, 3}, "ranks of earlier stages"
            assert all(value["would_hold"] == value["last_stage"] for value in found["values"])
            assert any(value["held"] != value["would_hold"] for value in found["values"])
        assert answered >= 2

    def test_it_changes_nothing_where_the_engine_has_it(self, replay: Command) -> None:
        stories = replay(*TRACES.glob("good-*"), "request", "0-", "--json").json
        assert {life["fixed_mask"]["answer"] for story in stories for life in story["lives"]} == {NO_CHANGE}

    def test_a_row_that_was_dropped_and_never_ran_again_came_to_no_harm(
        self, replay: Command, recorded: Recorded
    ) -> None:
        notices = [i for i in recorded.live if i.severity == "notice"]
        answers = [
            replay(recorded.rings, "show", i.id, "--json").json["fixed_mask"]["answer"] for i in notices[:4]
        ]
        assert set(answers) == {HARMLESS}


class TestStep:
    def test_every_row_of_every_rank_is_there(self, replay: Command, run: Run, recorded: Recorded) -> None:
        step = 40
        [story] = replay(recorded.rings, "step", str(step), "--json").json
        bodies = run.inputs[0, step]
        last = bodies[max(bodies)]
        assert [row["request"] for row in story["rows"]] == [run.names[key] for key in last.request.tolist()]
        assert isinstance(last, Inputs)

    def test_one_that_nobody_recorded(self, replay: Command, recorded: Recorded) -> None:
        outcome = replay(recorded.rings, "step", "999999")
        assert (outcome.status, outcome.err) == (2, "stagewatch: no rank recorded step 999999\n")


class TestDiff:
    def test_it_finds_where_the_harmed_requests_part(self, replay: Command, recorded: Recorded) -> None:
        [story] = replay(recorded.rings, "diff", "0", "5", "--json").json
        first = sorted({found["step"] for found in story["first"]})
        assert first[0] == min(i.first_bad_step for i in recorded.live if i.severity == "critical")
        assert len(story["first"]) >= sum(i.severity == "critical" for i in recorded.live)

    def test_ranks_that_agree_have_nothing_to_tell(self, replay: Command, recorded: Recorded) -> None:
        [story] = replay(recorded.rings, "diff", "4", "5", "--json").json
        assert (story["rows_different"], story["first"]) == (0, [])
        assert story["rows"] > 100

    @pytest.mark.parametrize(
        "ranks, why",
        [
            (("0", "0"), "rank 0 twice: name two ranks"),
            (("0", "9"), "no rank 9 in the recordings: they hold 0, 1, 2, 3, 4 and 1 more"),
            (("0", "x"), "'x' is no rank: give a whole number"),
        ],
    )
    def test_ranks_that_cannot_be_compared(
        self, ranks: tuple[str, str], why: str, replay: Command, recorded: Recorded
    ) -> None:
        outcome = replay(recorded.rings, "diff", *ranks)
        assert (outcome.status, outcome.err) == (2, f"stagewatch: {why}\n")


class TestFilters:
    @pytest.mark.parametrize(
        "flags, wanted",
        [
            (("--severity", "critical"), lambda i: i.severity == "critical"),
            (("--check", "excluded-row"), lambda i: i.check == "excluded-row"),
            (("--request", "r14"), lambda i: i.request.startswith("r14")),
            (("--rank", "5"), lambda i: 5 in i.ranks or 5 in i.blamed),
            (("--step", "80:90"), lambda i: 80 <= i.first_bad_step <= 90),
            (("--engine", "sim-1"), lambda i: i.instance == "sim-1"),
            (("--engine", "none"), lambda i: False),
        ],
    )
    def test_each_narrows_what_is_told_and_nothing_else(
        self, flags: tuple[str, str], wanted: Any, replay: Command, recorded: Recorded
    ) -> None:
        outcome = replay(recorded.rings, *flags, "--json")
        assert [i["id"] for i in outcome.json["incidents"]] == [i.id for i in recorded.live if wanted(i)]
        assert outcome.status == 1, "the exit status is that of all that was found"

    @pytest.mark.parametrize("text", ["5:4", "x", "-1:", ""])
    def test_a_range_of_steps_that_is_none(self, text: str, replay: Command) -> None:
        with pytest.raises(SystemExit) as ended:
            replay(TRACES, f"--step={text}")
        assert ended.value.code == 2


ESCAPE = re.compile(rb"\x1b\[[0-9;]*m")


def on_a_terminal(*arguments: str, **environment: str) -> bytes:
    """What `stagewatch replay` of the traces writes on a terminal, until it ends."""
    ours, theirs = pty.openpty()
    surroundings = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "PAGER", "LINES", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "stagewatch.monitor", "replay", str(TRACES), *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**surroundings, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", **environment},
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # Linux says so when the last process has closed the terminal
            break
        if not part:
            break
        said += part
    process.wait()
    os.close(ours)
    return said


class TestTerminal:
    def test_severities_are_coloured_unless_no_color_is_set(self) -> None:
        assert ESCAPE.search(on_a_terminal("--no-pager"))
        assert not ESCAPE.search(on_a_terminal("--no-pager", NO_COLOR="1"))

    def test_long_text_goes_through_the_pager_and_short_text_does_not(self, tmp_path: Path) -> None:
        pager = f"{sys.executable} -c \"import sys; print('PAGED', len(sys.stdin.readlines()) > 24)\""
        assert b"PAGED True" in on_a_terminal(PAGER=pager)
        assert b"PAGED" not in on_a_terminal("--no-pager", PAGER=pager)
        assert b"PAGED" not in on_a_terminal("--check", "stall", PAGER=pager)
        assert b"PAGED" not in on_a_terminal("--json", PAGER=pager)

    def test_a_pager_that_cannot_be_started_is_done_without(self) -> None:
        assert b"Incidents: 1 critical" in on_a_terminal(PAGER="no-such-program")


class _Screen:
    """A stream that says it is a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        self.terminal, self.written = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None:
        pass


class TestProgress:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        now = [0.0]
        monkeypatch.setattr("stagewatch.monitor.progress.time.monotonic", lambda: now[0])
        return now

    def test_a_long_replay_shows_how_far_it_has_come_and_leaves_nothing_behind(self, clock: Any) -> None:
        screen = _Screen(terminal=True)
        with ProgressBar(screen) as bar:  # type: ignore[arg-type]  # what it uses of a stream
            bar.at(1, 100)
            assert screen.written == "", "what is over in a moment needs no bar"
            clock[0] = 5.0
            bar.at(25_000_000, 100_000_000)
            assert screen.written == "\r[######                  ]  25%  25 of 100 MB"
        assert screen.written.endswith("\r\x1b[K")

    def test_a_stream_that_is_no_terminal_is_left_alone(self, clock: Any) -> None:
        screen = _Screen(terminal=False)
        with ProgressBar(screen) as bar:  # type: ignore[arg-type]  # what it uses of a stream
            clock[0] = 5.0
            bar.at(1, 2)
        assert screen.written == ""
