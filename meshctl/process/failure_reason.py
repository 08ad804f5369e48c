"""Why a service did not start, as the end of its log says it (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile

# What services write (common/runtime/config.py, common/service/lifecycle.py,
# common/registry/consul.py).
_REFUSED = "the configuration cannot be used:"
_FAILED = "start failed"
_AWAITED = "registry_awaited"
_ANSWERED = "registry_answered"
# The log for people (`--log-format console`): `2026-... [error    ] start failed  error='...'`.
_DATED = re.compile(r"\d{4}-\d\d-\d\dT")
_ON_CONSOLE = re.compile(
    rf"""\] ({_FAILED}|{_AWAITED}|{_ANSWERED})\b(?:.*?\berror=('[^']*'|"[^"]*"|\S+))?"""
)


def reason(lines: Sequence[str]) -> list[str]:
    """The lines that say it, out of the last ones of a log; empty if none of them does."""
    for number in reversed(range(len(lines))):
        line = lines[number]
        if line.endswith(_REFUSED):
            return [line, *takewhile(lambda one: one.startswith(" "), lines[number + 1 :])]
        event, error = _told(line)
        if event == _FAILED and error:
            return [error]
    return _last_words(lines)


def _last_words(lines: Sequence[str]) -> list[str]:
    """What a service waits for, or said outside its log: in a traceback, or in its own words."""
    words: list[str] = []
    for line in lines:
        event, error = _told(line)
        if event == _AWAITED:
            words = [error]
        elif event == _ANSWERED:
            words = []
        elif line.strip() and not (line.startswith("{") or _DATED.match(line)):
            words = [line]
    return words


def _told(line: str) -> tuple[str, str]:
    """The event of a line of the log and its error: of a traceback alone, the last line."""
    if found := _ON_CONSOLE.search(line):
        return found[1], (found[2] or "").strip("'\"")
    try:
        event = json.loads(line)
        trace = event.get("exception", "").splitlines()
        return event["event"], str(event.get("error") or "".join(trace[-1:]))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", ""
