"""What a request counts, by how it ended."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from common.errors import MeshError, RequestCancelled, WorkerLost
from common.request.preprocessed import FinishReason, PromptTokensDetails, usage
from common.usage import UsageCounts
from frontend_svc.request.outcomes import merge_outcomes
from frontend_svc.request.types import RequestOutcome
from frontend_svc.usage.accounting import NO_USE, count

LOST = WorkerLost("its process ended", retryable=True)
GONE = RequestCancelled("the client disconnected")


def outcome(
    prompt: int,
    output: int,
    *,
    cached: int | None = 0,
    error: MeshError | None = None,
    attempts: int = 1,
    workers: tuple[int, ...] = (7,),
) -> RequestOutcome:
    counts = usage(prompt, output)
    if cached is not None:
        details = PromptTokensDetails(cached_tokens=cached)
        counts = replace(counts, prompt_tokens_details=details)
    reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
    return RequestOutcome(reason, error, counts, attempts, workers, None)


def counted(*outcomes: RequestOutcome | None, n: int = 1) -> UsageCounts:
    errors = [one.error for one in outcomes if one is not None and one.error is not None]
    is_cancelled = bool(errors) and all(isinstance(e, RequestCancelled) for e in errors)
    return count(outcomes, n, has_failed=bool(errors), is_cancelled=is_cancelled)


def test_a_complete_response_counts_as_its_usage() -> None:
    assert counted(outcome(10, 4, cached=8)) == UsageCounts(1, 0, 10, 8, 4)


def test_a_prompt_counts_once_for_its_choices() -> None:
    choices = (outcome(10, 4, cached=8), outcome(10, 5, cached=10), outcome(10, 6))
    assert counted(*choices, n=3) == UsageCounts(1, 0, 10, 8, 15)


def test_each_prompt_of_a_request_counts() -> None:
    assert counted(outcome(10, 1), outcome(20, 2)) == UsageCounts(1, 0, 30, 0, 3)


def test_a_migrated_response_counts_its_prompt_once() -> None:
    migrated = outcome(10, 4, attempts=3, workers=(7, 8, 9))
    assert counted(migrated) == UsageCounts(1, 0, 10, 0, 4)


def test_a_response_that_its_client_left_counts_the_tokens_that_were_delivered() -> None:
    assert counted(outcome(10, 3, error=GONE)) == UsageCounts(1, 1, 10, 0, 3)


def test_a_client_that_leaves_before_the_first_token_pays_its_prompt_if_a_worker_has_it() -> None:
    assert counted(outcome(10, 0, error=GONE)) == UsageCounts(1, 1, 10, 0, 0)
    waiting = outcome(10, 0, error=GONE, workers=())
    assert counted(waiting) == UsageCounts(1, 1, 0, 0, 0)


def test_a_failure_counts_what_was_delivered_before_it() -> None:
    assert counted(outcome(10, 3, error=LOST)) == UsageCounts(1, 1, 10, 0, 3)


def test_a_failure_before_the_first_token_costs_nothing() -> None:
    assert counted(outcome(10, 0, error=LOST)) == UsageCounts(1, 1, 0, 0, 0)


def test_choices_that_end_because_of_another_are_no_reason_to_charge_the_prompt() -> None:
    assert counted(outcome(10, 0, error=LOST), outcome(10, 0, error=GONE), n=2).prompt_tokens == 0


def test_a_request_that_no_router_was_asked_for_is_none() -> None:
    assert counted() == counted(None) == NO_USE


def test_inputs_of_a_batch_that_have_not_begun_do_not_count() -> None:
    assert counted(outcome(10, 0), None, None) == UsageCounts(1, 0, 10, 0, 0)


_CHOICES = st.integers(0, 30)
_PROMPTS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 50), st.lists(_CHOICES, min_size=3, max_size=3)),
    min_size=1,
    max_size=4,
)


@given(_PROMPTS, st.lists(st.booleans(), min_size=12, max_size=12), st.booleans())
def test_counts_are_the_usage_of_the_client_and_a_failure_never_costs_more(
    prompts: list[tuple[int, int, list[int]]], lost: list[bool], is_cancelled: bool
) -> None:
    whole = [
        outcome(prompt, output, cached=min(prompt, cached))
        for prompt, cached, outputs in prompts
        for output in outputs
    ]
    client = merge_outcomes(whole, 3).usage
    assert client.prompt_tokens_details is not None
    complete = count(whole, 3, has_failed=False, is_cancelled=False)
    cached = client.prompt_tokens_details.cached_tokens or 0
    assert complete == UsageCounts(1, 0, client.prompt_tokens, cached, client.completion_tokens)

    error = GONE if is_cancelled else LOST
    cut = [
        replace(one, error=error if is_lost else None)
        for one, is_lost in zip(whole, lost, strict=False)
    ]
    failed = count(cut, 3, has_failed=True, is_cancelled=is_cancelled)
    assert failed.output_tokens == complete.output_tokens, "delivered tokens count"
    assert failed.cached_tokens <= failed.prompt_tokens <= complete.prompt_tokens
    delivered = sum(p for p, _, outputs in prompts if any(outputs))
    assert failed.prompt_tokens >= delivered, "the prompt of a delivered token counts"
