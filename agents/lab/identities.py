"""What a lab rank says of itself."""

from importlib.metadata import version
from typing import Final

from stagewatch.agents.identity import Fingerprint, Identity, Rank, Sizes

BASE_FINGERPRINTS: Final = (Fingerprint("model", "lab"), Fingerprint("drafter_layout", "embedding tied"))


def lab_identity(
    rank: Rank,
    sizes: Sizes,
    *,
    deployment: str,
    instance: str,
    spec_tokens: int,
    vocab_size: int,
    max_model_len: int,
    config: tuple[Fingerprint, ...] = BASE_FINGERPRINTS,
    host: str = "lab",
    pid: int = 0,
    started_ns: int = 0,
) -> Identity:
    """Identity of a lab rank."""
    return Identity(
        deployment,
        instance,
        rank,
        sizes,
        host,
        pid,
        "lab",
        version("stagewatch"),
        "lab",
        spec_tokens,
        vocab_size,
        max_model_len,
        started_ns,
        config,
    )
