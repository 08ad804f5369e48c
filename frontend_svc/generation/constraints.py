"""Checks constraints of guided decoding before a worker is requested."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from common.errors import InvalidRequest, Overloaded, Unavailable
from common.request.grammar import ConstraintError
from common.request.preprocessed import GuidedDecoding
from common.trials.constraints import ConstraintTrials
from common.trials.fair_trials import FairTrials
from frontend_svc.openai.body.guided import Constraint, requested_constraint
from frontend_svc.openai.body.schema import ChatRequest, GenerationRequest
from frontend_svc.openai.body.tool_calls import (
    ToolPlan,
    UsableFunction,
    constraint_with_tools,
    with_any_arguments,
)


class ConstraintChecks:
    """compile_s: processor time of one constraint, and time of all functions of a request
    together."""

    def __init__(self, trials: FairTrials, compile_s: float) -> None:
        self._compile_s = compile_s
        self._trials = ConstraintTrials(trials, compile_s)

    async def check(
        self, constraint: Constraint, tenant: str, deadline_s: float | None = None
    ) -> None:
        """Raises InvalidRequest, which names the field, if the constraint is invalid, too large or
        too complex, or is not compiled in time; Overloaded if others are not compiled in time.
        deadline_s: on the loop's clock; None: that of a single constraint."""
        try:
            await self._trials.check(constraint.guided, tenant, deadline_s)
        except ConstraintError as error:
            text = f"Invalid '{constraint.field}': {error}."
            raise InvalidRequest(text, constraint.field) from error

    async def resolve(
        self, request: GenerationRequest, plan: ToolPlan | None, tenant: str
    ) -> GuidedDecoding | None:
        """Returns the checked constraint of a request. plan: of its tools.

        Raises InvalidRequest; Overloaded and Unavailable if a constraint that must be enforced is
        not compiled."""
        constraint = requested_constraint(request)
        if plan is not None:
            assert isinstance(request, ChatRequest), "only chats have tools"
            deadline_s = asyncio.get_running_loop().time() + self._compile_s
            functions = [
                await self._usable(function, tenant, deadline_s) for function in plan.functions
            ]
            plan = replace(plan, functions=functions)
            constraint = constraint_with_tools(request, plan, constraint)
        if constraint is None:
            return None
        try:
            await self.check(constraint, tenant)
        except (Overloaded, Unavailable):
            if constraint.guided.best_effort:
                return None
            raise
        return constraint.guided

    async def _usable(
        self, function: UsableFunction, tenant: str, deadline_s: float
    ) -> UsableFunction:
        """Returns the function, with arguments of any form if its schema cannot be enforced, or not
        now, and need not be."""
        guided = GuidedDecoding(json=dict(function.schema))
        try:
            constraint = Constraint(guided, f"{function.field}.parameters")
            await self.check(constraint, tenant, deadline_s)
        except (InvalidRequest, Overloaded, Unavailable):
            if function.is_strict:
                raise
            return with_any_arguments(function)
        return function
