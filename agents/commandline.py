"""Running a command: what the two programs share.

Each module of a commands package is one command. Its name is the module's, so names cannot drift; it has
``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``. Only the command asked for is imported, because
an engine's environment lacks what the other commands need.
"""

import importlib
import os
import pkgutil
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Final

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.options import Parser

USAGE_STATUS: Final = 2
"""Exit status for input or settings that cannot be used."""


def main(
    program: str,
    summary: str,
    package: ModuleType,
    extra: str,
    argv: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run the command that ``argv`` names; return the exit status.

    ``extra`` is the installation extra that carries what the package's commands import.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        names = dict(commands_of(package))
        if not arguments or arguments[0] not in names:
            return _without_command(program, summary, package, names, arguments)
        name = arguments[0]
        module = _load(f"{package.__name__}.{names[name]}", name, extra)
        parser = Parser(prog=f"{program} {name}", description=module.HELP)
        module.add_arguments(parser)
        if not {"-h", "--help"} & set(arguments):  # help must not fail for what it could explain
            parser.take_defaults_from(environment)
        return int(module.run(parser.parse_intermixed_args(arguments[1:])))
    except StagewatchError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return USAGE_STATUS
    except BrokenPipeError:
        # Whoever read our output left. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def commands_of(package: ModuleType) -> Iterator[tuple[str, str]]:
    """(command name, module name) of every command in ``package``, in alphabetical order."""
    for found in pkgutil.iter_modules(package.__path__):
        yield found.name.replace("_", "-"), found.name


def _load(module_name: str, command: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("stagewatch"):
            raise
        raise StagewatchError(
            f"{command} needs {error.name}, which is not installed: pip install 'stagewatch[{extra}]'"
        ) from None


def _without_command(
    program: str, summary: str, package: ModuleType, names: Mapping[str, str], arguments: Sequence[str]
) -> int:
    asked = arguments[0] if arguments else ""
    if asked in ("-V", "--version"):
        from importlib.metadata import version

        print(f"{program} {version('stagewatch')}")
        return 0
    if asked not in ("", "-h", "--help"):
        raise StagewatchError(f"there is no command {asked!r}: choose from {', '.join(names)}")
    lines = [f"usage: {program} COMMAND [options]", "", *_folded(summary), "", "commands:"]
    for name, module_name in names.items():
        try:
            text = importlib.import_module(f"{package.__name__}.{module_name}").HELP
        except ModuleNotFoundError as error:
            text = f"(not installed: needs {error.name})"
        lines += _folded(f"  {name:<12} {text}", " " * 15)
    lines += ["", *_folded(f"`{program} COMMAND --help` lists a command's options and their variables.")]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else USAGE_STATUS


def _folded(text: str, indent: str = "") -> list[str]:
    """Lines as argparse folds them: two columns short of the terminal's width."""
    width = max(shutil.get_terminal_size().columns - 2, 40)
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False)
