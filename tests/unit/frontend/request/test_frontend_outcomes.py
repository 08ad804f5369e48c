from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import MeshError, RequestCancelled, WorkerLost
from common.request.preprocessed import (
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    PromptTokensDetails,
)
from frontend_svc.request.outcomes import merge_outcomes
from frontend_svc.request.types import RequestOutcome


def outcome(
    prompt: int = 5,
    completion: int = 3,
    cached: int | None = 1,
    worker: int = 7,
    error: MeshError | None = None,
) -> RequestOutcome:
    details = None if cached is None else PromptTokensDetails(cached_tokens=cached)
    usage = CompletionUsage(prompt, completion, prompt + completion, details)
    return RequestOutcome(FinishReason.STOP, error, usage, 1, (worker,), None)


def test_a_prompt_counts_once_and_every_completion_counts() -> None:
    merged = merge_outcomes([outcome(), outcome(cached=4), outcome(9, 2, 8), outcome(9, 1, 9)], 2)
    assert merged.usage == CompletionUsage(14, 9, 23, PromptTokensDetails(cached_tokens=9))


def test_cached_tokens_are_counted_only_if_every_prompt_has_a_report() -> None:
    assert merge_outcomes([outcome(), outcome(cached=None)], 1).usage.prompt_tokens_details is None


def test_attempts_are_summed_and_workers_listed_once() -> None:
    merged = merge_outcomes([outcome(worker=7), outcome(worker=8), outcome(worker=7)], 3)
    assert (merged.attempts, merged.worker_ids) == (3, (7, 8))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_error_is_the_one_that_cancelled_the_other_choices(order: tuple[int, ...]) -> None:
    lost = WorkerLost("lost", retryable=False)
    outcomes = [outcome(error=lost), outcome(error=RequestCancelled("gone"))]
    assert merge_outcomes([outcomes[index] for index in order], 2).error is lost


def test_tiers_and_drafts_are_summed() -> None:
    prompt = PromptTokensDetails(cached_tokens=8, host_cached_tokens=4)
    drafts = CompletionTokensDetails(accepted_prediction_tokens=2, rejected_prediction_tokens=1)
    usage = CompletionUsage(9, 3, 12, prompt, drafts)
    merged = merge_outcomes([replace(outcome(), usage=usage), replace(outcome(), usage=usage)], 1)
    assert merged.usage.prompt_tokens_details == PromptTokensDetails(
        cached_tokens=16, host_cached_tokens=8
    )
    assert merged.usage.completion_tokens_details == CompletionTokensDetails(
        accepted_prediction_tokens=4, rejected_prediction_tokens=2
    )
