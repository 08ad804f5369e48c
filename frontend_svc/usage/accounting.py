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

from collections.abc import Sequence

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
    has_ended = False
    prompt_tokens = cached_tokens = output_tokens = 0
    for start in range(0, len(outcomes), choices_per_prompt):
        first: CompletionUsage | None = None
        is_computed = False
        for outcome in outcomes[start : start + choices_per_prompt]:
            if outcome is None:
                continue
            usage = outcome.usage
            first = usage if first is None else first
            output_tokens += usage.completion_tokens
            is_delivered = outcome.error is None or usage.completion_tokens > 0
            if is_delivered or (is_cancelled and outcome.worker_ids):
                is_computed = True
        if first is None:
            continue
        has_ended = True
        if is_computed:
            prompt_tokens += first.prompt_tokens
            cached_tokens += _cached_tokens(first)
    if not has_ended:
        return NO_USE
    return UsageCounts(1, int(has_failed), prompt_tokens, cached_tokens, output_tokens)


def _cached_tokens(usage: CompletionUsage) -> int:
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0
