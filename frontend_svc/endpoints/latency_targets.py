"""Whether requests met their latency targets (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from common.request.placement import TARGET_UNMET
from frontend_svc.endpoints.request_context import EndedRequest

TARGETS = ("ttft", "itl")
# refused: the router expected that the target would be missed; failed: for any other reason.
OUTCOMES = ("met", "missed", "refused", "failed")


def target_outcomes(ended: EndedRequest) -> Iterator[tuple[str, str]]:
    """Yields the outcome of each target of a request. The target for further tokens is met if their
    mean is; a response with fewer than two tokens meets it."""
    targets = ended.context.progress.targets
    if targets is None:
        return
    for name, target_ms, measured_ms in (
        ("ttft", targets.ttft_target, _ttft_ms(ended)),
        ("itl", targets.itl_target, _itl_ms(ended)),
    ):
        if target_ms is not None:
            yield name, _outcome(ended, target_ms, measured_ms)


def _outcome(ended: EndedRequest, target_ms: float, measured_ms: float | None) -> str:
    if ended.error is not None and ended.error.reason == TARGET_UNMET:
        return "refused"
    if measured_ms is None:
        return "failed"
    return "met" if measured_ms <= target_ms else "missed"


def _ttft_ms(ended: EndedRequest) -> float | None:
    return None if ended.ttft_s is None else ended.ttft_s * 1000


def _itl_ms(ended: EndedRequest) -> float | None:
    """Returns the mean time of a further token; None without a response."""
    outcome, ttft_ms = ended.outcome, _ttft_ms(ended)
    if outcome is None or ttft_ms is None or ended.error is not None:
        return None
    choices = max(1, len(ended.context.progress.responses))
    further = outcome.usage.completion_tokens / choices - 1
    return (ended.total_ms - ttft_ms) / further if further > 0 else 0.0
