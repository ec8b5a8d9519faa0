"""Errors that a user can act on: each message is one line, names the cause and the way out."""


def one_line(error: BaseException) -> str:
    """Type and message of an exception in one line, in any case: it never raises."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # noqa: BLE001  # an exception that cannot say what it is must not raise another
        return type(error).__name__


class StagewatchError(Exception):
    """Base of every error that the commands print without a traceback."""


class RingError(StagewatchError):
    """A ring file that cannot be created, opened or trusted."""


class RecordError(StagewatchError):
    """Bytes that are not a record of this build's layout."""


class SettingsError(StagewatchError):
    """A setting that is missing, malformed or contradicts another."""


class FrameError(StagewatchError):
    """A wire frame that is malformed or over a limit."""


class FrameLimitError(FrameError):
    """A wire frame that is over a limit; ``limit`` says which, as a label: one of `stagewatch.agents.wire.LIMITS`."""

    def __init__(self, message: str, limit: str) -> None:
        super().__init__(message)
        self.limit = limit
