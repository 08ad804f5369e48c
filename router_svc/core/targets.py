"""Latency targets of requests: what the first token will take, and the refusal (pure).

The estimate has the speeds that routers measure of their bookings, as the recommended number of
workers has (`pools`). `token_s` is the mean time for a prompt token over all ranks, `slowness` that
of the rank divided by it (`RankLoads.prefill_work`):

    first token = waited + (ahead / ranks + (work + uncached) * slowness) * token_s

ahead: prompt tokens to compute that leave the queue before this request, by order and by the shares
of tenants; ranks: those that may compute it; work: what the chosen rank still has to compute;
uncached: what it lacks of this prompt. Nothing is refused before a prompt has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import Overloaded
from common.request.placement import TARGET_UNMET, Query

# The soonest retry of a refused request.
RETRY_MIN_S = 0.1


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the time to the first token of a request consists of; see the module. Tokens are prompt
    tokens to compute."""

    waited_s: float
    ahead_tokens: float
    ranks: int
    work_tokens: float
    uncached_tokens: int
    token_s: float
    slowness: float = 1.0

    @property
    def seconds(self) -> float:
        """The time from the arrival at the frontend; 0 if nothing was measured yet."""
        if not self.token_s:
            return 0.0
        own_tokens = (self.work_tokens + self.uncached_tokens) * self.slowness
        return self.waited_s + (self.ahead_tokens / self.ranks + own_tokens) * self.token_s


def check_first_token(query: Query, expected: FirstToken) -> None:
    """Raises Overloaded (TARGET_UNMET) if the first token is expected after the target of the
    query."""
    target_ms = query.ttft_target_ms
    if target_ms is not None and expected.seconds * 1000 > target_ms:
        raise _unmet(query, "ttft", "the first token", expected.seconds * 1000, target_ms)


def slow_ranks_error(query: Query, itl_s: float) -> Overloaded:
    """Returns the error if each eligible rank exceeds the target for further tokens. itl_s: of the
    fastest of them."""
    assert query.itl_target_ms is not None, "the query has a target"
    return _unmet(query, "itl", "a further token", itl_s * 1000, query.itl_target_ms)


def _unmet(
    query: Query, target: str, token: str, estimate_ms: float, target_ms: float
) -> Overloaded:
    retry_after_s = max(RETRY_MIN_S, (estimate_ms - target_ms) / 1000)
    if target == "itl":
        retry_after_s = 1.0  # A step is shorter as soon as a response ends.
    error = Overloaded(
        retry_after_s,
        f"{token} is expected after {estimate_ms:.0f} ms, and the target is {target_ms:g} ms; "
        f"retry after {retry_after_s:.1f} s",
        reason=TARGET_UNMET,
        metadata={
            "model": query.model,
            "target": target,
            "estimate_ms": f"{estimate_ms:.0f}",
            "target_ms": f"{target_ms:g}",
        },
    )
    error.field = f"query.{target}_target_ms"
    return error
