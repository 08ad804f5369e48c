"""Constraints of guided decoding that were compiled in a trial, within its limits."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import replace
from typing import Final

from common.request.grammar import GRAMMAR_BYTES_MAX, ConstraintError, check_constraint
from common.request.preprocessed import GuidedDecoding
from common.trials.fair_trials import FairTrials
from common.trials.trial import Trial, TrialExceeded, TrialLimits, TrialRefused

PREPARE: Final = "common.request.grammar:prepare_checks"
MEMORY_BYTES_MAX: Final = 512 << 20
# Digests of constraints that passed.
_PASSED_MAX: Final = 4096
# A process gets little of a busy processor.
_WALL_FACTOR: Final = 20.0
_COMPILE: Final = f"{check_constraint.__module__}:{check_constraint.__name__}"


class ConstraintTrials:
    """Compiles each new constraint in a trial.

    - cpu_s: limit of processor time of one.
    - compile_path: the function, as `module:name`, which raises ValueError for an invalid one.
    """

    def __init__(self, trials: FairTrials, cpu_s: float, compile_path: str = _COMPILE) -> None:
        self._trials = trials
        self._cpu_s = cpu_s
        self._compile_path = compile_path
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        # Constraints in a trial. The result is the error of an invalid one; None: see `_passed`.
        self._running: dict[bytes, asyncio.Future[ConstraintError | None]] = {}

    async def check(
        self, guided: GuidedDecoding, sender: str, deadline_s: float | None = None
    ) -> None:
        """Raises ConstraintError if the constraint is invalid or exceeds a limit, Overloaded if
        those of others are not compiled in time, and Unavailable if no process can be started.
        deadline_s: on the loop's clock, for this one and all before it; None: no others."""
        # Of a continued response; the tokens that it has are not compiled.
        guided = replace(guided, prefix_tokens=None)
        try:
            content = repr(guided).encode("utf-8", "replace")
            key = hashlib.sha256(content).digest()
            while key not in self._passed:
                running = self._running.get(key)
                if running is None:
                    await self._try(key, guided, len(content), sender, deadline_s)
                elif (invalid := await asyncio.shield(running)) is not None:
                    raise ConstraintError(str(invalid))
        except RecursionError as error:
            raise ConstraintError("it is nested too deeply") from error
        self._passed.move_to_end(key)

    async def _try(
        self,
        key: bytes,
        guided: GuidedDecoding,
        size: int,
        sender: str,
        deadline_s: float | None,
    ) -> None:
        """Runs the trial of a constraint, for all requests that have it meanwhile. An error for
        want of time or of a process counts for this request only."""
        running = self._running[key] = asyncio.get_running_loop().create_future()
        shared: ConstraintError | None = None
        try:
            await self._compile(guided, size, sender, deadline_s)
            self._passed[key] = None
            if len(self._passed) > _PASSED_MAX:
                self._passed.popitem(last=False)
        except ConstraintError as error:
            if deadline_s is None:
                shared = error
            raise
        finally:
            del self._running[key]
            running.set_result(shared)

    async def _compile(
        self, guided: GuidedDecoding, size: int, sender: str, deadline_s: float | None
    ) -> None:
        if size > 4 * GRAMMAR_BYTES_MAX:  # larger than as a grammar, by no more than this
            raise ConstraintError(f"it has {size}/{GRAMMAR_BYTES_MAX} bytes")
        now = asyncio.get_running_loop().time()
        cpu_s = self._cpu_s if deadline_s is None else min(self._cpu_s, deadline_s - now)
        if cpu_s <= 0:
            text = f"the functions before it take more than {self._cpu_s:g} s to compile"
            raise ConstraintError(text)
        limits = TrialLimits(cpu_s, _WALL_FACTOR * cpu_s, MEMORY_BYTES_MAX)
        trial = Trial(self._compile_path, (guided,), limits)
        try:
            await self._trials.run(trial, sender, now + self._cpu_s)
        except TrialRefused as error:
            raise ConstraintError(str(error)) from error
        except TrialExceeded as error:
            text = f"it takes more than {self._cpu_s:g} s" if error.is_time else str(error)
            raise ConstraintError(f"{text} to compile") from error
