# ruff: noqa: ANN001, ANN201, ANN205  # signatures are those of vLLM and Triton, which are loose
"""The backend's compiler half: present, never used."""

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    """Claims the cpu target; compiling is an error, because kernels are interpreted."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "stagewatch-interpreted"

    def parse_options(self, options):
        raise NotImplementedError

    def add_stages(self, stages, options, language=None):
        raise NotImplementedError

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
