"""A `while` loop of a test or benchmark that may wait has a bound, or states why it ends.

A loop may wait if it has an `await` or a call of WAITS. It has a bound if it reads a clock, or is
inside of `asyncio.timeout` in its function. Otherwise a comment on its line or above it states what
ends it: `# Ends: the server closes the connection.` Most loops are a condition with a deadline:
tests/kit/waiting.py. Modules that use the loop of tests/sim run in virtual time and are not
checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.style.sleeps import VIRTUAL_TIME, imports, states_reason
from tools.style.sources import ROOT, report, tracked_files

FOLDERS = (
    *(f"tests/{name}" for name in ("chaos", "contract", "e2e", "fuzz", "integration", "kit")),
    *("tests/clients", "tests/sglang", "tests/unit", "bench"),
)
REASON = "# Ends: "
WAITS = {
    *("sleep", "recv", "recv_into", "read", "readline", "acquire", "wait", "select", "poll"),
    *("get", "post", "put", "send", "request", "result"),
}
CLOCKS = {"monotonic", "perf_counter", "process_time", "time"}
TIMEOUTS = {"timeout", "timeout_at"}


def _called(node: ast.AST) -> str:
    """Returns the name of a called function or method; "" for other nodes."""
    match node:
        case ast.Call(func=(ast.Attribute(attr=name) | ast.Name(id=name))):
            return name
    return ""


def _may_wait(loop: ast.While) -> bool:
    return any(isinstance(node, ast.Await) or _called(node) in WAITS for node in ast.walk(loop))


def _is_timeout(node: ast.AST) -> bool:
    return isinstance(node, ast.With | ast.AsyncWith) and any(
        _called(item.context_expr) in TIMEOUTS for item in node.items
    )


def _loops(node: ast.AST, *, is_timed: bool) -> Iterator[tuple[ast.While, bool]]:
    """Yields each loop below a node, and whether it is inside of a timeout of its function."""
    for child in ast.iter_child_nodes(node):
        timed = is_timed or _is_timeout(child)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            timed = False
        if isinstance(child, ast.While):
            yield child, timed
        yield from _loops(child, is_timed=timed)


def unbounded_loops(source: str) -> Iterator[int]:
    """Yields the line of each loop that may wait, has no bound and states no reason."""
    tree = ast.parse(source)
    if imports(tree, VIRTUAL_TIME):
        return
    lines = ["", *source.splitlines()]
    for loop, is_timed in _loops(tree, is_timed=False):
        has_clock = any(_called(node) in CLOCKS for node in ast.walk(loop))
        is_bounded = is_timed or has_clock or states_reason(lines, loop.lineno, REASON)
        if _may_wait(loop) and not is_bounded:
            yield loop.lineno


def check_loops() -> bool:
    """Returns whether each loop of tests and benchmarks that may wait ends."""
    wrong = [
        f"{path}:{line}: a loop that may wait without a bound; wait for a condition "
        f"(tests/kit/waiting.py), or state what ends it above it: {REASON}..."
        for path in tracked_files(*(f"{folder}/*.py" for folder in FOLDERS))
        for line in unbounded_loops((ROOT / path).read_text("utf-8"))
    ]
    return report("loops", wrong, "each that may wait has a bound or states what ends it")
