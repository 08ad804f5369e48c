"""What an HTTP request counts as use (pure); the rule is in `frontend_svc/usage/accounting.py`."""

from __future__ import annotations

from common.errors import RequestCancelled
from common.usage import UsageCounts, UsageKey
from frontend_svc.endpoints.request_context import EndedRequest
from frontend_svc.usage.accounting import NO_USE, count


def usage_key(ended: EndedRequest) -> UsageKey:
    """Returns what a request of a served model counts for."""
    caller, progress = ended.context.caller, ended.context.progress
    model = progress.base_model
    if not model and progress.body is not None:  # passed through
        model = progress.body.model
    return UsageKey(caller.tenant, caller.key_id, model, progress.adapter)


def usage_counts(ended: EndedRequest) -> UsageCounts:
    """Returns what a request counts; NO_USE if it is none."""
    progress = ended.context.progress
    for placement in progress.placements:
        if placement.is_query_only:
            return NO_USE
    error = ended.error
    return count(
        [response.outcome for response in progress.responses],
        progress.choices_per_prompt,
        has_failed=error is not None,
        is_cancelled=isinstance(error, RequestCancelled),
    )
