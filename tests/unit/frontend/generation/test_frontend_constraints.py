"""Checks of constraints: in trials, with a limit of time for each and for all of a request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from common.errors import InvalidRequest, MeshError, Overloaded, Unavailable
from common.request.preprocessed import GuidedDecoding
from common.trials.constraints import PREPARE
from common.trials.fair_trials import FairTrials
from common.trials.trial import Trial, TrialRefused
from common.trials.trials import Trials
from frontend_svc.generation.constraints import ConstraintChecks
from frontend_svc.openai.body.guided import Constraint
from frontend_svc.openai.body.parsing import parse_chat
from frontend_svc.openai.body.tool_calls import plan_tools
from frontend_svc.tools.formats import HERMES
from tests.kit.bombs import CONSTRAINT_BOMBS

pytestmark = pytest.mark.slow


class SlowTrials(FairTrials):
    """Trials that take a while and pass. compiled: in their order."""

    def __init__(self) -> None:
        super().__init__(Trials(()))
        self.compiled: list[GuidedDecoding] = []

    # Any: JSON.
    async def run(self, trial: Trial, sender: str, deadline_s: float) -> Any:
        self.compiled += trial.arguments
        # Sleep: the compilation takes time.
        await asyncio.sleep(0.03)


@pytest.fixture(scope="module")
def trials() -> Trials:
    return Trials((PREPARE,))


def of_regex(regex: str) -> Constraint:
    return Constraint(GuidedDecoding(regex=regex), "guided_regex")


async def refusal(checks: ConstraintChecks, constraint: Constraint) -> InvalidRequest:
    """The error of a constraint; on a busy machine the first trials may get no processor."""
    for _ in range(10):
        try:
            await checks.check(constraint, "tenant")
        except InvalidRequest as error:
            return error
        except Overloaded:
            continue
    raise AssertionError("the constraint passed, or got no processor")


async def test_a_constraint_without_end_delays_no_others(trials: Trials) -> None:
    checks = ConstraintChecks(FairTrials(trials), 0.5)
    loop = asyncio.get_running_loop()
    await checks.check(of_regex("a+"), "tenant")
    schema = CONSTRAINT_BOMBS["an intersection of digits"]["guided_json"]
    bomb = Constraint(GuidedDecoding(json=schema), "guided_json")
    refused = asyncio.create_task(refusal(checks, bomb))
    try:
        for number, tenant in enumerate(("tenant", "other", "third")):
            begin = loop.time()
            await checks.check(of_regex(f"b{number}"), tenant)
            print(f"{tenant}: {loop.time() - begin:.3f} s")
        assert not refused.done()
        error = await refused
    finally:
        refused.cancel()
    assert "more than 0.5 s to compile" in error.message
    assert error.field == "guided_json"


async def test_a_constraint_that_passed_needs_no_other_trial() -> None:
    slow = SlowTrials()
    checks = ConstraintChecks(slow, 2.0)
    for _ in range(3):
        await checks.check(of_regex("a"), "tenant")
    await checks.check(of_regex("b"), "tenant")
    assert [guided.regex for guided in slow.compiled] == ["a", "b"]


async def test_a_long_grammar_is_refused_before_its_conversion(trials: Trials) -> None:
    guided = GuidedDecoding(grammar="root ::= " + '"a" ' * 100_000)
    checks = ConstraintChecks(FairTrials(trials), 5.0)
    with pytest.raises(InvalidRequest, match="400009/262144"):
        await checks.check(Constraint(guided, "guided_grammar"), "tenant")


async def test_the_functions_of_a_request_share_one_time_limit() -> None:
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
        slow = SlowTrials()
        checks = ConstraintChecks(slow, 0.1)
        if strict:
            with pytest.raises(InvalidRequest, match=r"more than 0\.1 s") as refused:
                await checks.resolve(request, plan, "tenant")
            assert (refused.value.field or "").startswith("tools[")
        else:
            guided = await checks.resolve(request, plan, "tenant")
            assert guided is not None
            tags: Any = guided.structural_tag
            schemas = [tag["content"]["json_schema"] for tag in tags["format"]["tags"]]
            assert schemas[0] == {"type": "object", "title": "0"}
            assert schemas[-1] == {"type": "object"}, "not enforced, since there was no time left"
        assert len(slow.compiled) < 10


async def test_requests_with_the_same_new_constraint_share_one_trial() -> None:
    trials = SlowTrials()
    checks = ConstraintChecks(trials, 0.5)
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(checks.check(of_regex("a+"), "tenant")) for _ in range(300)]
        # Sleep: the first one is in its trial.
        await asyncio.sleep(0.01)
        waiting[0].cancel()
    assert trials.compiled == [GuidedDecoding(regex="a+")] * 2, "one for the cancelled request"


async def test_requests_with_the_same_invalid_constraint_share_its_error() -> None:
    class RefusingTrials(SlowTrials):
        async def run(self, trial: Trial, sender: str, deadline_s: float) -> Any:
            await super().run(trial, sender, deadline_s)
            raise TrialRefused("it is invalid")

    trials = RefusingTrials()
    checks = ConstraintChecks(trials, 0.5)
    checked = [checks.check(of_regex("a+"), "tenant") for _ in range(20)]
    errors = await asyncio.gather(*checked, return_exceptions=True)
    assert all(isinstance(error, InvalidRequest) for error in errors)
    assert len(trials.compiled) == 1


@pytest.mark.parametrize("error", [Unavailable("no process"), Overloaded(1.0)])
async def test_without_trials_a_request_goes_on_without_constraints_that_are_optional(
    error: MeshError,
) -> None:
    class NoTrials(SlowTrials):
        async def run(self, trial: Trial, sender: str, deadline_s: float) -> Any:
            raise error

    checks = ConstraintChecks(NoTrials(), 0.5)
    for choice, strict in (("auto", False), ("auto", True), ("required", False)):
        function = {"name": "f", "strict": strict, "parameters": {"title": "f"}}
        tools = [{"type": "function", "function": function}]
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}
        request = parse_chat(json.dumps(body | {"tool_choice": choice}).encode())
        plan = plan_tools(request, HERMES)
        if (choice, strict) == ("auto", False):
            assert await checks.resolve(request, plan, "tenant") is None
        else:
            with pytest.raises(type(error)):
                await checks.resolve(request, plan, "tenant")
