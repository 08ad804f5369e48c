"""State of one HTTP request from its body to its span and its log line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from opentelemetry.util.types import AttributeValue

from common.errors import MeshError
from common.request.preprocessed import (
    CompletionUsage,
    PreprocessedRequest,
    RequestTracker,
    to_json_value,
)
from frontend_svc import errors as openai
from frontend_svc.access.caller import ANONYMOUS, Caller
from frontend_svc.access.quotas import Quota
from frontend_svc.edge.asgi import ClientConnection, Headers, Receive, Send
from frontend_svc.endpoints.route import Route
from frontend_svc.request.outcomes import merge_outcomes
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import RequestOutcome
from frontend_svc.text.response_format import ResponseFormat
from frontend_svc.tracing import RequestSpan

MODEL_OWNER = "kvmesh"

# Parts of the time to the first token.
_LOGGED_TIMES = ("prefill_wait_time_ms", "prefill_time_ms")

log = structlog.get_logger()


class RequestBody(Protocol):
    """What logs and metrics need of a body."""

    @property
    def model(self) -> str: ...
    @property
    def is_stream(self) -> bool: ...


class ResponsePart(Protocol):
    """What logs need of one request to workers. first_token_at: on the clock of the metrics."""

    @property
    def outcome(self) -> RequestOutcome | None: ...
    @property
    def first_token_at(self) -> float | None: ...


@dataclass(slots=True)
class HttpRequest:
    """One request to an endpoint. request_id: unique, made by the frontend. client_id:
    the client's x-request-id, or request_id. started_at_s: on the clock of the metrics. headers: of
    the client; header_pairs: the same, with repetitions. base_model: the model itself, or the base
    model of an adapter; "" if passed through or not known yet. responses: one per choice or input.
    quota: of a tenant with limits.
    stream_format: of the stream that has begun. status: HTTP status sent to the client, 0 before
    it is sent. tracker: of the first choice. uses_alias: whether the body names its extensions
    `kvmesh`. request: of the first prompt; None: unknown. queries: of the responses, in order.
    response_json: the body sent to the client; b"": none, or a stream. render_stream: writes the
    response of a stream, up to now, as one object; None: it is not recorded."""

    route: Route
    request_id: str
    client_id: bytes
    span: RequestSpan
    started_at_s: float
    tracker: RequestTracker
    header_pairs: Headers
    headers: Mapping[bytes, bytes]
    receive: Receive
    send: Send
    connection: ClientConnection
    caller: Caller = ANONYMOUS
    quota: Quota | None = None
    body: RequestBody | None = None
    uses_alias: bool = False
    request: PreprocessedRequest | None = None
    base_model: str = ""
    responses: Sequence[ResponsePart] = ()
    placements: Sequence[PlacementRequest] = ()
    choices_per_prompt: int = 1
    stream_format: ResponseFormat | None = None
    render_stream: Callable[[CompletionUsage], bytes] | None = None
    status: int = 0
    response_json: bytes = b""
    error: MeshError | None = None
    is_response_complete: bool = False

    @property
    def own_headers(self) -> Headers:
        """Headers of every response: the ids of the request, and what is left of its quota."""
        headers: Headers = ((b"x-request-id", self.client_id),)
        if self.route.errors.has_request_id:
            headers = (*headers, (b"request-id", self.client_id))
        return headers if self.quota is None else (*headers, *self.quota.headers)

    @property
    def used_tokens(self) -> int:
        """Tokens of its prompts and its output so far."""
        if (outcome := self.outcome) is None:
            return 0
        return outcome.usage.prompt_tokens + outcome.usage.completion_tokens

    @property
    def names(self) -> Container[bytes]:
        """The names of its headers, and ALIAS if its body uses it: see `client_param`."""
        return {*self.headers, openai.ALIAS} if self.uses_alias else self.headers

    @property
    def caller_fields(self) -> Mapping[str, str]:
        """Its client, for logs and traces; empty without keys."""
        caller = self.caller
        return {"tenant": caller.tenant, "key_id": caller.key_id} if caller.tenant else {}

    @property
    def outcome(self) -> RequestOutcome | None:
        """The outcome of all choices that have ended; None if there are none."""
        outcomes = [one.outcome for one in self.responses if one.outcome is not None]
        return merge_outcomes(outcomes, self.choices_per_prompt) if outcomes else None

    @property
    def final_error(self) -> MeshError | None:
        """The error of the HTTP request, or else of its outcome."""
        if self.error is not None or (outcome := self.outcome) is None:
            return self.error
        return outcome.error

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None without one."""
        times = [one.first_token_at for one in self.responses if one.first_token_at is not None]
        return min(times) - self.started_at_s if times else None


def span_attributes(context: HttpRequest) -> dict[str, AttributeValue]:
    fields: dict[str, AttributeValue] = {
        "request_id": context.request_id,
        "x_request_id": context.client_id.decode("latin-1"),
        "http.response.status_code": context.status,
        **context.caller_fields,
    }
    if context.body is not None:
        fields |= {
            "model": context.body.model,
            "gen_ai.operation.name": context.route.span_operation,
            "gen_ai.provider.name": MODEL_OWNER,
            "gen_ai.request.model": context.body.model,
            "gen_ai.request.stream": context.body.is_stream,
        }
    for name, value in _mark_fields(context).items():
        if isinstance(value, dict):
            fields |= {f"{name}.{key}": text for key, text in value.items()}
        else:
            fields[name] = value
    if context.ttft_s is not None:
        fields["ttft_ms"] = round(context.ttft_s * 1000, 3)
        fields["gen_ai.response.time_to_first_chunk"] = round(context.ttft_s, 6)
    if (outcome := context.outcome) is not None:
        fields |= {
            "attempts": outcome.attempts,
            "gen_ai.usage.input_tokens": outcome.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.usage.completion_tokens,
            "worker_ids": list(map(str, outcome.worker_ids)),
        }
        if outcome.placed is not None:
            fields["routing.reasons"] = list(outcome.placed.reasons)
            fields["routing.overlap_blocks"] = outcome.placed.overlap_blocks
    return fields


def log_request(context: HttpRequest, now_s: float) -> None:
    """Writes the one log line of a request. now_s: on the clock of `started_at_s`."""
    error = context.final_error
    # Also if the response had begun, with status 200.
    level = logging.WARNING if error is not None and openai.is_server_fault(error) else logging.INFO
    if not log.is_enabled_for(level):
        return
    fields: dict[str, object] = {
        "request_id": context.request_id,
        "endpoint": context.route.label,
        "status": context.status,
        "total_ms": round((now_s - context.started_at_s) * 1000, 1),
    }
    fields |= context.caller_fields
    if context.client_id != context.request_id.encode():
        fields["client_request_id"] = context.client_id.decode("latin-1")
    if context.span.trace_id:
        fields["trace_id"] = context.span.trace_id
    if context.body is not None:
        fields |= {"model": context.body.model, "stream": context.body.is_stream}
        if context.base_model not in ("", context.body.model):
            fields["base_model"] = context.base_model
    fields |= _mark_fields(context)
    if context.ttft_s is not None:
        fields["ttft_ms"] = round(context.ttft_s * 1000, 1)
        timing = context.tracker.timing()
        for name in _LOGGED_TIMES:
            if name in timing:
                fields[name] = round(timing[name], 1)
    if len(context.responses) > 1:
        fields["requests"] = len(context.responses)
    if (outcome := context.outcome) is not None:
        fields |= _outcome_fields(outcome)
    if error is not None:
        message, param = context.route.errors.client_message(error, context.names)
        fields |= {"failure": error.reason, "error": message}
        if param is not None:
            fields["param"] = param
    log.log(level, "request", **fields)


# Any: JSON.
def _mark_fields(context: HttpRequest) -> dict[str, Any]:
    """What the client states about the request, for logs and traces."""
    request, fields = context.request, dict[str, Any]()
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
    if outcome.finish_reason is not None:
        fields["finish_reason"] = outcome.finish_reason.value
    if details is not None and details.cached_tokens is not None:
        fields["cached_tokens"] = details.cached_tokens
    if outcome.placed is not None:
        fields["predicted_cached_tokens"] = outcome.placed.predicted_cached_tokens
        fields["routing"] = list(outcome.placed.reasons)
    return fields
