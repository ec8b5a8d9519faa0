"""The `vllm.general_plugins` entry point. vLLM calls `register` once in every process it starts.

Imports nothing of stagewatch unless asked to watch, so that an engine without the variable runs as if
this package were not installed. vLLM guards the import of a plugin but not the call: what `register` raised would
end the engine.
"""

import logging
import os

RING_DIR = "STAGEWATCH_RING_DIR"
"""Same name as `stagewatch.agents.settings.RING_DIR`, repeated here so that nothing has to be imported."""


def register() -> None:
    """Arm this process's worker, if it turns out to be one, where ``STAGEWATCH_RING_DIR`` is set."""
    if not os.environ.get(RING_DIR):
        return
    try:
        from stagewatch.agents.engines import vllm

        vllm.install()
    except Exception as error:  # noqa: BLE001  # whatever it is, it must not reach the engine
        said = " ".join(f"{type(error).__name__}: {error}".split())
        logging.getLogger("stagewatch").warning(
            "stagewatch: not armed: %s. The engine is not affected.", said
        )
