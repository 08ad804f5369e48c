"""The outcome of an HTTP request that needed several requests of the mesh (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.errors import MeshError, RequestCancelled
from common.request.preprocessed import (
    CompletionUsage,
    sum_completion_details,
    sum_prompt_details,
)
from frontend_svc.request.types import RequestOutcome


def merge_outcomes(outcomes: Sequence[RequestOutcome], choices_per_prompt: int) -> RequestOutcome:
    """Returns the sum of at least one outcome, in the order of the choices. A prompt counts once
    for its consecutive choices; its first choice reports its cached tokens."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    workers = dict.fromkeys(worker for outcome in outcomes for worker in outcome.worker_ids)
    return replace(
        first,
        error=_first_error(outcomes),
        usage=_sum_usage([outcome.usage for outcome in outcomes], choices_per_prompt),
        attempts=sum(outcome.attempts for outcome in outcomes),
        worker_ids=tuple(workers),
        migrations=sum(outcome.migrations for outcome in outcomes),
    )


def _first_error(outcomes: Sequence[RequestOutcome]) -> MeshError | None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    # If one choice fails, the others are cancelled.
    return min(errors, key=lambda error: isinstance(error, RequestCancelled), default=None)


def _sum_usage(usages: Sequence[CompletionUsage], choices_per_prompt: int) -> CompletionUsage:
    prompts = usages[::choices_per_prompt]
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return CompletionUsage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        sum_prompt_details([prompt.prompt_tokens_details for prompt in prompts]),
        sum_completion_details(usage.completion_tokens_details for usage in usages),
    )
