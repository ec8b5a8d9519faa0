"""The sound engine: ranks agree at every step, outputs are those of one unsplit engine, runs repeat exactly."""

import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_records import disagreements, inputs_by_step
from msgspec.structs import fields

from stagewatch.agents.arming import arm
from stagewatch.agents.engines.lab import ProbeLike
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.messages import Output
from stagewatch.agents.lab.scheduler import LabError
from stagewatch.agents.lab.simulator import SimConfig, SimResult, Simulator
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Collective, Inputs, Kind, Payload
from stagewatch.agents.ring import RingReader
from stagewatch.agents.settings import ProbeSettings


def completed(result: SimResult) -> dict[str, tuple[int, ...]]:
    """Tokens of the requests that were not aborted."""
    return {name: output.tokens for name, output in result.outputs.items() if output.reason != "abort"}


def reference(config: SimConfig) -> dict[str, tuple[int, ...]]:
    """What one unsplit, unhurried engine answers to the same requests."""
    unsplit = replace(
        config,
        pp=1,
        tp=1,
        layers=config.pp,
        spec_tokens=0,
        blocks=0,
        preempt_probability=0.0,
        early_results=0.0,
        chunk_max=config.max_model_len,
        fault=None,
    )
    # Aborts come by the clock, and this engine has another: let it answer everything.
    workload = replace(config.workload, abort_probability=0.0)
    return completed(Simulator(replace(unsplit, workload=workload), record=False).run())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), pp=st.integers(2, 5), tp=st.integers(1, 2), k=st.integers(0, 7))
def test_ranks_agree_and_answers_are_those_of_one_engine(seed: int, pp: int, tp: int, k: int) -> None:
    """GIVEN every benign event WHEN there is no fault THEN no rank ever differs and no token is wrong."""
    config = SimConfig.benign(seed, pp=pp, tp=tp, spec_tokens=k, requests=40)
    result = Simulator(config).run()
    expected = reference(config)
    answers = completed(result)
    assert disagreements(result.records) == []
    assert answers == {name: expected[name] for name in answers}
    assert set(result.outputs) == {f"r{number}" for number in range(40)}
    assert result.wedged == ""


def test_benign_events_really_happen() -> None:
    """A run that is to prove silence must contain what could break it."""
    config = SimConfig.benign(11, pp=3, tp=1, spec_tokens=5, requests=120)
    result = Simulator(config).run()
    bodies = [r.body for r in result.records[Rank(0, 0, 0)] if r.kind is Kind.INPUTS]
    inputs = [body for body in bodies if isinstance(body, Inputs)]
    consumed = [r.body for r in result.records[Rank(0, 0, 0)] if r.kind is Kind.CONSUMED]
    sent = [r.body for r in result.records[Rank(0, 2, 0)] if r.kind is Kind.SENT]
    seen = {
        "preemption": result.preemptions > 0,
        "abort": any(output.reason == "abort" for output in result.outputs.values()),
        "stop token": any(output.reason == "stop" for output in result.outputs.values()),
        "prefill in chunks": any(
            ((b.mirror > 0) & (b.mirror + b.scheduled < b.prefill_len)).any() for b in inputs
        ),
        "mixed batch": any(b.prefilling.any() and not b.prefilling.all() for b in inputs),
        "slot reuse": any((b.generation > 1).any() for b in inputs),
        "variable K": len({b.spec_tokens for b in inputs}) > 2,
        "-1 placeholders": any((b.draft_tokens == -1).any() for b in inputs),
        "variable width": {b.tokens.shape[1] for b in sent if isinstance(b, Payload) and not b.skipped}
        == {1, 6},
        "update for a freed slot": any(
            (b.generation != b.generation_now).any() for b in consumed if isinstance(b, Payload)
        ),
        "empty iteration": any(b.tick - a.tick > 1 for a, b in pairwise(inputs)),
        "slots of each rank's own": any(
            not np.array_equal(a.slot, b.slot)
            for ranks in inputs_by_step(result.records).values()
            for a, b in [(ranks[Rank(0, 0, 0)], ranks[Rank(0, 2, 0)])]
        ),
        "mirror ahead of the device": any((b.mirror > b.computed).any() for b in inputs),
    }
    assert [name for name, happened in seen.items() if not happened] == []


def test_final_prefill_at_the_cap_is_left_out_by_the_refined_mask_alone() -> None:
    """GIVEN requests of one output token THEN the refined mask (0.31) broadcasts nothing, the plain one does."""
    workload = Workload(requests=4, prompt_len=(20, 20), max_tokens=(1, 1))
    plain = SimConfig(seed=1, workload=workload, refined_mask=False)
    skipped = {}
    for refined in (False, True):
        result = Simulator(replace(plain, refined_mask=refined)).run()
        payloads = [r.body for r in result.records[Rank(0, 1, 0)] if r.kind is Kind.SENT]
        skipped[refined] = [body.skipped for body in payloads if isinstance(body, Payload)]
    assert skipped == {False: [0, 0, 0, 0], True: [1, 1, 1, 1]}


def test_the_host_count_is_ahead_by_what_is_in_flight() -> None:
    """The device's count never passes the host's, which is ahead by at most one step of K + 1 tokens per iteration."""
    result = Simulator(SimConfig.benign(5, pp=4, spec_tokens=6, requests=60)).run()
    for ranks in inputs_by_step(result.records).values():
        for body in ranks.values():
            ahead = body.mirror - body.computed
            assert ahead.min() >= 0
            assert ahead.max() <= 7 * 2


def test_a_request_decodes_once_in_pp_size_iterations() -> None:
    result = Simulator(SimConfig.benign(6, pp=4, spec_tokens=3, requests=60)).run()
    last_tick: dict[tuple[int, int], int] = {}
    gaps = set()
    for record in result.records[Rank(0, 0, 0)]:
        if isinstance(record.body, Inputs):
            body = record.body
            for slot, generation, prefilling in zip(body.slot, body.generation, body.prefilling, strict=True):
                key = int(slot), int(generation)
                if not prefilling and key in last_tick:
                    gaps.add(body.tick - last_tick[key])
                if not prefilling:
                    last_tick[key] = body.tick
    assert min(gaps) == 4


def test_a_payload_is_consumed_pp_size_iterations_after_it_was_received() -> None:
    result = Simulator(SimConfig.benign(7, pp=3, spec_tokens=2, requests=40)).run()
    ticks = {r.step: r.body.tick for r in result.records[Rank(0, 0, 0)] if isinstance(r.body, Inputs)}
    consumed = [r for r in result.records[Rank(0, 0, 0)] if r.kind is Kind.CONSUMED]
    assert len(consumed) > 20
    for record in consumed:
        assert isinstance(record.body, Payload)
        if record.body.at in ticks:
            # The step about to run may come after empty iterations, never before the payload's turn.
            assert ticks[record.body.at] >= ticks[record.step] + 3
            earlier = ticks.get(record.body.at - 1, 0)
            assert earlier < ticks[record.step] + 3


def test_what_is_sent_is_received_and_consumed() -> None:
    result = Simulator(SimConfig.benign(8, pp=3, tp=2, spec_tokens=4, requests=40)).run()
    by_kind: dict[Kind, dict[tuple[int, int, int], Payload]] = {
        Kind.SENT: {},
        Kind.RECEIVED: {},
        Kind.CONSUMED: {},
    }
    for rank, records in result.records.items():
        for record in records:
            if record.kind in by_kind and isinstance(record.body, Payload) and not record.body.skipped:
                by_kind[record.kind][record.step, rank.pp, rank.tp] = record.body
    assert len(by_kind[Kind.RECEIVED]) == 2 * len(by_kind[Kind.SENT])
    for (step, pp, tp), received in by_kind[Kind.RECEIVED].items():
        sent = by_kind[Kind.SENT][step, 2, tp]
        consumed = by_kind[Kind.CONSUMED][step, pp, tp]
        for name in ("request", "num_sampled", "num_rejected", "tokens", "draft_tokens"):
            assert np.array_equal(getattr(received, name), getattr(sent, name))
            assert np.array_equal(getattr(consumed, name), getattr(sent, name))


def test_calls_of_a_group_agree_in_order_and_size() -> None:
    result = Simulator(SimConfig.benign(9, pp=3, tp=2, dp=2, spec_tokens=4, requests=30)).run()
    groups: dict[tuple[str, int, int], list[list[tuple[str, int]]]] = {}
    for rank, records in result.records.items():
        own: dict[tuple[str, int, int], list[tuple[str, int]]] = {}
        for record in records:
            if isinstance(record.body, Collective):
                name = record.body.what.split()[0]
                key = {"tp": (name, rank.dp, rank.pp), "dp": (name, rank.pp, rank.tp)}.get(
                    name, (name, rank.dp, rank.tp)
                )
                if name != "pp":
                    own.setdefault(key, []).append((record.body.what, record.body.numel))
        for key, calls in own.items():
            groups.setdefault(key, []).append(calls)
    assert {name for name, _, _ in groups} == {"tp", "dp", "pp_broadcast"}
    for members in groups.values():
        assert len(members) > 1
        assert all(calls == members[0] for calls in members)


def test_a_line_reproduces_a_run() -> None:
    config = SimConfig.benign(10, pp=2, tp=2, spec_tokens=3, requests=30)
    first, second = Simulator(config).run(), Simulator(config).run()
    assert first.outputs == second.outputs
    for rank, records in first.records.items():
        assert [(r.kind, r.step, r.seq) for r in records] == [
            (r.kind, r.step, r.seq) for r in second.records[rank]
        ]
    other = Simulator(replace(config, seed=12)).run()
    assert other.outputs != first.outputs


def test_real_probes_hold_what_memory_holds(tmp_path: Path) -> None:
    """GIVEN rings instead of memory THEN every record comes back from them, equal in every column."""
    config = SimConfig.benign(14, pp=2, tp=2, spec_tokens=3, requests=20)
    expected = Simulator(config).run().records
    settings_ = ProbeSettings(tmp_path, "simulated", 1 << 24, 3600.0, 0.0, 2, False)
    probes: dict[Rank, ProbeLike] = {
        rank: arm(identity, settings_) for rank, identity in Simulator(config).identities().items()
    }
    Simulator(config, probes=probes).run()
    for path in tmp_path.glob("*.ring"):
        reader = RingReader(path)
        kept = [r for r in reader.read(1 << 20) if r.kind not in (Kind.NOTE, Kind.HEARTBEAT)]
        memory = expected[reader.identity.rank]
        assert [(r.kind, r.step) for r in kept] == [(r.kind, r.step) for r in memory]
        for one, other in zip(kept, memory, strict=True):
            for field in fields(one.body):
                assert np.array_equal(getattr(one.body, field.name), getattr(other.body, field.name)), (
                    field.name
                )
        reader.close()


def test_replicas_have_requests_and_ordinals_of_their_own() -> None:
    config = SimConfig.benign(13, pp=2, dp=3, spec_tokens=2, requests=20)
    result = Simulator(config).run()
    assert {name.split("-")[0] for name in result.outputs} == {"dp0", "dp1", "dp2"}
    assert disagreements(result.records) == []
    expected: dict[str, Output] = {}
    for name, output in result.outputs.items():
        assert output.finished, name
        expected[name] = output
    assert len(expected) == 60


@pytest.mark.parametrize(("prompt", "most", "k"), [(1000, 64, 0), (1000, 64, 1), (100, 8, 7)])
def test_long_and_short_requests_end_at_their_length(prompt: int, most: int, k: int) -> None:
    workload = Workload(requests=3, prompt_len=(prompt, prompt), max_tokens=(most, most))
    config = SimConfig(seed=2, pp=4, spec_tokens=k, workload=workload, max_model_len=1100, stops=False)
    result = Simulator(config).run()
    assert [len(output.tokens) for output in result.outputs.values()] == [most] * 3


@pytest.mark.parametrize(
    "config",
    [
        SimConfig(),
        SimConfig(seed=3, pp=4, workload=Workload(requests=5, prompt_len=(1, 2))),
        SimConfig.benign(7, pp=5, dp=2, requests=9, seats=64),
        replace(SimConfig.benign(1), stops=False, fault=Plan("old-mask", Rank(0, 1, 0), 20, 3)),
    ],
)
def test_the_line_of_a_run_says_all_that_determines_it(config: SimConfig) -> None:
    *_, benign, option, encoded = shlex.split(config.line)
    assert (benign, option) == ("--benign", "--config")
    assert SimConfig.decode(encoded, benign=True) == config


def test_a_config_that_is_none_is_refused() -> None:
    for text in ("{", '{"pp":"many"}', "[]"):
        with pytest.raises(LabError, match="no simulator configuration"):
            SimConfig.decode(text, benign=False)
