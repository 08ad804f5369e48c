"""Checks constraints of guided decoding before a worker is requested."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from common.errors import InvalidRequest
from common.request.grammar import ConstraintError, check_constraint
from common.request.preprocessed import GuidedDecoding
from frontend_svc.core.openai.guided import Constraint

# Digests of valid constraints.
_CHECKED_MAX = 256


class ConstraintChecks:
    """Compiles each new constraint in a thread. compile_s: time limit of one."""

    def __init__(self, compile_s: float) -> None:
        self._compile_s = compile_s
        self._checked: OrderedDict[bytes, None] = OrderedDict()
        # One at a time: compiling takes a processor.
        self._lock = asyncio.Lock()

    async def check(self, constraint: Constraint) -> None:
        """Raises InvalidRequest, which names the field, if the constraint is invalid, too large or
        too complex, or is not compiled in time."""
        try:
            key = hashlib.sha256(repr(constraint.guided).encode("utf-8", "replace")).digest()
            if key in self._checked:
                self._checked.move_to_end(key)
                return
            await self._compile(constraint.guided)
        except (ConstraintError, RecursionError) as error:
            text = f"Invalid '{constraint.field}': {error}."
            raise InvalidRequest(text, constraint.field) from error
        self._checked[key] = None
        if len(self._checked) > _CHECKED_MAX:
            self._checked.popitem(last=False)

    async def _compile(self, guided: GuidedDecoding) -> None:
        try:
            async with self._lock, asyncio.timeout(self._compile_s):
                await asyncio.to_thread(check_constraint, guided)
        except TimeoutError:
            text = f"it takes more than {self._compile_s:g} s to compile"
            raise ConstraintError(text) from None
