"""Secrets and users' data, planted with values one can search for, and the places where none may turn up."""

import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from certificates import authority
from house import House
from service_processes import BIN, CollectorProcess, wait_until
from service_records import KEY, identity, inputs

from stagewatch.agents.digest import Digester
from stagewatch.agents.probe import Probe
from stagewatch.agents.record import Kind, request_key
from stagewatch.agents.ring import RingWriter

TOKEN = "planted-token-7f3a9c5e1b2d4f60"  # noqa: S105  # to be searched for
DIGEST_KEY = "a1b2c3d4e5f60718293a4b5c6d7e8f90"
REQUEST = "planted-request-of-a-customer"
TOKENS = 771_234_501
"""Token ids from here on; the vocabulary is made large enough for them."""
PATHS = (
    "/metrics",
    "/v1/incidents",
    "/v1/engines",
    "/v1/engines/life-1",
    "/v1/engines/life-1/healthz",
    "/v1/engines/life-1/picture?batches=true",
    "/v1/engines/nobody",
    "/v1/incidents?severity=wrong",
    "/v1/incidents/none",
    "/v1/status",
    "/v1/tokens",
    "/openapi.json",
    "/",
)


def planted(step: int, shift: int = 0, request: str = "request") -> Any:
    """A step's inputs whose token ids are the planted ones, all different."""
    body = inputs(step)
    keys = np.array([request_key(f"{request}-{row}") for row in range(len(body.request))], np.uint64)

    def fresh(values: Any) -> Any:
        return (TOKENS + shift + np.arange(values.size) % 97).astype(np.int32).reshape(values.shape)

    names = ("last_sampled", "draft_tokens", "input_ids")
    return msgspec.structs.replace(body, request=keys, **{name: fresh(getattr(body, name)) for name in names})


def blamed(collector: CollectorProcess) -> list[str]:
    """The requests that incidents are about."""
    return [found["request"] for found in collector.get("/v1/incidents")["incidents"] if found["request"]]


def spellings(value: int) -> list[bytes]:
    """A token id as text, and as bytes in either order."""
    return [str(value).encode(), value.to_bytes(4, "little"), value.to_bytes(4, "big")]


@pytest.mark.slow
def test_nothing_planted_turns_up_anywhere(house: House, tmp_path: Path) -> None:
    # GIVEN a collector with TLS and a token, a sidecar with a key that masks request ids, and rings that disagree
    ca = authority(tmp_path, "ca")
    cert, key = ca.issue("server")
    token_file, key_file = tmp_path / "planted.token", tmp_path / "planted.key"
    for path, content in ((token_file, TOKEN), (key_file, DIGEST_KEY)):
        path.touch(0o600)
        path.write_text(content)
    trusted = ssl.create_default_context(cafile=str(ca.file))
    collector = house.collector(
        *("--token-file", token_file, "--tls-cert", cert, "--tls-key", key),
        token=TOKEN,
        verify=trusted,
    )
    house.ring_dir.mkdir(mode=0o700)
    probes = []
    for stage in (0, 1):
        who = identity(stage)
        ring = RingWriter(house.ring_dir, who, 1 << 20)
        probe = Probe(ring, who)
        probes.append(probe)
        for row in range(4):
            probe.bind(f"{REQUEST}-{row}", row, 1, 10)
        for step in range(1, 20):
            body = planted(step, stage * 100 * (step > 10), REQUEST)
            ring.append(Kind.INPUTS, step, step * 1000, body)
    sidecar = house.ship(
        collector.url.replace("https", "wss"),
        TOKEN,
        *("--key-file", key_file, "--pseudonymise", "--tls-ca", ca.file),
    )
    wait_until(lambda: blamed(collector), "the ranks disagree about requests")
    # WHEN everything is asked, rightly and wrongly, with events and refusals too
    shown: dict[str, bytes] = {}
    for path in PATHS:
        answer = collector.http.get(path)
        assert answer.status_code < 500, path
        shown[path] = answer.content
    for headers in ({"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}, {}):
        answer = httpx.get(
            f"{collector.url}/v1/incidents?token={TOKEN}",
            headers=headers,
            verify=ssl.create_default_context(cafile=str(ca.file)),
        )
        shown[f"refused {len(shown)}"] = answer.content + str(answer.headers).encode()
    with collector.http.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"}) as events:
        for chunk in events.iter_raw():
            if chunk.startswith(b"id:"):
                shown["events"] = chunk
                break
    assert (sidecar.end(), collector.end()) == (0, 0)
    for name in ("lock", "token", "data"):  # what goes wrong at a start is told, too
        broken = house.process(
            *(BIN / "stagewatch", "collect", "--port", "0", "--data-dir", f"/sys/{name}"),
            STAGEWATCH_TOKEN=TOKEN,
        )
        assert broken.status() == 2
        shown[f"error {name}"] = broken.output.encode()
    for variable, value in (
        ("STAGEWATCH_TOKEN", TOKEN + " two"),
        ("STAGEWATCH_DIGEST_KEY", DIGEST_KEY + "zz"),
    ):
        broken = house.process(
            *(BIN / "stagewatch-agent", "ship", "--ring-dir", house.ring_dir),
            **{"STAGEWATCH_TOKEN": TOKEN, variable: value},
        )
        assert broken.status() == 2
        shown[f"error {variable}"] = broken.output.encode()
    replay = subprocess.run([BIN / "stagewatch", "replay", house.data_dir], capture_output=True, check=False)
    shown["replay"] = replay.stdout + replay.stderr
    shown["collector's log"] = collector.output.encode()
    shown["sidecar's log"] = sidecar.output.encode()
    for path in house.data_dir.rglob("*"):
        if path.is_file():
            shown[f"file {path.name}"] = path.read_bytes()
    # THEN the requests are there under other names, and what was planted is nowhere
    assert b"anon-" in shown["/v1/incidents"]
    assert any(b"anon-" in content for name, content in shown.items() if name.endswith(".journal"))
    secrets = [
        TOKEN.encode(),
        DIGEST_KEY.encode(),
        bytes.fromhex(DIGEST_KEY),
        REQUEST.encode(),
        b"PRIVATE KEY",
    ]
    secrets += [spelling for value in range(TOKENS, TOKENS + 197) for spelling in spellings(value)]
    found = [(name, secret) for name, content in shown.items() for secret in secrets if secret in content]
    assert found == []


def test_secrets_are_on_no_command_line(house: House) -> None:
    house.ring_dir.mkdir(mode=0o700)
    collector = house.collector()
    sidecar = house.ship(collector.url, collector.token)
    for process in (collector, sidecar):
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert collector.token.encode() not in line


class TestDigests:
    VOCABULARY = np.arange(50_000, dtype=np.int32)

    def dictionary(self, key: bytes) -> dict[int, int]:
        """Every token of a vocabulary by its digest under a key."""
        digests = Digester(key).prefixes(self.VOCABULARY[:, None], np.ones(len(self.VOCABULARY), np.int32))
        return dict(zip(digests.tolist(), self.VOCABULARY.tolist(), strict=True))

    def test_a_dictionary_of_the_vocabulary_reverses_them_only_with_the_key(self) -> None:
        # GIVEN the digests of a thousand tokens, as they leave the node
        said = self.VOCABULARY[7::50]
        digests = Digester(KEY).prefixes(said[:, None], np.ones(len(said), np.int32)).tolist()
        # THEN who has the key reads them, so the check below can fail
        right = self.dictionary(KEY)
        assert [right.get(digest) for digest in digests] == said.tolist()
        # AND who has another, or one that differs in a bit, or none, reads nothing
        for key in (bytes(16), bytes([KEY[0] ^ 1, *KEY[1:]]), bytes([*KEY[:-1], KEY[-1] ^ 128])):
            wrong = self.dictionary(key)
            assert [digest for digest in digests if digest in wrong] == []

    def test_equal_tokens_do_not_show_the_difference_of_others(self) -> None:
        """Sums or XORs of digests do not cancel: what two digests differ in tells nothing of their tokens."""
        digests = Digester(KEY).prefixes(self.VOCABULARY[:2000, None], np.ones(2000, np.int32))
        steps = np.diff(digests.astype(np.uint64))
        assert len(set(steps.tolist())) > 1990
        assert len(set((digests[1:] ^ digests[:-1]).tolist())) > 1990


@pytest.mark.parametrize("masked", [False, True])
def test_request_ids_are_pseudonyms_from_end_to_end_where_asked_for(house: House, masked: bool) -> None:
    collector = house.collector()
    house.ring_dir.mkdir(mode=0o700)
    for stage in (0, 1):
        who = identity(stage)
        ring = RingWriter(house.ring_dir, who, 1 << 20)
        probe = Probe(ring, who)
        for row in range(4):
            probe.bind(f"request-{row}", row, 1, 10)
        for step in range(1, 20):
            ring.append(Kind.INPUTS, step, step * 1000, planted(step, shift=stage * 100 * (step > 10)))
    house.ship(collector.url, collector.token, *(("--pseudonymise",) if masked else ()))
    requests = set(wait_until(lambda: blamed(collector), "the ranks disagree about requests"))
    assert {request.startswith("anon-") for request in requests} == {masked}
    assert {request.startswith("request-") for request in requests} == {not masked}
    one = sorted(requests)[0]
    assert collector.get(f"/v1/incidents?request={one}")["incidents"]
