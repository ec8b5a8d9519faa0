"""Options: flag over variable over default, for every option of every command, and the docs that list them."""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stagewatch.agents import commandline
from stagewatch.agents.credentials import key_from_text, key_of_directory, read_token_file, token_from_text
from stagewatch.agents.errors import SettingsError
from stagewatch.agents.options import Parser, bounded, default_text, variable_of
from stagewatch.monitor import docs

ROOT = Path(__file__).parents[2]


def parser() -> Parser:
    made = Parser()
    made.add_argument("--port", type=bounded(0, 65535, int), default=8765)
    made.add_argument("--level", choices=("low", "high"), default="low")
    made.add_argument("--loud", action="store_true")
    made.add_argument("--only", action="append")
    made.add_argument("paths", nargs="*")
    return made


def parsed(arguments: list[str], **environment: str) -> argparse.Namespace:
    made = parser()
    made.take_defaults_from(environment)
    return made.parse_args(arguments)


class TestPrecedence:
    def test_the_flag_wins_over_the_variable_and_that_over_the_default(self) -> None:
        assert parsed([]).port == 8765
        assert parsed([], STAGEWATCH_PORT="1").port == 1
        assert parsed(["--port", "2"], STAGEWATCH_PORT="1").port == 2

    def test_an_empty_variable_is_none(self) -> None:
        assert parsed([], STAGEWATCH_PORT="").port == 8765

    def test_a_switch_is_one_or_zero(self) -> None:
        assert [parsed([], STAGEWATCH_LOUD=text).loud for text in ("0", "1")] == [False, True]

    def test_a_repeated_flag_takes_one_value_from_its_variable(self) -> None:
        assert parsed([], STAGEWATCH_ONLY="x").only == ["x"]

    def test_arguments_without_a_flag_have_no_variable(self) -> None:
        assert parsed(["a"], STAGEWATCH_PATHS="b").paths == ["a"]

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("STAGEWATCH_PORT", "x", "STAGEWATCH_PORT='x' is no good: 'x' is not a number"),
            ("STAGEWATCH_PORT", "70000", "STAGEWATCH_PORT='70000' is no good: 70000 is outside 0 to 65535"),
            ("STAGEWATCH_LOUD", "yes", "STAGEWATCH_LOUD='yes' must be 0 or 1"),
            ("STAGEWATCH_LEVEL", "mid", "STAGEWATCH_LEVEL='mid' must be one of low, high"),
        ],
    )
    def test_a_bad_value_names_its_variable(self, name: str, value: str, message: str) -> None:
        with pytest.raises(SettingsError) as caught:
            parsed([], **{name: value})
        assert str(caught.value) == message


def every_option() -> list[tuple[str, argparse.Action]]:
    found = []
    for program, package in docs.PROGRAMS:
        for name, module_name in commandline.commands_of(package):
            made = Parser()
            importlib.import_module(f"{package.__name__}.{module_name}").add_arguments(made)
            found += [(f"{program} {name}", action) for action in made.options]
    return found


def told(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("STAGEWATCH_")}
    return subprocess.run(
        [Path(sys.executable).parent / program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**cleared, **environment},
    )


class TestDocs:
    @pytest.mark.parametrize("name", docs.PAGES)
    def test_the_page_is_fresh(self, name: str) -> None:
        assert (ROOT / "docs" / name).read_text() == docs.PAGES[name](), (
            "run: python -m stagewatch.monitor.docs"
        )

    def test_every_option_is_listed_with_its_variable_and_says_what_it_does(self) -> None:
        page = docs.settings_page()
        options = every_option()
        assert len(options) > 10
        for command, action in options:
            assert f"`{variable_of(action)}`" in page, command
            assert action.help, f"{command} {action.option_strings}"

    def test_one_variable_means_one_thing(self) -> None:
        meanings: dict[str, set[str]] = {}
        for _, action in every_option():
            meanings.setdefault(variable_of(action), set()).add(str(action.type))
        assert {name: types for name, types in meanings.items() if len(types) > 1} == {}


class TestCommands:
    @pytest.mark.parametrize("program", ["stagewatch", "stagewatch-agent"])
    def test_help_lists_each_command_once(self, program: str) -> None:
        package = dict(docs.PROGRAMS)[program]
        result = subprocess.run(
            [Path(sys.executable).parent / program, "--help"], capture_output=True, text=True, check=True
        )
        lines = result.stdout.splitlines()
        listed = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
        assert listed == [name for name, _ in commandline.commands_of(package)]

    def test_an_unknown_command_names_those_there_are(self) -> None:
        result = subprocess.run(
            [Path(sys.executable).parent / "stagewatch", "colect"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith("stagewatch: there is no command 'colect': choose from ")

    def test_help_fits_a_narrow_terminal(self) -> None:
        for arguments in (["--help"], ["collect", "--help"]):
            result = told("stagewatch", *arguments, COLUMNS="60")
            assert (result.returncode, result.stderr) == (0, "")
            assert max(map(len, result.stdout.splitlines())) <= 60

    def test_no_command_is_a_mistake_and_its_answer_is_no_output(self) -> None:
        result = told("stagewatch")
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith("usage: stagewatch COMMAND")

    @pytest.mark.parametrize(("program", "package"), docs.PROGRAMS)
    def test_help_tells_every_option_s_default_and_variable(self, program: str, package: ModuleType) -> None:
        for name, _ in commandline.commands_of(package):
            text = " ".join(told(program, name, "--help").stdout.split())
            for command, action in every_option():
                if command == f"{program} {name}":
                    default = default_text(action)
                    assert (
                        f"(default: {default}; " if default else "("
                    ) + f"env: {variable_of(action)})" in text

    def test_a_default_in_bytes_is_told_in_binary_units_too(self) -> None:
        made = Parser()
        assert default_text(made.add_argument("--keep-bytes", default=8 << 30)) == "8589934592, 8 GiB"
        assert default_text(made.add_argument("--ranks-max", default=4096)) == "4096"
        assert default_text(made.add_argument("--loud", action="store_true")) == ""

    def test_help_is_given_whatever_the_environment_holds(self) -> None:
        result = told("stagewatch", "collect", "--help", STAGEWATCH_PORT="tcp://10.0.0.1:80")
        assert (result.returncode, result.stderr) == (0, "")
        assert "(default: 8765; env: STAGEWATCH_PORT)" in " ".join(result.stdout.split())

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--port", "99999"], "argument --port: 99999 is outside 0 to 65535"),
            (["--prot", "1"], "unrecognized arguments: --prot 1"),
        ],
    )
    def test_a_bad_flag_is_told_in_one_line(self, arguments: list[str], said: str) -> None:
        result = told("stagewatch", "collect", *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert (
            result.stderr == f"stagewatch collect: {said} (`stagewatch collect --help` lists the options)\n"
        )

    def test_the_sidecar_needs_no_collector_and_no_arrow(self) -> None:
        code = (
            "import sys, stagewatch.agents.commands.ship; "
            "print([m for m in sys.modules if m.split('.')[0] in ('pyarrow', 'fastapi', 'opentelemetry', 'torch')"
            " or m.startswith('stagewatch.monitor')])"
        )
        assert (
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            == "[]\n"
        )


class TestCredentials:
    @pytest.mark.parametrize(
        "text", ["", "  \n", "short", "two words of enough length", "ünïcode-long-enough", "x" * 600]
    )
    def test_what_cannot_be_a_token_is_refused_without_showing_it(self, text: str) -> None:
        with pytest.raises(SettingsError) as caught:
            token_from_text(text, "the file")
        assert str(caught.value).startswith("the file ")
        assert not text.strip() or text.strip() not in str(caught.value)

    def test_white_space_around_a_token_is_no_part_of_it(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("  sixteen-or-more-characters\n")
        (tmp_path / "token").chmod(0o600)
        assert read_token_file(tmp_path / "token") == "sixteen-or-more-characters"

    def test_a_key_is_32_hex_digits_and_errors_do_not_show_it(self) -> None:
        assert key_from_text("00" * 16 + "\n", "x") == bytes(16)
        with pytest.raises(SettingsError) as caught:
            key_from_text("abcdef" * 3, "the file")
        assert "abcdef" not in str(caught.value)

    def test_the_sidecars_of_a_directory_share_one_private_key(self, tmp_path: Path) -> None:
        key = key_of_directory(tmp_path)
        assert key_of_directory(tmp_path) == key
        assert (tmp_path / "digest.key").stat().st_mode & 0o777 == 0o600
        assert list(tmp_path.iterdir()) == [tmp_path / "digest.key"]  # nothing half made is left
        assert key_of_directory(_made(tmp_path / "other")) != key

    def test_a_directory_that_is_none_holds_no_key(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SettingsError) as caught:
            key_of_directory(tmp_path / "file")
        assert "cannot be made: Not a directory" in str(caught.value)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
