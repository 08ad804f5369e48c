"""The events of the logs, from the calls in the code."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from tools.docs.references.text import code, page, table
from tools.style.names import LOG_METHODS, LOGGERS
from tools.style.sources import modules

SERVICES: Final = (
    *("frontend_svc", "router_svc", "indexer_svc", "worker_svc", "batch_svc", "console_svc"),
    *("epp_svc", "meshctl", "common"),
)
_NOTE: Final = """Each line of a log is a JSON object (`--log-format console` is for reading it \
directly) with `event`, `level`, `timestamp`, `instance`, `name` and the fields of the event. \
[`meshctl logs`](../operations.md#meshctl-logs) merges the logs of a mesh. The module in the last \
column decides when the event is written; events of `common` are those of several services."""


@dataclass(slots=True)
class _Event:
    levels: set[str] = field(default_factory=set)
    fields: dict[str, None] = field(default_factory=dict)
    modules: dict[str, None] = field(default_factory=dict)


def log_events_page() -> str:
    """Returns the page of all events."""
    parts = [_NOTE]
    for service in SERVICES:
        events = _events(service)
        parts.append(f"## {service.removesuffix('_svc')}")
        parts.append(
            table(
                ["event", "level", "fields", "module"],
                (
                    [
                        code(name),
                        ", ".join(sorted(event.levels)),
                        ", ".join(map(code, event.fields)),
                        ", ".join(map(code, event.modules)),
                    ]
                    for name, event in sorted(events.items())
                ),
            )
        )
    return page("Log events", "the calls that write logs", *parts)


def _events(service: str) -> dict[str, _Event]:
    found: dict[str, _Event] = defaultdict(_Event)
    for path, tree in modules(service):
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=logger), attr=level),
                    args=[ast.Constant(value=str(name)), *_],
                ) if logger in LOGGERS and level in LOG_METHODS:
                    pass
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=logger), attr="log"),
                    args=[_, ast.Constant(value=str(name)), *_],
                ) if logger in LOGGERS:
                    level = "by outcome"
                case _:
                    continue
            event = found[name]
            event.levels.add(level)
            event.modules[path] = None
            event.fields.update({word.arg: None for word in node.keywords if word.arg})
    return found
