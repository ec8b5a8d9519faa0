"""What makes an identity, as a hello tells it, unacceptable."""

from stagewatch.agents.identity import Identity


def fault_of(identity: Identity) -> str:
    """What makes an identity unacceptable; empty if nothing does."""
    rank, sizes = identity.rank, identity.sizes
    if not all(1 <= size <= 4096 for size in (sizes.dp, sizes.pp, sizes.tp)):
        return "a parallel size outside 1 to 4096"
    if sizes.pp * sizes.tp > 4096:
        return f"{sizes.pp} stages of {sizes.tp} ranks exceed 4096 ranks to compare"
    if not (0 <= rank.dp < sizes.dp and 0 <= rank.pp < sizes.pp and 0 <= rank.tp < sizes.tp):
        return f"rank {rank} is outside its own sizes"
    if not _is_name(identity.deployment, 64) or not _is_name(identity.instance, 128):
        return "deployment or instance is not 1 to 64 (128) letters, digits, dots, dashes or underscores"
    texts = (identity.host, identity.engine, identity.engine_version, identity.variant)
    if any(len(text) > 256 or not text.isprintable() for text in texts):
        return "host, engine, version or variant is longer than 256 characters or not printable"
    if len(identity.config) > 256 or any(len(f.name) > 128 or len(f.value) > 1024 for f in identity.config):
        return "more than 256 configuration fingerprints, or one of more than 1024 characters"
    return ""


def _is_name(text: str, length_max: int) -> bool:
    return 1 <= len(text) <= length_max and text.isascii() and all(c.isalnum() or c in "._-" for c in text)
