"""Configuration that must be equal on all ranks of an engine, compared before the first request."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

from stagewatch.agents.identity import Identity
from stagewatch.monitor.checks.base import Finding, Phase
from stagewatch.monitor.checks.liveness import Progress
from stagewatch.monitor.incidents import Severity, Value

CONFIGURED: Final = "draft_configured"
"""What a rank's configuration says of its draft model, in the same words as `LOADED`."""
LOADED: Final = "draft_loaded"


class Configuration:
    """Ranks of one engine run the same engine with the same settings."""

    NAME: ClassVar = "configuration"
    INVARIANT: ClassVar = "I13"
    COMPARES: ClassVar = (
        "engine version, broadcast variant, K, vocabulary, model length and each rank's fingerprints; within a rank, "
        "the draft model as loaded with what its configuration says of it"
    )
    SEVERITY: ClassVar = "warning"
    EXCEPTIONS: ClassVar = (
        "settings that a rank does not report; draft models of different stages, of which loading changes the "
        "configuration; what a draft model shares with its target"
    )
    REMEDY: ClassVar = (
        "Start all ranks from one image with one set of flags and environment variables, and compare the named "
        "setting between the nodes."
    )

    def look(self, progress: Progress) -> Iterable[Finding]:
        """One finding for each setting that differs between the ranks heard of."""
        known = [(rank.index, rank.identity) for rank in progress.ranks if rank.identity is not None]
        yield from self._contradictions(progress, known)
        settings: dict[str, dict[int, str]] = {}
        for index, identity in known:
            for name, value in _settings(identity):
                settings.setdefault(name, {})[index] = value
        for place, (name, by_index) in enumerate(settings.items()):
            if len(set(by_index.values())) < 2:
                continue
            common, count = Counter(by_index.values()).most_common(1)[0]
            blamed: tuple[int, ...] = ()
            if count * 2 > len(by_index) > 2:
                blamed = progress.group.numbers([i for i, value in by_index.items() if value != common])
            yield Finding(
                check=self.NAME,
                severity=Severity.WARNING,
                step=0,
                phase=Phase.INPUTS,
                text=f"{name} differs between ranks",
                remedy=self.REMEDY,
                of_step=False,
                row=place,
                ranks=blamed or progress.group.numbers(sorted(by_index)),
                blamed=blamed,
                fields=(name,),
                values=tuple(Value(progress.group.number(i), name, by_index[i]) for i in sorted(by_index)),
                t_ns=progress.first_heard_ns,
            )

    def _contradictions(self, progress: Progress, known: Sequence[tuple[int, Identity]]) -> Iterator[Finding]:
        """One finding where ranks loaded another draft model than their own configuration describes."""
        wrong: dict[int, tuple[str, str]] = {}
        for index, identity in known:
            told = {one.name: one.value for one in identity.config if one.name in (CONFIGURED, LOADED)}
            if len(told) == 2 and told[CONFIGURED] != told[LOADED]:
                wrong[index] = told[CONFIGURED], told[LOADED]
        if not wrong:
            return
        numbers = progress.group.numbers(sorted(wrong))
        yield Finding(
            check=self.NAME,
            severity=Severity.WARNING,
            step=0,
            phase=Phase.INPUTS,
            text="the draft model as loaded contradicts its own configuration",
            remedy=self.REMEDY,
            of_step=False,
            row=-1,
            ranks=numbers,
            blamed=numbers,
            fields=(LOADED,),
            values=tuple(
                Value(progress.group.number(index), name, value)
                for index in sorted(wrong)
                for name, value in zip((CONFIGURED, LOADED), wrong[index], strict=True)
            ),
            t_ns=progress.first_heard_ns,
        )


def _settings(identity: Identity) -> Iterator[tuple[str, str]]:
    yield "engine_version", identity.engine_version
    yield "variant", identity.variant
    yield "spec_tokens", str(identity.spec_tokens)
    yield "vocab_size", str(identity.vocab_size)
    yield "max_model_len", str(identity.max_model_len)
    yield "sizes", f"dp {identity.sizes.dp}, pp {identity.sizes.pp}, tp {identity.sizes.tp}"
    for fingerprint in identity.config:
        if fingerprint.name not in (CONFIGURED, LOADED):
            yield fingerprint.name, fingerprint.value
