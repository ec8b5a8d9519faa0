"""Options of the commands, declared once: each is a flag and an environment variable at the same time.

A command declares its options with argparse's own `add_argument`; `Parser` gives every flag ``--ring-dir``
the variable ``STAGEWATCH_RING_DIR``. The flag wins over the variable, the variable over the default. Secrets
have a variable and no flag, because a command line can be read by every user of the machine: `SECRETS`.
"""

import argparse
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.settings import Variable

PREFIX: Final = "STAGEWATCH_"

TOKEN: Final = "STAGEWATCH_TOKEN"  # noqa: S105  # the name of a variable, not a secret
DIGEST_KEY: Final = "STAGEWATCH_DIGEST_KEY"
GRAFANA_TOKEN: Final = "STAGEWATCH_GRAFANA_TOKEN"  # noqa: S105  # the name of a variable, not a secret
GRAFANA_WEBHOOK: Final = "STAGEWATCH_GRAFANA_WEBHOOK"

SECRETS: Final = (
    Variable(
        TOKEN,
        "",
        "The bearer token that sidecar and collector share. `--token-file` does the same by a file.",
    ),
    Variable(
        DIGEST_KEY,
        "",
        "The digest key, 32 hex digits, equal on all nodes of a deployment. `--key-file` does the same by a file.",
    ),
    Variable(
        GRAFANA_TOKEN,
        "",
        "A Grafana service account's token, for `stagewatch grafana`. `--grafana-token-file` does the same by a file.",
    ),
    Variable(
        GRAFANA_WEBHOOK,
        "",
        "Address of a webhook that Grafana tells of alerts, for `stagewatch grafana`; often as good as a password.",
    ),
)


class _Formatter(argparse.HelpFormatter):
    """Help that ends with each flag's default and variable."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not _has_variable(action):
            return text
        default = default_text(action).replace("%", "%%")
        return f"{text} ({f'default: {default}; ' if default else ''}env: {variable_of(action)})"


class Parser(argparse.ArgumentParser):
    """An argument parser whose flags can also be set through environment variables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.options: list[argparse.Action] = []
        """The flags that have a variable, in the order declared."""
        super().__init__(*args, **{"formatter_class": _Formatter, **kwargs})

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Declare an argument as argparse does; a flag gets a variable, too."""
        action = super().add_argument(*args, **kwargs)
        if _has_variable(action):
            self.options.append(action)
        return action

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line, where argparse would repeat every flag."""
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists the options)\n")

    def take_defaults_from(self, environment: Mapping[str, str]) -> None:
        """Replace defaults by what the environment says. Raises SettingsError for a value that is no good."""
        for action in self.options:
            text = environment.get(variable_of(action))
            if text:
                action.default = _value(action, text)
                action.required = False


def variable_of(action: argparse.Action) -> str:
    """Name of the environment variable that stands for a flag."""
    longest = max(action.option_strings, key=len)
    return PREFIX + longest.lstrip("-").replace("-", "_").upper()


def default_text(action: argparse.Action) -> str:
    """A flag's default as help and docs show it; empty where there is none."""
    value = action.default
    if value is None or value is False:
        return ""
    if isinstance(value, int):
        for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if variable_of(action).endswith("_BYTES") and value >= 1 << power and value % (1 << power) == 0:
                return f"{value}, {value >> power} {unit}"
    return str(value)


def _has_variable(action: argparse.Action) -> bool:
    return bool(action.option_strings) and not isinstance(
        action, argparse._HelpAction | argparse._VersionAction
    )


def _value(action: argparse.Action, text: str) -> object:
    name = variable_of(action)
    if action.nargs == 0:
        if text not in ("0", "1"):
            raise SettingsError(f"{name}={text!r} must be 0 or 1")
        return text == "1" if action.const in (True, None) else (action.const if text == "1" else None)
    convert: Any = action.type or str
    try:
        value = convert(text)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        hint = ""
        if text.startswith("tcp://"):
            hint = " (Kubernetes made it from a service's name: set enableServiceLinks: false)"
        raise SettingsError(f"{name}={text!r} is no good: {error}{hint}") from None
    if action.choices is not None and value not in action.choices:
        raise SettingsError(f"{name}={text!r} must be one of {', '.join(map(str, action.choices))}")
    return [value] if action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction) else value


def bounded(least: float, most: float, kind: type[int] | type[float]) -> Any:
    """An argparse type: a number from ``least`` to ``most``."""

    def convert(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is outside {least:g} to {most:g}")
        return value

    return convert
