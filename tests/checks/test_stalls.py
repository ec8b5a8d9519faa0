"""Engines that stopped in the middle of a step: who did not come, what is owed, its size on each rank, and for whom."""

import msgspec
import numpy as np
import pytest
from simulated import Run, beat, hello, take
from stories import DIGESTER, Row, S, Sent, Story, prefill

from stagewatch.agents.evidence import digest_records
from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.agents.probe import Health
from stagewatch.agents.record import Collective, Heartbeat, Kind, Record
from stagewatch.monitor.callbook import CallBook
from stagewatch.monitor.calls import Calls, Names
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.watch import Watch


class Halted(Story):
    """Ranks that run two whole steps; in the third, each goes as far as a test lets it."""

    def whole(self) -> None:
        for number in range(2):
            row = Row(computed=10 + 3 * number)
            self.step(row)
            self.masks(True)
            self.broadcast((row, Sent(tokens=(28, 29, 30), drafts=(41, 42))))
            for index in range(self.last + 1):
                self.enter(index, "receive", "tp", "send", "broadcast")

    def enter(self, index: int, *calls: str, numel: int = 8, early: int = 0) -> None:
        """A rank enters calls of the current step, or of one that it has not begun (``early``)."""
        stage = index // self.tp
        for call in calls:
            if call == "tp" and self.tp == 1:
                continue
            if (call == "receive" and not stage) or (call == "send" and stage == self.pp - 1):
                continue
            text = {
                "receive": "pp_p2p receive float32",
                "send": "pp_p2p send float32",
                "tp": "tp all_reduce float32",
                "broadcast": "pp_broadcast broadcast int64",
            }[call]
            body = Collective(1, -1 if call == "receive" else numel, self.pp, text)
            self.record(index, Kind.COLLECTIVE, body, self.step_now + early)

    def halted(self) -> tuple[Watch, Incident]:
        """What is told once nobody has moved for half a minute."""
        watch = self.watch(finish=False)
        health = msgspec.json.encode(Health(True, "", 1, 0, 0, 0, 0)).decode()
        for index in range(self.last + 1):
            record = Record(Kind.HEARTBEAT, self.seq[index], self.step_now, 0, Heartbeat(health))
            identity = self.identity(index)
            watch.take("i", identity.rank, digest_records([record], identity, DIGESTER), -1.0, 25 * S)
        watch.tick(34 * S)
        (incident,) = watch.incidents()
        return watch, incident


def told(story: Halted) -> tuple[str, str, tuple[int, ...]]:
    watch, incident = story.halted()
    assert watch.states()[0].wedged
    return incident.check, incident.severity.word, incident.blamed


NEWCOMER = prefill("late", slot=1)


def third(story: Halted, *without: int) -> None:
    """All but some ranks begin the third step, which a request joins."""
    for index in range(story.last + 1):
        if index not in without:
            story.bind("late", slot=1, only=index)
    story.step(Row(computed=16), NEWCOMER, without=without)


def test_a_last_stage_that_does_not_come() -> None:
    story = Halted(pp=3)
    story.whole()
    third(story, 2)
    story.enter(0, "send", "broadcast")
    story.enter(1, "receive", "send")
    assert told(story) == ("stall", "critical", (2,))


def test_a_middle_stage_that_does_not_come() -> None:
    """The last one waits to receive before it begins the step; that it has not begun is not its fault."""
    story = Halted(pp=3)
    story.whole()
    third(story, 1, 2)
    story.enter(0, "send")
    story.enter(2, "receive")
    assert told(story) == ("stall", "critical", (1,))


def test_a_middle_stage_that_comes_and_does_not_send() -> None:
    story = Halted(pp=4)
    story.whole()
    third(story, 2, 3)
    story.enter(0, "send", "broadcast")
    story.enter(1, "receive", "send")
    story.enter(3, "receive")
    assert told(story) == ("stall", "critical", (2,))


def test_a_peer_that_does_not_enter_its_stages_collective() -> None:
    story = Halted(pp=2, tp=2)
    story.whole()
    third(story, 2, 3)
    story.enter(0, "tp")
    story.enter(2, "receive", early=0)
    story.enter(3, "receive", early=0)
    assert told(story) == ("stall", "critical", (1,))


def test_sizes_that_differ_are_what_the_stall_comes_from() -> None:
    """NCCL negotiates no sizes. The first finding names the cause; that the engine stands still makes no second one."""
    story = Halted(pp=3)
    story.whole()
    third(story)
    story.masks(True, True)
    for index in range(3):
        story.enter(index, "receive", "send")
        story.enter(index, "broadcast", numel=3 if index == 2 else 8)
    watch, incident = story.halted()
    assert (incident.check, incident.blamed) == ("collective-order", (2,))
    assert {value.rank: value.text for value in incident.values} == {
        0: "pp_broadcast broadcast int64 of 8",
        1: "pp_broadcast broadcast int64 of 8",
        2: "pp_broadcast broadcast int64 of 3",
    }
    assert watch.states()[0].wedged


def test_a_mask_that_is_none_on_one_rank_leaves_the_others_waiting() -> None:
    story = Halted(pp=3)
    story.whole()
    third(story)
    story.masks(True, True, r0=None, fixed=(True, True))
    for index in range(3):
        story.enter(index, "receive", "send")
    for index in (1, 2):
        story.enter(index, "broadcast")
    assert told(story) == ("mask-disagreement", "critical", (0,))


@pytest.mark.parametrize("pp", [2, 3])
def test_what_is_owed_its_size_on_each_rank_and_who_joined_are_told(pp: int) -> None:
    story = Halted(pp=pp)
    story.whole()
    third(story)
    for index in range(pp):
        story.enter(index, "receive", "send")
    for index in range(1, pp):
        story.enter(index, "broadcast", numel=48)
    _, incident = story.halted()
    assert (incident.check, incident.blamed, incident.first_bad_step) == ("stall", (0,), 3)
    text = incident.chain[0].text
    assert "rank 0 did not enter pp_broadcast broadcast int64 of 48 of step 3" in text
    assert "joined the batch: late" in text
    shown = {value.rank: value.text for value in incident.values}
    assert shown == {0: "not entered", **dict.fromkeys(range(1, pp), "pp_broadcast broadcast int64 of 48")}


def test_ranks_that_wait_for_each_other_are_told_as_such_where_the_right_order_was_never_seen() -> None:
    """GIVEN a first broadcast that rank 0 enters before it sends, THEN nobody is said not to have come who waits."""
    story = Halted(pp=2)
    story.step(prefill())
    for index in range(2):
        story.enter(index, "receive", "send")
    story.step(Row())
    story.enter(0, "broadcast")
    story.enter(1, "receive")
    _, incident = story.halted()
    assert (incident.check, incident.blamed, incident.ranks) == ("stall", (), (0, 1))
    assert (
        "rank 0 waits in pp_broadcast broadcast int64 of 8 of step 2, rank 1 waits in pp_p2p receive float32 of "
        "step 2: each for another that waits" in incident.chain[0].text
    )
    assert {value.rank: value.text for value in incident.values} == {
        0: "pp_broadcast broadcast int64 of 8",
        1: "pp_p2p receive float32",
    }


def test_what_is_usual_does_not_depend_on_how_calls_were_batched() -> None:
    """GIVEN steps of different orders, WHEN they come at once or call by call THEN the same came always first."""
    names = Names()
    texts = ["pp_p2p send a", "pp_broadcast broadcast b", "tp all_reduce c"]
    codes = names.codes([texts[at] for at in (0, 1, 2, 2, 0, 1, 0, 1, 1, 0)])
    steps = np.array([1, 1, 2, 3, 3, 3, 5, 5, 9, 9])
    calls = Calls(steps, codes, np.ones(10, np.int64), np.arange(10))
    at_once, one_by_one = CallBook(names), CallBook(names)
    at_once.add(calls)
    for place in range(len(calls)):
        one_by_one.add(calls.where(np.arange(len(calls)) == place))
    assert at_once.before == one_by_one.before
    # the newest step, which is in another order, may not have ended
    assert at_once.before[("pp_broadcast", "broadcast")] == {("pp_p2p", "send")}
    assert at_once.before[("pp_p2p", "send")] == set()


@pytest.mark.parametrize("late", [0, 30])
def test_idle_replicas_whose_first_records_are_gone_are_not_stalled(late: int) -> None:
    """GIVEN sidecars that came when rings had been overrun, THEN calls shared with other replicas cannot be counted."""
    run, watch = Run(SimConfig.benign(2, pp=2, dp=2, requests=10)), Watch()
    hello(run, watch)
    for place, (rank, records) in enumerate(run.records.items()):
        first = late * place
        take(run, watch, rank, first, len(records), first)
    for second in (25, 50):
        beat(run, watch, second * S)
        watch.tick((second + 9) * S)
    assert watch.incidents() == []
    assert [state.wedged for state in watch.states()] == ["", ""]
