"""The order of the modules of tests."""

from __future__ import annotations

from pathlib import Path

from tests.module_order import LONG_S, longest_first

ROOT = Path(__file__).parents[2]


def test_long_modules_come_first_then_those_with_many_tests() -> None:
    few, many = "tests/unit/a.py::one", [f"tests/unit/b.py::{n}" for n in range(3)]
    long = [f"tests/e2e/test_fuzz.py::{n}" for n in (2, 1)]
    longest = "tests/e2e/test_rolling.py::one"
    given = [few, *many, *long, longest]
    assert sorted(given, key=longest_first(given)) == [longest, *long, *many, few]


def test_the_long_modules_exist() -> None:
    assert [path for path in LONG_S if not (ROOT / path).exists()] == []
