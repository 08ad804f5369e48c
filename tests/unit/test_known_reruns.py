"""The noted causes of reruns."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.known_reruns import CAUSES, without_cause

ROOT = Path(__file__).parents[2]


def test_a_rerun_of_any_parameters_needs_one_noted_cause() -> None:
    reruns = ["t.py::test_b", "t.py::test_a[1]", "t.py::test_a[2-x[y]]", "t.py::test_c[1]"]
    assert without_cause(reruns, {"t.py::test_c": "a slow disk"}) == [
        "t.py::test_a",
        "t.py::test_b",
    ]


@pytest.mark.parametrize("test", CAUSES)
def test_a_noted_cause_is_that_of_an_existing_test(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert name in {function.name for function in functions}
