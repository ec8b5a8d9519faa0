"""The watch as bytes and back, so that a restart does not have to judge again what was judged.

Python's own pickling, for the watch is arrays and plain objects that refer to one another. What is thawed may name
only classes of the modules that make up the watch: such bytes can make no file, open no connection and call nothing
else.
They fit one build only, the one that wrote them: `build` tells.
"""

import builtins
import collections
import io
import pickle
import re
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from stagewatch import agents, monitor
from stagewatch.agents.errors import StagewatchError, one_line

_WATCH: Final = "stagewatch.monitor.watch"
_EVIDENCE: Final = ("stagewatch.agents.blocks", "stagewatch.agents.identity", "stagewatch.agents.record")
_IMPORT: Final = re.compile(r"^from (stagewatch\.monitor[\w.]*) import \(?([\w, ]*)", re.MULTILINE)
_PLAIN: Final[dict[tuple[str, str], Any]] = {
    **{
        ("builtins", name): getattr(builtins, name)
        for name in ("set", "frozenset", "range", "slice", "complex")
    },
    **{
        ("collections", name): getattr(collections, name)
        for name in ("Counter", "OrderedDict", "defaultdict", "deque")
    },
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("builtins", "int"): int,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
}
_NUMPY: Final = frozenset({"_reconstruct", "scalar", "_frombuffer"})
"""Functions by which arrays and numbers of numpy come back."""
_NUMPY_MODULES: Final = frozenset(
    {"numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"}
)


class FrozenError(StagewatchError):
    """Bytes that are no watch of this build."""


def freeze(watch: object) -> bytes:
    """A watch as bytes. Raises FrozenError where it holds what cannot be frozen."""
    try:
        return pickle.dumps(watch, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise FrozenError(f"the watch cannot be saved: {one_line(error)}") from None


def thaw(data: bytes) -> object:
    """What `freeze` made the bytes of. Raises FrozenError."""
    try:
        return _Thawer(io.BytesIO(data)).load()
    except FrozenError:
        raise
    except Exception as error:  # noqa: BLE001  # damaged pickles raise whatever the classes they name raise
        raise FrozenError(f"a saved watch cannot be read: {one_line(error)}") from None


class _Thawer(pickle.Unpickler):
    """Unpickles what a watch is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that a watch may be made of. Raises FrozenError for anything else."""
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module in _NUMPY_MODULES and name in _NUMPY:
            return super().find_class(module, name)
        if (module, name) == ("msgspec._core", "rebuild"):
            return _rebuild
        if module in modules_of_a_watch() and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise FrozenError(f"a saved watch names {module[:60]}.{name[:60]}, which no watch is made of")


def _rebuild(cls: type, state: dict[str, Any]) -> Any:
    """A structure of msgspec from its fields, as its own function does it, for structures alone."""
    if not (isinstance(cls, type) and issubclass(cls, msgspec.Struct)):
        raise FrozenError("a saved watch calls something that is no structure")
    return cls(**state)


@cache
def modules_of_a_watch() -> frozenset[str]:
    """Names of the modules whose classes a watch may be made of: what it imports, and the evidence it holds."""
    found: set[str] = set()
    waiting = [_WATCH]
    while waiting:
        module = waiting.pop()
        path = Path(monitor.__path__[0], *module.split(".")[2:]).with_suffix(".py")
        if module in found or not path.is_file():
            continue
        found.add(module)
        for package, names in _IMPORT.findall(path.read_text()):
            waiting += [package, *(f"{package}.{name.strip()}" for name in names.split(","))]
    return frozenset(found | {*_EVIDENCE})


@cache
def build() -> str:
    """What tells this build from another: a digest of our own source."""
    digest = blake2b(digest_size=16)
    for package in (agents, monitor):
        (root,) = {Path(path) for path in package.__path__}
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0")
            digest.update(blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
