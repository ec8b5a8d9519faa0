"""Every check, in the order in which findings of one step and phase are told: causes before symptoms."""

from typing import Final

from stagewatch.monitor.checks.base import ChunkCheck, RowCheck
from stagewatch.monitor.checks.draft_block import DraftBlock
from stagewatch.monitor.checks.excluded_row import ExcludedRow
from stagewatch.monitor.checks.input_divergence import InputDivergence
from stagewatch.monitor.checks.last_sampled import LastSampled
from stagewatch.monitor.checks.mask_disagreement import MaskDisagreement
from stagewatch.monitor.checks.position_drift import PositionDrift

CHUNK_CHECKS: Final[tuple[type[ChunkCheck], ...]] = (MaskDisagreement, ExcludedRow)
ROW_CHECKS: Final[tuple[type[RowCheck], ...]] = (DraftBlock, LastSampled, PositionDrift, InputDivergence)

NAMES: Final = (*(check.NAME for check in CHUNK_CHECKS), *(check.NAME for check in ROW_CHECKS))
ORDER: Final = {name: place for place, name in enumerate(NAMES)}
