"""The registry of faults: every one that can be put into the lab, by name."""

from typing import Final

from stagewatch.agents.identity import Sizes
from stagewatch.agents.lab import faults_agreed, faults_group, faults_stage
from stagewatch.agents.lab.fault import Fault, FaultError, Injection, Plan, Where
from stagewatch.agents.lab.faults_process import PROCESS_REGISTRY

__all__ = ["REGISTRY", "Fault", "FaultError", "Injection", "Plan", "Where", "make_fault"]

REGISTRY: Final[dict[str, type[Fault]]] = {
    fault.NAME: fault for fault in (*faults_stage.FAULTS, *faults_group.FAULTS, *faults_agreed.FAULTS)
}
"""Every fault by name; the founding one first, and last those that leave all ranks agreed."""


def make_fault(plan: Plan | None, sizes: Sizes, spec_tokens: int) -> Fault:
    """The fault of ``plan``, or the sound engine for None. Raises FaultError where it cannot happen."""
    if plan is None:
        return Fault()
    found = REGISTRY.get(plan.name) or PROCESS_REGISTRY.get(plan.name)
    if found is None:
        raise FaultError(f"fault {plan.name!r} is unknown: choose one of {', '.join(REGISTRY)}")
    for dimension in ("dp", "pp", "tp"):
        least = getattr(found.LEAST, dimension)
        if getattr(sizes, dimension) < least:
            raise FaultError(f"fault {plan.name} needs {dimension} of {least} or more")
    if spec_tokens < found.LEAST_SPEC_TOKENS:
        raise FaultError(f"fault {plan.name} needs {found.LEAST_SPEC_TOKENS} draft tokens or more")
    return found(plan)
