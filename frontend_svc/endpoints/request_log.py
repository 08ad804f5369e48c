"""The log line and the span of one HTTP request."""

from __future__ import annotations

import logging
from typing import Any

import structlog
from opentelemetry.util.types import AttributeValue

from common.request.preprocessed import to_json_value
from frontend_svc.endpoints.request_context import MODEL_OWNER, EndedRequest, HttpRequest
from frontend_svc.errors import is_server_fault
from frontend_svc.request.types import RequestOutcome

# Parts of the time to the first token.
_LOGGED_TIMES = ("prefill_wait_time_ms", "prefill_time_ms")

log = structlog.get_logger()


def span_attributes(ended: EndedRequest) -> dict[str, AttributeValue]:
    """Returns the attributes of the request's span."""
    context, progress = ended.context, ended.context.progress
    fields: dict[str, AttributeValue] = {
        "request_id": context.request_id,
        "x_request_id": context.client_id.decode("latin-1"),
        "http.response.status_code": progress.status,
        **context.caller_fields,
    }
    if progress.body is not None:
        fields |= {
            "model": progress.body.model,
            "gen_ai.operation.name": context.route.span_operation,
            "gen_ai.provider.name": MODEL_OWNER,
            "gen_ai.request.model": progress.body.model,
            "gen_ai.request.stream": progress.body.is_stream,
        }
    for name, value in _mark_fields(context).items():
        if isinstance(value, dict):
            fields |= {f"{name}.{key}": text for key, text in value.items()}
        else:
            fields[name] = value
    if ended.ttft_s is not None:
        fields["ttft_ms"] = round(ended.ttft_s * 1000, 3)
        fields["gen_ai.response.time_to_first_chunk"] = round(ended.ttft_s, 6)
    if (outcome := ended.outcome) is not None:
        fields |= {
            "attempts": outcome.attempts,
            "migrations": outcome.migrations,
            "gen_ai.usage.input_tokens": outcome.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.usage.completion_tokens,
            "worker_ids": list(map(str, outcome.worker_ids)),
        }
        if outcome.placed is not None:
            fields["routing.reasons"] = list(outcome.placed.reasons)
            fields["routing.overlap_blocks"] = outcome.placed.overlap_blocks
    return fields


def log_request(ended: EndedRequest) -> None:
    """Writes the one log line of a request."""
    context, progress, error = ended.context, ended.context.progress, ended.error
    # Also if the response had begun, with status 200.
    level = logging.WARNING if error is not None and is_server_fault(error) else logging.INFO
    if not log.is_enabled_for(level):
        return
    fields: dict[str, object] = {
        "request_id": context.request_id,
        "endpoint": context.route.label,
        "status": progress.status,
        "total_ms": ended.total_ms,
    }
    fields |= context.caller_fields
    if context.client_id != context.request_id.encode():
        fields["client_request_id"] = context.client_id.decode("latin-1")
    if context.span.trace_id:
        fields["trace_id"] = context.span.trace_id
    if progress.body is not None:
        fields |= {"model": progress.body.model, "stream": progress.body.is_stream}
        if progress.base_model not in ("", progress.body.model):
            fields["base_model"] = progress.base_model
    fields |= _mark_fields(context)
    if ended.ttft_s is not None:
        fields["ttft_ms"] = round(ended.ttft_s * 1000, 1)
        timing = context.tracker.timing()
        for name in _LOGGED_TIMES:
            if name in timing:
                fields[name] = round(timing[name], 1)
    if len(progress.responses) > 1:
        fields["requests"] = len(progress.responses)
    if (outcome := ended.outcome) is not None:
        fields |= _outcome_fields(outcome)
    if error is not None:
        message, param = context.route.errors.client_message(error, context.names)
        fields |= {"failure": error.reason, "error": message}
        if param is not None:
            fields["param"] = param
    log.log(level, "request", **fields)


# Any: JSON.
def _mark_fields(context: HttpRequest) -> dict[str, Any]:
    """Returns what the client states about the request, for logs and traces."""
    request, fields = context.progress.request, dict[str, Any]()
    if request is None:
        return fields
    if request.annotations:
        fields["annotations"] = list(request.annotations)
    if request.agent_context is not None:
        fields["agent_context"] = to_json_value(request.agent_context)
    if request.request_timestamp_ms is not None:
        # From the client's clock to this one.
        fields["client_delay_ms"] = round(
            context.tracker.received_ms - request.request_timestamp_ms, 1
        )
    return fields


def _outcome_fields(outcome: RequestOutcome) -> dict[str, object]:
    details = outcome.usage.prompt_tokens_details
    fields: dict[str, object] = {
        "prompt_tokens": outcome.usage.prompt_tokens,
        "completion_tokens": outcome.usage.completion_tokens,
        "attempts": outcome.attempts,
        "workers": list(map(str, outcome.worker_ids)),
    }
    if outcome.migrations:
        fields["migrations"] = outcome.migrations
    if outcome.finish_reason is not None:
        fields["finish_reason"] = outcome.finish_reason.value
    if details is not None and details.cached_tokens is not None:
        fields["cached_tokens"] = details.cached_tokens
        if details.host_cached_tokens is not None:
            fields["host_cached_tokens"] = details.host_cached_tokens
        if details.disk_cached_tokens is not None:
            fields["disk_cached_tokens"] = details.disk_cached_tokens
    if outcome.placed is not None:
        fields["predicted_cached_tokens"] = outcome.placed.predicted_cached_tokens
        fields["routing"] = list(outcome.placed.reasons)
    return fields
