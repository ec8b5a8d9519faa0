"""The checks' page of the docs, written from the registry.

``python -m stagewatch.monitor.checkdocs > docs/checks.md``
"""

import sys
import textwrap
from typing import Final

from stagewatch.agents.lab.fault import Fault
from stagewatch.agents.lab.faults import REGISTRY
from stagewatch.agents.lab.faults_process import PROCESS_REGISTRY
from stagewatch.monitor.checks import registry
from stagewatch.monitor.checks.base import ChunkCheck, RowCheck
from stagewatch.monitor.checks.liveness import LivenessCheck

INVARIANTS: Final = {
    "I1": "the broadcast mask is the same on all ranks, None-ness included",
    "I2": "no decoding row is left out of the broadcast",
    "I3": "the last sampled token is the same on all ranks",
    "I4": "the draft block is the same on all ranks",
    "I5": "counts of computed tokens are the same on all ranks, follow from the step before, and stay below the mirror",
    "I6": "all ranks feed the same tokens at the same positions",
    "I7": "ranks that share a communicator enter the same calls",
    "I8": "no deferred update reaches a slot's next owner",
    "I9": "all ranks run the same batch",
    "I10": "tensor-parallel peers sample the same",
    "I11": "a request does not decode again before its last token was consumed",
    "I12": "recurrent state is committed on every stage, addressed by slot",
    "I13": "choices made rank by rank come out the same",
    "I14": "the drafts a grammar's bitmask was made for are the drafts verified",
    "I15": "what was sent is what was received and consumed",
    "I16": "counts, ids and positions lie in their ranges",
    "I17": "every rank goes on",
}
"""Every invariant of the field notes. A check names the one it holds, a fault those it breaks."""

NOT_OBSERVABLE: Final = {
    "I8": (
        "Updates that reach a slot's next owner are seen. Writes of a batch without a request are not: a dummy batch "
        "has no row to record, and where it writes KV is decided inside the model (vLLM PR 56734)."
    ),
    "I12": (
        "No adapter sees it. Where a recurrent state is committed is decided inside the model's own kernels and "
        "metadata builders, which differ by model and pass through none of the callables that vLLM's stages share. "
        "Its harm is seen where it makes ranks differ in what they feed; where all ranks err alike (vLLM PR 55467) "
        "only the statistics of acceptance and repetition move."
    ),
    "I14": (
        "No adapter sees it. Bitmasks are made in the scheduler's process, and neither they nor the drafts handed back "
        "to it carry the step they belong to (vLLM issue 54437), so a worker cannot tell a stale pair from a fresh "
        "one. A hand-off of drafts that differ between ranks is found as draft-block."
    ),
}

INVARIANTS_HEAD: Final = """\
The faults are those of the lab that break it, by the names of `python -m stagewatch.agents.lab faults`; first those
that break it before any other. What finds each, and in how many steps: [confusion-matrix.md](confusion-matrix.md).
"""

HEAD: Final = """\
# Checks

<!-- Written by `python -m stagewatch.monitor.checkdocs`; a test holds it to the registry. -->

A step's row is CONSISTENT, DIVERGED or INDETERMINATE, the last always with a reason: `rank_missing` (a rank was never
heard of, or fell silent), `gap` (a rank's ring was overrun), `batch_differs` (ranks ran different batches under one
ordinal), `ordinals_shifted` (a rank counted its batches otherwise than the others, and these have no counterpart on
record), `digests_differ` (ranks' sidecars use different digest keys, or only some hide request ids), `not_consumed`
(the evidence ended before every rank had come so far). A ring or stream of another schema is refused where it is read,
and its rank counts as missing. Only complete evidence accuses.

Severity only rises. An incident is one request and one cause; a cause of the whole engine is one incident, whose
chain names the first requests it harms. Findings of one step are told causes first, in the order of this page.
"""


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD, "## Invariants", "", INVARIANTS_HEAD, "| | what must hold | checks | faults |"]
    parts.append("|---|---|---|---|")
    for name, text in INVARIANTS.items():
        held = [f"[{check}](#{check})" for check in holding(name)]
        if name in NOT_OBSERVABLE:
            held.append("part of it is not observable, see below" if held else "not observable, see below")
        parts.append(f"| {name} | {text} | {', '.join(held)} | {', '.join(breaking(name)) or 'see below'} |")
    parts += ["", "## What cannot be observed", ""]
    parts += [f"- **{name}**: {' '.join(text.split())}" for name, text in NOT_OBSERVABLE.items()]
    parts += [f"- **{name}** {_control(fault)}" for name, fault in REGISTRY.items() if fault.UNSEEN]
    parts += [
        "- **Repetition and acceptance** are symptoms, kept as statistics beside an engine's verdicts. They",
        "  never raise an incident: acceptance collapses where all ranks agree, and looks normal where they do not.",
    ]
    for title, section in _sections():
        parts += ["", f"## {title}"]
        for check in section:
            parts += ["", *_entry(check)]
    return "\n".join(parts) + "\n"


def holding(invariant: str) -> list[str]:
    """Names of the checks that hold an invariant."""
    return [check.NAME for _, section in _sections() for check in section if invariant == check.INVARIANT]


def breaking(invariant: str) -> list[str]:
    """Names of the lab's faults that break an invariant, those that break it first at the front."""
    faults = {**REGISTRY, **PROCESS_REGISTRY}
    found = [name for name, fault in faults.items() if invariant in fault.INVARIANTS]
    return sorted(found, key=lambda name: faults[name].INVARIANTS.index(invariant) > 0)


def _control(fault: type[Fault]) -> str:
    cases = ", ".join(map(str, fault.CASES))
    return f"(case {cases}), a fault of the lab that must stay silent: {fault.DESCRIPTION}. {_sentence(fault.UNSEEN)}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


Check = type[LivenessCheck] | type[ChunkCheck] | type[RowCheck]


def _sections() -> list[tuple[str, tuple[Check, ...]]]:
    return [
        ("When all ranks are known", registry.ARMING_CHECKS),
        ("About once a second", registry.LIVENESS_CHECKS),
        ("On what happened between steps", registry.CHUNK_CHECKS),
        ("On every row of every step", registry.ROW_CHECKS),
        ("On what usually follows from the above", registry.SYMPTOM_CHECKS),
    ]


def _entry(check: Check) -> list[str]:
    summary = (check.__doc__ or "").strip().splitlines()[0]
    lines = [f"### {check.NAME}", "", summary, ""]
    for label, text in (
        ("Invariant", f"{check.INVARIANT}, {INVARIANTS[check.INVARIANT]}"),
        ("Compares", check.COMPARES),
        ("Severity", check.SEVERITY),
        ("Stays silent on", check.EXCEPTIONS),
        ("Remedy", check.REMEDY),
    ):
        lines += textwrap.wrap(f"- **{label}**: {text}", 120, subsequent_indent="  ", break_on_hyphens=False)
    return lines


if __name__ == "__main__":
    sys.stdout.write(page())
