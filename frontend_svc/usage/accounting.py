"""What a request counts (pure).

- Requests for which a placement was requested count, once, when they end. Those that are refused
  before, placement queries and canaries do not.
- A prompt counts once, whatever its choices, retries and migrations: if a token or vector of it was
  delivered, if its response ended without an error, or if its client disconnected after a worker
  had received it. So a failure before the first token costs nothing.
- Cached tokens are those that the first attempt to compute the prompt reported at its end; 0 if it
  ended early.
- Output counts as the response reports it: without the tokens after a stop string. Of a response
  that ended early (client disconnected, worker lost, time limit, slow reader), the tokens that
  workers had delivered by then.
- A passed-through body counts what its engine reports at the end; 0 if it ends early.

So the counts of complete responses are those of their `usage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.request.preprocessed import CompletionUsage
from common.usage import UsageCounts
from frontend_svc.request.types import RequestOutcome

NO_USE = UsageCounts()


def count(
    outcomes: Sequence[RequestOutcome | None],
    choices_per_prompt: int,
    *,
    has_failed: bool,
    is_cancelled: bool,
) -> UsageCounts:
    """Returns what a request counts; NO_USE if it has no outcome.

    - outcomes: of its choices, those of one prompt after each other; None: it has not ended.
    - is_cancelled: whether its client disconnected.
    """
    ended = [outcome for outcome in outcomes if outcome is not None]
    if not ended:
        return NO_USE
    prompts = list(_computed_prompts(outcomes, choices_per_prompt, is_cancelled=is_cancelled))
    return UsageCounts(
        requests=1,
        failed_requests=int(has_failed),
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        cached_tokens=sum(map(_cached_tokens, prompts)),
        output_tokens=sum(outcome.usage.completion_tokens for outcome in ended),
    )


def _computed_prompts(
    outcomes: Sequence[RequestOutcome | None], choices_per_prompt: int, *, is_cancelled: bool
) -> Iterator[CompletionUsage]:
    """Yields the usage of the first choice of each prompt that counts."""
    for start in range(0, len(outcomes), choices_per_prompt):
        choices = [
            outcome
            for outcome in outcomes[start : start + choices_per_prompt]
            if outcome is not None
        ]
        if any(_has_computed(choice, is_cancelled=is_cancelled) for choice in choices):
            yield choices[0].usage


def _has_computed(choice: RequestOutcome, *, is_cancelled: bool) -> bool:
    is_delivered = choice.error is None or choice.usage.completion_tokens > 0
    return is_delivered or (is_cancelled and bool(choice.worker_ids))


def _cached_tokens(usage: CompletionUsage) -> int:
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0
