"""Checks of constraints: one compiles at a time, also after a time-out."""

from __future__ import annotations

import asyncio
import threading

import pytest

from common.errors import InvalidRequest, Overloaded
from common.request.preprocessed import GuidedDecoding
from frontend_svc.core.openai.guided import Constraint
from frontend_svc.models import constraints
from frontend_svc.models.constraints import ConstraintChecks


def of_regex(regex: str) -> Constraint:
    return Constraint(GuidedDecoding(regex=regex), "guided_regex")


async def test_a_slow_constraint_occupies_one_thread_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end, compiled = threading.Event(), list[str | None]()

    def compile_slowly(guided: GuidedDecoding) -> None:
        compiled.append(guided.regex)
        assert may_end.wait(30.0)

    monkeypatch.setattr(constraints, "check_constraint", compile_slowly)
    checks = ConstraintChecks(0.05)
    with pytest.raises(InvalidRequest, match=r"more than 0\.05 s"):
        await checks.check(of_regex("a"))
    with pytest.raises(Overloaded):
        await checks.check(of_regex("b"))
    assert compiled == ["a"], "the second one has not begun"
    may_end.set()
    while "b" not in compiled:
        try:
            await checks.check(of_regex("b"))
        except Overloaded:
            await asyncio.sleep(0.01)


async def test_a_long_grammar_is_refused_before_its_conversion() -> None:
    guided = GuidedDecoding(grammar="root ::= " + '"a" ' * 100_000)
    with pytest.raises(InvalidRequest, match="400009/262144"):
        await ConstraintChecks(5.0).check(Constraint(guided, "guided_grammar"))
