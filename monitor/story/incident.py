"""An incident in full: what is told of it live, where its request's ranks part, and what the fixed mask changes."""

import msgspec

from stagewatch.monitor.incidents import Report
from stagewatch.monitor.story.errors import NotFoundError, told_in_line
from stagewatch.monitor.story.request import Life, RequestStory, StepOfRequest
from stagewatch.monitor.story.sides import Divergence
from stagewatch.monitor.story.step import StepStory
from stagewatch.monitor.story.whatif import WhatIf

AROUND: int = 4
"""Steps of the request shown before and after its first bad step."""


class IncidentStory(msgspec.Struct, frozen=True):
    """The story of one incident. What concerns its request is empty where the cause belongs to none."""

    incident: Report
    divergence: Divergence | None
    """Where the ranks part, in the life of the request in which the incident lies."""
    steps: tuple[StepOfRequest, ...]
    """The request's steps around the first bad one."""
    fixed_mask: WhatIf | None
    step: StepStory | None
    """The first bad step, where the cause belongs to no request."""


def find_incident(text: str, incidents: list[Report]) -> Report:
    """The incident whose id ``text`` is or begins. Raises NotFoundError for none or several."""
    found = [incident for incident in incidents if incident.id.startswith(text.lower())] if text else []
    if len(found) == 1:
        return found[0]
    if found:
        ids = told_in_line([incident.id for incident in found])
        raise NotFoundError(
            f"incident {told_in_line([text])} begins {len(found)} ids: {ids}: give more of it"
        )
    held = told_in_line([incident.id for incident in incidents]) if incidents else "none"
    raise NotFoundError(f"no incident {told_in_line([text])} in the recordings: they hold {held}")


def incident_story(incident: Report, request: RequestStory | None, step: StepStory | None) -> IncidentStory:
    """The story of ``incident``; ``request`` is that of its request, ``step`` that of its first bad step."""
    life = life_of(incident, request)
    if life is None:
        return IncidentStory(incident, None, (), None, step)
    places = [place for place, each in enumerate(life.steps) if each.step >= incident.first_bad_step]
    at = places[0] if places else len(life.steps)
    around = life.steps[max(at - AROUND, 0) : at + AROUND + 1]
    return IncidentStory(incident, life.divergence, around, life.fixed_mask, step)


def life_of(incident: Report, request: RequestStory | None) -> Life | None:
    """The life whose steps hold the incident's first bad one, or the last that began before it."""
    if request is None or not request.lives:
        return None
    began = [life for life in request.lives if life.steps and life.steps[0].step <= incident.first_bad_step]
    return began[-1] if began else request.lives[0]
