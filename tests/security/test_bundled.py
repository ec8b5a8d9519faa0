"""A bundle of a running collector: the same as of its journal, with nothing in it that is not to leave."""

import json
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from commands import Command, command
from house import House
from service_processes import CollectorProcess, wait_until
from service_records import identity
from test_planted import DIGEST_KEY, REQUEST, TOKEN, TOKENS, planted, spellings

from stagewatch.agents.probe import Probe
from stagewatch.agents.record import Kind
from stagewatch.agents.ring import RingWriter
from stagewatch.agents.tls import NO_TLS_FILES
from stagewatch.monitor.cli import main
from stagewatch.monitor.remote import CollectorOrigin


@pytest.fixture
def bundle(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(main, "bundle", capsys)


def private(path: Path, content: str) -> Path:
    path.touch(0o600)
    path.write_text(content)
    return path


def diverging(ring_dir: Path) -> list[RingWriter]:
    """Two ranks that part at step 11."""
    ring_dir.mkdir(mode=0o700)
    rings = []
    for stage in (0, 1):
        who = identity(stage)
        ring = RingWriter(ring_dir, who, 1 << 20)
        probe = Probe(ring, who)
        for row in range(4):
            probe.bind(f"{REQUEST}-{row}", row, 1, 10)
        for step in range(1, 20):
            ring.append(Kind.INPUTS, step, step * 1000, planted(step, stage * 100 * (step > 10), REQUEST))
        rings.append(ring)
    return rings


def settled(collector: CollectorProcess) -> dict[str, Any]:
    """An incident about a request, once all that was recorded is judged."""
    wait_until(lambda: [collector.last_step(f"life-1.{stage}") for stage in (0, 1)] == [19, 19], "all came")

    def about_a_request() -> Any:
        found = collector.get("/v1/incidents")["incidents"]
        return [incident for incident in found if incident["request"]]

    found: list[dict[str, Any]] = wait_until(about_a_request, "the ranks disagree about requests")
    return min(found, key=lambda incident: str(incident["id"]))


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def held(content: dict[str, bytes], secrets: list[bytes]) -> list[tuple[str, bytes]]:
    return [(name, secret) for name, data in content.items() for secret in secrets if secret in data]


TOKEN_IDS = [spelling for value in range(TOKENS, TOKENS + 197) for spelling in spellings(value)]


@pytest.mark.timeout(180)
def test_a_bundle_of_a_running_collector(house: House, bundle: Command, tmp_path: Path) -> None:
    # GIVEN a sidecar that ships token values and masks requests, and ranks that part
    token_file = private(tmp_path / "planted.token", TOKEN)
    key_file = private(tmp_path / "planted.key", DIGEST_KEY)
    collector = house.collector("--token-file", token_file, token=TOKEN)
    diverging(house.ring_dir)
    house.ship(collector.url, TOKEN, "--key-file", key_file, "--pseudonymise", "--raw-tokens")
    incident = settled(collector)["id"]
    asked = ("--collector", collector.url, "--token-file", token_file)
    # WHEN it is packed without and with what users said
    bare = bundle(incident, *asked, "-o", tmp_path / "bare.zip", "--json")
    full = bundle(incident, *asked, "-o", tmp_path / "full.zip", "--json", "--raw-tokens")
    assert (bare.err, full.err) == ("", "")
    # THEN both say what was said, and only the second holds any of it
    assert [bare.json[name] for name in ("reproduces", "raw_tokens", "raw_left_out")] == [True, False, True]
    assert [full.json[name] for name in ("reproduces", "raw_tokens", "raw_left_out")] == [True, True, False]
    secrets = [TOKEN.encode(), DIGEST_KEY.encode(), bytes.fromhex(DIGEST_KEY), REQUEST.encode()]
    assert held(members(tmp_path / "bare.zip"), secrets + TOKEN_IDS) == []
    assert held(members(tmp_path / "full.zip"), secrets) == []
    assert held(members(tmp_path / "full.zip"), TOKEN_IDS) != []
    # AND the journal says the same with no collector
    assert collector.end() == 0
    offline = bundle(incident, "--from", house.data_dir, "-o", tmp_path / "offline.zip", "--json")
    assert offline.json["reproduces"] is True
    of_both = [json.loads(members(tmp_path / name)["incident.json"]) for name in ("bare.zip", "offline.zip")]
    assert of_both[0] == of_both[1]


def test_a_token_goes_nowhere_else(bundle: Command, tmp_path: Path) -> None:
    """GIVEN a server that sends its clients to another WHEN it is asked THEN the other hears nothing."""
    heard: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.path)
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/stolen")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        refused = bundle(
            *("0" * 16, "--collector", f"http://127.0.0.1:{server.server_port}"),
            *("--token-file", private(tmp_path / "token", TOKEN)),
        )
        server.shutdown()
        thread.join()
    assert (refused.status, heard) == (2, [f"/v1/incidents/{'0' * 16}"])
    assert "refuses (HTTP 302)" in refused.err


def test_a_network_in_clear_is_told(tmp_path: Path) -> None:
    def exposed(address: str) -> bool:
        return CollectorOrigin(address, TOKEN, NO_TLS_FILES).is_exposed

    addresses = ("http://127.0.0.1:1", "http://localhost:1", "http://collector:1", "https://collector:1")
    assert [exposed(address) for address in addresses] == [False, False, True, False]


@pytest.mark.timeout(180)
def test_what_a_collector_refuses_is_told_in_a_line(house: House, bundle: Command, tmp_path: Path) -> None:
    collector = house.collector()
    token_file, wrong = collector.token_file, private(tmp_path / "wrong", "x" * 24)
    asked = ("-o", tmp_path / "a.zip", "--collector")
    for words, says in (
        ((*asked, collector.url, "--token-file", token_file, "0" * 16), "no such incident"),
        ((*asked, collector.url, "--token-file", token_file, "beef"), "wants all of its 16 digits"),
        ((*asked, collector.url, "--token-file", wrong, "0" * 16), "does not know the token"),
        ((*asked, "http://127.0.0.1:1", "--token-file", wrong, "0" * 16), "cannot be asked"),
        ((*asked, "file:///etc/passwd", "--token-file", wrong, "0" * 16), "is no address"),
        (
            (*asked, collector.url.replace("//", "//me:secret@"), "--token-file", wrong, "0" * 16),
            "more than an",
        ),
    ):
        refused = bundle(*words)
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert says in refused.err
        assert "secret" not in refused.err
    assert not (tmp_path / "a.zip").exists()
