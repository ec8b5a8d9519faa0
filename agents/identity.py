"""Who a record comes from: one rank of one life of one engine."""

import msgspec


class Rank(msgspec.Struct, frozen=True, order=True):
    """Coordinates of a worker."""

    dp: int
    pp: int
    """Pipeline stage, 0 first."""
    tp: int

    def __str__(self) -> str:
        return f"dp{self.dp}.pp{self.pp}.tp{self.tp}"


class Sizes(msgspec.Struct, frozen=True):
    """Extents of the parallel dimensions."""

    dp: int
    pp: int
    tp: int


class Fingerprint(msgspec.Struct, frozen=True):
    """One named part of a rank's configuration that must be equal on all ranks of an engine."""

    name: str
    value: str


class Node(msgspec.Struct, frozen=True, array_like=True):
    """What a sidecar tells of itself with every batch, since its start. Fields are only ever added at the end."""

    sidecar: str
    """Which one: 16 hex digits, new at each start."""
    ring_removed: int = 0
    """Records of rings that were removed before anybody acknowledged them."""
    ring_unreadable: int = 0
    """Records of rings that could not be read on."""
    rings_refused: int = 0
    """Files in its directory, now, that are no rings it can read."""
    windows_dropped: int = 0
    """Frozen windows removed because newer ones needed their room, and requests for which there was no time."""


class Identity(msgspec.Struct, frozen=True):
    """What a ring's header and every wire frame say of their rank."""

    deployment: str
    instance: str
    """Unique to one life of one engine (vLLM: ``VllmConfig.instance_id``): never compare across lives."""
    rank: Rank
    sizes: Sizes
    host: str
    pid: int
    engine: str
    """The engine's name: ``vllm``, ``lab``."""
    engine_version: str
    variant: str
    """Shape of the engine's broadcast path that the adapter found, e.g. ``C``."""
    spec_tokens: int
    """Largest number of draft tokens per row (K); 0 without speculation."""
    vocab_size: int
    max_model_len: int
    started_ns: int
    config: tuple[Fingerprint, ...] = ()

    @property
    def ring_name(self) -> str:
        """File name of the rank's ring, without directory."""
        return f"{self.instance}.{self.rank}.ring"
