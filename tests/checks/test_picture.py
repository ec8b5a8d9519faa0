"""The picture: it follows the verdicts, says what changed, stays small, and keeps what surrounds an incident."""

import numpy as np
import pytest
from simulated import Run, cut, feed_live, hello, plan, settle, take

from stagewatch.agents.lab.simulator import SimConfig
from stagewatch.monitor import picture as pictures
from stagewatch.monitor.freezing import freeze, thaw
from stagewatch.monitor.picture import DIFFERS, EXCLUDED, Picture, View
from stagewatch.monitor.showing import showing
from stagewatch.monitor.watch import Watch


def picture_of(run: Run, watch: Watch) -> Picture:
    engine = watch.engine((next(iter(run.identities.values())).instance, 0))
    assert engine is not None
    return engine.picture


def marked(view: View, bit: int) -> int:
    return sum(int((segment.state & bit != 0).sum()) for segment in view.segments)


@pytest.fixture(scope="module")
def faulty() -> tuple[Run, Watch]:
    run, watch = Run(plan("old-mask")), Watch()
    feed_live(run, watch)
    settle(run, watch)
    return run, watch


class TestVerdicts:
    def test_every_compared_row_is_there_once_and_marked_as_it_was_judged(
        self, faulty: tuple[Run, Watch]
    ) -> None:
        run, watch = faulty
        [state] = watch.states()
        view = picture_of(run, watch).view(0, 10_000)
        steps = np.concatenate([segment.step for segment in view.segments])
        assert list(steps) == sorted(set(steps.tolist()))
        assert sum(len(segment.request) for segment in view.segments) == sum(state.verdicts.values())
        assert marked(view, DIFFERS) == state.verdicts["DIVERGED"] > 0
        assert marked(view, EXCLUDED) == state.rows_excluded > 0

    def test_the_ranks_that_differ_are_those_that_the_incidents_blame(
        self, faulty: tuple[Run, Watch]
    ) -> None:
        run, watch = faulty
        shown = showing(picture_of(run, watch).view(0, 10_000), lambda key: run.names[key], batches=False)
        at = {
            (step, shown.requests[request]): ranks
            for step, request, state, ranks in zip(
                shown.marks.step, shown.marks.request, shown.marks.state, shown.marks.ranks, strict=True
            )
            if state & DIFFERS
        }
        critical = [incident for incident in watch.incidents() if incident.blamed]
        assert critical
        assert {(i.first_bad_step, i.request): list(i.blamed) for i in critical}.items() <= at.items()

    def test_a_sound_run_has_no_marks(self) -> None:
        run, watch = Run(SimConfig.benign(3, pp=3, requests=40)), Watch()
        feed_live(run, watch)
        shown = showing(picture_of(run, watch).view(0, 10_000), lambda key: run.names[key], batches=True)
        assert shown.marks.step == []
        assert shown.batches is not None
        assert len(shown.batches.request) == sum(shown.rows) > 0


class TestChanges:
    def test_looking_again_and_again_comes_to_the_same_as_looking_once(self) -> None:
        run, watch = Run(plan("old-mask")), Watch()
        hello(run, watch)
        seen: dict[int, tuple[int, ...]] = {}
        revision = 0
        at = dict.fromkeys(run.records, 0)
        for made in run.iterations:
            for rank, count in made.items():
                if count:
                    take(run, watch, rank, at[rank], at[rank] + count)
                    at[rank] += count
            view = picture_of(run, watch).view(revision, 10_000)
            revision = view.revision
            seen |= states_by_step(view)
        assert seen == states_by_step(picture_of(run, watch).view(0, 10_000))

    def test_nothing_is_told_twice(self, faulty: tuple[Run, Watch]) -> None:
        run, watch = faulty
        picture = picture_of(run, watch)
        assert picture.view(picture.view(0, 10_000).revision, 10_000).segments == ()

    def test_the_newest_come_first_where_not_all_are_wanted(self, faulty: tuple[Run, Watch]) -> None:
        run, watch = faulty
        picture = picture_of(run, watch)
        every = [*states_by_step(picture.view(0, 10_000))]
        assert [*states_by_step(picture.view(0, 7))] == every[-7:]


class TestSaved:
    def test_it_comes_back_as_it_was(self, faulty: tuple[Run, Watch]) -> None:
        run, watch = faulty
        picture = picture_of(run, watch)
        back = thaw(freeze(picture))
        assert isinstance(back, Picture)
        assert states_by_step(back.view(0, 10_000)) == states_by_step(picture.view(0, 10_000))
        assert back.view(0, 10_000).revision == picture.view(0, 10_000).revision


class TestBounds:
    def test_it_forgets_the_oldest_steps_but_those_around_an_incident(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pictures, "STEPS_KEPT", 20)
        monkeypatch.setattr(pictures, "AROUND_STEPS", 3)
        run, watch = Run(plan("old-mask")), Watch()
        feed_live(run, watch)
        first = min(incident.first_bad_step for incident in watch.incidents())
        steps = [*states_by_step(picture_of(run, watch).view(0, 10_000))]
        newest = steps[-1]
        assert first < newest - 30
        assert set(range(first - 3, first + 4)) <= set(steps)
        assert set(range(newest - 19, newest + 1)) <= set(steps)
        bad = {link.step for incident in watch.incidents() for link in incident.chain}
        assert all(step > newest - 40 or any(abs(step - one) <= 3 for one in bad) for step in steps)

    def test_one_batch_of_evidence_larger_than_the_picture_leaves_its_newest_steps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pictures, "ROWS_KEPT", 50)
        run, watch = Run(SimConfig.benign(3, pp=3, requests=40)), Watch()
        hello(run, watch)
        for rank, own in run.records.items():
            watch.take(run.identities[rank].instance, rank, cut(run.evidence[rank], 0, len(own)), -1.0, 1)
        view = picture_of(run, watch).view(0, 10_000)
        assert 0 < sum(len(segment.request) for segment in view.segments) <= 50
        assert view.segments[-1].step[-1] == max(step for _, step in run.inputs)


def states_by_step(view: View) -> dict[int, tuple[int, ...]]:
    found = {}
    for segment in view.segments:
        for step, first, end in zip(segment.step, segment.starts[:-1], segment.starts[1:], strict=True):
            found[int(step)] = tuple(segment.state[first:end].tolist())
    return found
