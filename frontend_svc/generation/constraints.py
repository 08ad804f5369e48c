"""Checks constraints of guided decoding before a worker is requested."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import replace

from common.errors import InvalidRequest, Overloaded
from common.request.grammar import ConstraintError, check_constraint
from common.request.preprocessed import GuidedDecoding
from frontend_svc.openai.body.guided import Constraint, requested_constraint
from frontend_svc.openai.body.schema import ChatRequest, GenerationRequest
from frontend_svc.openai.body.tool_calls import (
    ToolPlan,
    UsableFunction,
    constraint_with_tools,
    with_any_arguments,
)

# Digests of valid constraints.
_CHECKED_MAX = 4096


class ConstraintChecks:
    """Compiles each new constraint in a thread. compile_s: time limit of one, and of all functions
    of a request together."""

    def __init__(self, compile_s: float) -> None:
        self._compile_s = compile_s
        self._checked: OrderedDict[bytes, None] = OrderedDict()
        # One at a time: compiling takes a processor.
        self._lock = asyncio.Lock()

    async def check(self, constraint: Constraint, deadline_s: float | None = None) -> None:
        """Raises InvalidRequest, which names the field, if the constraint is invalid, too large or
        too complex, or is not compiled in time; Overloaded if others are not compiled in time.
        deadline_s: on the loop's clock; None: that of a single constraint."""
        try:
            key = hashlib.sha256(repr(constraint.guided).encode("utf-8", "replace")).digest()
            if key in self._checked:
                self._checked.move_to_end(key)
                return
            await self._compile(constraint.guided, deadline_s or self._deadline_s())
        except (ConstraintError, RecursionError) as error:
            text = f"Invalid '{constraint.field}': {error}."
            raise InvalidRequest(text, constraint.field) from error
        self._checked[key] = None
        if len(self._checked) > _CHECKED_MAX:
            self._checked.popitem(last=False)

    async def resolve(
        self, request: GenerationRequest, plan: ToolPlan | None
    ) -> GuidedDecoding | None:
        """Returns the checked constraint of a request. plan: of its tools.

        Raises InvalidRequest."""
        constraint = requested_constraint(request)
        if plan is not None:
            assert isinstance(request, ChatRequest), "only chats have tools"
            deadline_s = self._deadline_s()
            functions = [await self._usable(function, deadline_s) for function in plan.functions]
            plan = replace(plan, functions=functions)
            constraint = constraint_with_tools(request, plan, constraint)
        if constraint is None:
            return None
        await self.check(constraint)
        return constraint.guided

    async def _usable(self, function: UsableFunction, deadline_s: float) -> UsableFunction:
        """Returns the function, with arguments of any form if its schema cannot be enforced and
        need not be."""
        guided = GuidedDecoding(json=dict(function.schema))
        try:
            await self.check(Constraint(guided, f"{function.field}.parameters"), deadline_s)
        except (InvalidRequest, Overloaded):
            if function.is_strict:
                raise
            return with_any_arguments(function)
        return function

    def _deadline_s(self) -> float:
        return asyncio.get_running_loop().time() + self._compile_s

    async def _compile(self, guided: GuidedDecoding, deadline_s: float) -> None:
        if asyncio.get_running_loop().time() >= deadline_s:
            text = f"the functions before it take more than {self._compile_s:g} s to compile"
            raise ConstraintError(text)
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._lock.acquire()
        except TimeoutError:
            text = f"other grammars took more than {self._compile_s:g} s to compile"
            raise Overloaded(1.0, text) from None
        compiling = asyncio.ensure_future(asyncio.to_thread(check_constraint, guided))
        compiling.add_done_callback(self._on_compiled)
        try:
            async with asyncio.timeout_at(deadline_s):
                await asyncio.shield(compiling)
        except TimeoutError:
            text = f"it takes more than {self._compile_s:g} s to compile"
            raise ConstraintError(text) from None

    def _on_compiled(self, compiling: asyncio.Future[None]) -> None:
        """Frees the thread for the next one; after a time-out the error has no other reader."""
        self._lock.release()
        if not compiling.cancelled():
            compiling.exception()
