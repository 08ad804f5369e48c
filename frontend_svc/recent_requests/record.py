"""What is kept of an ended request, and which ones a query finds (pure).

A record has small values only: neither the body of the request nor its tokens. The message
`RecentRequest` of `frontend.proto` derives from its fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.registry.instances import Snapshot
from common.request.preprocessed.codecs import U32, U64
from frontend_svc.endpoints.request_context import EndedRequest, HttpRequest
from frontend_svc.request.types import RequestOutcome

# Of one text of a record; a client chooses the name of the model, for example.
TEXT_CHARS_MAX = 256
WORKERS_MAX = 32
REASONS_MAX = 16
# The id of a request in that of its response, such as `chatcmpl-ID`.
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class RequestWorker:
    """A worker that received a request. name, role: "" if it had left."""

    worker_id: U64
    name: str = ""
    role: str = ""


@dataclass(slots=True)
class RecentRequest:
    """An ended request; the fields are described in `frontend.proto`."""

    request_id: str
    sequence: U64 = 0
    client_request_id: str = ""
    trace_id: str = ""
    endpoint: str = ""
    model: str = ""
    base_model: str = ""
    tenant: str = ""
    key_id: str = ""
    status: U32 = 0
    finish_reason: str = ""
    failure: str = ""
    error: str = ""
    received_ms: float = 0.0
    tokenized_ms: float | None = None
    routed_ms: float | None = None
    prefilled_ms: float | None = None
    first_token_ms: float | None = None
    last_token_ms: float | None = None
    total_ms: float = 0.0
    queue_ms: U32 = 0
    prompt_tokens: U64 = 0
    output_tokens: U64 = 0
    cached_tokens: U64 | None = None
    predicted_cached_tokens: U64 | None = None
    workers: tuple[RequestWorker, ...] = ()
    is_pair: bool = False
    router_id: U64 = 0
    router_name: str = ""
    reasons: tuple[str, ...] = ()
    attempts: U32 = 0
    migrations: U32 = 0
    choices: U32 = 0
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class RecentQuery:
    """What records must have; "" and 0: anything. after: a lower `sequence`. failed: only requests
    that failed."""

    after: int = 0
    id: str = ""
    model: str = ""
    tenant: str = ""
    failed: bool = False

    def matches(self, record: RecentRequest) -> bool:
        return (
            record.sequence > self.after
            and self.model in ("", record.model)
            and self.tenant in ("", record.tenant)
            and not (self.failed and not record.failure)
            and not (self.id and not self._names(record))
        )

    def _names(self, record: RecentRequest) -> bool:
        found = _REQUEST_ID.search(self.id)
        ids = (self.id,) if found is None else (self.id, found[0])
        own = (record.request_id, record.client_request_id, record.trace_id)
        return any(id_ in own for id_ in ids)


def record_of(ended: EndedRequest, snapshot: Snapshot) -> RecentRequest:
    """Returns the record of a request, without a sequence number.

    - snapshot: has the names of workers and routers.
    """
    context, progress, error = ended.context, ended.context.progress, ended.error
    record = RecentRequest(
        context.request_id,
        trace_id=context.span.trace_id,
        endpoint=context.route.label,
        tenant=context.caller.tenant,
        key_id=context.caller.key_id,
        status=progress.status,
        received_ms=context.tracker.received_ms,
        total_ms=ended.total_ms,
        choices=len(progress.responses),
    )
    if context.client_id != context.request_id.encode():
        record.client_request_id = context.client_id.decode("latin-1")
    if progress.body is not None:
        record.model = progress.body.model[:TEXT_CHARS_MAX]
        record.is_stream = progress.body.is_stream
        if progress.base_model != progress.body.model:
            record.base_model = progress.base_model[:TEXT_CHARS_MAX]
    if error is not None:
        record.failure, record.error = error.reason, error.message[:TEXT_CHARS_MAX]
    _set_times(record, context, ended.ttft_s)
    if ended.outcome is not None:
        _set_outcome(record, ended.outcome, snapshot)
    return record


def _set_times(record: RecentRequest, context: HttpRequest, ttft_s: float | None) -> None:
    tracker, placements = context.tracker, context.progress.placements
    marks, received_s = tracker.marks, tracker.received_s
    if placements:
        record.tokenized_ms = _ms(placements[0].arrived_at - context.arrived_at)
    if (at := marks.get("prefill_started")) is not None:
        # The clock of the loop may be some milliseconds late.
        record.routed_ms = max(_ms(at - received_s), record.tokenized_ms or 0.0)
    if (at := marks.get("prefill_finished")) is not None:
        record.prefilled_ms = _ms(at - received_s)
    if ttft_s is not None:
        record.first_token_ms = _ms(ttft_s)
        if (at := marks.get("last_token")) is not None:
            record.last_token_ms = _ms(at - received_s)


def _set_outcome(record: RecentRequest, outcome: RequestOutcome, snapshot: Snapshot) -> None:
    instances, usage = snapshot.instances, outcome.usage
    record.attempts, record.migrations = outcome.attempts, outcome.migrations
    record.prompt_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
    if outcome.finish_reason is not None:
        record.finish_reason = outcome.finish_reason.value
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
    record.workers = tuple(
        RequestWorker(id_)
        if (worker := instances.get(id_)) is None
        else RequestWorker(id_, worker.stable_name, worker.role)
        for id_ in outcome.worker_ids[:WORKERS_MAX]
    )
    if (placed := outcome.placed) is None:
        return
    record.is_pair, record.queue_ms = placed.prefill is not None, placed.queued_ms
    record.reasons = tuple(reason[:TEXT_CHARS_MAX] for reason in placed.reasons[:REASONS_MAX])
    if not placed.is_unrouted:
        record.predicted_cached_tokens = placed.predicted_cached_tokens
        record.router_id = placed.router_id
        if (router := instances.get(placed.router_id)) is not None:
            record.router_name = router.stable_name


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
