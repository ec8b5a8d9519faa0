"""`stagewatch grafana`: put dashboards and alerts into a Grafana, or take them out again."""

import argparse
import os
from pathlib import Path

from stagewatch.agents.credentials import given_token
from stagewatch.agents.errors import SettingsError
from stagewatch.agents.options import GRAFANA_TOKEN, GRAFANA_WEBHOOK
from stagewatch.monitor.grafana.api import connect
from stagewatch.monitor.grafana.steps import Done, Grafana
from stagewatch.monitor.grafana.wanted import Places

HELP = "put dashboards, alert rules and their routing into a Grafana, or take them out again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "action",
        choices=("apply", "remove"),
        help="apply: make or update folder, data source, dashboards, rules, contact point and route; remove: take away "
        "what apply made, and nothing else",
    )
    parser.add_argument("--grafana-url", default="http://localhost:3000", help="the Grafana")
    parser.add_argument(
        "--grafana-token-file",
        type=Path,
        help=f"file that holds a service account's token; {GRAFANA_TOKEN} can hold the token itself",
    )
    parser.add_argument("--dry-run", action="store_true", help="write nothing, show what would change")
    parser.add_argument(
        "--prometheus-url",
        default="http://localhost:9090",
        help="the Prometheus that scrapes the collector, as Grafana's server reaches it",
    )
    parser.add_argument(
        "--data-source", default="", help="uid of a Prometheus data source to use instead of making one"
    )
    parser.add_argument(
        "--collector-url", default="", help="the collector, as browsers reach it, for links to its page"
    )
    parser.add_argument(
        "--docs-url", default="", help="where this documentation is served, for links to the alerts' pages"
    )
    parser.add_argument(
        "--contact-email",
        default="",
        help=f"whom to tell of alerts; {GRAFANA_WEBHOOK} can hold the address of a webhook instead; without either no "
        "contact point is made and the notification policy stays as it is",
    )


def run(args: argparse.Namespace) -> int:
    """Apply or remove; one line a thing, and with ``--dry-run`` what differs."""
    grafana = Grafana(connect(args.grafana_url, _token(args)), _places(args), dry=args.dry_run)
    for done in grafana.apply() if args.action == "apply" else grafana.remove():
        print("\n".join(_lines(done, dry=args.dry_run)), flush=True)
    return 0


def _token(args: argparse.Namespace) -> str:
    way_out = f"give a service account's by --grafana-token-file or {GRAFANA_TOKEN}"
    return given_token(args.grafana_token_file, GRAFANA_TOKEN, way_out)


def _places(args: argparse.Namespace) -> Places:
    webhook = os.environ.get(GRAFANA_WEBHOOK, "")
    if args.contact_email and webhook:
        raise SettingsError(f"--contact-email and {GRAFANA_WEBHOOK} are two ways to say the same: give one")
    return Places(
        args.prometheus_url, args.data_source, args.collector_url, args.docs_url, args.contact_email, webhook
    )


def _lines(done: Done, *, dry: bool) -> list[str]:
    said = (
        done.action
        if not dry or done.action in ("unchanged", "absent", "kept")
        else f"would be {done.action}"
    )
    head = f"{done.what}: {said}{f' ({done.why})' if done.why else ''}"
    return [head, *(f"    {line}" for line in _hidden(done.diff))] if dry else [head]


def _hidden(diff: tuple[str, ...]) -> list[str]:
    """The lines of a diff without the webhook's address, which is as good as a password."""
    webhook = os.environ.get(GRAFANA_WEBHOOK, "")
    return [line.replace(webhook, "***") if webhook else line for line in diff]
