"""Wrappers around an engine's callables that cannot hurt it.

The engine's call always runs, exactly once, with its own arguments, and its result or exception passes
through untouched. What a hook raises disarms the probe and goes no further.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stagewatch.agents.errors import one_line
from stagewatch.agents.probe import Probe

_ACTIVE: Final = "_stagewatch_active"

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Before = Callable[[Args, Kwargs], Any]
"""Called before the engine's callable; its value is handed to the hook after it."""
After = Callable[[Any, Any, Args, Kwargs], None]
"""Called after the engine's callable with (value of the hook before, result, args, kwargs)."""


@dataclass(frozen=True, slots=True)
class _Wrapped:
    target: Any
    name: str
    wrapper: Callable[..., Any]
    own: bool
    """Whether the target itself held the attribute, rather than its class."""
    original: Callable[..., Any]


class Wrapping:
    """A set of wrappers over attributes of objects, classes or modules, installed together and removed together.

    ``active`` says whether hooks run at present; where it is false a call goes straight to the engine.
    """

    def __init__(self, probe: Probe, active: Callable[[], bool]) -> None:
        self._probe = probe
        self._active = active
        self._wrapped: list[_Wrapped] = []
        self._spent_ns = 0

    def wrap(self, target: Any, name: str, before: Before | None = None, after: After | None = None) -> None:
        """Put a wrapper in place of ``target.name``. Raises AttributeError where there is nothing to wrap."""
        original = getattr(target, name)
        active, safely = self._active, self._safely

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not active():
                return original(*args, **kwargs)
            seen = safely(before, args, kwargs) if before is not None else None
            result = original(*args, **kwargs)
            if after is not None:
                safely(after, seen, result, args, kwargs)
            return result

        setattr(call, _ACTIVE, active)
        own = name in getattr(target, "__dict__", {})
        setattr(target, name, call)
        self._wrapped.append(_Wrapped(target, name, call, own, original))

    def remove(self) -> None:
        """Take every wrapper off again. One that somebody wrapped since stays, and passes calls through."""
        while self._wrapped:
            found = self._wrapped.pop()
            if getattr(found.target, "__dict__", {}).get(found.name) is not found.wrapper:
                continue
            if found.own:
                setattr(found.target, found.name, found.original)
            else:
                delattr(found.target, found.name)

    def _safely(self, hook: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter_ns()
        try:
            return hook(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not reach the engine
            name = getattr(hook, "__name__", "hook").lstrip("_")
            self._probe.disarm(f"{name} failed: {one_line(error)}")
            return None
        finally:
            self._spent_ns += time.perf_counter_ns() - began

    def settle(self) -> None:
        """Account to the probe's current step what its hooks took; called once a step, because that costs, too."""
        spent, self._spent_ns = self._spent_ns, 0
        self._probe.spent(spent)


def is_watched(function: Any) -> bool:
    """Whether ``function`` is a wrapper whose hooks still run."""
    return bool(getattr(function, _ACTIVE, bool)())


def argument(args: Args, kwargs: Kwargs, position: int, name: str) -> Any:
    """The argument that a caller gave by position or by name; None if it gave neither."""
    return kwargs[name] if name in kwargs else args[position] if len(args) > position else None
