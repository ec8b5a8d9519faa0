"""A report in one HTML file: nothing is fetched, nothing runs, and text from recordings stays text.

The policy in its head allows nothing but its own style sheet, by hash.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import IO, Final

from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.exports.exporter import Found
from stagewatch.monitor.exports.lattice import AFTER, BEFORE, columns_of, lattice_svg
from stagewatch.monitor.incidents import Incident, Severity, report
from stagewatch.monitor.showing import Showing, showing
from stagewatch.monitor.story.errors import NotFoundError
from stagewatch.monitor.story.incident import life_of
from stagewatch.monitor.story.picker import Picker, Selection
from stagewatch.monitor.story.request import Life, RequestStory, request_story

TOLD_MAX: Final = 50
"""Incidents told in full; those after them, which are no worse, are counted."""
_STEPS_MAX: Final = 1 << 20
_STYLE: Final = """
.cells { display: block; }
.cells text { font: 12px system-ui, sans-serif; fill: var(--text); }
.cells .axis { font-size: 11px; fill: var(--dim); }
.cells .same { fill: var(--consistent); } .cells .differs { fill: var(--differs); }
.cells .excluded { fill: var(--excluded); }
.cells .none { stroke: var(--none); stroke-width: 1.5; }
.cells .stroke { stroke: var(--panel); stroke-width: 1.5; fill: none; }
.cells .mark { stroke: var(--focus); stroke-width: 2; fill: none; }
.legend .cells { display: inline-block; vertical-align: -4px; margin-right: .35rem; }
h2 { overflow-wrap: anywhere; }
@media print { .scroll { overflow-x: visible; } .panel { break-inside: avoid; } }
"""


class HtmlExporter:
    """Writes one report into ``file``."""

    def __init__(self, file: IO[bytes], title: str) -> None:
        self._file: Final = file
        self._title: Final = title
        self._ranks: dict[tuple[str, int], dict[Rank, Identity]] = {}

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """Note the rank; all else is in the checks' own memory."""
        ranks = self._ranks.setdefault((identity.instance, identity.rank.dp), {})
        ranks.setdefault(identity.rank, identity)

    def finish(self, found: Found) -> list[str]:
        """Write the report."""
        told = found.incidents[:TOLD_MAX]
        lives = self._lives(found, told)
        pictures = {key: self._picture(found, key) for key in self._ranks}
        style = (Path(__file__).parents[1] / "web" / "page.css").read_text() + _STYLE
        parts = [
            _head(style, self._title),
            *self._summary(found),
            *self._engines(pictures),
            *_list(found, told),
            *(part for incident in told for part in self._incident(incident, lives, pictures)),
            "</main></body></html>\n",
        ]
        for part in parts:
            self._file.write(part.encode("utf-8", "replace"))
        left = len(found.incidents) - len(told)
        return [f"{len(told)} incidents in full" + (f", {left} more counted" if left else "")]

    # ---- what is told

    def _lives(self, found: Found, told: Sequence[Incident]) -> dict[str, Life]:
        """By incident, the life of its request in which it lies."""
        keys: dict[str, int] = {}
        for incident in told:
            with suppress(
                NotFoundError
            ):  # a request whose id is no longer remembered, or never was on record
                keys[incident.request] = found.names.resolve(incident.request)[0] if incident.request else 0
        keys.pop("", None)
        if not keys:
            return {}
        reports = [report(incident) for incident in told]
        picker = Picker(Selection(frozenset(keys.values())))
        found.again([picker])
        lives: dict[str, Life] = {}
        for incident in told:
            picked = picker.engines.get((incident.instance, incident.dp))
            if incident.request not in keys or picked is None:
                continue
            of_one = picked.only(keys[incident.request])
            story: RequestStory = request_story(of_one, incident.request, keys[incident.request], reports)
            life = life_of(report(incident), story)
            if life is not None:
                lives[incident.id] = life
        return lives

    def _picture(self, found: Found, key: tuple[str, int]) -> Showing | None:
        engine = found.watch.engine(key)
        if engine is None:
            return None
        return showing(engine.picture.view(0, _STEPS_MAX), found.names.name, batches=False)

    def _summary(self, found: Found) -> Iterable[str]:
        summary = found.summary
        severities = [incident.severity for incident in found.incidents]
        counts = ", ".join(f"{severities.count(s)} {s.word}" for s in reversed(Severity) if s in severities)
        reasons = ", ".join(
            f"{why.replace('_', ' ')} {rows:,}" for why, rows in summary.indeterminate.items()
        )
        yield f"<h1>{escape(self._title)}</h1>"
        yield f"<p>Incidents: <strong>{counts or 'none'}</strong>.</p>"
        rows = [("Steps compared", f"{summary.steps:,}"), ("Rows", f"{summary.rows:,}")]
        rows += [(verdict.capitalize(), f"{count:,}") for verdict, count in summary.verdicts.items()]
        if reasons:
            rows.append(("Not comparable", reasons))
        yield _table("Verdicts", ("Verdict", "#Rows"), rows)

    def _engines(self, pictures: dict[tuple[str, int], Showing | None]) -> Iterable[str]:
        for key, ranks in self._ranks.items():
            identity = next(iter(ranks.values()))
            yield f"<h2>Engine {escape(key[0])}{f', replica {key[1]}' if identity.sizes.dp > 1 else ''}</h2>"
            sizes = identity.sizes
            yield (
                f"<p>{escape(f'{identity.engine} {identity.engine_version}'.strip())}, deployment "
                f"{escape(identity.deployment)}: PP {sizes.pp}, TP {sizes.tp}, DP {sizes.dp}.</p>"
            )
            yield self._lattice(key, pictures[key], 0, _STEPS_MAX * _STEPS_MAX, None)
        yield _LEGEND

    def _lattice(
        self, key: tuple[str, int], shown: Showing | None, first: int, last: int, incident: Incident | None
    ) -> str:
        identity = next(iter(self._ranks[key].values()))
        sizes = identity.sizes
        names = [
            f"stage {pp}" + (f" · tp {tp}" if sizes.tp > 1 else "")
            for pp in range(sizes.pp)
            for tp in range(sizes.tp)
        ]
        columns = columns_of(shown, len(names), first, last) if shown is not None else []
        if not columns:
            return '<p class="dim">No picture of these steps: it keeps the newest, and those around incidents.</p>'
        differing = sum(any(column.differing) for column in columns)
        title = (
            f"Lattice of steps {columns[0].first} to {columns[-1].last}: ranks differ from the last stage in "
            f"{differing} of {len(columns)} columns"
        )
        marked = incident.first_bad_step if incident is not None else 0
        about = f"around {incident.id}" if incident is not None else f"of {key[0]}, replica {key[1]}"
        return _scrolled(
            f"Lattice {about}", lattice_svg(columns, names, (sizes.pp - 1) * sizes.tp, title, marked)
        )

    def _incident(
        self,
        incident: Incident,
        lives: dict[str, Life],
        pictures: dict[tuple[str, int], Showing | None],
    ) -> Iterable[str]:
        key, step = (incident.instance, incident.dp), incident.first_bad_step
        yield f'<section class="panel" id="i{incident.id}"><h2>{_chip(incident.severity)} {_about(incident)}</h2>'
        facts = [
            ("Incident", incident.id),
            ("Check", incident.check),
            ("Engine", f"{incident.instance}, replica {incident.dp}"),
            ("First bad step", str(step)),
            ("Last good step", str(incident.last_good_step or "none on record")),
            ("Ranks that disagree", ", ".join(map(str, incident.ranks)) or "none"),
            ("Blamed", ", ".join(map(str, incident.blamed)) or "undecided"),
        ]
        yield _table(f"Facts of {incident.id}", ("Fact", "Value"), facts)
        yield "<h3>Chain of cause</h3><ol>"
        yield "".join(
            f"<li><strong>step {link.step}:</strong> {escape(link.text)}</li>" for link in incident.chain
        )
        yield "</ol>"
        yield from _values(incident)
        yield from _divergence(incident, lives.get(incident.id))
        if key in pictures:
            yield "<h3>Where it began</h3>"
            yield self._lattice(key, pictures[key], max(step - BEFORE, 0), step + AFTER, incident)
        yield f"<h3>What to do</h3><p>{escape(incident.remedy)}</p></section>"


def _head(style: str, title: str) -> str:
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<title>{escape(title)}</title>\n<style>{style}</style></head>\n<body><main id="main">\n'
    )


def _list(found: Found, told: Sequence[Incident]) -> Iterable[str]:
    yield "<h2>Incidents</h2>"
    if not told:
        yield '<p class="dim">None.</p>'
        return
    rows = [
        f'<tr><td>{_chip(i.severity)}</td><td><a href="#i{i.id}">{_about(i)}</a></td><td>{escape(i.check)}</td>'
        f'<td class="number">{i.first_bad_step}</td>'
        f"<td>{'rank ' + ', '.join(map(str, i.blamed)) if i.blamed else 'undecided'}</td></tr>"
        for i in told
    ]
    yield _table("Incidents", ("Severity", "Request", "Check", "#First bad step", "Blamed"), rows)
    left = len(found.incidents) - len(told)
    if left:
        yield f"<p>{left} more, none of them worse, are not told here: narrow by --severity, --request or --step.</p>"


def _values(incident: Incident) -> Iterable[str]:
    if not incident.values:
        return
    ranks = sorted({value.rank for value in incident.values})
    text = {(value.field, value.rank): value.text for value in incident.values}
    rows = []
    for field in dict.fromkeys(value.field for value in incident.values):
        held = [text.get((field, rank), "") for rank in ranks]
        unequal = ' class="unequal"' if len(set(held)) > 1 else ""
        cells = "".join(f"<td><code>{escape(value)}</code></td>" for value in held)
        rows.append(f"<tr{unequal}><td>{escape(field)}</td>{cells}</tr>")
    heads = ["Field", *(f"Rank {rank}{' (wrong)' if rank in incident.blamed else ''}" for rank in ranks)]
    yield f"<h3>Step {incident.first_bad_step}, side by side</h3>"
    yield _table(f"Values of {incident.id} at its first bad step", heads, rows)


def _divergence(incident: Incident, life: Life | None) -> Iterable[str]:
    if life is None:
        return
    parted = life.divergence
    if parted is not None:
        equal = f"step {parted.last_equal_step}" if parted.last_equal_step else "no equal step on record"
        heads = (
            "Field",
            "#Rank",
            f"Last equal ({equal})",
            f"First different (step {parted.first_different_step})",
        )
        rows = [
            f'<tr><td>{escape(side.field)}</td><td class="number">{side.rank}</td><td><code>{escape(side.last_equal)}'
            f"</code></td><td><code>{escape(side.first_different)}</code></td></tr>"
            for side in parted.sides
        ]
        yield "<h3>Where the ranks part</h3>"
        yield _table(f"First divergence of {incident.id}", heads, rows)
    what_if = life.fixed_mask
    yield f"<h3>Under the fixed mask</h3><p>{escape(what_if.answer)}: {escape(what_if.why)}.</p>"


def _about(incident: Incident) -> str:
    return escape(incident.request or "the whole engine")


def _chip(severity: Severity) -> str:
    return f'<span class="chip {severity.word}">{severity.word}</span>'


def _table(caption: str, heads: Sequence[str], rows: Iterable[tuple[str, ...] | str]) -> str:
    """A table. Cells of tuples are text; strings are rows of HTML already. ``#`` before a head: numbers."""

    def kind(head: str) -> str:
        return ' class="number"' if head.startswith("#") else ""

    head = "".join(f'<th scope="col"{kind(h)}>{escape(h.removeprefix("#"))}</th>' for h in heads)
    body = "".join(
        row
        if isinstance(row, str)
        else "<tr>"
        + "".join(f"<td{kind(h)}>{escape(cell)}</td>" for h, cell in zip(heads, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return _scrolled(
        caption,
        f'<table><caption class="skip">{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table>",
    )


def _scrolled(name: str, what: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">{what}</div>\n'


def _sample(shape: str, text: str) -> str:
    return f'<li><svg class="cells" width="13" height="18" aria-hidden="true">{shape}</svg>{text}</li>'


_CELL = '<rect class="{}" width="11" height="18"/>'
_LEGEND: Final = (
    '<ul class="legend" aria-label="Legend">'
    + _sample(_CELL.format("same"), "agrees with the last stage")
    + _sample(_CELL.format("differs") + '<path class="stroke" d="M2 2L9 16M9 2L2 16"/>', "differs")
    + _sample(_CELL.format("differs") + '<path class="stroke" d="M0 9h11"/>', "frozen on an old token")
    + _sample(_CELL.format("differs") + '<path class="stroke" d="M0 14L11 4"/>', "drifts in position")
    + _sample(
        _CELL.format("same") + '<path class="excluded" d="M0 0h11l-5.5 8z"/>',
        "dropped a row from the broadcast",
    )
    + _sample('<path class="none" d="M0 1h11M0 5h11M0 9h11M0 13h11M0 17h11"/>', "not comparable")
    + "</ul>"
)
