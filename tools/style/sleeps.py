"""A sleep in a test states its reason; a wait for an event is a condition with a deadline.

A sleep is allowed for a pause that is part of the case, and to prove that nothing happens. Its
reason is a comment on its line or above it: `# Sleep: the client does not read meanwhile.`
Modules that use the loop of tests/sim run in virtual time and are not checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.style.sources import ROOT, report, tracked_files

FOLDERS = ("chaos", "contract", "e2e", "integration", "unit")
REASON = "# Sleep: "
VIRTUAL_TIME = "tests.sim.loop"


def _is_sleep(call: ast.Call) -> bool:
    """Returns whether the call pauses. `sleep(0)` only lets other tasks run."""
    match call.func, call.args:
        case ((ast.Attribute(attr="sleep") | ast.Name(id="sleep")), [seconds, *_]):
            return not (isinstance(seconds, ast.Constant) and seconds.value == 0)
    return False


def _imports(tree: ast.Module, module: str) -> bool:
    return any(isinstance(node, ast.ImportFrom) and node.module == module for node in tree.body)


def sleeps(source: str) -> Iterator[tuple[int, bool]]:
    """Yields the line of each sleep, and whether its reason is stated."""
    tree = ast.parse(source)
    if _imports(tree, VIRTUAL_TIME):
        return
    lines = ["", *source.splitlines()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_sleep(node):
            above = node.lineno - 1
            while lines[above].strip().startswith("#") and REASON not in lines[above]:
                above -= 1
            stated = lines[above] if lines[above].strip().startswith("#") else ""
            reasons = (line.partition(REASON)[2].strip() for line in (stated, lines[node.lineno]))
            yield node.lineno, any(reasons)


def check_sleeps() -> bool:
    """Returns whether each sleep of the tests states its reason."""
    found = [
        (path, *sleep)
        for path in tracked_files(*(f"tests/{folder}/*.py" for folder in FOLDERS))
        for sleep in sleeps((ROOT / path).read_text("utf-8"))
    ]
    wrong = [
        f"{path}:{line}: a sleep without a reason; wait for a condition (tests/kit/waiting.py), "
        f"or state the reason above it: {REASON}..."
        for path, line, has_reason in found
        if not has_reason
    ]
    return report("sleeps", wrong, f"{len(found)} in tests, each with a reason")
