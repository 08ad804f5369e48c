"""Runs the checks on an engine and says what became of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from worker_svc.conformance.bench import Bench, Failed, Limits, Skipped, within
from worker_svc.conformance.checks import Check, all_checks
from worker_svc.engines.contract import LLMEngine

# A check takes several answers and ends at most.
CHECK_LIMITS = 6


class Verdict(StrEnum):
    """What became of a check."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class Result:
    """A check, its verdict, and why, or a remark."""

    check: Check
    verdict: Verdict
    why: str = ""

    def __str__(self) -> str:
        remark = f" ({self.why})" if self.why else ""
        if self.verdict is Verdict.PASS:
            return f"PASS {self.check.name}: {self.check.rule}{remark}"
        return f"{self.verdict} {self.check.name}: {self.why}; the rule: {self.check.rule}"


async def results(
    make: Callable[[], LLMEngine],
    limits: Limits | None = None,
    checks: Sequence[Check] | None = None,
) -> AsyncIterator[Result]:
    """The results, as they come. make: constructs an engine; it is ended whatever happens.

    Raises what `make` raises.
    """
    bench = Bench(make, limits or Limits())
    try:
        for check in all_checks() if checks is None else checks:
            yield await _result(check, bench)
    finally:
        if bench.was_started:  # also when the checks that end it were not reached
            with suppress(Exception):
                await within(bench.limits.end_s, bench.engine.cleanup(), "")


async def _result(check: Check, bench: Bench) -> Result:
    limits = bench.limits
    limit_s = limits.start_s + CHECK_LIMITS * (limits.answer_s + limits.end_s)
    try:
        remark = await within(limit_s, check.run(bench), "the check has no end")
    except Skipped as why:
        return Result(check, Verdict.SKIP, str(why))
    except Failed as why:
        return Result(check, Verdict.FAIL, str(why))
    except Exception as error:
        return Result(check, Verdict.FAIL, f"{type(error).__name__}: {error}")
    return Result(check, Verdict.PASS, remark or "")
