"""Collector and sidecar as the processes an operator runs, on loopback, with rings written for real."""

import json
import os
import resource
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_processes import BIN, CollectorProcess, Process, Stage, wait_until
from service_records import ROWS, append_steps, batch_message, hello, identity, journalled_seqs, lost_records
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from stagewatch.agents import wire
from stagewatch.agents.probe import Probe
from stagewatch.agents.ring import RingWriter

FIRST, LAST = "life-1.0", "life-1.1"


def rings(stage: Stage, capacity: int = 1 << 22, instance: str = "life-1") -> list[RingWriter]:
    stage.ring_dir.mkdir(mode=0o700, exist_ok=True)
    return [RingWriter(stage.ring_dir, identity(number, instance), capacity) for number in (0, 1)]


def both_reach(collector: CollectorProcess, step: int) -> None:
    wait_until(
        lambda: min(collector.last_step(FIRST), collector.last_step(LAST)) >= step, f"both ranks at {step}"
    )


class TestEndToEnd:
    def test_records_of_two_ranks_are_compared_and_journalled_once(self, stage: Stage) -> None:
        # GIVEN a collector, and a sidecar whose ring directory does not exist yet
        collector = stage.collector()
        sidecar = stage.sidecar(collector)
        wait_until(lambda: "waiting for ring directory" in sidecar.output, "the sidecar waits")
        # WHEN two ranks record equal steps
        for ring in rings(stage):
            append_steps(ring, 51)
        both_reach(collector, 51)
        # THEN both are known, every row agrees, and each record is in the journal once. The newest step
        # may still be open: more of it could come.
        compared = "stagewatch_rows_compared_total"
        wait_until(lambda: collector.metric(compared, verdict="consistent") >= 50 * ROWS, "all compared")
        assert collector.metric(compared) == collector.metric(compared, verdict="consistent")
        assert collector.get("/v1/incidents")["incidents"] == []
        assert sidecar.end() == 0
        assert collector.end() == 0
        assert journalled_seqs(stage.data_dir) == {
            "life-1.dp0.pp0.tp0": list(range(51)),
            "life-1.dp0.pp1.tp0": list(range(51)),
        }

    def test_a_rank_that_disarms_is_shown_with_its_reason(self, stage: Stage) -> None:
        collector = stage.collector()
        stage.sidecar(collector)
        stage.ring_dir.mkdir(mode=0o700)
        probe = Probe(RingWriter(stage.ring_dir, identity(), 1 << 20), identity())
        probe.disarm("the hook went missing")
        rank = wait_until(
            lambda: (r := collector.ranks().get(FIRST)) and not r["armed"] and r, "the rank is disarmed"
        )
        assert rank["reason"] == "the hook went missing"

    def test_the_ring_margin_is_reported_in_seconds(self, stage: Stage) -> None:
        collector = stage.collector()
        stage.sidecar(collector)
        ring, _ = rings(stage)
        step = 1

        def margin() -> bool:
            nonlocal step
            append_steps(ring, 1, step)
            step += 1
            return collector.metric("stagewatch_ring_margin_seconds", stage="0") > 0

        wait_until(margin, "a margin is known")


class TestKilled:
    def test_a_killed_collector_loses_nothing_and_counts_nothing_twice(self, stage: Stage) -> None:
        # GIVEN a stream of which something is journalled
        collector = stage.collector()
        sidecar = stage.sidecar(collector)
        writers = rings(stage)
        for ring in writers:
            append_steps(ring, 40)
        both_reach(collector, 40)
        # WHEN the collector is killed, records come meanwhile, and it starts again
        collector.kill()
        for ring in writers:
            append_steps(ring, 40, first_step=41)
        collector = stage.collector(port=collector.port)
        # THEN the sidecar comes back by itself and the journal has everything once, in order
        both_reach(collector, 80)
        assert sidecar.end() == 0
        assert collector.end() == 0
        assert list(journalled_seqs(stage.data_dir).values()) == [list(range(80))] * 2

    def test_the_watch_stands_where_it_stood(self, stage: Stage) -> None:
        # GIVEN two ranks that fed different tokens, and the incident that follows
        collector = stage.collector()
        stage.sidecar(collector)
        first, last = rings(stage)
        append_steps(first, 30)
        append_steps(last, 10)
        append_steps(last, 20, first_step=11, wrong_token=1)
        found = wait_until(lambda: collector.get("/v1/incidents")["incidents"], "an incident")
        wait_until(lambda: _settled(collector), "the incidents settle")
        found = collector.get("/v1/incidents")["incidents"]
        before = collector.get("/v1/engines")
        # WHEN the collector is killed and reads its journal back, twice
        for _ in range(2):
            collector.kill()
            collector = stage.collector(port=collector.port)
        # THEN it says the same, and told nobody anything anew
        assert collector.get("/v1/incidents")["incidents"] == found
        after = collector.get("/v1/engines")
        assert [e["verdicts"] for e in after["engines"]] == [e["verdicts"] for e in before["engines"]]
        assert collector.metric("stagewatch_incidents_total") == 0

    def test_a_killed_sidecar_goes_on_where_the_collector_is(self, stage: Stage) -> None:
        collector = stage.collector()
        sidecar = stage.sidecar(collector)
        writers = rings(stage)
        for ring in writers:
            append_steps(ring, 40)
        both_reach(collector, 20)
        sidecar.kill()
        for ring in writers:
            append_steps(ring, 40, first_step=41)
        stage.sidecar(collector)
        both_reach(collector, 80)
        assert collector.end() == 0
        assert list(journalled_seqs(stage.data_dir).values()) == [list(range(80))] * 2

    def test_an_engine_killed_leaves_its_last_records(self, stage: Stage) -> None:
        # GIVEN rings whose writers are gone without a word
        for ring in rings(stage):
            append_steps(ring, 25)
        del ring
        # WHEN a sidecar starts only now
        collector = stage.collector()
        stage.sidecar(collector)
        both_reach(collector, 25)
        # THEN the files stay: they are the flight recorder
        assert len(list(stage.ring_dir.glob("*.ring"))) == 2

    def test_an_overrun_ring_is_counted_and_accuses_nobody(self, stage: Stage) -> None:
        # GIVEN a collector that is down while more is recorded than the rings hold
        collector = stage.collector()
        stage.sidecar(collector, "--held-bytes", "65536")
        writers = rings(stage, capacity=1 << 16)
        for ring in writers:
            append_steps(ring, 5)
        both_reach(collector, 5)
        collector.kill()
        for ring in writers:
            append_steps(ring, 2000, first_step=6)
        # WHEN it comes back
        collector = stage.collector(port=collector.port)
        both_reach(collector, 2005)
        # THEN what is missing is counted to the record, and is no verdict against anybody
        ranks = collector.ranks()
        lost = sum(rank["lost_records"] for rank in ranks.values())
        assert collector.get("/v1/incidents?severity=warning")["incidents"] == []
        assert collector.metric("stagewatch_rows_compared_total", verdict="diverged") == 0
        assert collector.end() == 0
        have = sum(len(seqs) for seqs in journalled_seqs(stage.data_dir).values())
        assert lost > 0
        assert lost == lost_records(stage.data_dir)
        assert have + lost == 2 * 2005


class TestBadInput:
    def test_a_ring_of_another_schema_does_not_stop_the_others(self, stage: Stage) -> None:
        collector = stage.collector()
        writers = rings(stage)
        foreign = stage.ring_dir / "foreign.dp0.pp0.tp0.ring"
        content = bytearray(Path(writers[0].path).read_bytes())
        struct.pack_into("<I", content, 8, 99)
        foreign.write_bytes(content)
        sidecar = stage.sidecar(collector)
        for ring in writers:
            append_steps(ring, 10)
        both_reach(collector, 10)
        warning = "ring foreign.dp0.pp0.tp0.ring: schema 99, this build reads 1: upgrade the sidecar"
        wait_until(lambda: warning in sidecar.output, "the warning")
        # once, however long it lies there
        append_steps(writers[0], 10, first_step=11)
        wait_until(lambda: collector.last_step(FIRST) == 20, "life goes on")
        assert sidecar.output.count(warning) == 1

    def test_a_frame_that_is_none_is_refused_with_its_reason_and_at_last_the_door(self, stage: Stage) -> None:
        collector = stage.collector()
        with _connection(collector) as socket:
            for _ in range(3):
                socket.send(b"\x81no frame at all")
                refusal = wire.decode_downward(socket.recv())
                assert isinstance(refusal, wire.Refusal)
                assert refusal.reason.startswith("malformed frame")
            wait_until(lambda: _is_closed(socket), "the connection is closed")
            assert socket.close_code == 1008
        assert collector.metric("stagewatch_ingest_refused_total", reason="malformed") == 3

    def test_evidence_that_is_none_is_refused_by_name_and_the_stream_goes_on_past_it(
        self, stage: Stage
    ) -> None:
        collector = stage.collector()
        with _connection(collector) as socket:
            socket.send(hello())
            assert wire.decode_downward(socket.recv()) == wire.Welcome("life-1", identity().rank, 0)
            bad = wire.encode_frame(
                wire.Batch("life-1", identity().rank, 0, 3, 0, -1.0, {"inputs": b"rubbish"})
            )
            socket.send(bad)
            refusal = wire.decode_downward(socket.recv())
            assert isinstance(refusal, wire.Refusal)
            assert (refusal.instance, refusal.rank, refusal.next_seq) == ("life-1", identity().rank, 3)
            socket.send(batch_message(3, 6, lost=3))
            assert wire.decode_downward(socket.recv()) == wire.Ack("life-1", identity().rank, 6)
        assert collector.metric("stagewatch_ingest_refused_total", reason="evidence") == 1

    def test_nobody_gets_in_without_the_token(self, stage: Stage) -> None:
        collector = stage.collector()
        anonymous = httpx.Client(base_url=collector.url)
        for path in (
            "/v1/incidents",
            "/v1/engines",
            "/v1/events",
            "/metrics",
            "/openapi.json",
            "/v1/status",
            "/no",
        ):
            assert anonymous.get(path).status_code == 401
        for path in ("/healthz", "/readyz"):
            assert anonymous.get(path).status_code == 200
        assert anonymous.get("/metrics", headers={"Authorization": "Bearer " + "x" * 43}).status_code == 401
        assert collector.metric("stagewatch_ingest_refused_total", reason="unauthenticated") == 8

    def test_a_sidecar_with_a_wrong_token_says_so_once_and_goes_on_trying(self, stage: Stage) -> None:
        collector = stage.collector()
        rings(stage)
        sidecar = stage.sidecar(collector, token="wrong-but-long-enough")  # noqa: S106
        wait_until(
            lambda: collector.metric("stagewatch_ingest_refused_total", reason="unauthenticated") >= 3,
            "three tries",
        )
        assert sidecar.output.count("refuses our token") == 1
        assert sidecar.end() == 0

    def test_metrics_can_be_opened(self, stage: Stage) -> None:
        collector = stage.collector("--open-metrics")
        assert httpx.get(f"{collector.url}/metrics").status_code == 200
        assert httpx.get(f"{collector.url}/v1/incidents").status_code == 401


class TestRefusesToStart:
    """Each with one line that names cause and way out, and status 2."""

    def one_line(self, process: Process) -> str:
        assert process.status() == 2
        lines = process.output.splitlines()
        assert len(lines) == 1, process.output
        return lines[0]

    def collect(self, stage: Stage, *options: str, **environment: str) -> Process:
        return stage.process(BIN / "stagewatch", "collect", *options, **environment)

    def test_where_the_port_is_taken(self, stage: Stage) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            line = self.one_line(
                self.collect(
                    stage, "--port", port, "--data-dir", str(stage.data_dir), STAGEWATCH_TOKEN="t" * 20
                )
            )
        assert line.startswith(f"stagewatch: cannot listen on 127.0.0.1 port {port}: Address already in use")

    def test_where_another_collector_has_the_directory(self, stage: Stage) -> None:
        stage.collector()
        line = self.one_line(self.collect(stage, "--port", "0", "--data-dir", str(stage.data_dir)))
        assert line.endswith("is used by another collector: stop it, or choose another --data-dir")

    def test_where_the_directory_is_read_only(self, stage: Stage) -> None:
        # A file system that nobody can write, not even root, who runs these tests in containers.
        line = self.one_line(self.collect(stage, "--data-dir", "/sys/stagewatch", STAGEWATCH_TOKEN="t" * 20))
        assert line.startswith("stagewatch: data directory /sys/stagewatch cannot be written: ")

    def test_where_the_directory_is_a_file(self, stage: Stage) -> None:
        stage.data_dir.write_text("")
        line = self.one_line(
            self.collect(stage, "--port", "0", "--data-dir", str(stage.data_dir), STAGEWATCH_TOKEN="t" * 20)
        )
        assert line == f"stagewatch: data directory {stage.data_dir} cannot be written: File exists"

    def test_beyond_localhost_without_a_token(self, stage: Stage) -> None:
        line = self.one_line(
            self.collect(stage, "--host", "0.0.0.0", "--port", "0", "--data-dir", str(stage.data_dir))  # noqa: S104
        )
        assert "can be reached by others: give a token" in line

    def test_with_a_token_file_that_is_empty(self, stage: Stage) -> None:
        (stage.directory / "token").write_text("\n")
        (stage.directory / "token").chmod(0o600)
        options = ("--token-file", str(stage.directory / "token"), "--data-dir", str(stage.data_dir))
        assert "token" in (line := self.one_line(self.collect(stage, *options))) and "is empty" in line

    def test_with_a_variable_that_is_no_number(self, stage: Stage) -> None:
        line = self.one_line(self.collect(stage, STAGEWATCH_PORT="tcp://10.0.0.1:8765"))
        assert line.startswith("stagewatch: STAGEWATCH_PORT='tcp://10.0.0.1:8765' is no good")
        assert "enableServiceLinks" in line

    def test_a_sidecar_without_a_ring_directory(self, stage: Stage) -> None:
        line = self.one_line(stage.process(BIN / "stagewatch-agent", "ship", STAGEWATCH_TOKEN="t" * 20))
        assert line.startswith("stagewatch-agent: --ring-dir (or STAGEWATCH_RING_DIR) is missing")

    def test_a_sidecar_whose_ring_directory_others_can_write(self, stage: Stage) -> None:
        if os.geteuid() == 0:
            pytest.skip("root reads every directory")
        stage.ring_dir.mkdir()
        stage.ring_dir.chmod(0o777)
        options = ("--ring-dir", str(stage.ring_dir))
        line = self.one_line(
            stage.process(BIN / "stagewatch-agent", "ship", *options, STAGEWATCH_TOKEN="t" * 20)
        )
        assert line.endswith("can be written by others: chmod 700 it")


class TestFullDisk:
    def test_a_full_disk_stops_acknowledgements_and_corrupts_nothing(self, stage: Stage) -> None:
        # GIVEN a stream that runs
        collector = stage.collector()
        sidecar = stage.sidecar(collector)
        writers = rings(stage)
        for ring in writers:
            append_steps(ring, 20)
        both_reach(collector, 20)
        # WHEN no file may grow any more
        resource.prlimit(collector.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        for ring in writers:
            append_steps(ring, 20, first_step=21)
        wait_until(lambda: collector.http.get("/readyz").status_code == 503, "not ready")
        # THEN it says so, takes nothing as safe, and lives
        assert "File too large" in collector.get("/v1/status")["reason"]
        assert collector.metric("stagewatch_journal_failing") == 1
        assert min(len(seqs) for seqs in journalled_seqs(stage.data_dir).values()) == 20
        # AND WHEN there is room again, it goes on, and nothing is missing or twice
        resource.prlimit(
            collector.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        both_reach(collector, 40)
        wait_until(lambda: collector.http.get("/readyz").status_code == 200, "ready again")
        assert sidecar.end() == 0
        assert collector.end() == 0
        assert list(journalled_seqs(stage.data_dir).values()) == [list(range(40))] * 2


class TestSecrets:
    def test_key_and_token_are_private_files_and_are_told_to_nobody(self, stage: Stage) -> None:
        collector = stage.collector()
        sidecar = stage.sidecar(collector)
        for ring in rings(stage):
            append_steps(ring, 5)
        both_reach(collector, 5)
        key = (stage.ring_dir / "digest.key").read_text().strip()
        for path in (stage.ring_dir / "digest.key", stage.data_dir / "token"):
            assert path.stat().st_mode & 0o777 == 0o600
        shown = [
            collector.http.get(path).text
            for path in ("/metrics", "/v1/engines", "/v1/status", "/openapi.json")
        ]
        for text in (*shown, collector.output, sidecar.output):
            assert key not in text
            assert collector.token not in text
        assert sidecar.end() == 0
        assert collector.end() == 0
        journal = b"".join(path.read_bytes() for path in (stage.data_dir / "journal").iterdir())
        assert bytes.fromhex(key) not in journal

    def test_a_token_file_is_rotated_without_a_restart(self, stage: Stage) -> None:
        token_file = stage.directory / "token"
        first = "first-token-of-the-test"
        token_file.touch(0o600)
        token_file.write_text(first)
        collector = stage.collector("--token-file", str(token_file), token=first)
        token_file.write_text("second-token-of-the-test")
        header = {"Authorization": "Bearer second-token-of-the-test"}
        assert httpx.get(f"{collector.url}/v1/engines", headers=header).status_code == 200
        assert collector.http.get("/v1/engines").status_code == 401

    def test_pseudonyms_replace_request_ids(self, stage: Stage) -> None:
        collector = stage.collector()
        sidecar = stage.sidecar(collector, "--pseudonymise")
        stage.ring_dir.mkdir(mode=0o700)
        probe = Probe(RingWriter(stage.ring_dir, identity(), 1 << 20), identity())
        probe.bind("customer-4711-chat", 0, 1, 10)
        wait_until(lambda: journalled_seqs(stage.data_dir), "it is journalled")
        assert sidecar.end() == 0
        assert collector.end() == 0
        journal = b"".join(path.read_bytes() for path in (stage.data_dir / "journal").iterdir())
        assert b"customer-4711-chat" not in journal
        assert b"anon-" in journal


class TestEventStream:
    def test_events_resume_after_the_last_one_seen(self, stage: Stage) -> None:
        collector = stage.collector()
        stage.sidecar(collector)
        first, last = rings(stage)
        append_steps(first, 30)
        append_steps(last, 10)
        append_steps(last, 20, first_step=11, wrong_token=1)
        wait_until(lambda: collector.get("/v1/incidents")["incidents"], "an incident")
        wait_until(lambda: _settled(collector), "the incidents settle")
        everything = _events(collector, after=0, count=2)
        assert [number for number, _ in everything] == [1, 2]
        assert everything[0][1]["kind"] == "opened"
        assert _events(collector, after=1, count=1) == everything[1:]

    def test_an_open_stream_does_not_keep_the_collector_from_ending(self, stage: Stage) -> None:
        collector = stage.collector()
        with collector.http.stream("GET", "/v1/events") as response:
            assert response.status_code == 200
            collector.signal(signal.SIGTERM)
            assert next(iter(response.iter_lines())).startswith("retry:")
        assert collector.status() == 0


def _events(collector: CollectorProcess, after: int, count: int) -> list[tuple[int, dict[str, Any]]]:
    found = []
    with collector.http.stream("GET", "/v1/events", headers={"Last-Event-ID": str(after)}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        number = 0
        for line in response.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            if line.startswith("data: "):
                found.append((number, json.loads(line[6:])))
                if len(found) == count:
                    return found
    raise AssertionError("the stream ended early")


_seen: dict[str, str] = {}


def _settled(collector: CollectorProcess) -> bool:
    """Whether incidents and verdicts are the same as when last asked."""
    now = collector.http.get("/v1/incidents").text + str(
        [engine["verdicts"] for engine in collector.get("/v1/engines")["engines"]]
    )
    before, _seen[collector.url] = _seen.get(collector.url), now
    return before == now


def _connection(collector: CollectorProcess) -> ClientConnection:
    url = collector.url.replace("http", "ws") + "/v1/ingest"
    return connect(url, additional_headers={"Authorization": f"Bearer {collector.token}"}, compression=None)


def _is_closed(socket: ClientConnection) -> bool:
    try:
        socket.recv(timeout=0.01)
    except TimeoutError:
        return False
    except ConnectionClosed:
        return True
    return False
