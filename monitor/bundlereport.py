"""The report in a bundle, for people who open it with nothing of ours: the same as plain text and as a page."""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from stagewatch.agents.identity import Identity
from stagewatch.monitor.bundlefile import EVIDENCE, INCIDENT, SETTINGS, Manifest
from stagewatch.monitor.story.incident import IncidentStory
from stagewatch.monitor.story.render import incident_story_text
from stagewatch.monitor.text import Style, printable, wrapped

_STYLE: Final = Style(100, colour=False)
_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ margin: 1.5rem auto; max-width: 110ch; padding: 0 1rem; font: 15px/1.45 system-ui, sans-serif }}
pre {{ overflow-x: auto; font: 13px/1.4 ui-monospace, monospace }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<pre>{text}</pre>
</main>
</body>
</html>
"""


def report_text(manifest: Manifest, story: IncidentStory, identities: Sequence[Identity]) -> str:
    """The report as text of at most 100 columns, but for names that are longer."""
    made = datetime.fromtimestamp(manifest.made_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    paragraphs = [
        incident_story_text(story, _STYLE),
        f"Engine {manifest.instance} of deployment {manifest.deployment}. Packed {made} by {manifest.made_by}.",
        _evidence(manifest),
        _tokens(manifest),
        f"`stagewatch replay THIS_FILE show {manifest.incident}` tells the same from {EVIDENCE}; {INCIDENT} is the "
        f"incident for machines, {SETTINGS} what each rank said of itself.",
    ]
    lines = [paragraphs[0], *(wrapped(printable(paragraph), _STYLE) for paragraph in paragraphs[1:])]
    lines += ["Ranks\n" + "\n".join(_rank(identity) for identity in identities)]
    if manifest.windows:
        told = "\n".join(printable(_window(manifest, place)) for place in range(len(manifest.windows)))
        lines += ["Windows that the sidecars froze, on the nodes\n" + told]
    return "\n\n".join(lines) + "\n"


def page_of(text: str, title: str) -> str:
    """A report's text as a page that loads nothing."""
    return _PAGE.format(title=escape(title), text=escape(text))


def _evidence(manifest: Manifest) -> str:
    steps = f"steps {manifest.first_step} to {manifest.last_step}"
    held = (
        f"all of the engine that the journal held, {steps}"
        if manifest.whole
        else f"everything journalled of {steps}, and of earlier ones which request took which slot; other incidents "
        "than this one may look different here than they were"
    )
    if manifest.reproduces:
        return f"The evidence is {held}. Replayed, it says of this incident what was said when it was found."
    return (
        f"The evidence is {held}. Replayed, it does not say of this incident all that was said when it was found: a "
        "part of what it was found in is gone from the journal, or the incident was still growing."
    )


def _tokens(manifest: Manifest) -> str:
    if manifest.raw_tokens:
        return "It holds token values: what users asked and were answered can be read from it."
    if manifest.raw_left_out:
        return "Token values were recorded and are left out: tokens are keyed digests here."
    return "Tokens are keyed digests; no token value was recorded."


def _rank(identity: Identity) -> str:
    settings = ", ".join(f"{f.name} {f.value}" for f in identity.config)
    line = (
        f"  {identity.rank} on {identity.host}: {identity.engine} {identity.engine_version}, variant "
        f"{identity.variant}, {identity.spec_tokens} draft tokens{f'; {settings}' if settings else ''}"
    )
    return wrapped(printable(line), _STYLE, "      ")


def _window(manifest: Manifest, place: int) -> str:
    window = manifest.windows[place]
    if window.failure:
        return f"  {window.rank} on {window.host}: none: {window.failure}"
    return (
        f"  {window.rank} on {window.host}: {window.path} (steps {window.first_step} to {window.last_step})"
    )
