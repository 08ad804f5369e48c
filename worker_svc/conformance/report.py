"""Runs the checks on an engine and yields the results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from worker_svc.conformance.checks import Check, all_checks
from worker_svc.conformance.harness import (
    CheckFailed,
    CheckSkipped,
    EngineHarness,
    TimeLimits,
    run_within,
)
from worker_svc.engines.contract import LLMEngine

# Number of responses and ends that one check may take.
TIMEOUTS_PER_CHECK = 6


class Verdict(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class Result:
    check: Check
    verdict: Verdict
    reason: str = ""

    def __str__(self) -> str:
        remark = f" ({self.reason})" if self.reason else ""
        if self.verdict is Verdict.PASS:
            return f"PASS {self.check.name}: {self.check.rule}{remark}"
        return f"{self.verdict} {self.check.name}: {self.reason}; rule: {self.check.rule}"


async def run_checks(
    make_engine: Callable[[], LLMEngine],
    limits: TimeLimits | None = None,
    checks: Sequence[Check] | None = None,
) -> AsyncIterator[Result]:
    """Yields the results. make_engine: constructs an engine; `cleanup` is called in any case.

    Raises what `make_engine` raises.
    """
    harness = EngineHarness(make_engine, limits or TimeLimits())
    try:
        for check in all_checks() if checks is None else checks:
            yield await _run_check(check, harness)
    finally:
        if harness.was_started:  # also if the checks that stop it were not reached
            with suppress(Exception):
                await run_within(harness.limits.end_s, harness.engine.cleanup(), "")


async def _run_check(check: Check, harness: EngineHarness) -> Result:
    limits = harness.limits
    limit_s = limits.start_s + TIMEOUTS_PER_CHECK * (limits.answer_s + limits.end_s)
    try:
        if not check.any_role:
            harness.require_aggregated()
        remark = await run_within(limit_s, check.run(harness), "the check did not end")
    except CheckSkipped as reason:
        return Result(check, Verdict.SKIP, str(reason))
    except CheckFailed as reason:
        return Result(check, Verdict.FAIL, str(reason))
    except Exception as error:
        return Result(check, Verdict.FAIL, f"{type(error).__name__}: {error}")
    return Result(check, Verdict.PASS, remark or "")
