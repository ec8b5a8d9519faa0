"""`stagewatch collect`: run the collector."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import uvicorn

from stagewatch.agents.credentials import token_from_text
from stagewatch.agents.errors import SettingsError
from stagewatch.agents.options import TOKEN, bounded
from stagewatch.agents.wire import Limits
from stagewatch.monitor.app import create_app
from stagewatch.monitor.auth import make_token
from stagewatch.monitor.collector import Collector
from stagewatch.monitor.connections import FrugalWebSocket, ImpatientProtocol, allow_many_files
from stagewatch.monitor.otlp.push import Push
from stagewatch.monitor.otlp.settings import PROTOCOLS, settings_of
from stagewatch.monitor.settings import CollectorSettings
from stagewatch.monitor.tls import RenewedContext, ServerTls
from stagewatch.monitor.tokens import read_grants
from stagewatch.monitor.watch import Watch

OPEN_TO: Final = ("loopback", "everyone")
WORDS_BYTES: Final = 1 << 20
"""Room for a frame that is too long to be read to its end, and answered in words."""
DEAF_S: Final = 60
"""A peer that acknowledges nothing for so long is taken for dead."""

HELP = "take evidence from sidecars, compare the ranks, keep and serve the incidents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; beyond localhost only with a token"
    )
    parser.add_argument(
        "--port", type=bounded(0, 65535, int), default=8765, help="port to listen on; 0 for any that is free"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path("stagewatch-data"),
        help="directory of the journal and the incidents",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help="file of the tokens, made by `stagewatch token`, or of one token that is good for everything; read again "
        f"when it changes; {TOKEN} can hold one token itself; without either one is made in the data directory, for "
        "listening on localhost only",
    )
    parser.add_argument(
        "--tls-cert",
        type=Path,
        help="file of the certificate to show, in PEM and with its chain; speaks TLS from then on, and nothing else; "
        "read again when it changes",
    )
    parser.add_argument(
        "--tls-key", type=Path, help="file of that certificate's private key, if it is not in the same file"
    )
    parser.add_argument(
        "--tls-client-ca",
        type=Path,
        help="file of the authorities, in PEM, one of which must have signed the certificate of everyone who connects",
    )
    parser.add_argument(
        "--segment-bytes",
        type=bounded(1 << 16, 1 << 34, int),
        default=128 << 20,
        help="size at which the journal begins a new segment",
    )
    parser.add_argument(
        "--segment-s",
        type=bounded(1, 1 << 30, float),
        default=3600.0,
        help="age in seconds at which the journal begins a new segment",
    )
    parser.add_argument(
        "--keep-bytes",
        type=bounded(1 << 17, 1 << 50, int),
        default=8 << 30,
        help="bytes of journal to keep; the oldest segments beyond are removed",
    )
    parser.add_argument(
        "--keep-s",
        type=bounded(0, 1 << 40, float),
        default=0.0,
        help="seconds for which journal is kept; 0 for as long as --keep-bytes lets it",
    )
    parser.add_argument(
        "--pin-bytes",
        type=bounded(0, 1 << 50, int),
        default=2 << 30,
        help="bytes of journal kept beyond that because they hold the minute around an incident; the oldest beyond go",
    )
    parser.add_argument(
        "--keep-incidents",
        type=bounded(1, 1 << 40, int),
        metavar="COUNT",
        default=100_000,
        help="incidents to keep; those changed longest ago go, but none that changed within the hour unless there are "
        "twice as many",
    )
    parser.add_argument(
        "--keep-incidents-s",
        type=bounded(0, 1 << 40, float),
        metavar="SECONDS",
        default=0.0,
        help="seconds for which an incident is kept after its last change; 0 for as long as --keep-incidents lets it",
    )
    parser.add_argument(
        "--queue-bytes",
        type=bounded(1 << 16, 1 << 36, int),
        default=256 << 20,
        help="bytes of memory for frames that wait for the disk before sidecars are made to wait",
    )
    parser.add_argument(
        "--ranks-max",
        type=bounded(1, 1 << 20, int),
        default=4096,
        help="ranks that may stream at the same time",
    )
    parser.add_argument(
        "--engines-max",
        type=bounded(1, 1 << 20, int),
        default=256,
        help="engines of one deployment that may be known at the same time, each start counting as one until it was "
        "silent for an hour",
    )
    parser.add_argument(
        "--readers-max",
        type=bounded(1, 1 << 16, int),
        default=256,
        help="event streams that may be open at the same time, at most half of them with one token",
    )
    parser.add_argument(
        "--open-metrics",
        nargs="?",
        choices=OPEN_TO,
        metavar="WHO",
        const="everyone",
        default="",
        help="who may read /metrics, and whether an engine is well, without a token: those on this machine (loopback), "
        "or everyone who reaches the port (everyone, also if nothing is said)",
    )
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        default="",
        help="OpenTelemetry receiver to push metrics, incidents and traces to, http://HOST:4317 or https://HOST:4317; "
        "without it, OpenTelemetry's own variables are followed (OTEL_EXPORTER_OTLP_ENDPOINT and so on), and where "
        "they say nothing nothing is pushed",
    )
    parser.add_argument(
        "--otlp-protocol",
        metavar="NAME",
        choices=PROTOCOLS,
        default="",
        help="how to push; without it as OTEL_EXPORTER_OTLP_PROTOCOL says, or over grpc",
    )


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="stagewatch: %(message)s", stream=sys.stderr)
    token, said = _token(args)
    tls = _tls(args)
    settings = CollectorSettings(
        host=args.host,
        port=args.port,
        data_dir=args.data_dir,
        token=token,
        segment_bytes=args.segment_bytes,
        keep_bytes=args.keep_bytes,
        queue_bytes=args.queue_bytes,
        ranks_max=args.ranks_max,
        open_metrics=args.open_metrics,
        limits=Limits(),
        segment_s=args.segment_s,
        keep_s=args.keep_s,
        pin_bytes=args.pin_bytes,
        keep_incidents=args.keep_incidents,
        keep_incidents_s=args.keep_incidents_s,
        readers_max=args.readers_max,
        engines_max=args.engines_max,
    )
    allow_many_files()
    pushing = settings_of(args.otlp_endpoint, args.otlp_protocol, os.environ)
    collector = Collector(settings, Watch(), Push(pushing) if pushing else None)
    with contextlib.closing(listen(settings.host, settings.port)) as listener:
        if said:
            logging.getLogger("stagewatch").info("%s", said)
        return asyncio.run(_serve(collector, listener, tls))


def _token(args: argparse.Namespace) -> tuple[str | Path, str]:
    """The token or the file of tokens, and what to tell the operator about it."""
    given = os.environ.get(TOKEN)
    if args.token_file is not None:
        read_grants(args.token_file)
        return args.token_file, ""
    if given:
        return token_from_text(given, TOKEN), ""
    if not is_local(args.host):
        raise SettingsError(
            f"--host {args.host} can be reached by others: "
            f"give a token by --token-file or {TOKEN}, or listen on 127.0.0.1"
        )
    path: Path = args.data_dir / "token"
    try:
        args.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_token(path)
    except OSError as error:
        raise SettingsError(
            f"--data-dir {args.data_dir} cannot take a token: {error.strerror}: give another one"
        ) from None
    read_grants(path)
    return path, f"no token given: using the one in {path}; sidecars need it too (--token-file {path})"


def _tls(args: argparse.Namespace) -> RenewedContext | None:
    """What TLS is spoken with; None for none. Raises SettingsError."""
    if args.tls_cert is None:
        if args.tls_key or args.tls_client_ca:
            raise SettingsError("--tls-key and --tls-client-ca need --tls-cert: give the certificate to show")
        if not is_local(args.host):
            logging.getLogger("stagewatch").warning(
                "tokens and evidence cross the network in clear: give --tls-cert, or put a TLS proxy before it"
            )
        return None
    return RenewedContext(ServerTls(args.tls_cert, args.tls_key, args.tls_client_ca))


def is_local(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises SettingsError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SettingsError(f"--host {host} is no address to listen on: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Every connection inherits these: whoever is gone, or no longer reads, does not keep one for ever.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT"):
            if hasattr(socket, option):  # Linux
                limit = DEAF_S * (1000 if option == "TCP_USER_TIMEOUT" else 1)
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), limit)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {host} port {port}: {error.strerror}: choose another --port, or stop what uses it"
        ) from None
    return listener


class _Refusals(logging.Filter):
    """Tells of refused connections once in a while, in words; uvicorn calls each an error of ours."""

    _UVICORN: Final = "ASGI callable returned without completing handshake."
    _PAUSE_S: Final = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._silent_until = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged; its text may change."""
        if record.msg != self._UVICORN:
            return True
        now = time.monotonic()
        if now < self._silent_until:
            return False
        self._silent_until = now + self._PAUSE_S
        record.msg = (
            "a sidecar was refused: compare its --token-file with ours (see stagewatch_ingest_refused_total)"
        )
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which end the process by the signal instead of with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(collector: Collector, listener: socket.socket, tls: RenewedContext | None) -> int:
    logging.getLogger("uvicorn.error").addFilter(_Refusals())
    config = uvicorn.Config(
        create_app(collector),
        http=ImpatientProtocol,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws=FrugalWebSocket,
        # A little more than we take, so that who is slightly over is told so by a refusal.
        ws_max_size=collector.settings.limits.frame_bytes + WORDS_BYTES,
        # Evidence is digests, which do not compress; and nothing can be inflated against us.
        ws_per_message_deflate=False,
        # Who asks is whoever connected: what a header says of that is for proxies to know.
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        limit_concurrency=None,
    )
    config.load()
    config.ssl = tls
    server = _Server(config)

    def end() -> None:
        collector.hub.close()
        server.should_exit = True

    collector.on_crash = end
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"stagewatch: listening on http{'s' if tls else ''}://{shown}:{port}", flush=True)
    await server.serve(sockets=[listener])
    return 0 if collector.crash is None else 1
