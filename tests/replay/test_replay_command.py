"""`stagewatch replay` over recorded traces and rings: verdicts, exit status, and what it says of bad input."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command, command
from recorded import TRACES

from stagewatch.monitor.cli import main


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(main, "replay", capsys)


def copied(name: str, directory: Path) -> tuple[Path, Path]:
    for rank in (0, 1):
        shutil.copy(TRACES / f"{name}.rank{rank}.jsonl", directory / f"{name}.rank{rank}.jsonl")
    return directory / f"{name}.rank0.jsonl", directory / f"{name}.rank1.jsonl"


def edited(path: Path, step: int, kind: str, change: Callable[[dict[str, Any]], None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == kind and line["step"] == step:
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class TestRecordedTraces:
    def test_the_released_mask_gives_no_incident_at_all(self, replay: Command) -> None:
        outcome = replay(*TRACES.glob("good-*"), "--json")
        assert outcome.status == 0
        assert outcome.json == {
            "steps": 30,
            "rows": 66,
            "verdicts": {"CONSISTENT": 66, "DIVERGED": 0, "INDETERMINATE": 0},
            "indeterminate": {},
            "incidents": [],
        }

    def test_the_old_mask_gives_one_critical_incident_and_two_notices(self, replay: Command) -> None:
        outcome = replay(*TRACES.glob("old-mask-*"), "--json")
        told = [
            (i["check"], i["severity"], i["request"], i["first_bad_step"], i["blamed"])
            for i in outcome.json["incidents"]
        ]
        assert outcome.status == 1
        assert told == [
            ("excluded-row", "critical", "1-b83a22bb", 32, [0]),
            ("excluded-row", "notice", "2-bc14f63d", 21, []),
            ("excluded-row", "notice", "0-8fef9541", 40, []),
        ]

    def test_the_critical_incident_tells_the_chain_of_cause_and_both_sides(self, replay: Command) -> None:
        incident = replay(*TRACES.glob("old-mask-*"), "--json").json["incidents"][0]
        values = {(value["rank"], value["field"]): value["text"] for value in incident["values"]}
        assert [link["step"] for link in incident["chain"]][:2] == [31, 32]
        assert incident["last_good_step"] == 31
        assert (values[0, "num_computed"], values[1, "num_computed"]) == ("43", "36")
        assert (values[0, "last_sampled_tokens"], values[1, "last_sampled_tokens"]) == ("396", "473")
        assert set(incident["fields"]) == {
            "draft_tokens",
            "last_sampled_tokens",
            "num_computed",
            "input_ids",
            "positions",
        }

    def test_a_directory_stands_for_every_trace_in_it(self, replay: Command) -> None:
        assert replay(TRACES, "--json").json["steps"] == 70

    def test_naming_a_file_twice_changes_nothing(self, replay: Command) -> None:
        assert (
            replay(TRACES, TRACES / "good-pp2-eagle7.rank0.jsonl", "--json").json
            == replay(TRACES, "--json").json
        )

    def test_the_text_names_the_engine_where_there_are_several(self, replay: Command) -> None:
        several = replay(TRACES).out.splitlines()
        one = replay(*TRACES.glob("old-mask-*")).out.splitlines()
        assert "  engine old-mask-pp2-eagle7" in several
        assert [line for line in several if not line.startswith("  engine ")][:3] == one[:3]
        assert not [line for line in one if line.startswith("  engine ")]

    def test_the_text_fits_a_narrow_terminal(self, replay: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "60")
        lines = replay(*TRACES.glob("old-mask-*")).out.splitlines()
        assert max(map(len, lines)) <= 60


class TestAlteredTraces:
    def test_a_request_id_cannot_steer_the_terminal(self, replay: Command, tmp_path: Path) -> None:
        for path in copied("old-mask-pp2-eagle7", tmp_path):
            path.write_text(path.read_text().replace("1-b83a22bb", "1-\\u001b[2J\\nall is well"))
        lines = replay(tmp_path).out.splitlines()
        assert "all is well" not in lines
        assert not any("\x1b" in line for line in lines)
        assert any("'1-\\x1b[2J\\nall is well'" in line for line in lines)

    def test_a_payload_altered_in_flight_is_blamed_on_the_receiver(
        self, replay: Command, tmp_path: Path
    ) -> None:
        first, last = copied("good-pp2-eagle7", tmp_path)

        def alter(line: dict[str, Any]) -> None:
            line["tokens"][0][0] += 1

        edited(first, 5, "received", alter)
        incidents = replay(first, last, "--json").json["incidents"]
        assert [(i["check"], i["severity"], i["first_bad_step"], i["blamed"]) for i in incidents] == [
            ("payload-mismatch", "critical", 5, [0])
        ]

    def test_undefined_token_columns_may_hold_anything(self, replay: Command, tmp_path: Path) -> None:
        first, last = copied("good-pp2-eagle7", tmp_path)

        def alter(line: dict[str, Any]) -> None:
            for tokens, count in zip(line["tokens"], line["num_sampled"], strict=True):
                tokens[count:] = [2**62 - 1] * (len(tokens) - count)

        for step in range(1, 31):
            edited(first, step, "received", lambda line: alter(line) if line["tokens"] else None)
        assert replay(first, last, "--json").json["incidents"] == []

    def test_a_step_that_one_rank_lost_is_indeterminate_and_accuses_nobody(
        self, replay: Command, tmp_path: Path
    ) -> None:
        first, last = copied("good-pp2-eagle7", tmp_path)
        kept = [line for line in first.read_text().splitlines() if json.loads(line)["step"] not in (10, 11)]
        first.write_text("\n".join(kept) + "\n")
        outcome = replay(first, last, "--json").json
        assert outcome["incidents"] == []
        assert set(outcome["indeterminate"]) == {"gap"}

    def test_a_request_that_one_rank_lacks_is_a_batch_disagreement(
        self, replay: Command, tmp_path: Path
    ) -> None:
        first, last = copied("good-pp2-eagle7", tmp_path)
        edited(first, 30, "inputs", lambda line: line["rows"].pop())
        kept = [
            line
            for line in first.read_text().splitlines()
            if not (json.loads(line)["step"] == 30 and json.loads(line)["kind"] != "inputs")
        ]
        first.write_text("\n".join(kept) + "\n")
        incidents = replay(first, last, "--json").json["incidents"]
        assert [(i["check"], i["severity"], i["first_bad_step"], i["blamed"]) for i in incidents] == [
            ("batch-disagreement", "critical", 30, [])
        ]

    def test_lines_of_unknown_kinds_are_left_out_and_told(self, replay: Command, tmp_path: Path) -> None:
        first, last = copied("good-pp2-eagle7", tmp_path)
        with first.open("a") as trace:
            trace.write('{"kind": "err", "step": 30, "where": "receive"}\n')
        outcome = replay(first, last, "--json")
        assert outcome.status == 0
        assert "1 lines of unknown kinds" in outcome.err

    def test_a_last_line_that_was_cut_off_loses_only_itself(self, replay: Command, tmp_path: Path) -> None:
        first, last = copied("good-pp2-eagle7", tmp_path)
        last.write_text(last.read_text() + '{"kind": "inputs", "step": 31, "ro')
        outcome = replay(first, last, "--json")
        assert (outcome.status, outcome.json["steps"]) == (0, 30)
        assert "cut off" in outcome.err

    def test_the_mark_of_utf_8_that_some_editors_put_first_is_no_content(
        self, replay: Command, tmp_path: Path
    ) -> None:
        for path in copied("old-mask-pp2-eagle7", tmp_path):
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert replay(tmp_path, "--json").json == replay(*TRACES.glob("old-mask-*"), "--json").json

    def test_line_ends_of_windows_are_no_content(self, replay: Command, tmp_path: Path) -> None:
        for path in copied("old-mask-pp2-eagle7", tmp_path):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        assert replay(tmp_path, "--json").json == replay(*TRACES.glob("old-mask-*"), "--json").json


class TestNothingCompared:
    """A run of which nothing was compared was not found sound."""

    def test_files_without_a_step(self, replay: Command, tmp_path: Path) -> None:
        for path in copied("good-pp2-eagle7", tmp_path):
            path.write_bytes(b"")
        outcome = replay(tmp_path, "--json")
        assert (outcome.status, outcome.json["rows"]) == (2, 0)
        assert outcome.err == (
            "stagewatch: nothing was compared: no step is recorded: give recordings of a run that served requests\n"
        )

    def test_a_rank_without_a_step(self, replay: Command, tmp_path: Path) -> None:
        _, last = copied("good-pp2-eagle7", tmp_path)
        last.write_bytes(b"")
        outcome = replay(tmp_path, "--json")
        assert (outcome.status, outcome.json["indeterminate"]) == (2, {"rank_missing": 66})
        assert outcome.err == (
            "stagewatch: nothing was compared: 66 rank missing: give the recordings of all ranks of the same steps\n"
        )


class TestUnusableInput:
    def test_a_path_that_does_not_exist(self, replay: Command, tmp_path: Path) -> None:
        outcome = replay(tmp_path / "nothing")
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)
        assert "no such file or directory" in outcome.err

    def test_an_empty_directory(self, replay: Command, tmp_path: Path) -> None:
        outcome = replay(tmp_path)
        assert (outcome.status, "holds no trace" in outcome.err) == (2, True)

    def test_a_rank_that_is_missing_is_named(self, replay: Command, tmp_path: Path) -> None:
        _, last = copied("good-pp2-eagle7", tmp_path)
        shutil.copy(last, tmp_path / "good-pp2-eagle7.rank2.jsonl")
        last.unlink()
        outcome = replay(tmp_path)
        assert (outcome.status, "rank 1 is missing" in outcome.err) == (2, True)

    def test_a_rank_that_comes_twice_is_named_with_its_files(self, replay: Command, tmp_path: Path) -> None:
        first, _ = copied("good-pp2-eagle7", tmp_path)
        shutil.copy(first, tmp_path / "good-pp2-eagle7.rank00.jsonl")
        outcome = replay(tmp_path)
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)
        assert (
            f"rank 0 comes twice, as {first} and {first.with_name('good-pp2-eagle7.rank00.jsonl')}"
            in outcome.err
        )

    def test_ranks_in_different_directories_are_one_run(self, replay: Command, tmp_path: Path) -> None:
        paths = []
        for rank in (0, 1):
            (tmp_path / f"node{rank}").mkdir()
            ranks = copied("good-pp2-eagle7", tmp_path / f"node{rank}")
            ranks[1 - rank].unlink()
            paths.append(ranks[rank])
        assert replay(*paths, "--json").json == replay(*TRACES.glob("good-*"), "--json").json
        assert replay(*paths).status == replay(tmp_path / "node0", tmp_path / "node1").status == 0

    def test_runs_of_one_name_in_different_directories_stay_apart(
        self, replay: Command, tmp_path: Path
    ) -> None:
        for run in ("a", "b"):
            (tmp_path / run).mkdir()
            copied("old-mask-pp2-eagle7", tmp_path / run)
        outcome = replay(tmp_path / "a", tmp_path / "b", "--json")
        criticals = [i["instance"] for i in outcome.json["incidents"] if i["severity"] == "critical"]
        assert criticals == ["a/old-mask-pp2-eagle7", "b/old-mask-pp2-eagle7"]

    def test_a_compressed_trace_is_told_to_be_unpacked(self, replay: Command, tmp_path: Path) -> None:
        first, last = copied("good-pp2-eagle7", tmp_path)
        packed = tmp_path / (first.name + ".gz")
        packed.write_bytes(gzip.compress(first.read_bytes()))
        outcome = replay(packed)
        assert (outcome.status, outcome.err) == (2, f"stagewatch: {packed}: compressed: unpack it first\n")
        shutil.copy(packed, first)
        outcome = replay(first, last)
        assert (outcome.status, outcome.err) == (2, f"stagewatch: {first}: compressed: unpack it first\n")

    def test_a_path_that_the_system_refuses(self, replay: Command) -> None:
        outcome = replay("x" * 300)
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)
        assert "cannot be read: File name too long" in outcome.err

    def test_a_single_rank_has_nothing_to_be_compared_with(self, replay: Command) -> None:
        outcome = replay(TRACES / "good-pp2-eagle7.rank0.jsonl")
        assert (outcome.status, "only rank 0" in outcome.err) == (2, True)

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("not json\n", "malformed"),
            ('{"kind": "inputs", "step": 4}\n', "rows"),
            ('{"kind": "inputs", "step": 1, "rows": []}\n', "steps must rise"),
            ('{"kind": "sent", "step": 9, "tokens": [], "num_sampled": [], "num_rejected": []}\n', "follows"),
            ("[" * 100_000 + "\n", "array"),
            ('{"kind": "inputs", "x": ' + "[" * 100_000 + "\n", "ecursion"),
        ],
    )
    def test_a_bad_line_is_named_by_file_and_line(
        self, replay: Command, tmp_path: Path, line: str, said: str
    ) -> None:
        first, last = copied("good-pp2-eagle7", tmp_path)
        lines = first.read_text().splitlines(keepends=True)
        first.write_text("".join([*lines[:6], line, *lines[6:]]))
        outcome = replay(first, last)
        assert (outcome.status, outcome.err.count("\n")) == (2, 1)
        assert f"{first}:7:" in outcome.err
        assert said in outcome.err
