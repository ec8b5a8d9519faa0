"""`stagewatch-agent ship`: run the sidecar."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from stagewatch.agents.credentials import given_token, key_from_text, read_key_file
from stagewatch.agents.errors import SettingsError, StagewatchError
from stagewatch.agents.options import DIGEST_KEY, TOKEN, bounded
from stagewatch.agents.shipping import Destination, ingest_url, is_exposed
from stagewatch.agents.sidecar import Sidecar, SidecarSettings
from stagewatch.agents.tls import NO_TLS_FILES, ClientTls, add_tls_arguments

HELP = "ship what the ranks of this node recorded to the collector"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--ring-dir", type=Path, help="directory of the ring files, the same as the engine's")
    parser.add_argument(
        "--collector",
        default="ws://127.0.0.1:8765",
        help="the collector's address: ws://HOST:PORT or wss://HOST:PORT",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file that holds the collector's bearer token; {TOKEN} can hold the token itself",
    )
    add_tls_arguments(parser)
    parser.add_argument(
        "--key-file",
        type=Path,
        help="file that holds the digest key, 32 hex digits, equal on all nodes of a deployment; "
        f"{DIGEST_KEY} can hold the key itself; without either the sidecars of one node share digest.key in the ring "
        "directory",
    )
    parser.add_argument(
        "--raw-tokens", action="store_true", help="send token values too, not only their digests"
    )
    parser.add_argument(
        "--pseudonymise",
        action="store_true",
        help="send keyed digests in place of request ids; on all nodes or none",
    )
    parser.add_argument(
        "--held-bytes",
        type=bounded(1 << 16, 1 << 36, int),
        default=64 << 20,
        help="bytes of unacknowledged frames to hold in memory",
    )
    parser.add_argument(
        "--drain-s",
        type=bounded(0, 3600, float),
        default=5.0,
        help="seconds to wait for acknowledgements when told to end",
    )
    parser.add_argument(
        "--freeze-bytes",
        type=bounded(0, 1 << 40, int),
        default=64 << 20,
        help="bytes of windows kept on the node: what rings held around critical incidents; the oldest go first; 0 "
        "keeps none",
    )
    parser.add_argument(
        "--freeze-most",
        type=bounded(1, 10_000, int),
        default=16,
        help="incidents whose windows are kept",
    )
    parser.add_argument(
        "--freeze-dir",
        type=Path,
        help="directory for them, of the sidecar's user alone; without it `frozen` in the ring directory",
    )
    parser.add_argument(
        "--health-file",
        type=Path,
        help="file to touch at every look for rings, for `stagewatch-agent health` to judge by",
    )


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="stagewatch-agent: %(message)s", stream=sys.stderr)
    sidecar = Sidecar(settings_of(args))
    try:
        asyncio.run(_until_told(sidecar))
    except* StagewatchError as errors:
        raise errors.exceptions[0] from None
    return 0


def settings_of(args: argparse.Namespace) -> SidecarSettings:
    """The settings that arguments and environment give. Raises SettingsError."""
    if args.ring_dir is None:
        raise SettingsError(
            "--ring-dir (or STAGEWATCH_RING_DIR) is missing: give the engine's ring directory"
        )
    if args.ring_dir.exists() and not args.ring_dir.is_dir():
        raise SettingsError(
            f"--ring-dir {args.ring_dir} is not a directory: give the engine's ring directory"
        )
    url = ingest_url(args.collector)
    if is_exposed(url):
        logging.getLogger("stagewatch").warning("the token goes to %s in clear: prefer wss://", url)
    return SidecarSettings(
        ring_dir=args.ring_dir,
        destination=Destination(url, _token(args), _tls(args, url)),
        key=_key(args),
        raw_tokens=args.raw_tokens,
        pseudonymise=args.pseudonymise,
        held_bytes=args.held_bytes,
        drain_s=args.drain_s,
        freeze_bytes=args.freeze_bytes,
        freeze_most=args.freeze_most,
        freeze_dir=args.freeze_dir,
        health_file=args.health_file,
    )


def _token(args: argparse.Namespace) -> str | Path:
    path: Path | None = args.token_file
    token = given_token(path, TOKEN, f"give the collector's by --token-file or {TOKEN}")
    return path or token  # a file is read again at each connection


def _tls(args: argparse.Namespace, url: str) -> ClientTls:
    tls = ClientTls.of(args)
    if url.startswith("wss:"):
        tls.context()  # what cannot be used is told now, and not at each connection
    elif tls != NO_TLS_FILES:
        raise SettingsError(f"--collector {args.collector} is not TLS: write wss://, or leave out --tls-...")
    return tls


def _key(args: argparse.Namespace) -> bytes | None:
    given = os.environ.get(DIGEST_KEY)
    if args.key_file is not None:
        return read_key_file(args.key_file)
    return key_from_text(given, DIGEST_KEY) if given else None


async def _until_told(sidecar: Sidecar) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await sidecar.run(stop)
