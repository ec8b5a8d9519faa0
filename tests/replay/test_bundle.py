"""`stagewatch bundle`: one file that says of an incident, anywhere, what was said where it was found."""

import json
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commands import Command, Outcome, command
from recorded import Recorded, record
from simulated import Run, plan
from test_equal_to_live import QUICK, SIMULATED, recorded

from stagewatch.agents import wire
from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Fingerprint
from stagewatch.agents.wire import Limits
from stagewatch.monitor import bundling
from stagewatch.monitor.bundlefile import EVIDENCE, MEMBERS, Bundle, Manifest
from stagewatch.monitor.bundlereport import page_of
from stagewatch.monitor.cli import main
from stagewatch.monitor.incidents import Report
from stagewatch.monitor.journal import EntryKind, SegmentReader, head_of
from stagewatch.monitor.sources import open_recordings


@pytest.fixture
def bundle(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(main, "bundle", capsys)


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(main, "replay", capsys)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run of many steps with the founding fault."""
    return record(Run(plan("old-mask", requests=60)), tmp_path_factory.mktemp("broken"))


def worst(kept: Recorded) -> Report:
    return kept.live[0]


def encoded(report: Any) -> bytes:
    return msgspec.json.encode(msgspec.convert(report, Report))


class TestWhatReplaySays:
    @pytest.mark.parametrize("steps", [None, 8])
    @pytest.mark.parametrize(
        "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SIMULATED]
    )
    def test_the_same_incident_byte_for_byte(
        self,
        name: str,
        steps: int | None,
        bundle: Command,
        replay: Command,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """GIVEN a run with a fault WHEN its worst incident is packed THEN the file alone says of it what live did."""
        if steps is not None:
            monkeypatch.setattr(bundling, "STEPS_BEFORE", steps)
            monkeypatch.setattr(bundling, "STEPS_AFTER", steps)
        kept = recorded(name, tmp_path)
        if not kept.live:
            pytest.skip("nothing is said of this fault, live or later")
        live, out = worst(kept), tmp_path / "a.zip"
        packed = bundle(live.id, "--from", kept.journal, "-o", out, "--json")
        assert (packed.status, packed.err, packed.json["reproduces"]) == (0, "", True)
        told = replay(out, "--json")
        assert told.err == ""
        (incident,) = [each for each in told.json["incidents"] if each["id"] == live.id]
        assert encoded(incident) == msgspec.json.encode(live)
        assert encoded(json.loads(zipfile.ZipFile(out).read("incident.json"))) == msgspec.json.encode(live)

    def test_a_window_of_a_long_run_says_it_too(
        self,
        broken: Recorded,
        bundle: Command,
        replay: Command,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # GIVEN windows that are short for this run's length
        monkeypatch.setattr(bundling, "STEPS_BEFORE", 8)
        monkeypatch.setattr(bundling, "STEPS_AFTER", 8)
        live = max(broken.live, key=lambda each: each.first_bad_step)
        packed = bundle(live.id, "--from", broken.journal, "-o", tmp_path / "a.zip", "--json").json
        # THEN not all of it is packed, and that is said, and the incident is the same
        assert (packed["whole"], packed["reproduces"]) == (False, True)
        assert packed["first_step"] > 1
        told = replay(tmp_path / "a.zip", "--json").json["incidents"]
        assert [encoded(each) for each in told if each["id"] == live.id] == [msgspec.json.encode(live)]

    def test_every_question_can_be_asked_of_it(
        self, broken: Recorded, bundle: Command, replay: Command, tmp_path: Path
    ) -> None:
        live, out = worst(broken), tmp_path / "a.zip"
        bundle(live.id, "--from", broken.journal, "-o", out)
        step = str(live.first_bad_step)
        for words in (["show", live.id], ["request", live.request], ["step", step], ["diff", "0", "1"]):
            of_bundle, of_journal = replay(out, *words, "--json"), replay(broken.journal, *words, "--json")
            assert (of_bundle.status, of_bundle.err) == (0, "")
            assert of_bundle.out == of_journal.out

    def test_a_bundle_can_be_made_of_a_bundle(
        self, broken: Recorded, bundle: Command, tmp_path: Path
    ) -> None:
        live = worst(broken)
        bundle(live.id, "--from", broken.journal, "-o", tmp_path / "a.zip")
        again = bundle(live.id[:8], "--from", tmp_path / "a.zip", "-o", tmp_path / "b.zip", "--json")
        assert (again.status, again.json["reproduces"]) == (0, True)


class TestTheFile:
    def test_what_clients_chose_is_no_markup_in_the_page(self) -> None:
        page = page_of("request <script>alert(1)</script> {title}", "<b>")
        assert "<script" not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt; {title}" in page
        assert "<title>&lt;b&gt;</title>" in page
        assert "default-src 'none'" in page

    def test_anybody_can_read_it_and_only_its_owner_may(
        self, broken: Recorded, bundle: Command, tmp_path: Path
    ) -> None:
        live, out = worst(broken), tmp_path / "a.zip"
        bundle(live.id, "--from", broken.journal, "-o", out)
        assert stat.S_IMODE(out.stat().st_mode) == 0o600
        with zipfile.ZipFile(out) as archive:
            assert archive.testzip() is None
            assert set(archive.namelist()) == {"manifest.json", *MEMBERS}
            page, text = archive.read("report.html").decode(), archive.read("report.txt").decode()
            settings = json.loads(archive.read("settings.json"))
        assert live.id in text
        assert f"request {live.request}" in text
        assert f"<h1>{live.severity} {live.check}</h1>" in page
        assert "Replayed, it says of this incident what was said when it was found." in " ".join(text.split())
        assert "<script" not in page
        assert len(settings) == len(list(broken.rings.glob("*.ring")))

    def test_a_file_that_is_there_is_left_alone(
        self, broken: Recorded, bundle: Command, tmp_path: Path
    ) -> None:
        out = tmp_path / "a.zip"
        out.write_text("mine")
        refused = bundle(worst(broken).id, "--from", broken.journal, "-o", out)
        assert (refused.status, out.read_text()) == (2, "mine")
        assert "--force" in refused.err
        assert bundle(worst(broken).id, "--from", broken.journal, "-o", out, "--force").status == 0
        assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["0000", "--from", "{data}"], "no incident 0000"),
            (["0000", "--from", "{data}/none"], "no such file or directory"),
            (["0000", "--from", "{rings}"], "bundles are made of a collector's data directory"),
            (["0000"], "no token"),
        ],
    )
    def test_what_cannot_be_packed_is_told_in_a_line(
        self, broken: Recorded, bundle: Command, words: list[str], says: str
    ) -> None:
        filled = [word.format(data=broken.journal, rings=broken.rings) for word in words]
        refused = bundle(*filled)
        assert (refused.status, refused.err.count("\n")) == (2, 1)
        assert says in refused.err

    def test_evidence_that_is_gone_is_told(self, bundle: Command, tmp_path: Path) -> None:
        """GIVEN an incident that says more than the journal WHEN it is packed THEN that is said."""
        kept = record(Run(plan("old-mask", requests=30)), tmp_path)
        live = worst(kept)

        class Half(bundling.JournalOrigin):
            def told(self, incident_id: str) -> bundling.Told:
                found = super().told(incident_id)
                grown = msgspec.structs.replace(
                    found.incident, last_good_step=found.incident.last_good_step + 1
                )
                return replace(found, incident=grown)

        origin = Half(open_recordings([kept.journal]))
        packed = bundling.make_bundle(origin, live.id, lambda _: tmp_path / "a.zip")
        assert packed.manifest.reproduces is False
        text = zipfile.ZipFile(tmp_path / "a.zip").read("report.txt").decode()
        assert "does not say of this incident" in " ".join(text.split())


def raw_journal(directory: Path, secret: str = "") -> tuple[Path, list[int]]:
    """A journal of sidecars with --raw-tokens, and token values that are in it."""
    run = Run(plan("old-mask", requests=14))
    path = directory / "data" / "journal" / f"{1:016d}.journal"
    path.parent.mkdir(parents=True)
    content = b"STGWJRN1"
    values: set[int] = set()
    for rank, own in run.records.items():
        who = run.identities[rank]
        if secret:
            who = msgspec.structs.replace(who, config=(*who.config, Fingerprint("hf_api_key", secret)))
        hello = wire.encode_frame(wire.Hello(wire.PROTOCOL, who))
        content += head_of(EntryKind.HELLO, 1, hello) + hello
        evidence = digest_records(
            [replace(r, seq=i) for i, r in enumerate(own)], who, Digester(bytes(16)), raw=True
        )
        assert evidence.inputs is not None
        values |= set(evidence.inputs.raw_ids.tolist())
        batch = wire.encode_frame(wire.batch_of(who, evidence, -1.0))
        content += head_of(EntryKind.BATCH, 2, batch) + batch
    path.write_bytes(content)
    return path.parent.parent, sorted(values)


def raw_values(path: Path) -> set[int]:
    """Token values in a bundle's evidence."""
    opened = Bundle.open(path)
    found: set[int] = set()
    for entry in SegmentReader(opened.evidence):
        if entry.kind is EntryKind.BATCH:
            frame = wire.decode_upward(entry.payload, Limits())
            assert isinstance(frame, wire.Batch)
            evidence = wire.evidence_of(frame, Limits())
            for block in (evidence.inputs, evidence.sent, evidence.received, evidence.consumed):
                for name in ("raw_ids", "raw_last", "raw_drafts", "raw_tokens"):
                    found |= set(getattr(block, name, None).tolist()) if hasattr(block, name) else set()
    return found


class TestWhatIsLeftOut:
    def first_critical(self, replay: Command, data: Path) -> str:
        (found, *_) = replay(data, "--json").json["incidents"]
        return str(found["id"])

    def test_token_values_go_in_only_on_demand(
        self, bundle: Command, replay: Command, tmp_path: Path
    ) -> None:
        data, values = raw_journal(tmp_path)
        incident = self.first_critical(replay, data)
        bare = bundle(incident, "--from", data, "-o", tmp_path / "a.zip", "--json").json
        assert (bare["raw_tokens"], bare["raw_left_out"], bare["reproduces"]) == (False, True, True)
        assert raw_values(tmp_path / "a.zip") == set()
        full = bundle(incident, "--from", data, "-o", tmp_path / "b.zip", "--raw-tokens", "--json").json
        assert (full["raw_tokens"], full["raw_left_out"], full["reproduces"]) == (True, False, True)
        assert raw_values(tmp_path / "b.zip") >= set(values)

    def test_where_none_were_recorded_the_flag_changes_nothing(
        self, broken: Recorded, bundle: Command, tmp_path: Path
    ) -> None:
        out = tmp_path / "a.zip"
        full = bundle(worst(broken).id, "--from", broken.journal, "-o", out, "--raw-tokens", "--json").json
        assert (full["raw_tokens"], full["raw_left_out"]) == (False, False)
        assert raw_values(out) == set()

    def test_settings_that_sound_secret_lose_their_values_everywhere(
        self, bundle: Command, replay: Command, tmp_path: Path
    ) -> None:
        data, _ = raw_journal(tmp_path, secret="planted-5f3a")  # noqa: S106  # to be searched for
        out = tmp_path / "a.zip"
        assert bundle(self.first_critical(replay, data), "--from", data, "-o", out).status == 0
        with zipfile.ZipFile(out) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        assert [name for name, content in members.items() if b"planted-5f3a" in content] == []
        assert b"hf_api_key" in members["settings.json"]
        assert b"hf_api_key" in members[EVIDENCE]


# ---- hostile bundles

Change = Callable[[dict[str, bytes]], None]


@pytest.fixture(scope="module")
def sound(broken: Recorded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The members of a sound bundle."""
    out = tmp_path_factory.mktemp("sound") / "a.zip"
    assert main(["bundle", worst(broken).id, "--from", str(broken.journal), "-o", str(out)]) == 0
    with zipfile.ZipFile(out) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(members: dict[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def _manifest(**changes: Any) -> Change:
    def change(members: dict[str, bytes]) -> None:
        manifest = msgspec.json.decode(members["manifest.json"], type=Manifest)
        members["manifest.json"] = msgspec.json.encode(msgspec.structs.replace(manifest, **changes))

    return change


def _renamed(old: str, new: str) -> Change:
    def change(members: dict[str, bytes]) -> None:
        members[new] = members.pop(old)

    return change


def _content(name: str, content: bytes) -> Change:
    def change(members: dict[str, bytes]) -> None:
        members[name] = content

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "a name that climbs": (_renamed("report.txt", "../../report.txt"), "which no bundle of stagewatch does"),
    "an absolute name": (_renamed("report.txt", "/etc/passwd"), "which no bundle of stagewatch does"),
    "a member too many": (_content("more", b""), "no bundle of stagewatch"),
    "a member too few": (lambda members: members.pop("report.html") and None, "no bundle of stagewatch"),
    "another format": (_manifest(format=99), "upgrade stagewatch"),
    "other members": (_manifest(members={}), "names other members"),
    "no manifest": (_content("manifest.json", b"[" * 100_000), "manifest cannot be read"),
    "a changed report": (_content("report.txt", b"nothing happened"), "not what the manifest says"),
    "changed evidence": (_content(EVIDENCE, b"STGWJRN1"), "not what the manifest says"),
    "a bomb": (_content("report.txt", bytes(5 << 20)), "is longer than"),
}


class TestHostileBundles:
    def refused(self, replay: Command, path: Path) -> Outcome:
        outcome = replay(path)
        assert (outcome.status, outcome.out, outcome.err.count("\n")) == (2, "", 1)
        return outcome

    def test_what_a_tool_packed_again_is_still_a_bundle(
        self, replay: Command, sound: dict[str, bytes], tmp_path: Path
    ) -> None:
        """The control: what is refused below is not refused for being packed by these tests."""
        assert replay(packed(sound, tmp_path / "a.zip")).status == 1

    @pytest.mark.parametrize("name", HOSTILE)
    def test_it_is_refused_in_a_line(
        self, name: str, replay: Command, sound: dict[str, bytes], tmp_path: Path
    ) -> None:
        change, says = HOSTILE[name]
        members = dict(sound)
        change(members)
        assert says in self.refused(replay, packed(members, tmp_path / "a.zip")).err

    def test_evidence_beyond_its_limit_is_not_unpacked(
        self, replay: Command, sound: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stagewatch.monitor.bundlefile.EVIDENCE_BYTES_MAX", 1000)
        assert "is longer than 1000 bytes" in self.refused(replay, packed(sound, tmp_path / "a.zip")).err

    @pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
    def test_what_is_cut_off_is_refused(
        self, keep: float, replay: Command, sound: dict[str, bytes], tmp_path: Path
    ) -> None:
        path = packed(sound, tmp_path / "a.zip")
        content = path.read_bytes()
        path.write_bytes(content[: max(int(len(content) * keep), 4)])
        self.refused(replay, path)

    def test_a_directory_that_announces_millions_is_not_parsed(
        self, replay: Command, sound: dict[str, bytes], tmp_path: Path
    ) -> None:
        path = packed(sound, tmp_path / "a.zip")
        content = bytearray(path.read_bytes())
        content[-14:-10] = b"\xff\xff\xff\xff"
        path.write_bytes(content)
        assert "no bundle of stagewatch" in self.refused(replay, path).err

    def test_a_rank_that_cannot_be_is_refused_though_its_checksums_fit(
        self, replay: Command, sound: dict[str, bytes], tmp_path: Path, broken: Recorded
    ) -> None:
        import hashlib

        run = Run(plan("old-mask", requests=1))
        who = next(iter(run.identities.values()))
        hello = wire.encode_frame(
            wire.Hello(
                wire.PROTOCOL,
                msgspec.structs.replace(who, sizes=msgspec.structs.replace(who.sizes, pp=10**9)),
            )
        )
        evidence = b"STGWJRN1" + head_of(EntryKind.HELLO, 1, hello) + hello
        members = dict(sound)
        manifest = json.loads(members["manifest.json"])
        manifest["members"][EVIDENCE] = {
            "bytes": len(evidence),
            "sha256": hashlib.sha256(evidence).hexdigest(),
        }
        members |= {EVIDENCE: evidence, "manifest.json": json.dumps(manifest).encode()}
        assert "evidence cannot be used" in self.refused(replay, packed(members, tmp_path / "a.zip")).err
