"""The columns of the Parquet tables: the schema, and what its documentation is made from."""

from dataclasses import dataclass
from typing import Final, Literal

SCHEMA_VERSION: Final = "1"
"""Rises when a column goes or changes its meaning; new columns do not raise it."""

Type = Literal[
    "string",
    "bool",
    "uint8",
    "int32",
    "int64",
    "uint64",
    "time",
    "int32 list",
    "string list",
    "links",
    "values",
]


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    type: Type
    what: str
    raw: bool = False
    """Holds token values: null unless they were asked for."""


@dataclass(frozen=True, slots=True)
class Table:
    """One file."""

    name: str
    what: str
    columns: tuple[Column, ...]


_WHO: Final = (
    Column("instance", "string", "engine instance: one life of one engine"),
    Column("dp", "int32", "replica"),
    Column("pp", "int32", "pipeline stage, 0 first"),
    Column("tp", "int32", "tensor-parallel rank"),
    Column("rank", "int32", "number in engine order, `(dp * pp_size + pp) * tp_size + tp`"),
)
_WHEN: Final = (
    Column("step", "int64", "ordinal of the step; of a payload, of the step that sent it"),
    Column("time", "time", "the rank's wall clock when it was recorded, UTC; null in recorded traces"),
)
_ROW: Final = (
    Column("row", "int32", "place in the step's batch, 0 first"),
    Column("request", "string", "request id; null where no record names it"),
    Column("request_key", "uint64", "the request's key; there even without its id"),
    Column("slot", "int32", "slot of the rank's own tables"),
    Column("generation", "int32", "how often the slot was given out"),
)

INPUTS: Final = Table(
    "inputs",
    "what each rank fed: one row per rank, step and batch row",
    (
        *_WHO,
        *_WHEN,
        *_ROW,
        Column("prefilling", "bool", "the row runs a prefill chunk"),
        Column("num_computed", "int32", "tokens computed, as the device holds it"),
        Column("num_computed_mirror", "int32", "the same as the CPU's mirror holds it"),
        Column("prefill_len", "int32", "tokens to prefill"),
        Column("cap", "int32", "tokens at which the request ends; null where unknown"),
        Column("scheduled", "int32", "tokens fed"),
        Column("draft_count", "int32", "draft tokens among them"),
        Column("position", "int32", "the first position fed"),
        Column("position_shape", "uint64", "order-sensitive sum over the other positions, relative to the first"),
        Column("input_ids_digest", "uint64", "of the tokens fed"),
        Column("last_sampled_digest", "uint64", "of `last_sampled_tokens[slot]`; defined for decoding rows"),
        Column("draft_tokens_digest", "uint64", "of the drafts that the step uses"),
        Column("flags", "uint8", "1 id below 0, 2 beyond the vocabulary, 4 position out of range, 16 drafts all zero, "
               "32 what is fed is last token and drafts"),
        Column("input_ids", "int32 list", "the tokens fed", raw=True),
        Column("last_sampled", "int32", "the last sampled token", raw=True),
        Column("draft_tokens", "int32 list", "the whole draft block", raw=True),
    ),
)  # fmt: skip
MASKS: Final = Table(
    "masks",
    "which rows a step's broadcast holds: one row per rank, step and batch row",
    (
        *_WHO,
        *_WHEN,
        Column("row", "int32", "place in the step's batch, 0 first"),
        Column(
            "engine", "bool", "by the engine's mask; no row where it is None, so that nothing is broadcast"
        ),
        Column("fixed", "bool", "by the fixed mask, which is None where no row yields a sample"),
    ),
)
PAYLOADS: Final = Table(
    "payloads",
    "broadcasts: one row per rank, kind, step and batch row",
    (
        *_WHO,
        *_WHEN,
        Column("kind", "string", "`sent`, `received` or `consumed`"),
        Column("at", "int64", "step before which it was consumed; null where it was not"),
        *_ROW,
        Column("generation_now", "int32", "the slot's generation when it was consumed"),
        Column("applied", "bool", "in the mask when sent or received; written to its slot when consumed"),
        Column("num_sampled", "int32", "tokens sampled"),
        Column("num_rejected", "int32", "draft tokens rejected"),
        Column("tokens_digest", "uint64", "of the sampled tokens"),
        Column("last_digest", "uint64", "of the last of them; 0 for a row that sampled none"),
        Column("draft_tokens_digest", "uint64", "of the draft block"),
        Column("flags", "uint8", "1 id below 0, 2 beyond the vocabulary, 8 counts out of range"),
        Column("tokens", "int32 list", "the sampled tokens, `num_sampled` of them", raw=True),
        Column("draft_tokens", "int32 list", "the draft block", raw=True),
    ),
)
RECORDS: Final = Table(
    "records",
    "every record: one row per rank and sequence number",
    (
        *_WHO,
        *_WHEN,
        Column("seq", "int64", "sequence number on its rank"),
        Column("kind", "string", "`inputs`, `mask`, `sent`, `received`, `consumed`, `bind`, `free`, `collective`, "
               "`heartbeat`, `note`"),
        Column("rows", "int32", "batch rows; null for what has none"),
        Column("at", "int64", "of a payload, the step before which it was consumed"),
        Column("skipped", "bool", "of a payload, whether the engine broadcast nothing"),
        Column("slot", "int32", "of a bind or free"),
        Column("generation", "int32", "of a bind or free"),
        Column("request_key", "uint64", "of a bind or free"),
        Column("prompt_len", "int32", "of a bind"),
        Column("cap", "int32", "of a bind; null where unknown"),
        Column("numel", "int64", "elements of a collective"),
        Column("text", "string", "request id of a bind, `group op dtype` of a collective, a heartbeat's JSON, a note"),
    ),
)  # fmt: skip
RANKS: Final = Table(
    "ranks",
    "who recorded: one row per rank",
    (
        *_WHO,
        Column("deployment", "string", "deployment"),
        Column("host", "string", "host name"),
        Column("pid", "int64", "process"),
        Column("engine", "string", "the engine's name; `trace` for a recorded trace"),
        Column("engine_version", "string", "its version"),
        Column("spec_tokens", "int32", "most draft tokens a row; null where unknown"),
        Column("started", "time", "when the rank began, UTC"),
        Column("lost_records", "int64", "records that were overwritten or damaged before they could be read"),
    ),
)
INCIDENTS: Final = Table(
    "incidents",
    "what the checks found: one row per incident, worst first",
    (
        Column("id", "string", "16 hex digits, the same live and in every replay"),
        Column("deployment", "string", "deployment"),
        Column("instance", "string", "engine instance"),
        Column("dp", "int32", "replica"),
        Column("check", "string", "the check (docs/checks.md)"),
        Column("severity", "string", "`notice`, `warning` or `critical`"),
        Column("request", "string", "request id; null where the cause belongs to none"),
        Column("first_bad_step", "int64", "first bad step"),
        Column("first_bad_time", "time", "when the first rank recorded it, UTC"),
        Column("last_good_step", "int64", "last step found consistent; null where there was none"),
        Column("last_bad_step", "int64", "newest bad step"),
        Column("ranks", "int32 list", "ranks whose evidence disagrees"),
        Column("blamed", "int32 list", "ranks found wrong; empty where undecided"),
        Column("fields", "string list", "what differs"),
        Column("chain", "links", "the chain of cause: `step`, `text`"),
        Column("values", "values", "what each rank held: `rank`, `field`, `text`"),
        Column("remedy", "string", "what to do"),
    ),
)
TABLES: Final = (INPUTS, MASKS, PAYLOADS, RECORDS, RANKS, INCIDENTS)
