# ruff: noqa: ANN001, ANN202  # signatures are those of vLLM and Triton, which are loose
"""General plugin: an engine that can run here, and the faults a test orders.

``STAGEWATCH_LAB_FAULT`` names faults, separated by commas; see `faults`.
"""

import os

_registered = False


def register() -> None:
    """Patch this process's vLLM."""
    global _registered
    if _registered:
        return
    _registered = True
    _allow_asynchronous_scheduling()
    from stagewatch_vllm_lab import faults

    for name in filter(None, os.environ.get("STAGEWATCH_LAB_FAULT", "").split(",")):
        faults.FAULTS[name]()


def _allow_asynchronous_scheduling() -> None:
    """Keep ``async_scheduling=True``, which the CPU platform would turn off.

    Without it, pipeline stages with speculative decoding fail an assertion in prepare_inputs.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config):
        asked = bool(vllm_config.scheduler_config.async_scheduling)
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
