"""Names: log events are snake_case; one public class name is defined once in each service."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tools.style.sources import SERVICES, modules, report

LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
LOGGERS = {"log", "LOG", "logger"}
EVENT = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def check_log_events() -> bool:
    """Returns whether each log event of product code is snake_case."""
    wrong = [
        f"{path}:{node.lineno}: log event is not snake_case: {node.args[0].value!r}"
        for path, tree in modules(*SERVICES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LOG_METHODS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGGERS
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and not EVENT.fullmatch(str(node.args[0].value))
    ]
    return report("log events", wrong, "all snake_case")


def check_class_names() -> bool:
    """Returns whether no public class name is defined in two modules of one service."""
    wrong = []
    for service in SERVICES:
        places: dict[str, list[str]] = defaultdict(list)
        for path, tree in modules(service):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(path)
        wrong += [
            f"{service}: class {name} is defined in {', '.join(paths)}"
            for name, paths in sorted(places.items())
            if len(paths) > 1
        ]
    return report("class names", wrong, "each once in its service")
