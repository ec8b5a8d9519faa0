"""The hotfix: a mask that is proven faulty gives way to the fixed one, on all ranks or on none.

Half a replacement would be worse than none: ranks whose masks differ broadcast different things and hang.
So every rank whose own mask is proven faulty casts a vote into the store that torch.distributed rendezvoused
over. Votes are cast when a model has been loaded; no rank executes a step before all ranks have loaded, so at
its first step each rank finds every vote that will ever be cast. Whoever comes first counts them and
settles the matter with one atomic compare-and-set, and everybody reads what was settled. No collective is
called and nothing is waited for.
"""

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stagewatch.agents.engines.vllm_mask import MaskVerdict, judge_mask, sound_mask
from stagewatch.agents.engines.vllm_variants import Finding
from stagewatch.agents.errors import one_line
from stagewatch.agents.mask import BoolArray

log = logging.getLogger("stagewatch")

_PREFIX: Final = "stagewatch/fixed-mask"
_ENGINE_MODULES: Final = "vllm.v1.worker"
_REPLACE: Final = b"replace"
_KEEP: Final = b"keep"


@dataclass(frozen=True, slots=True)
class Ballot:
    """A place to vote: the store and this rank's seat among ``world_size`` ranks."""

    store: Any
    """A ``torch.distributed.Store``."""
    rank: int
    world_size: int

    def cast(self, vote: str) -> None:
        """Say what this rank would do, and on what grounds."""
        self.store.set(f"{_PREFIX}/{self.rank}", vote)

    def settle(self, vote: str) -> bool:
        """Whether all ranks replace their mask: all have cast the same ``vote``. The same answer on every rank."""
        keys = [f"{_PREFIX}/{rank}" for rank in range(self.world_size)]
        unanimous = self.store.check(keys) and all(self.store.get(key) == vote.encode() for key in keys)
        wanted = _REPLACE if unanimous else _KEEP
        return bytes(self.store.compare_set(f"{_PREFIX}/settled", "", wanted.decode())) == _REPLACE


def ballot_of(distributed: Any) -> Ballot:
    """The ballot of this process's default process group. Raises where torch offers no store."""
    store = distributed.distributed_c10d._get_default_store()
    return Ballot(store, distributed.get_rank(), distributed.get_world_size())


class Hotfix:
    """Replaces ``pp_utils.compute_need_sampled_mask`` once that is settled.

    ``note`` leaves a sentence for the operator. Until the first step, and for good where ranks do not
    agree, the engine's own mask answers.
    """

    def __init__(self, runner: Any, pp_utils: Any, finding: Finding, note: Callable[[str], None]) -> None:
        self.in_force = False
        self._runner = runner
        self._pp_utils = pp_utils
        self._finding = finding
        self._note = note
        self._original = pp_utils.compute_need_sampled_mask

    def prepare(self, ballot: Callable[[], Ballot]) -> MaskVerdict:
        """Judge the engine's mask; where it is proven faulty, vote, and settle at the first step."""
        verdict = judge_mask(self._original, refined=self._finding.refined)
        if verdict.verdict == "sound":
            self._say(f"fixed mask refused: the engine's own mask is sound ({verdict.why})")
        elif verdict.verdict == "unknown":
            self._say(f"fixed mask refused: the engine's own mask {verdict.why}")
        elif holders := self._other_holders():
            self._say(f"fixed mask refused: {', '.join(holders)} would go on using the engine's own mask")
        else:
            vote = f"{self._finding.variant} {verdict.results}"
            seat = ballot()
            seat.cast(vote)
            self._pp_utils.compute_need_sampled_mask = self._mask
            self._settle_at_first_step(seat, vote)
        return verdict

    def _other_holders(self) -> list[str]:
        """Modules of the engine, besides the mask's own, that hold the mask under a name of theirs.

        Replaced in one place only, it would be two masks in one rank.
        """
        return sorted(
            name
            for name, module in list(sys.modules.items())
            if name.startswith(_ENGINE_MODULES)
            and module is not self._pp_utils
            and any(value is self._original for value in list(vars(module).values()))
        )

    def _settle_at_first_step(self, ballot: Ballot, vote: str) -> None:
        runner = self._runner
        execute_model = runner.execute_model

        @functools.wraps(execute_model)
        def first_step(*args: Any, **kwargs: Any) -> Any:
            if runner.__dict__.get("execute_model") is first_step:
                del runner.execute_model
            if not settled:
                settled.append(True)
                self._settle(ballot, vote)
            return execute_model(*args, **kwargs)

        settled: list[bool] = []
        runner.execute_model = first_step

    def _settle(self, ballot: Ballot, vote: str) -> None:
        try:
            self.in_force = ballot.settle(vote)
        except Exception as error:  # noqa: BLE001  # a store that is gone must not stop the engine
            self._say(f"fixed mask refused: the ranks could not agree: {one_line(error)}")
            return
        if self.in_force:
            self._say(
                "FIXED MASK IN FORCE: the engine's own mask is faulty and has been replaced on all ranks"
            )
        else:
            self._say(
                "fixed mask refused: not every rank asked for it on the same grounds, so none replaces its mask"
            )

    def _mask(self, input_batch: Any) -> BoolArray | None:
        if not self.in_force:
            mask: BoolArray | None = self._original(input_batch)
            return mask
        caps = self._runner.req_states.max_seq_len[input_batch.idx_mapping_np]
        return sound_mask(input_batch, refined=self._finding.refined, max_seq_len=caps)

    def _say(self, text: str) -> None:
        log.warning("stagewatch: %s.", text)
        self._note(text)
