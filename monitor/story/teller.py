"""Answers over recordings. Each takes one or two passes, so that memory holds only what is told, not what is read."""

from collections.abc import Sequence
from typing import Final

from stagewatch.monitor.incidents import Report
from stagewatch.monitor.replay import Missing, Progress, Tap, replay
from stagewatch.monitor.sources import Recordings
from stagewatch.monitor.story.diff import Differ, DiffStory
from stagewatch.monitor.story.errors import NotFoundError, told_in_line
from stagewatch.monitor.story.filters import Filters, number
from stagewatch.monitor.story.incident import IncidentStory, find_incident, incident_story
from stagewatch.monitor.story.names import Names
from stagewatch.monitor.story.picker import Picked, Picker, Selection
from stagewatch.monitor.story.render import diff_text, incident_story_text, joined, request_text, step_text
from stagewatch.monitor.story.request import RequestStory, request_story
from stagewatch.monitor.story.step import StepStory, step_story
from stagewatch.monitor.story.verdicts import Summary, missing_text, reports, summary, summary_text
from stagewatch.monitor.text import Style
from stagewatch.monitor.watch import Watch

Answer = Summary | IncidentStory | list[RequestStory] | list[StepStory] | list[DiffStory]


class Teller:
    """Tells of one set of recordings."""

    def __init__(self, recordings: Recordings, filters: Filters, progress: Progress | None = None) -> None:
        self.names: Final = Names()
        self.all_incidents: list[Report] = []
        """What the replay found, whatever is told of it."""
        self.engines = 0
        """Replicas of engines in the recordings."""
        self._recordings = recordings
        self._filters = filters
        self._progress = progress
        self._missing = Missing(0, 0)

    # ---- what is told

    def incidents(self) -> Summary:
        """Verdicts, and the incidents wanted."""
        watch = self._watched()
        return summary(watch, [i for i in self.all_incidents if self._filters.takes(i)])

    def show(self, incident_id: str) -> IncidentStory:
        """One incident in full. Raises NotFoundError."""
        self._watched()
        incident = find_incident(incident_id, [i for i in self.all_incidents if self._filters.takes(i)])
        if not incident.request:
            stories = self._steps(incident.first_bad_step, incident.instance, incident.dp)
            return incident_story(incident, None, stories[0] if stories else None)
        key, name = self.names.resolve(incident.request)
        found = self._requests(
            key, name, Selection(frozenset({key}), engine=incident.instance, dp=incident.dp)
        )
        return incident_story(incident, found[0] if found else None, None)

    def request(self, request_id: str) -> list[RequestStory]:
        """A request on every engine that ran it. Raises NotFoundError."""
        self._watched()
        key, name = self.names.resolve(request_id)
        first, last = self._filters.steps
        selection = Selection(frozenset({key}), first, last, self._filters.engine)
        found = self._requests(key, name, selection)
        if selection.narrows:
            found = [story for story in found if any(life.steps for life in story.lives)]
        if not found:
            raise NotFoundError(
                f"request {told_in_line([name])} ran no step that is wanted: widen --step or --engine"
            )
        return found

    def step(self, step: str) -> list[StepStory]:
        """A step of every engine. Raises NotFoundError."""
        at = number(step, "step")
        self._watched()
        found = self._steps(at, self._filters.engine, None)
        if not found:
            raise NotFoundError(f"no rank recorded step {at}{self._recorded()}")
        return found

    def diff(self, one: str, other: str) -> list[DiffStory]:
        """Two ranks. Raises NotFoundError."""
        ranks = number(one, "rank"), number(other, "rank")
        if ranks[0] == ranks[1]:
            raise NotFoundError(f"rank {ranks[0]} twice: name two ranks")
        differ = Differ(*ranks, self._filters.engine, *self._filters.steps)
        self._replay(None, [self.names, differ])
        for rank in ranks:
            if rank not in differ.seen:
                held = told_in_line([str(number) for number in sorted(differ.seen)]) or "none"
                raise NotFoundError(f"no rank {rank} in the recordings: they hold {held}")
        found = [story for story in differ.stories() if story.steps or story.batches_different]
        if not found:
            raise NotFoundError(f"ranks {one} and {other} have no step in common: are they of one replica?")
        return found

    def text(self, answer: object, style: Style) -> str:
        """An answer as text."""
        if isinstance(answer, Summary):
            return summary_text(answer, style, names_engine=self.engines > 1)
        if isinstance(answer, IncidentStory):
            return incident_story_text(answer, style)
        parts: list[str] = []
        for each in answer if isinstance(answer, list) else []:
            match each:
                case RequestStory():
                    parts.append(request_text(each, style))
                case StepStory():
                    parts.append(step_text(each, style))
                case DiffStory():
                    names = {first.request: self.names.name(first.request) for first in each.first}
                    parts.append(diff_text(each, names, style))
        return joined(parts)

    def missing(self) -> list[str]:
        """What of the recordings could not be used."""
        return missing_text(self._missing, self._recordings)

    # ---- passes

    def _watched(self) -> Watch:
        watch = Watch()
        self._replay(watch, [self.names])
        self.all_incidents = reports(watch)
        self.engines = len(watch.states())
        return watch

    def _replay(self, watch: Watch | None, taps: Sequence[Tap]) -> None:
        self._missing = replay(self._recordings, watch, taps=taps, progress=self._progress)

    def _picked(self, selection: Selection) -> list[Picked]:
        picker = Picker(selection)
        self._replay(None, [picker])
        return list(picker.engines.values())

    def _requests(self, key: int, name: str, selection: Selection) -> list[RequestStory]:
        found = [p for p in self._picked(selection) if p.fed or p.bound]
        return [request_story(picked, name, key, self.all_incidents) for picked in found]

    def _steps(self, step: int, engine: str, dp: int | None) -> list[StepStory]:
        requests = frozenset[int]()
        if self._filters.request:
            requests = frozenset({self.names.resolve(self._filters.request)[0]})
        found = self._picked(Selection(requests, step, step, engine, dp, calls=True))
        stories = [step_story(p, step, self.names.name, self.all_incidents) for p in found]
        return [story for story in stories if story.rows or story.calls]

    def _recorded(self) -> str:
        narrowed = self._filters.engine or self._filters.request
        return ": widen --engine or --request" if narrowed else ""
