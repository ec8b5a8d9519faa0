"""Making bundles: an incident with its evidence, the ranks' windows, versions, settings and a readable report.

The evidence is cut out of a journal around the steps that the incident names. Whether so much is enough is not guessed:
the cut is replayed, and widened until it says of the incident what was said of it before. What is packed as the
incident is what the packed evidence says.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Final

import msgspec

from stagewatch.agents.identity import Identity
from stagewatch.monitor import bundlefile
from stagewatch.monitor.bundlefile import BundleError, Manifest, json_of, path_of, write_bundle
from stagewatch.monitor.bundlereport import page_of, report_text
from stagewatch.monitor.incidents import Report, Window
from stagewatch.monitor.journal import segments_in
from stagewatch.monitor.pieces import STEP_MAX
from stagewatch.monitor.replay import Progress, replay
from stagewatch.monitor.slicing import STEPS_AFTER, STEPS_BEFORE, Found, Wanted, sliced
from stagewatch.monitor.sources import Recordings
from stagewatch.monitor.story.filters import Filters
from stagewatch.monitor.story.incident import IncidentStory, find_incident
from stagewatch.monitor.story.teller import Teller
from stagewatch.monitor.story.verdicts import reports
from stagewatch.monitor.watch import Watch

_GOOD_STEPS_MAX: Final = 4096
"""A last good step further back than this is not among the steps that are packed first."""

_GROWN_MAX: Final = 3
"""Times that an incident is asked for again because it had grown while its evidence was cut."""


@dataclass(frozen=True, slots=True)
class Told:
    """An incident as it was told before it is packed, and where frozen windows of it lie."""

    incident: Report
    windows: tuple[Window, ...] = ()


class Origin:
    """Where a bundle's evidence comes from."""

    def told(self, incident_id: str) -> Told:
        """The incident whose id this is, or begins. Raises StagewatchError."""
        raise NotImplementedError

    def slice(self, wanted: Wanted, incident_id: str, found: Found) -> Iterator[bytes]:
        """The bytes of a segment that holds what is wanted; ``found`` is filled meanwhile."""
        raise NotImplementedError


class JournalOrigin(Origin):
    """A collector's data directory, or other bundles, with no collector."""

    def __init__(self, recordings: Recordings, progress: Progress | None = None) -> None:
        if recordings.sources or not recordings.journals:
            raise BundleError(
                "bundles are made of a collector's data directory: `stagewatch replay` opens rings, dumps and traces "
                "as they are, and `stagewatch-agent dump` makes one file of rings"
            )
        self._recordings = recordings
        self._progress = progress

    def told(self, incident_id: str) -> Told:
        """The incident, as a replay of everything finds it."""
        watch = Watch()
        replay(self._recordings, watch, progress=self._progress)
        return Told(find_incident(incident_id, reports(watch)))

    def slice(self, wanted: Wanted, incident_id: str, found: Found) -> Iterator[bytes]:
        """Out of the directories."""
        paths = [path for directory in self._recordings.journals for path in segments_in(directory)]
        return sliced(paths, wanted, found)


@dataclass(frozen=True, slots=True)
class Packed:
    """What came of making a bundle."""

    path: Path
    bytes: int
    manifest: Manifest


def make_bundle(
    origin: Origin,
    incident_id: str,
    output: Callable[[str], Path],
    *,
    raw_tokens: bool = False,
    replace: bool = False,
) -> Packed:
    """Pack an incident; ``output`` names the file by the incident's whole id.

    Raises NotFoundError where no incident, or more than one, has the id; BundleError where nothing can be written.
    """
    told = origin.told(incident_id)
    path = output(told.incident.id)
    if path.exists() and not replace:
        raise BundleError(f"{path} exists: choose another --output, or give --force")
    with tempfile.TemporaryFile() as evidence:
        found, story, reproduces = _cut(origin, told.incident, raw_tokens, evidence)
        for _ in range(_GROWN_MAX):
            if reproduces or (again := origin.told(told.incident.id)) == told:
                break
            told = again
            found, story, reproduces = _cut(origin, told.incident, raw_tokens, evidence)
        incident = told.incident
        identities = [found.identities[rank] for rank in sorted(found.identities)]
        manifest = Manifest(
            format=bundlefile.FORMAT,
            incident=incident.id,
            deployment=incident.deployment,
            instance=incident.instance,
            made_by=f"stagewatch {version('stagewatch')}",
            made_ns=time.time_ns(),
            first_step=found.first_step,
            last_step=found.last_step,
            whole=not found.cut,
            reproduces=reproduces,
            raw_tokens=found.has_raw,
            raw_left_out=found.raw_left_out,
            versions=_versions(identities),
            windows=told.windows,
            members={},
        )
        text = report_text(manifest, story, identities)
        members = {
            bundlefile.PAGE: page_of(text, f"{incident.severity} {incident.check}").encode(),
            bundlefile.REPORT: text.encode(),
            bundlefile.INCIDENT: json_of(story.incident),
            bundlefile.SETTINGS: json_of(identities),
        }
        size = write_bundle(path, manifest, members, evidence, replace=replace)
    return Packed(path, size, manifest)


def _cut(
    origin: Origin, incident: Report, raw: bool, evidence: IO[bytes]
) -> tuple[Found, IncidentStory, bool]:
    """Fill ``evidence`` with as little as says of the incident what was said; what was found, and whether it does."""
    told: tuple[int, int] | None = None
    for steps in _widening(incident):
        try:
            found = _fill(evidence, origin, _wanted(incident, steps, raw), incident.id)
        except BundleError:
            if told is None:
                raise
            break  # so much is not to be had: what is told with less is packed
        story = _story(evidence, incident.id)
        if story is not None and _same(story.incident, incident, raw=raw):
            return found, story, True
        told = steps if story is not None else told
        if not found.cut:
            break
    if told is not None:
        found = _fill(evidence, origin, _wanted(incident, told, raw), incident.id)
        if story := _story(evidence, incident.id):
            return found, story, False
    raise BundleError(
        f"the journal does not hold the evidence of {incident.id} any more: what is left of it says nothing of it"
    )


def _wanted(incident: Report, steps: tuple[int, int], raw: bool) -> Wanted:
    return Wanted(incident.deployment, incident.instance, steps, raw)


def _widening(incident: Report) -> Iterator[tuple[int, int]]:
    """First and last step to pack, ever wider: around all that the incident names, then all there is."""
    named = [incident.first_bad_step, *(link.step for link in incident.chain if link.step)]
    if 0 < incident.first_bad_step - incident.last_good_step <= _GOOD_STEPS_MAX and incident.last_good_step:
        named.append(incident.last_good_step)
    first, last = max(min(named) - STEPS_BEFORE, 0), max(named) + STEPS_AFTER
    yield first, last
    yield max(first - 8 * STEPS_BEFORE, 0), last + 8 * STEPS_AFTER
    yield 0, STEP_MAX


def _fill(evidence: IO[bytes], origin: Origin, wanted: Wanted, incident_id: str) -> Found:
    evidence.seek(0)
    evidence.truncate()
    found = Found()
    limited(origin.slice(wanted, incident_id, found), evidence)
    return found


def limited(pieces: Iterable[bytes], file: IO[bytes]) -> None:
    """Write pieces of evidence. Raises BundleError for more than a bundle holds."""
    for piece in pieces:
        if file.tell() + len(piece) > bundlefile.EVIDENCE_BYTES_MAX:
            raise BundleError(
                f"its evidence takes more than the {bundlefile.EVIDENCE_BYTES_MAX} bytes that a bundle holds: "
                "carry the journal's directory instead"
            )
        file.write(piece)
    file.flush()


def _story(evidence: IO[bytes], incident_id: str) -> IncidentStory | None:
    """What the evidence says of the incident; None if nothing."""
    teller = Teller(Recordings((), (), (path_of(evidence),)), Filters())
    teller.incidents()
    if not any(incident.id == incident_id for incident in teller.all_incidents):
        return None
    return teller.show(incident_id)


def _same(one: Report, other: Report, *, raw: bool) -> bool:
    """Whether two tellings are of one content, byte for byte; without ``raw`` but for values that may be tokens."""
    return _encoded(one, raw) == _encoded(other, raw)


def _encoded(incident: Report, raw: bool) -> bytes:
    values = incident.values if raw else tuple(msgspec.structs.replace(v, text="") for v in incident.values)
    return msgspec.json.encode(msgspec.structs.replace(incident, values=values))


def _versions(identities: Sequence[Identity]) -> dict[str, str]:
    found = {"stagewatch": version("stagewatch")}
    for identity in identities:
        found[identity.engine or "engine"] = identity.engine_version
        found |= {f.name: f.value for f in identity.config if f.name in ("torch", "python", "cuda")}
    return found
