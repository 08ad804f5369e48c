"""Functions have at most LINES_MAX lines, from `def` to the end, without the docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.style.sources import PRODUCT, modules, report, stale

LINES_MAX = 70
# Functions that are still longer. The list only shrinks.
LONGER: set[str] = set()


def long_functions(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Yields name, line and length of each function that is too long."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or 0) - node.lineno + 1
        first = node.body[0]
        if ast.get_docstring(node, clean=False) is not None:
            length -= (first.end_lineno or 0) - first.lineno + 1
        if length > LINES_MAX:
            yield node.name, node.lineno, length


def check_function_lengths() -> bool:
    """Returns whether no function of product code is too long."""
    found = [(path, *long) for path, tree in modules(*PRODUCT) for long in long_functions(tree)]
    wrong = [
        f"{path}:{line}: function {name} has {length} lines; limit {LINES_MAX}"
        for path, name, line, length in found
        if name not in LONGER
    ]
    wrong += stale("LONGER", LONGER, {name for _, name, _, _ in found})
    return report("functions", wrong, f"{len(LONGER)} above {LINES_MAX} lines, as listed")
