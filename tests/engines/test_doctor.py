"""The doctor: verdict, evidence and exit status for each shape of engine."""

import argparse
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from standins import VARIANTS, make_engine
from test_variants import f0

from stagewatch.agents import doctor
from stagewatch.agents.commands import doctor as command
from stagewatch.agents.doctor import Examination, cadence_of, diagnose

STATUS = {"A1": 1, "A2": 1, "A+relay": 1, "B": 0, "C": 0, "D": 0}


class Plain:
    """A scheduler that sets no spacing."""

    def schedule(self, request: SimpleNamespace) -> bool:
        return bool(request.next_decode_eligible_step)


class Spacing(Plain):
    """A scheduler that does."""

    def schedule(self, request: SimpleNamespace) -> bool:
        request.next_decode_eligible_step = 3
        return True


def examination(variant: str) -> Examination:
    """What the doctor finds of a stand-in."""
    return diagnose(make_engine(variant), "0.0", (cadence_of(Plain, Spacing),), "no: not here")


class TestVerdict:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_exit_status_says_exposed_or_sound(self, variant: str) -> None:
        found = examination(variant)
        assert (found.variant, found.status) == (variant, STATUS[variant])

    def test_a_faulty_mask_comes_with_its_cases(self) -> None:
        found = examination("A+relay")
        assert found.mask == "faulty"
        assert [case.case for case in found.cases if not case.passed] == [3, 5, 7, 8]
        assert {e.name: e.answer for e in found.exposures}["faulty-mask"] == "yes"

    def test_drafts_that_are_never_relayed_are_an_exposure_of_their_own(self) -> None:
        answers = {
            variant: {e.name: e.answer for e in examination(variant).exposures}
            for variant in ("A2", "A+relay")
        }
        assert answers["A2"]["drafts-not-relayed"] == "yes"
        assert answers["A+relay"]["drafts-not-relayed"] == "no"

    def test_a_sound_mask_without_a_relay_is_exposed_all_the_same(self) -> None:
        engine = make_engine("A2")
        sound = make_engine("B").pp_utils.compute_need_sampled_mask
        engine.pp_utils.compute_need_sampled_mask = sound
        found = diagnose(engine, "0.0", (), "")
        assert (found.mask, found.status) == ("sound", 1)

    def test_an_unknown_shape_is_not_judged(self) -> None:
        found = diagnose(f0(), "0.0", (), "")
        assert (found.verdict, found.status, found.hooked) == ("unknown", 2, ())
        assert "vLLM 0.23.0 to 0.33.0" in found.not_hooked[0]


class TestCadence:
    def test_a_scheduler_that_spaces_only_when_asynchronous_is_exposed(self) -> None:
        assert cadence_of(Plain, Spacing).answer == "yes"

    def test_a_scheduler_that_always_spaces_is_not(self) -> None:
        assert cadence_of(Spacing, Spacing).answer == "no"

    def test_schedulers_that_never_space_are_not_known(self) -> None:
        assert cadence_of(Plain, Plain).answer == "unknown"


class TestCommand:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_table_fits_eighty_columns(self, variant: str) -> None:
        lines = command.table(examination(variant)).splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith("verdict")

    def test_json_is_one_object_and_the_status_the_verdict(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def talkative(plugins: bool) -> Examination:
            print("INFO: the engine logs to standard output")
            return examination("A1")

        monkeypatch.setattr(command, "examine", talkative)
        status = command.run(argparse.Namespace(json=True, no_plugins=False))
        found = json.loads(capsys.readouterr().out)  # and nothing of the engine's own lines
        assert (status, found["verdict"], found["variant"], found["mask"]) == (1, "exposed", "A1", "faulty")
        assert len(found["cases"]) == 8

    def test_an_environment_without_vllm_is_told_so_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)
        with pytest.raises(doctor.UnknownShapeError, match="install stagewatch in the engine's environment"):
            doctor.examine()

    def test_a_plugin_that_fails_is_named_with_the_way_round_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing() -> None:
            raise OSError("no licence\nfound")

        plugins = SimpleNamespace(load_general_plugins=failing)
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.plugins", plugins)
        monkeypatch.setattr(doctor, "load_engine", lambda: make_engine("C"))
        with pytest.raises(doctor.UnknownShapeError, match=r"OSError: no licence found\).*--no-plugins"):
            doctor.examine()


class TestArming:
    @pytest.mark.parametrize(
        ("environment", "said"),
        [
            ({"VLLM_PLUGINS": "other"}, "no: VLLM_PLUGINS=other leaves stagewatch out"),
            ({}, "no: STAGEWATCH_RING_DIR is not set"),
            ({"STAGEWATCH_RING_DIR": "rings", "VLLM_PLUGINS": "stagewatch"}, "yes, where"),
            (
                {"STAGEWATCH_RING_DIR": "rings", "STAGEWATCH_RING_BYTES": "many"},
                "no: STAGEWATCH_RING_BYTES='many' is not a number",
            ),
            (
                {"STAGEWATCH_RING_DIR": "rings", "VLLM_USE_V2_MODEL_RUNNER": "0"},
                "no: VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 runner",
            ),
        ],
    )
    def test_says_whether_a_worker_here_would_arm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert doctor.arming(environment).startswith(said)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["file", "file/below", "link", "open", "foreign", "unwritable/below"])
    def test_a_directory_that_would_be_refused_is_found_before_the_engine_starts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to(tmp_path)
        for directory, mode in (("open", 0o777), ("foreign", 0o700), ("unwritable", 0o500)):
            (tmp_path / directory).mkdir()
            (tmp_path / directory).chmod(mode)
        if name == "foreign":
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        if name.startswith("unwritable"):  # root may write anywhere
            monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "unwritable")
        said = doctor.arming({"STAGEWATCH_RING_DIR": str(tmp_path / name)})
        assert said.startswith(f"no: ring directory {tmp_path / name} ")
        assert len(list(tmp_path.iterdir())) == 5

    def test_too_little_room_for_one_ring_is_found_before_the_engine_starts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3 << 8, f_frsize=4096))
        said = doctor.arming({"STAGEWATCH_RING_DIR": str(tmp_path)})
        assert "has 3 MiB left and each rank on the node takes 65: make room, or set" in said
