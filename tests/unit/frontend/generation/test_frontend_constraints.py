"""Checks of constraints: one compiles at a time, also after a time-out."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import pytest

from common.errors import InvalidRequest, Overloaded
from common.request.preprocessed import GuidedDecoding
from frontend_svc.generation import constraints
from frontend_svc.generation.constraints import ConstraintChecks
from frontend_svc.openai.body.guided import Constraint
from frontend_svc.openai.body.parsing import parse_chat
from frontend_svc.openai.body.tool_calls import plan_tools
from frontend_svc.tools.formats import HERMES
from tests.kit.waiting import until


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

    async def is_compiled() -> bool:
        with contextlib.suppress(Overloaded):
            await checks.check(of_regex("b"))
        return "b" in compiled

    await until(is_compiled, "the checks accept another constraint")


async def test_a_long_grammar_is_refused_before_its_conversion() -> None:
    guided = GuidedDecoding(grammar="root ::= " + '"a" ' * 100_000)
    with pytest.raises(InvalidRequest, match="400009/262144"):
        await ConstraintChecks(5.0).check(Constraint(guided, "guided_grammar"))


async def test_the_functions_of_a_request_share_one_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = list[GuidedDecoding]()

    def compile_slowly(guided: GuidedDecoding) -> None:
        compiled.append(guided)
        # Sleep: the compilation takes time.
        time.sleep(0.03)

    monkeypatch.setattr(constraints, "check_constraint", compile_slowly)
    for strict in (True, False):
        tools = [
            {
                "type": "function",
                "function": {
                    "name": f"f{one}",
                    "strict": strict,
                    "parameters": {"title": f"{one}"},
                },
            }
            for one in range(128)
        ]
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}
        request = parse_chat(json.dumps(body | {"tool_choice": "required"}).encode())
        plan = plan_tools(request, HERMES)
        compiled.clear()
        if strict:
            with pytest.raises(InvalidRequest, match=r"more than 0\.1 s") as refused:
                await ConstraintChecks(0.1).resolve(request, plan)
            assert (refused.value.field or "").startswith("tools[")
        else:
            guided = await ConstraintChecks(0.1).resolve(request, plan)
            assert guided is not None
            tags: Any = guided.structural_tag
            schemas = [tag["content"]["json_schema"] for tag in tags["format"]["tags"]]
            assert schemas[0] == {"type": "object", "title": "0"}
            assert schemas[-1] == {"type": "object"}, "not enforced, since there was no time left"
        assert len(compiled) < 10
