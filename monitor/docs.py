"""Tables of the docs that come from the code: settings, metrics, the Parquet schema.

``python -m stagewatch.monitor.docs`` writes them into ``docs/``; a test asserts that they are fresh.
"""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from stagewatch.agents import commands as agent_commands
from stagewatch.agents.commandline import commands_of
from stagewatch.agents.options import SECRETS, Parser, default_text, variable_of
from stagewatch.agents.settings import VARIABLES
from stagewatch.monitor import commands as monitor_commands
from stagewatch.monitor.exports.columns import SCHEMA_VERSION, TABLES
from stagewatch.monitor.instruments import DROPS, INSTRUMENTS, RECORD_DROPS, REFUSALS

PROGRAMS: tuple[tuple[str, ModuleType], ...] = (
    ("stagewatch-agent", agent_commands),
    ("stagewatch", monitor_commands),
)

_GENERATED = "<!-- Made by `python -m stagewatch.monitor.docs`; edits here are lost. -->"


def settings_page() -> str:
    """Every setting of every part."""
    lines = [
        "# Settings",
        "",
        _GENERATED,
        "",
        "A flag wins over its environment variable, and the variable over the default. Secrets have no flag, because",
        "every user of a machine can read its command lines. A flag that takes no value is set by `1` in its variable.",
        "",
        "## The probe, in the engine's processes",
        "",
        *_table(
            ("Variable", "Default", "What it does"),
            ((f"`{v.name}`", _code(v.default), v.meaning) for v in VARIABLES),
        ),
        "",
        "## Secrets",
        "",
        *_table(("Variable", "What it is"), ((f"`{v.name}`", v.meaning) for v in SECRETS)),
    ]
    for program, package in PROGRAMS:
        for name, module_name in commands_of(package):
            lines += ["", *_command(program, name, f"{package.__name__}.{module_name}")]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric."""
    rows = (
        (
            f"`{item.prometheus_name}`",
            item.kind.removeprefix("observed "),
            ", ".join(f"`{label}`" for label in item.labels),
            item.help,
        )
        for item in INSTRUMENTS
    )
    lines = [
        "# Metrics",
        "",
        _GENERATED,
        "",
        "Served at `/metrics` of the collector, as Prometheus reads them. The scraper needs the token, like every",
        "other reader (in Prometheus: `authorization`, `credentials_file`), unless the collector runs with",
        "`--open-metrics`.",
        "`engine` is the id of one life of an engine, `dp` its replica, `stage` and `tp` a rank's coordinates.",
        "No metric has a request id. Of more than 64 replicas those heard of last have series;",
        "`stagewatch_engines_hidden` counts the others. Incidents of more than 256 deployments are counted under",
        "`(others)`.",
        "",
        *_table(("Metric", "Type", "Labels", "What it tells"), rows),
        "",
        "## Places and reasons of drops",
        "",
        "Nothing is left out without being counted. `stagewatch_records_dropped_total`, by rank:",
        "",
        *_drops(RECORD_DROPS),
        "",
        "`stagewatch_drops_total`, of stagewatch itself:",
        "",
        *_drops(DROPS),
        "",
        "## Reasons of refusals",
        "",
        *_table(("`reason`", "Why"), ((f"`{reason}`", text) for reason, text in REFUSALS.items())),
    ]
    return "\n".join(lines) + "\n"


def _drops(known: dict[tuple[str, str], str]) -> Iterator[str]:
    rows = ((f"`{place}`", f"`{reason}`", text) for (place, reason), text in known.items())
    return _table(("`place`", "`reason`", "What"), rows)


def parquet_page() -> str:
    """The schema of the Parquet export."""
    lines = [
        "# Parquet schema",
        "",
        _GENERATED,
        "",
        "What `stagewatch export parquet` writes ([replay.md](replay.md#parquet)). This is schema "
        f"{SCHEMA_VERSION}, as",
        "`stagewatch.schema` in each file's metadata says; it rises when a column goes or changes its meaning.",
        "Times are UTC, with nanoseconds. Digests are keyed: equal tokens have equal digests within one recording",
        "and under one key, and nowhere else; as text they are 16 hex digits. `links` and `values` are lists of",
        "structures.",
    ]
    for table in TABLES:
        rows = (
            (f"`{c.name}`", c.type, c.what + ("; null without `--raw-tokens`" if c.raw else ""))
            for c in table.columns
        )
        lines += ["", f"## `{table.name}.parquet`", "", f"{table.what[:1].upper()}{table.what[1:]}.", ""]
        lines += _table(("Column", "Type", "What"), rows)
    return "\n".join(lines) + "\n"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page, "parquet.md": parquet_page}


def _command(program: str, name: str, module_name: str) -> Iterator[str]:
    module = importlib.import_module(module_name)
    parser = Parser(prog=f"{program} {name}")
    module.add_arguments(parser)
    yield f"## `{program} {name}`"
    yield ""
    yield module.HELP[:1].upper() + module.HELP[1:] + "."
    if parser.options:
        yield ""
        yield from _table(("Flag", "Variable", "Default", "What it does"), map(_option, parser.options))


def _option(action: argparse.Action) -> tuple[str, ...]:
    flag = ", ".join(f"`{flag}`" for flag in action.option_strings)
    text = (action.help or "").replace("%%", "%")
    return (
        flag,
        f"`{variable_of(action)}`",
        _code(default_text(action)),
        text[:1].upper() + text[1:] + ("" if text.endswith(".") else "."),
    )


def _table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description="Write the pages of the docs that come from the code.")
    parser.add_argument("--directory", type=Path, default=Path("docs"))
    directory = parser.parse_args().directory
    for name, page in PAGES.items():
        (directory / name).write_text(page())


if __name__ == "__main__":
    main()
