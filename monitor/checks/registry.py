"""Every check, in the order in which findings of one step and phase are told: causes before symptoms."""

from typing import Final

from stagewatch.monitor.checks.base import ChunkCheck, RowCheck
from stagewatch.monitor.checks.batch_disagreement import BatchDisagreement
from stagewatch.monitor.checks.cadence import Cadence
from stagewatch.monitor.checks.collective_order import CollectiveOrder
from stagewatch.monitor.checks.configuration import Configuration
from stagewatch.monitor.checks.count_continuity import CountContinuity
from stagewatch.monitor.checks.draft_block import DraftBlock
from stagewatch.monitor.checks.excluded_row import ExcludedRow
from stagewatch.monitor.checks.input_divergence import InputDivergence
from stagewatch.monitor.checks.last_sampled import LastSampled
from stagewatch.monitor.checks.liveness import LivenessCheck
from stagewatch.monitor.checks.mask_disagreement import MaskDisagreement
from stagewatch.monitor.checks.mirror_behind import MirrorBehind
from stagewatch.monitor.checks.ordinal_shift import OrdinalShift
from stagewatch.monitor.checks.path_choice import PathChoice
from stagewatch.monitor.checks.payload_mismatch import PayloadMismatch
from stagewatch.monitor.checks.position_drift import PositionDrift
from stagewatch.monitor.checks.rank_silent import RankSilent
from stagewatch.monitor.checks.rank_unarmed import RankUnarmed
from stagewatch.monitor.checks.slot_generation import SlotGeneration
from stagewatch.monitor.checks.stall import Stall
from stagewatch.monitor.checks.tp_disagreement import TpDisagreement
from stagewatch.monitor.checks.value_range import ValueRange

CHUNK_CHECKS: Final[tuple[type[ChunkCheck], ...]] = (
    OrdinalShift,
    BatchDisagreement,
    SlotGeneration,
    TpDisagreement,
    PayloadMismatch,
    Cadence,
    MirrorBehind,
    PathChoice,
    CollectiveOrder,
    MaskDisagreement,
    ExcludedRow,
)
ROW_CHECKS: Final[tuple[type[RowCheck], ...]] = (DraftBlock, LastSampled, PositionDrift, InputDivergence)
SYMPTOM_CHECKS: Final[tuple[type[ChunkCheck], ...]] = (CountContinuity, ValueRange)
"""Chunk checks whose findings usually follow from what the others find."""

ARMING_CHECKS: Final[tuple[type[LivenessCheck], ...]] = (Configuration,)
"""Run once, when every rank was heard of."""
LIVENESS_CHECKS: Final[tuple[type[LivenessCheck], ...]] = (RankUnarmed, RankSilent, Stall)
"""Run about once a second: what they find depends on the time."""

NAMES: Final = (
    *(check.NAME for check in (*ARMING_CHECKS, *LIVENESS_CHECKS)),
    *(check.NAME for check in CHUNK_CHECKS),
    *(check.NAME for check in ROW_CHECKS),
    *(check.NAME for check in SYMPTOM_CHECKS),
)
ORDER: Final = {name: place for place, name in enumerate(NAMES)}
