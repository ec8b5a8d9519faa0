"""The parts of the engine, one by one."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.batch import context_parallel_parts, prepare_inputs
from stagewatch.agents.lab.collectives import entered
from stagewatch.agents.lab.fault import Call
from stagewatch.agents.lab.messages import I32, NewRequest, SchedulerOutput, StepResult
from stagewatch.agents.lab.recording import TraceWriter
from stagewatch.agents.lab.scheduler import LabError, Scheduler, SchedulerConfig
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.agents.lab.states import RequestStates
from stagewatch.agents.lab.text import text
from stagewatch.agents.lab.workload import Request, Workload


def ints(*values: int) -> I32:
    return np.array(values, np.int32)


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 600), st.integers(1, 4))
def test_context_parallel_parts_cover_the_chunk_once(start: int, length: int, ranks: int) -> None:
    parts = context_parallel_parts(start, length, ranks)
    assert sorted(np.concatenate(parts).tolist()) == list(range(start, start + length))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 2


def test_context_parallel_parts_balance_early_and_late() -> None:
    assert [part.tolist() for part in context_parallel_parts(8, 8)] == [[8, 9, 14, 15], [10, 11, 12, 13]]


def test_a_chunk_of_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="no chunk"):
        context_parallel_parts(0, -1)


class TestRequestStates:
    def test_a_released_slot_has_another_generation(self) -> None:
        states = RequestStates(ranks=2, slots=3, handles=3, length_max=8, drafts=2)
        slots = states.add((NewRequest(0, "a", ints(9, 9), 5, 0),))
        released, ended = states.release(ints(0))
        again = states.add((NewRequest(1, "b", ints(9, 9), 5, 0),))
        assert released.tolist() == slots.tolist() == again.tolist()
        assert ended.tolist() == [[0], [0]]
        assert states.generation[:, slots[0, 0]].tolist() == [1, 1]

    def test_a_new_owner_inherits_nothing(self) -> None:
        states = RequestStates(ranks=1, slots=1, handles=2, length_max=8, drafts=2)
        states.add((NewRequest(0, "a", ints(9, 9), 5, 0),))
        states.last_sampled[:], states.draft_tokens[:], states.computed[:] = 77, 78, 3
        states.release(ints(0))
        states.add((NewRequest(1, "b", ints(9, 9, 9), 6, 1),))
        assert (states.last_sampled[0, 0], states.computed[0, 0]) == (0, 1)
        assert states.draft_tokens[0, 0].tolist() == [0, 0]

    def test_an_anchor_is_fed_first(self) -> None:
        states = RequestStates(ranks=1, slots=1, handles=1, length_max=8, drafts=2)
        states.add((NewRequest(0, "a", ints(9, 9), 5, 2, anchor=42),))
        assert states.last_sampled[0, 0] == 42


def test_prepare_inputs_mixes_chunks_and_decodes() -> None:
    """The device's count decides positions, and the kind of row what is fed.

    GIVEN a middle chunk and a decoding row that lies one token behind the host's count
    THEN the chunk feeds known tokens, the decode its last token and drafts, both at the device's positions.
    """
    states = RequestStates(ranks=1, slots=4, handles=4, length_max=16, drafts=3)
    states.add((NewRequest(0, "chunk", ints(11, 12, 13, 14, 15, 16), 9, 2),))
    states.add((NewRequest(1, "decode", ints(21, 22), 12, 2),))
    slot = states.slot_of[0, 1]
    states.computed[0, slot], states.last_sampled[0, slot] = 5, 50
    states.draft_tokens[0, slot] = [51, 52, 53]
    handles = ints(0, 1)
    order = SchedulerOutput(ints(), (), handles, ints(3, 3), ints(0, 2), ints(2, 6), 3)
    batch = prepare_inputs(states, order, states.slot_of[:, handles], ints(2, 6)[None])
    assert batch.input_ids.tolist() == [[13, 14, 15, 50, 51, 52]]
    assert batch.positions.tolist() == [[2, 3, 4, 5, 6, 7]]
    assert batch.prefilling.tolist() == [[True, False]]
    assert batch.computed.tolist() == [[2, 5]]


class TestScheduler:
    CONFIG = SchedulerConfig(pp=2, spec_tokens=3, max_model_len=64)

    @staticmethod
    def scheduler(config: SchedulerConfig, *requests: Request) -> Scheduler:
        return Scheduler(config, requests)

    def test_the_host_counts_optimistically_and_is_corrected(self) -> None:
        """GIVEN a decode step in flight THEN its drafts count as accepted until its result says otherwise."""
        scheduler = self.scheduler(self.CONFIG, Request("a", ints(*range(8, 18)), 20))
        mirrors = []
        for tick in range(5):
            order = scheduler.schedule()
            mirrors.append(order.mirror.tolist())
            if tick == 2:
                scheduler.update(StepResult(ints(9, 0, 0, 0)[None], ints(1), ints(0)))  # the prefill
            if tick == 3:
                scheduler.update(None)
            if tick == 4:
                scheduler.update(StepResult(ints(9, 0, 0, 0)[None], ints(1), ints(3)))
        # Prefill of 10; empty; decode at 10; empty; decode at 14, whose predecessor is not back yet.
        assert mirrors == [[0], [], [10], [], [14]]
        assert scheduler.mirror.max() == 18 - 3

    def test_a_row_that_may_be_at_its_cap_is_not_scheduled(self) -> None:
        """The stop rule: skip if num_computed + 2 - placeholders >= prompt + max_tokens [VERSIONS.md]."""
        scheduler = self.scheduler(self.CONFIG, Request("a", ints(*range(8, 18)), 1))
        rows = [len(scheduler.schedule().handles) for _ in range(4)]
        assert rows == [1, 0, 0, 0]

    def test_an_output_that_returns_after_the_request_left_is_dropped(self) -> None:
        scheduler = self.scheduler(self.CONFIG, Request("a", ints(8, 9), 20, abort_after=0))
        scheduler.schedule()
        order = scheduler.schedule()
        scheduler.update(StepResult(ints(9, 0, 0, 0)[None], ints(1), ints(0)))
        assert order.finished.tolist() == [0]
        assert [output.reason for output in scheduler.take_outputs()] == ["abort"]
        assert scheduler.progress() == []

    def test_a_request_that_cannot_fit_is_refused(self) -> None:
        scheduler = self.scheduler(self.CONFIG, Request("a", ints(*range(8, 68)), 20))
        with pytest.raises(LabError, match="exceed max_model_len 64"):
            scheduler.schedule()

    def test_a_short_cache_preempts_the_youngest_and_resumes_it(self) -> None:
        config = SchedulerConfig(pp=1, spec_tokens=0, max_model_len=64, block_size=4, blocks=6)
        requests = [Request(name, ints(*range(8, 16)), 8) for name in ("old", "young")]
        scheduler = self.scheduler(config, *requests)
        names = []
        for _ in range(60):
            order = scheduler.schedule()
            names += [request.request_id for request in order.new]
            rows = len(order.handles)
            scheduler.update(
                StepResult(np.full((rows, 1), 9, np.int32), np.ones(rows, np.int32), np.zeros(rows, np.int32))
            )
        assert names == ["old", "young", "young"]
        assert scheduler.preemptions == 1
        assert [(o.request_id, len(o.tokens)) for o in scheduler.take_outputs()] == [("old", 8), ("young", 8)]


class TestEntered:
    RANKS = (Rank(0, 0, 0), Rank(0, 1, 0))

    @staticmethod
    def call(group: str, op: str, numel: int = 4) -> Call:
        return Call(group, op, "int64", numel, 2)

    def test_matching_calls_complete(self) -> None:
        first = [self.call("pp", "send"), self.call("pp_broadcast", "broadcast")]
        last = [self.call("pp", "recv"), self.call("pp_broadcast", "broadcast")]
        assert entered(self.RANKS, [first, last]) == ([first, last], True)

    def test_another_size_stops_both_in_that_call(self) -> None:
        small, large = self.call("pp_broadcast", "broadcast", 1), self.call("pp_broadcast", "broadcast", 8)
        after = self.call("pp_broadcast", "broadcast", 2)
        assert entered(self.RANKS, [[large, after], [small, after]]) == ([[large], [small]], False)

    def test_another_order_stops_both(self) -> None:
        broadcast, send, recv = (
            self.call("pp_broadcast", "broadcast"),
            self.call("pp", "send"),
            self.call("pp", "recv"),
        )
        assert entered(self.RANKS, [[broadcast, send], [recv, broadcast]]) == ([[broadcast], [recv]], False)


def test_a_trace_has_the_lines_of_the_recorded_ones(tmp_path: Path) -> None:
    """The form of `field/traces`: inputs and received on earlier ranks, inputs, sent and drafts on the last."""
    workload = Workload(requests=2, prompt_len=(5, 9), max_tokens=(8, 12))
    result = Simulator(SimConfig(workload=workload)).run()
    kinds = {}
    for number, (_, records) in enumerate(sorted(result.records.items())):
        path = tmp_path / f"run.rank{number}.jsonl"
        writer = TraceWriter(path)
        writer.write(records)
        writer.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kinds[number] = {line["kind"]: set(line) for line in lines}
        rows = next(line for line in lines if line["kind"] == "inputs")["rows"]
        assert set(rows[0]) == {
            *("req", "slot", "gen", "mirror", "computed", "prefill", "prefilling", "sched", "cap"),
            *("ids", "pos", "last", "drafts"),
        }
        assert rows[0]["req"] == "r0"
    payload = {"kind", "step", "mask", "tokens", "num_sampled", "num_rejected"}
    assert kinds[0] == {"inputs": {"kind", "step", "rows"}, "received": payload | {"drafts"}}
    assert kinds[1] == {
        "inputs": {"kind", "step", "rows"},
        "sent": payload,
        "drafts": {"kind", "step", "drafts"},
    }


def test_words_of_a_vocabulary_are_distinct() -> None:
    assert len(set(text(range(4096)).split())) == 4096


def test_a_workload_is_the_same_for_the_same_seed() -> None:
    workload = Workload(
        requests=300, streaming_probability=0.3, cached_probability=0.3, abort_probability=0.3
    )
    first, second = list(workload.draw(5, 1024)), list(workload.draw(5, 1024))
    assert [(r.request_id, r.prompt.tolist(), r.cached) for r in first] == [
        (r.request_id, r.prompt.tolist(), r.cached) for r in second
    ]
    assert all(request.cached < len(request.prompt) for request in first)
    assert any(request.more_input for request in first)
