"""`stagewatch-agent dump`: what rings hold goes into one file, digested, and a damaged file costs what it held."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import Command, command

from stagewatch.agents.cli import main
from stagewatch.agents.credentials import key_of_directory
from stagewatch.agents.dumpfile import MAGIC, DumpError, DumpFile, DumpWriter, batch_entry, hello_entry
from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.record import Bind, Collective, Heartbeat, Inputs, Kind
from stagewatch.agents.ring import RingWriter

SECRET_TOKEN = 54321


def identity(stage: int, instance: str = "life") -> Identity:
    sizes = Sizes(1, 2, 1)
    return Identity("test", instance, Rank(0, stage, 0), sizes, "node", 1, "none", "1", "C", 0, 0, 0, 1)


def filled(directory: Path, stage: int, *, steps: int = 3, instance: str = "life") -> RingWriter:
    directory.mkdir(mode=0o700, exist_ok=True)
    ring = RingWriter(directory, identity(stage, instance), 1 << 16)
    ring.append(Kind.BIND, 0, 10**9, Bind(0, 1, 1, 9, 7, "request-a"))
    ring.append(Kind.HEARTBEAT, 0, 10**9, Heartbeat('{"armed": false, "reason": "too slow"}'))
    one = np.ones(1, np.int32)
    for step in range(1, steps + 1):
        body = Inputs(
            step, 0, 0, 0, np.full(1, 7, np.uint64), one * 0, one, one * step, one * step, one, one, one * 0,
            one * 9, one * SECRET_TOKEN, np.zeros((1, 0), np.int32), one * SECRET_TOKEN, one * step,
            np.zeros(1, np.uint8),
        )  # fmt: skip
        ring.append(Kind.INPUTS, step, 10**9 + step, body)
        ring.append(Kind.COLLECTIVE, step, 10**9 + step, Collective(step, 4, 2, "pp send float64"))
    return ring


@pytest.fixture
def dump(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(main, "dump", capsys)


class TestWhatIsDumped:
    def test_all_rings_of_a_directory_go_into_one_file(self, dump: Command, tmp_path: Path) -> None:
        for stage in (0, 1):
            filled(tmp_path / "rings", stage).close()
        outcome = dump(tmp_path / "rings", "-o", tmp_path / "a.swdump", "--json")
        assert outcome.status == 0
        assert [(r["rank"], r["state"], r["records"], r["lost"], r["first_step"], r["last_step"], r["last_call"])
                for r in outcome.json["rings"]] == [
            ("dp0.pp0.tp0", "ended", 8, 0, 1, 3, "pp send float64"),
            ("dp0.pp1.tp0", "ended", 8, 0, 1, 3, "pp send float64"),
        ]  # fmt: skip
        opened = DumpFile.open(tmp_path / "a.swdump")
        assert (opened.complete, opened.cut_off_bytes, opened.unreadable) == (True, 0, 0)
        steps = [
            e.inputs.step.tolist() for e in opened.evidence(("life", Rank(0, 1, 0))) if e.inputs is not None
        ]
        assert steps == [[1, 2, 3]]

    def test_a_ring_of_a_running_engine_and_of_a_killed_one_are_told_apart(
        self, dump: Command, tmp_path: Path
    ) -> None:
        ring = filled(tmp_path / "rings", 0)
        assert dump(ring.path, "-o", tmp_path / "a", "--json").json["rings"][0]["state"] == "running"
        code = (
            "import os, sys; from pathlib import Path; import test_dump;"
            "test_dump.filled(Path(sys.argv[1]), 0); os.kill(os.getpid(), 9)"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code, tmp_path / "killed"], check=False, env=environment)
        assert dump(tmp_path / "killed", "-o", tmp_path / "b", "--json").json["rings"][0]["state"] == "killed"

    def test_the_text_says_how_the_engine_left_and_what_comes_next(
        self, dump: Command, tmp_path: Path
    ) -> None:
        filled(tmp_path / "rings", 0).close()
        lines = dump(tmp_path / "rings", "-o", tmp_path / "a.swdump").out.splitlines()
        assert lines[:5] == [
            "life.dp0.pp0.tp0.ring: none 1, ended",
            "  8 records, steps 1 to 3",
            "  last record 1970-01-01 00:00:01 UTC, 1 rows in the last batch",
            "  last call entered: pp send float64",
            "  probe disarmed: its heartbeat cannot be read",
        ]
        assert "digests only" in lines[5] or "digests only" in lines[6]

    def test_tokens_leave_only_on_demand(self, dump: Command, tmp_path: Path) -> None:
        filled(tmp_path / "rings", 0).close()
        raw = []
        for name, flags in (("a", ()), ("b", ("--raw-tokens",))):
            dump(tmp_path / "rings", "-o", tmp_path / name, *flags)
            (evidence,) = DumpFile.open(tmp_path / name).evidence(("life", Rank(0, 0, 0)))
            assert evidence.inputs is not None
            raw.append(evidence.inputs.raw_ids.tolist())
        assert raw == [[], [SECRET_TOKEN] * 3]

    def test_the_directorys_key_makes_the_digests_and_none_is_made_for_it(
        self, dump: Command, tmp_path: Path
    ) -> None:
        def digests(name: str) -> list[int]:
            dump(tmp_path / "rings", "-o", tmp_path / name)
            (evidence,) = DumpFile.open(tmp_path / name).evidence(("life", Rank(0, 0, 0)))
            assert evidence.inputs is not None
            return evidence.inputs.ids_digest.tolist()  # type: ignore[no-any-return]

        filled(tmp_path / "rings", 0).close()
        assert digests("a") != digests("b")  # a key for each dump alone
        assert [p.suffix for p in (tmp_path / "rings").iterdir()] == [".ring"]
        key_of_directory(tmp_path / "rings")
        assert digests("c") == digests("d")

    def test_the_base_install_and_the_sidecars_extra_suffice(self, tmp_path: Path) -> None:
        filled(tmp_path / "rings", 0).close()
        code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if name.startswith("stagewatch.monitor") or top in ("torch", "fastapi", "pyarrow", "rich", "starlette"):
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
sys.meta_path.insert(0, Refuse())
from stagewatch.agents.cli import main
sys.exit(main(["dump", *sys.argv[1:]]))
"""
        arguments = [sys.executable, "-c", code, tmp_path / "rings", "-o", tmp_path / "a"]
        assert subprocess.run(arguments, capture_output=True, check=True).stderr == b""


class TestUnusable:
    @pytest.mark.parametrize("name", ["nothing", "", "empty", "rubbish.ring"])
    def test_one_line_says_why(self, dump: Command, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "rubbish.ring").write_bytes(b"\x1b[2J" * 9999)
        (tmp_path / "rubbish.ring").chmod(0o600)
        outcome = dump(str(tmp_path / name) if name else "", "-o", tmp_path / "out")
        assert (outcome.status, outcome.err.count("\n"), outcome.out) == (2, 1, "")
        assert not (tmp_path / "out").exists()

    def test_a_file_that_exists_is_kept_unless_forced(self, dump: Command, tmp_path: Path) -> None:
        filled(tmp_path / "rings", 0).close()
        (tmp_path / "out").write_text("precious")
        assert "give --force" in dump(tmp_path / "rings", "-o", tmp_path / "out").err
        assert (tmp_path / "out").read_text() == "precious"
        assert dump(tmp_path / "rings", "-o", tmp_path / "out", "--force").status == 0

    def test_one_bad_ring_among_several_is_left_out_and_named(self, dump: Command, tmp_path: Path) -> None:
        filled(tmp_path / "rings", 0).close()
        (tmp_path / "rings" / "bad.ring").write_bytes(b"x" * 9999)
        (tmp_path / "rings" / "bad.ring").chmod(0o600)
        outcome = dump(tmp_path / "rings", "-o", tmp_path / "out", "--json")
        assert (outcome.status, len(outcome.json["rings"]), len(outcome.json["left_out"])) == (0, 1, 1)
        assert outcome.err.startswith("stagewatch-agent: left out: ring bad.ring: ")


class TestDamage:
    """A dump may be cut off, altered, or made to do harm."""

    @pytest.fixture
    def whole(self, dump: Command, tmp_path: Path) -> bytes:
        filled(tmp_path / "rings", 0).close()
        dump(tmp_path / "rings", "-o", tmp_path / "whole")
        return (tmp_path / "whole").read_bytes()

    def test_a_file_cut_off_anywhere_gives_what_is_left_of_it(self, whole: bytes, tmp_path: Path) -> None:
        for size in range(len(MAGIC), len(whole)):
            (tmp_path / "cut").write_bytes(whole[:size])
            opened = DumpFile.open(tmp_path / "cut")
            assert not opened.complete
            for key in opened.streams:
                assert len(list(opened.evidence(key))) <= 1

    def test_no_altered_byte_goes_unnoticed(self, whole: bytes, tmp_path: Path) -> None:
        path = tmp_path / "altered"
        for position in range(len(MAGIC), len(whole)):
            content = bytearray(whole)
            content[position] ^= 0xFF
            path.write_bytes(content)
            opened = DumpFile.open(path)
            found = [e.next_seq for key in opened.streams for e in opened.evidence(key)]
            assert found == [8] or opened.unreadable or not opened.complete, position

    def test_an_entry_that_unpacks_to_more_than_it_says_takes_no_memory(self, tmp_path: Path) -> None:
        entry = bytearray(batch_entry(0, bytes(10**7)))
        entry[4:8] = (100).to_bytes(4, "little")
        with DumpWriter(tmp_path / "bomb") as writer:
            writer.write(hello_entry(0, identity(0)))
            writer.write(bytes(entry))
        opened = DumpFile.open(tmp_path / "bomb")
        assert list(opened.evidence(("life", Rank(0, 0, 0)))) == []
        assert opened.unreadable == 1

    def test_what_is_no_dump_is_told_in_a_line(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"\x00" * 100)
        with pytest.raises(DumpError, match="not a dump"):
            DumpFile.open(tmp_path / "x")
