"""Why a service did not start, as the end of its log says it (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile

# What services write (common/config.py, common/lifecycle.py).
_REFUSED = "the configuration cannot be used:"
_FAILED = "start failed"
# The log for people (`--log-format console`): `2026-... [error    ] start failed  error='...'`.
_DATED = re.compile(r"\d{4}-\d\d-\d\dT")
_FAILED_ON_CONSOLE = re.compile(rf"""\] {_FAILED} .*?\berror=('[^']*'|"[^"]*"|\S+)""")


def reason(lines: Sequence[str]) -> list[str]:
    """The lines that say it, out of the last ones of a log; empty if none of them does."""
    for number in reversed(range(len(lines))):
        line = lines[number]
        if line.endswith(_REFUSED):
            return [line, *takewhile(lambda one: one.startswith(" "), lines[number + 1 :])]
        if why := _failure(line):
            return [why]
    # Not a line of the log: the last one of a traceback, or of somebody's own words.
    plain = [line for line in lines if not (line.startswith("{") or _DATED.match(line))]
    return [line for line in plain if line.strip()][-1:]


def _failure(line: str) -> str:
    """The error of a `start failed`, the last line of its traceback where that is all it has."""
    if found := _FAILED_ON_CONSOLE.search(line):
        return found[1].strip("'\"")
    try:
        event = json.loads(line)
        if event["event"] != _FAILED:
            return ""
        return str(event.get("error") or event["exception"].splitlines()[-1])
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
