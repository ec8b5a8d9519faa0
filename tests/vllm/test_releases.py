"""Other releases, as they were published."""

from runs import RunEngine

from stagewatch.agents.record import Kind

ALL = {"r0", "r1", "r2"}


class TestRelease029:
    """0.29.0 with only its boot check lifted: wrong text with status 0, and no fault of ours."""

    def test_all_requests_are_critical_because_no_draft_was_relayed(self, run_engine: RunEngine) -> None:
        run = run_engine("staggered", 2, 7, fault="allow-pp", version="0.29")
        assert run.status == 0
        sound = run_engine("basic", 1, 7).outputs
        assert all(run.outputs[name] != sound[name] for name in ALL)
        blocks = [i for i in run.replay["incidents"] if i["check"] == "draft-block"]
        assert {(i["request"].rpartition("-")[0], i["severity"]) for i in blocks} == {
            (name, "critical") for name in ALL
        }
        for incident in blocks:
            assert incident["blamed"] == [0]
            assert "draft block never relayed" in incident["chain"][0]["text"]

    def test_unequal_broadcast_widths_are_reported(self, run_engine: RunEngine) -> None:
        run = run_engine("staggered", 2, 7, fault="allow-pp", version="0.29")
        (incident,) = [i for i in run.replay["incidents"] if i["check"] == "collective-order"]
        first = {
            stage: next(
                r.body.numel for r in records if r.kind is Kind.COLLECTIVE and "pp_broadcast" in r.body.what
            )
            for stage, records in run.records.items()
        }
        assert first == {0: 8, 1: 1}
        assert (incident["first_bad_step"], incident["severity"]) == (1, "critical")

    def test_its_variant_is_told_apart(self, run_engine: RunEngine) -> None:
        run = run_engine("staggered", 2, 7, fault="allow-pp", version="0.29")
        assert run.notes(0)[0].startswith("armed: vllm 0.29.0, variant A2")


class TestRelease030:
    def test_is_silent(self, run_engine: RunEngine) -> None:
        run = run_engine("staggered", 2, 7, version="0.30")
        assert run.notes(1)[0].startswith("armed: vllm 0.30.0, variant B")
        assert run.replay["incidents"] == []
        assert run.replay["verdicts"]["CONSISTENT"] == run.replay["rows"] > 0
        assert run.outputs == run_engine("basic", 1, 7).outputs
