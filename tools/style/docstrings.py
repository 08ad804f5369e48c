"""A docstring does not pack explanations of many fields or parameters into running text.

The rule concerns the docstring of a class (its fields, properties, attributes and the parameters of
its constructor) and of a function (its parameters). A name is explained where a sentence or a line
starts with it: `name: text`, `name, other: text`, or the name in backticks. A paragraph that
explains more than NAMES_MAX names must be a list, in which each explanation starts a line.

The text of a field of a dataclass is better placed below the field, as a string of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.style.sources import PRODUCT, modules, report

NAMES_MAX = 3

_NAMES = r"`?\w+`?(?:(?:, | and | or )`?\w+`?)*"
# At the start of a line or sentence: "name:", "name, other:"; or names in backticks.
_EXPLANATION = re.compile(
    rf"(?P<start>^|(?<=[.;:)]) )(?:(?P<colon>{_NAMES})(?: \([^)]*\))?:(?=\s|$)"
    rf"|(?P<ticks>`\w+`(?:(?:, | and | or )`\w+`)*)(?=\s|$))",
    re.M,
)

Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = node.args
    return {
        argument.arg for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    }


def _attributes(constructor: ast.FunctionDef) -> set[str]:
    return {
        target.attr
        for target in ast.walk(constructor)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def explainable_names(node: Documented) -> set[str]:
    """Returns the fields of a class or the parameters of a function."""
    if not isinstance(node, ast.ClassDef):
        return _parameters(node) - {"self", "cls"}
    names = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef):
            if statement.name == "__init__":
                names |= _parameters(statement) | _attributes(statement)
            elif statement.decorator_list:
                names.add(statement.name)
    return names - {"self"}


def is_packed(paragraph: str, names: set[str]) -> bool:
    """Returns whether running text explains more than NAMES_MAX of the names."""
    explained = set()
    is_list = True
    for match in _EXPLANATION.finditer(paragraph):
        found = names.intersection(re.findall(r"\w+", match["colon"] or match["ticks"]))
        explained |= found
        is_list = is_list and not (found and match["start"])
    return len(explained) > NAMES_MAX and not is_list


def packed_docstrings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields name and line of each class and function with a packed docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)):
            names = explainable_names(node)
            if any(is_packed(part, names) for part in re.split(r"\n\s*\n", docstring)):
                yield node.name, node.lineno


def check_packed_docstrings() -> bool:
    """Returns whether no docstring of product code packs explanations."""
    found = [
        (path, *packed) for path, tree in modules(*PRODUCT) for packed in packed_docstrings(tree)
    ]
    wrong = [
        f"{path}:{line}: the docstring of {name} explains more than {NAMES_MAX} names in running "
        "text; write one line under each field, or a list"
        for path, name, line in found
    ]
    return report("docstrings", wrong, "none packed")
