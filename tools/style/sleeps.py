"""A sleep in a test states its reason; a wait for an event is a condition with a deadline.

A sleep is allowed for a pause that is part of the case, and to prove that nothing happens. Its
reason is a comment on its line or above it: `# Sleep: the client does not read meanwhile.`
Modules that use the loop of tests/sim run in virtual time and are not checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

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


def imports(tree: ast.Module, module: str) -> bool:
    """Returns whether a module imports from another one."""
    return any(isinstance(node, ast.ImportFrom) and node.module == module for node in tree.body)


def sleeps(source: str) -> Iterator[tuple[int, bool]]:
    """Yields the line of each sleep, and whether its reason is stated."""
    tree = ast.parse(source)
    if imports(tree, VIRTUAL_TIME):
        return
    lines = ["", *source.splitlines()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_sleep(node):
            yield node.lineno, states_reason(lines, node.lineno, REASON)


def states_reason(lines: Sequence[str], number: int, word: str) -> bool:
    """Returns whether a comment on a line or above it states a reason.

    - lines: of the module; the first one has the number 1.
    - word: with which the comment begins.
    """
    above = number - 1
    while lines[above].strip().startswith("#") and word not in lines[above]:
        above -= 1
    stated = lines[above] if lines[above].strip().startswith("#") else ""
    return any(line.partition(word)[2].strip() for line in (stated, lines[number]))


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
