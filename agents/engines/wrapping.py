"""Wrappers around an engine's callables that cannot hurt it.

The engine's call always runs, exactly once, with its own arguments, and its result or exception passes
through untouched. What a hook raises disarms the probe and goes no further, whatever it is; only what ends the
process (KeyboardInterrupt, SystemExit: a signal that arrived while a hook ran) is the engine's business.

A wrapper is as flat as it is because it is called many times a step, each time with caches that the engine's
own work has had: every function called in it would be fetched anew.
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

    Hooks run while the probe is armed and the set is not ``suspended``; else a call goes straight to the engine.
    """

    def __init__(self, probe: Probe) -> None:
        self.suspended = False
        self._probe: Final = probe
        self._wrapped: Final[list[_Wrapped]] = []
        self._spent_ns = 0

    def active(self) -> bool:
        """Whether hooks run at present."""
        return self._probe.armed and not self.suspended

    def wrap(self, target: Any, name: str, before: Before | None = None, after: After | None = None) -> None:
        """Put a wrapper in place of ``target.name``. Raises AttributeError where there is nothing to wrap."""
        original = getattr(target, name)
        probe, clock = self._probe, time.perf_counter_ns

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not probe.armed or self.suspended:
                return original(*args, **kwargs)
            seen = None
            if before is not None:
                began = clock()
                try:
                    seen = before(args, kwargs)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001  # whatever it is, it must not reach the engine
                    try:
                        self._failed(before, error)
                    except Exception:  # noqa: BLE001  # see `Probe.fell`
                        probe.fell, probe.armed = (name, error.with_traceback(None)), False
                self._spent_ns += clock() - began
            result = original(*args, **kwargs)
            if after is not None and probe.armed:
                began = clock()
                try:
                    after(seen, result, args, kwargs)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001  # whatever it is, it must not reach the engine
                    try:
                        self._failed(after, error)
                    except Exception:  # noqa: BLE001  # see `Probe.fell`
                        probe.fell, probe.armed = (name, error.with_traceback(None)), False
                self._spent_ns += clock() - began
            return result

        setattr(call, _ACTIVE, self.active)
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

    def _failed(self, hook: Callable[..., Any], error: BaseException) -> None:
        self._probe.disarm(f"{getattr(hook, '__name__', 'hook').lstrip('_')} failed: {one_line(error)}")

    def settle(self) -> None:
        """Account to the probe's current step what its hooks took; called once a step, because that costs, too."""
        spent, self._spent_ns = self._spent_ns, 0
        self._probe.spent(spent)


def is_watched(function: Any) -> bool:
    """Whether ``function`` is a wrapper whose hooks still run."""
    return bool(getattr(function, _ACTIVE, bool)())


def argument(args: Args, kwargs: Kwargs, position: int, name: str) -> Any:
    """The argument that a caller gave by position or by name; None if it gave neither."""
    if len(args) > position:
        return args[position]
    return kwargs.get(name)
