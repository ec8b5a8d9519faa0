"""A running collector in the hands of people who mean it no good: what they try, and what they get."""

import contextlib
import socket
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from house import House
from service_processes import BIN, CollectorProcess, wait_until
from service_records import batch_message, hello, identity
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from stagewatch.agents import wire
from stagewatch.agents.identity import Identity
from stagewatch.monitor.connections import FRAGMENTS_MAX

ADMIN = "admin-token-of-this-test-0123456789"


def make_token(path: Path, name: str, *options: str) -> str:
    """What `stagewatch token` prints, and nothing but that."""
    made = subprocess.run(
        [BIN / "stagewatch", "token", name, "--token-file", path, *options],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() not in made.stderr
    assert made.stdout.strip() not in path.read_text()
    return made.stdout.strip()


class Guarded:
    """A collector with a token file, and a token that may do everything."""

    def __init__(self, house: House, *options: str) -> None:
        self.tokens = house.directory / "tokens"
        self.whole = make_token(self.tokens, "whole", "--scopes", "ingest,read,admin")
        self.collector: CollectorProcess = house.collector(
            "--token-file", self.tokens, *options, token=self.whole
        )

    def refused(self, reason: str) -> float:
        return self.collector.metric("stagewatch_ingest_refused_total", reason=reason)

    @contextlib.contextmanager
    def door(self, token: str, **options: Any) -> Iterator[ClientConnection]:
        url = self.collector.url.replace("http", "ws") + "/v1/ingest"
        headers = {"Authorization": f"Bearer {token}"}
        options.setdefault("compression", None)
        with connect(url, additional_headers=headers, max_size=None, **options) as made:
            yield made

    def send_raw(self, content: bytes) -> bytes:
        """What comes back for bytes that no client of HTTP would send."""
        with socket.create_connection(("127.0.0.1", self.collector.port)) as connection:
            connection.settimeout(30)
            found = b""
            with contextlib.suppress(ConnectionError):  # it may hang up while we still talk
                connection.sendall(content)
                with contextlib.suppress(OSError):  # not connected any more
                    connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(65536):
                    found += chunk
            return found


def of(deployment: str, instance: str = "life-1", **changes: Any) -> Identity:
    return msgspec.structs.replace(identity(instance=instance), deployment=deployment, **changes)


class TestDeployments:
    def test_a_token_writes_its_own_and_no_other(self, house: House) -> None:
        guarded = Guarded(house)
        token = make_token(guarded.tokens, "a", "--scopes", "ingest", "--deployments", "a")
        with guarded.door(token) as door:
            door.send(hello(of("b")))
            refusal = wire.decode_downward(door.recv())
            assert isinstance(refusal, wire.Refusal)
            assert refusal.reason == "this token is not good for deployment b"
            door.send(hello(of("a", "life-2")))
            assert isinstance(wire.decode_downward(door.recv()), wire.Welcome)
            # a batch for the stream that another connection greeted is no way round
            with guarded.door(guarded.whole) as other:
                other.send(hello(of("b", "life-3")))
                assert isinstance(wire.decode_downward(other.recv()), wire.Welcome)
                door.send(batch_message(0, 3, of("b", "life-3")))
                refusal = wire.decode_downward(door.recv())
                assert isinstance(refusal, wire.Refusal)
                assert "said no hello on this connection" in refusal.reason
        assert guarded.refused("forbidden") == 1

        def known() -> list[str]:
            return [engine["instance"] for engine in guarded.collector.get("/v1/engines")["engines"]]

        wait_until(
            lambda: known() == ["life-2", "life-3"], "those that were welcomed, and no other, are known"
        )

    def test_no_token_means_no_socket(self, house: House) -> None:
        guarded = Guarded(house)
        reader = make_token(guarded.tokens, "reader", "--scopes", "read")
        for token, status in (("x" * 43, 401), (reader, 403)):
            with pytest.raises(InvalidStatus) as caught, guarded.door(token):
                pass
            assert caught.value.response.status_code == status
            assert caught.value.response.headers["X-Content-Type-Options"] == "nosniff"


class TestRevocation:
    def test_what_a_token_opened_is_closed_when_it_goes_and_the_rest_stays_open(self, house: House) -> None:
        # GIVEN a sidecar and a reader with tokens of their own, and others beside them
        guarded = Guarded(house)
        sidecar = make_token(guarded.tokens, "sidecar", "--scopes", "ingest")
        reader = make_token(guarded.tokens, "reader", "--scopes", "read")
        client = httpx.Client(base_url=guarded.collector.url, headers={"Authorization": f"Bearer {reader}"})
        with (
            guarded.door(sidecar) as door,
            guarded.door(guarded.whole) as other,
            client.stream("GET", "/v1/events", timeout=60) as events,
        ):
            chunks = events.iter_raw()
            assert next(chunks).startswith(b"retry")
            shown = {each["name"]: each["open"] for each in guarded.collector.get("/v1/tokens")["tokens"]}
            assert shown == {"whole": 1, "sidecar": 1, "reader": 1}
            # WHEN both tokens are replaced
            make_token(guarded.tokens, "sidecar", "--scopes", "ingest", "--replace")
            make_token(guarded.tokens, "reader", "--scopes", "read", "--replace")
            # THEN their connections end, and nobody else's
            with pytest.raises(ConnectionClosed) as caught:
                door.recv(timeout=60)
            assert caught.value.rcvd is not None
            assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1008, "the token is good no more")
            assert b"".join(chunks) == b""
            assert client.get("/v1/engines").status_code == 401
            other.send(hello())
            assert isinstance(wire.decode_downward(other.recv(timeout=60)), wire.Welcome)

    def test_less_than_it_was_is_gone_too(self, house: House) -> None:
        """A token whose line loses a deployment does not go on with what it had."""
        guarded = Guarded(house)
        token = make_token(guarded.tokens, "a", "--scopes", "ingest", "--deployments", "a,b")
        with guarded.door(token) as door:
            text = guarded.tokens.read_text()
            assert "  a,b  " in text
            guarded.tokens.write_text(text.replace("  a,b  ", "  a  "))
            with pytest.raises(ConnectionClosed):
                door.recv(timeout=60)
        with guarded.door(token) as door:
            door.send(hello(of("b")))
            assert isinstance(wire.decode_downward(door.recv()), wire.Refusal)


class TestLimits:
    def test_event_streams(self, house: House) -> None:
        guarded = Guarded(house, "--readers-max", "2")
        with (
            guarded.collector.http.stream("GET", "/v1/events", timeout=60) as first,
            contextlib.ExitStack() as rest,
        ):
            chunks = first.iter_raw()
            assert next(chunks).startswith(b"retry")
            refused = guarded.collector.http.get("/v1/events")
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "10")
            # another token has its own half
            other = make_token(guarded.tokens, "other", "--scopes", "read")
            headers = {"Authorization": f"Bearer {other}"}
            second = rest.enter_context(
                httpx.stream("GET", f"{guarded.collector.url}/v1/events", headers=headers, timeout=60)
            )
            assert second.status_code == 200

    def test_sidecars(self, house: House) -> None:
        guarded = Guarded(house, "--ranks-max", "1")
        with guarded.door(guarded.whole):
            with pytest.raises(InvalidStatus) as caught, guarded.door(guarded.whole):
                pass
            assert caught.value.response.status_code == 429
            assert caught.value.response.headers["Retry-After"] == "10"
        assert guarded.refused("too_many") == 1

    def test_engines_of_a_deployment(self, house: House) -> None:
        guarded = Guarded(house, "--engines-max", "2")
        with guarded.door(guarded.whole) as door:
            kinds = []
            for name, deployment in (("1", "a"), ("2", "a"), ("3", "a"), ("4", "b")):
                door.send(hello(of(deployment, name)))
                kinds.append(type(wire.decode_downward(door.recv())))
            assert kinds == [wire.Welcome, wire.Welcome, wire.Refusal, wire.Welcome]
        assert guarded.refused("too_many") == 1

    def test_a_frame_that_is_too_long_is_refused_in_words_and_one_without_end_is_broken_off(
        self, house: House
    ) -> None:
        guarded = Guarded(house)
        most = wire.Limits().frame_bytes
        with guarded.door(guarded.whole) as door:
            door.send(bytes(most + 1))
            refusal = wire.decode_downward(door.recv(timeout=60))
            assert isinstance(refusal, wire.Refusal)
            assert refusal.reason == f"frame of {most + 1} bytes exceeds {most}"
            with pytest.raises(ConnectionClosed):
                door.send(bytes(2 * most))
                door.recv(timeout=60)
        wait_until(lambda: guarded.refused("frame_too_long") == 2, "both are counted")

    def test_a_message_in_endless_empty_pieces(self, house: House) -> None:
        guarded = Guarded(house)
        with guarded.door(guarded.whole) as door:

            def pieces() -> Iterator[bytes]:
                yield from (b"" for _ in range(FRAGMENTS_MAX + 2))

            with pytest.raises(ConnectionClosed) as caught:
                door.send(pieces())
                door.recv(timeout=60)
            # Who is still sending may have the line cut before it reads why.
            assert caught.value.rcvd is None or caught.value.rcvd.code == 1008

    def test_text_is_no_frame(self, house: House) -> None:
        guarded = Guarded(house)
        with guarded.door(guarded.whole) as door:
            with pytest.raises(ConnectionClosed) as caught:
                door.send("text")
                door.recv(timeout=60)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1003

    def test_nothing_is_inflated(self, house: House) -> None:
        """GIVEN a peer that offers compression THEN it is not taken up, and who compresses all the same is cut off."""
        guarded = Guarded(house)
        with guarded.door(guarded.whole, compression="deflate") as door:
            assert door.protocol.extensions == []
            # a first frame marked as compressed, with a bomb in it
            bomb = zlib.compress(bytes(1 << 24))
            head = bytes([0xC2, 0xFE]) + min(len(bomb), 0xFFFF).to_bytes(2, "big") + bytes(4)
            door.socket.sendall(head + bomb[:0xFFFF])
            with pytest.raises(ConnectionClosed) as caught:
                door.recv(timeout=60)
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1002


class TestHttp:
    def test_paths_lead_nowhere_but_to_routes(self, house: House) -> None:
        guarded = Guarded(house)
        head = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {guarded.whole}\r\nConnection: close\r\n\r\n"
        for path in (
            "/v1/incidents/../../../../etc/passwd",
            "/page/../../../../etc/passwd",
            "/page/..%2f..%2f..%2fapp.py",
            "/page/%2e%2e/app.py",
            "//etc/passwd",
            "/v1/engines/%00/healthz",
        ):
            answer = guarded.send_raw(f"GET {path} {head}".encode())
            assert answer.split()[1] in (b"404", b"422"), path
            assert b"root:" not in answer
            assert b"import" not in answer

    def test_open_paths_do_not_open_others(self, house: House) -> None:
        guarded = Guarded(house)
        for path in (
            "/healthz/../v1/incidents",
            "/healthz/v1/incidents",
            "/page/../v1/incidents",
            "/page/%2e%2e/v1/incidents",
            "/page/..%2fv1%2fincidents",
            "/v1/incidents/healthz",
            "/v1/incidents?x=/healthz",
            "/v1/incidents#/healthz",
            "http://x/healthz/../v1/incidents",
            "/V1/incidents",
        ):
            answer = guarded.send_raw(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert answer.split()[1] in (b"401", b"404", b"400"), path
            assert b'"incidents":' not in answer

    def test_smuggled_requests_are_not_taken_for_ours(self, house: House) -> None:
        guarded = Guarded(house)
        inner = "GET /v1/incidents HTTP/1.1\r\nHost: x\r\n\r\n"
        for headers in (
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "Content-Length: 5\r\nContent-Length: 6\r\n",
            "Transfer-Encoding : chunked\r\n",
            "A: b\r\n Authorization: Bearer folded\r\n",
            "A\x00: b\r\n",
        ):
            answer = guarded.send_raw(
                f"GET /healthz HTTP/1.1\r\nHost: x\r\n{headers}\r\n0\r\n\r\n{inner}".encode()
            )
            assert b'"incidents":' not in answer
        assert guarded.collector.get("/v1/status")["ready"]

    def test_a_head_without_end_and_a_hundred_idle_connections(self, house: House) -> None:
        guarded = Guarded(house)
        endless = guarded.send_raw(b"GET /healthz HTTP/1.1\r\nA: " + b"x" * 300_000)
        assert not endless.startswith(b"HTTP/1.1 200")
        idle = [socket.create_connection(("127.0.0.1", guarded.collector.port)) for _ in range(100)]
        try:
            for connection in idle:
                connection.sendall(b"GET / HT")
            assert guarded.collector.http.get("/v1/engines").status_code == 200
        finally:
            for connection in idle:
                connection.close()

    def test_more_connections_than_there_are_files_for_are_told_to_wait(self, house: House) -> None:
        guarded = Guarded(house)
        pid = guarded.collector.pid
        subprocess.run(["prlimit", f"--pid={pid}", "--nofile=300:300"], check=True)
        idle: list[socket.socket] = []
        try:
            for _ in range(258):
                idle.append(socket.create_connection(("127.0.0.1", guarded.collector.port)))
            idle[-1].settimeout(30)
            answer = idle[-1].recv(4096)
            assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\n")
        finally:
            for connection in idle:
                connection.close()
        wait_until(lambda: guarded.collector.http.get("/v1/engines").status_code == 200, "it serves on")
