"""The reason of a failed start, from the end of the service's log (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile

# Written by common/runtime/config.py, common/service/lifecycle.py and common/registry.
_CONFIG_REJECTED = "the configuration cannot be used:"
_START_FAILED = "start_failed"
_REGISTRY_AWAITED = "registry_awaited"
_REGISTRY_ANSWERED = "registry_answered"
# `--log-format console`: `2026-... [error    ] start_failed  error='...'`.
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT")
_CONSOLE_EVENTS = f"({_START_FAILED}|{_REGISTRY_AWAITED}|{_REGISTRY_ANSWERED})"
_CONSOLE_LINE = re.compile(rf"""\] {_CONSOLE_EVENTS}\b(?:.*?\berror=('[^']*'|"[^"]*"|\S+))?""")


def reason(lines: Sequence[str]) -> list[str]:
    """The lines with the reason, from the last lines of a log; empty if there is none."""
    for number in reversed(range(len(lines))):
        line = lines[number]
        if line.endswith(_CONFIG_REJECTED):
            return [line, *takewhile(lambda one: one.startswith(" "), lines[number + 1 :])]
        event, error = _parse_log_line(line)
        if event == _START_FAILED and error:
            return [error]
    return _last_output(lines)


def _last_output(lines: Sequence[str]) -> list[str]:
    """The cause of a wait for the registry, or the last line that is not a log event."""
    message_lines: list[str] = []
    for line in lines:
        event, error = _parse_log_line(line)
        if event == _REGISTRY_AWAITED:
            message_lines = [error]
        elif event == _REGISTRY_ANSWERED:
            message_lines = []
        elif line.strip() and not (line.startswith("{") or _TIMESTAMP.match(line)):
            message_lines = [line]
    return message_lines


def _parse_log_line(line: str) -> tuple[str, str]:
    """The event and the error of a log line; of a traceback, its last line."""
    if found := _CONSOLE_LINE.search(line):
        return found[1], (found[2] or "").strip("'\"")
    try:
        event = json.loads(line)
        trace = event.get("exception", "").splitlines()
        return event["event"], str(event.get("error") or "".join(trace[-1:]))
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", ""
