"""What differs between what is in Grafana and what is wanted."""

import difflib
import json
from typing import Any, Final

REDACTED: Final = "[REDACTED]"
"""What Grafana shows in place of a secret."""


def alike(there: Any, wanted: Any) -> Any:
    """``there``, as far as ``wanted`` says anything: Grafana adds ids, versions and defaults of its own.

    And it leaves out what is false, empty or nought (Go's ``omitempty``, as in ``continue`` of a route).
    """
    if isinstance(wanted, dict) and isinstance(there, dict):
        return {
            key: value if key not in there and not value else alike(there.get(key), value)
            for key, value in wanted.items()
        }
    if isinstance(wanted, list) and isinstance(there, list):
        if len(there) != len(wanted):
            return there
        return [alike(one, other) for one, other in zip(there, wanted, strict=True)]
    return wanted if there == REDACTED else there


def difference(there: Any, wanted: Any) -> list[str]:
    """Lines of a unified diff, without its head; empty where nothing differs."""
    before = _lines(alike(there, wanted)) if there is not None else []
    lines = difflib.unified_diff(before, _lines(wanted), lineterm="", n=2)
    return list(lines)[2:]


def _lines(value: Any) -> list[str]:
    return json.dumps(value, indent=2, sort_keys=True).splitlines()
