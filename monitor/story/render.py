"""Stories as text for a terminal of any width. Whatever a recording says is made printable first."""

from collections.abc import Iterable, Iterator

from stagewatch.monitor.story.diff import DiffStory
from stagewatch.monitor.story.incident import IncidentStory
from stagewatch.monitor.story.records import Fed
from stagewatch.monitor.story.request import Life, RequestStory, StepOfRequest
from stagewatch.monitor.story.sides import COMPARED, Divergence, value_of
from stagewatch.monitor.story.step import RowOfStep, StepStory
from stagewatch.monitor.story.whatif import WhatIf
from stagewatch.monitor.text import Style, incident_text, printable, wrapped

_IN: str = " " * 14


def incident_story_text(story: IncidentStory, style: Style) -> str:
    """An incident in full."""
    lines = [incident_text(story.incident, style, names_engine=True)]
    if story.divergence is not None:
        lines += ["", *_divergence(story.divergence, style)]
    if story.steps:
        lines += ["", style.paint("  the request's steps around it", "label")]
        lines += [line for step in story.steps for line in _step(step, style)]
    if story.fixed_mask is not None:
        lines += ["", *_what_if(story.fixed_mask, style)]
    if story.step is not None:
        lines += ["", step_text(story.step, style)]
    return "\n".join(lines)


def request_text(story: RequestStory, style: Style) -> str:
    """A request's whole life."""
    replica = f", replica {story.dp}" if story.dp else ""
    lines = [
        wrapped(style.paint(f"request {printable(story.request)}", "title"), style, "  "),
        wrapped(f"  engine {printable(story.instance)}{replica}, key {story.key}", style, "  "),
    ]
    for life in story.lives:
        lines += _life(life, style)
    if not story.lives:
        lines.append(wrapped("  the last stage recorded no step of it", style, "  "))
    for incident in story.incidents:
        told = f"  {incident.severity} {incident.check} at step {incident.first_bad_step}: incident {incident.id}"
        lines.append(wrapped(told, style, "    "))
    if not story.incidents:
        lines.append("  no incident")
    lines += _caveats(story.lost_records, story.rows_left_out, style)
    return "\n".join(lines)


def _caveats(lost: int, left_out: int, style: Style) -> Iterator[str]:
    if lost:
        yield wrapped(f"  {lost} records of the engine were lost: steps may be missing", style, "  ")
    if left_out:
        yield wrapped(f"  {left_out} further rows are not shown: narrow it down with --step A:B", style, "  ")


def _life(life: Life, style: Style) -> Iterator[str]:
    admitted = (
        f"admitted after step {life.admitted_after}" if life.admitted_after >= 0 else "admission not recorded"
    )
    cap = f", cap {life.cap}" if life.cap >= 0 else ""
    yield wrapped(
        f"  {admitted}: slot {life.slot}, generation {life.generation}, prompt {life.prompt_len}{cap}",
        style,
        "    ",
    )
    for step in life.steps:
        yield from _step(step, style)
    ended = f" after step {life.ended_after}" if life.ended_after >= 0 else ""
    yield wrapped(f"  {life.end}{ended}, {life.tokens} tokens sampled", style, "    ")
    if life.divergence is not None:
        yield from _divergence(life.divergence, style)
    yield from _what_if(life.fixed_mask, style)


def _step(step: StepOfRequest, style: Style) -> Iterator[str]:
    if step.what == "decode":
        told = f"decode at {step.position}: {step.scheduled} tokens, {step.drafts} drafts"
        if step.sampled >= 0:
            told += f", {step.accepted} accepted, {step.rejected} rejected"
    else:
        told = f"{step.what} at {step.position}: {step.scheduled} tokens"
    yield wrapped(f"  step {step.step:<6} {told}", style, _IN)
    if step.sampled > 0:
        yield wrapped(f"{_IN}sampled {step.sampled}: {step.tokens}", style, _IN)
    if step.excluded:
        told = f"{_IN}left out of the broadcast, though the fixed mask keeps it"
        yield style.paint(wrapped(told, style, _IN), "warning")
    for each in step.consumed:
        if not each.applied and not step.excluded and step.sampled > 0:
            yield wrapped(f"{_IN}not written by rank {each.rank} at step {each.at}", style, _IN)
    if step.differs_in:
        told = f"{_IN}ranks differ in {', '.join(step.differs_in)}"
        yield style.paint(wrapped(told, style, _IN), "critical")


def _divergence(found: Divergence, style: Style) -> Iterator[str]:
    equal = (
        f"last equal at step {found.last_equal_step}" if found.last_equal_step else "no equal step on record"
    )
    yield style.paint(
        wrapped(f"  {equal}, first different at step {found.first_different_step}", style, "  "), "label"
    )
    for field in found.fields:
        yield f"    {field}"
        for side in found.sides:
            if side.field == field:
                before = f"{side.last_equal} -> " if side.last_equal else ""
                yield wrapped(f"      rank {side.rank:<3} {before}{side.first_different}", style, " " * 15)


def _what_if(found: WhatIf, style: Style) -> Iterator[str]:
    yield wrapped(f"  under the fixed mask: {found.answer}", style, "    ")
    yield wrapped(f"    {found.why}", style, "    ")
    for value in found.values:
        yield wrapped(
            f"    rank {value.rank} {value.field}: held {value.held}, would hold {value.would_hold}, "
            f"the last stage {value.last_stage}",
            style,
            " " * 8,
        )


def step_text(story: StepStory, style: Style) -> str:
    """One step, row by row."""
    ranks = ", ".join(map(str, story.ranks)) or "none"
    lines = [
        style.paint(wrapped(f"step {story.step} of {printable(story.instance)}", style, "  "), "title"),
        wrapped(f"  recorded by ranks {ranks}: {len(story.rows)} rows", style, "  "),
    ]
    for row in story.rows:
        lines += _row(row, style)
    if story.calls:
        lines.append(style.paint("  calls entered", "label"))
        lines += _calls(story, style)
    for incident in story.incidents:
        told = f"  {incident.severity} {incident.check}: incident {incident.id}"
        lines.append(wrapped(told, style, "    "))
    return "\n".join(lines)


def _calls(story: StepStory, style: Style) -> Iterator[str]:
    by_rank: dict[int, list[str]] = {}
    for call in story.calls:
        by_rank.setdefault(call.rank, []).append(f"{call.what} {call.numel}")
    told: dict[str, list[int]] = {}
    for rank, calls in sorted(by_rank.items()):
        told.setdefault(", ".join(calls), []).append(rank)
    for calls_text, ranks in told.items():
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        yield wrapped(f"    {who}: {printable(calls_text)}", style, " " * 8)


def _row(row: RowOfStep, style: Style) -> Iterator[str]:
    yield wrapped(f"  request {printable(row.request)}", style, "    ")
    if row.fed:
        last = row.fed[-1]
        what = "prefill chunk" if last.prefilling else "decode"
        yield wrapped(f"    {what}, {last.scheduled} tokens, {last.draft_count} drafts", style, "      ")
    for name, attribute in COMPARED:
        yield from _field(name, [(each.rank, _shown(each, attribute)) for each in row.fed], style)
    if row.missing:
        yield wrapped(f"    not recorded by ranks {', '.join(map(str, row.missing))}", style, "      ")
    masks = [
        (m.rank, f"{'in' if m.engine else 'out'}, fixed {'in' if m.fixed else 'out'}") for m in row.masked
    ]
    yield from _field("mask", masks, style)
    for kind in ("sent", "received", "consumed"):
        told = [
            (s.rank, f"{s.num_sampled} sampled, {s.num_rejected} rejected, {s.tokens if s.num_sampled > 0 else ''}"
             f"{'' if s.applied else ' (not applied)'}")
            for s in row.sent
            if s.kind == kind
        ]  # fmt: skip
        yield from _field(kind, told, style)


def _shown(row: Fed, attribute: str) -> str:
    return value_of(row, attribute) or "(unused)"


def _field(name: str, values: list[tuple[int, str]], style: Style) -> Iterator[str]:
    """One field: once where all ranks say the same, rank by rank where they do not."""
    if not values:
        return
    if len({value for _, value in values}) == 1:
        yield wrapped(f"    {name:<20} {values[0][1]}", style, " " * 6)
        return
    yield style.paint(f"    {name}", "critical")
    for rank, value in values:
        yield wrapped(f"      rank {rank:<3} {value}", style, " " * 15)


def diff_text(story: DiffStory, name: dict[int, str], style: Style) -> str:
    """Two ranks."""
    lines = [
        style.paint(
            wrapped(f"ranks {story.one} and {story.other} of {printable(story.instance)}", style, "  "),
            "title",
        ),
        wrapped(f"  {story.steps} steps, {story.rows} rows: {story.rows_different} different", style, "  "),
    ]
    lines += [f"    {check:<22} {rows}" for check, rows in sorted(story.by_check.items())]
    if story.batches_different:
        lines.append(wrapped(f"  {story.batches_different} steps with different batches", style, "  "))
    if story.steps_of_one_alone:
        lines.append(
            wrapped(f"  {story.steps_of_one_alone} steps that only one of them recorded", style, "  ")
        )
    for first in story.first:
        lines.append(
            wrapped(f"  request {printable(name.get(first.request, f'{first.request:016x}'))}", style, "    ")
        )
        equal = (
            f"last equal at step {first.last_equal_step}"
            if first.last_equal_step
            else "no equal step on record"
        )
        lines.append(wrapped(f"    {equal}, first different at step {first.step}", style, "      "))
        for pair in first.pairs:
            lines.append(f"    {pair.field}")
            for rank, before, now in (
                (story.one, pair.one_before, pair.one),
                (story.other, pair.other_before, pair.other),
            ):
                told = f"{before} -> {now}" if before else now
                lines.append(wrapped(f"      rank {rank:<3} {told}", style, " " * 15))
    if story.requests_left_out:
        lines.append(wrapped(f"  {story.requests_left_out} further requests differ", style, "  "))
    return "\n".join(lines)


def joined(parts: Iterable[str]) -> str:
    """Several stories, one after the other."""
    return "\n\n".join(parts)
