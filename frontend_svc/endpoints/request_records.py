"""Records of ended requests: the audit log and the request trace (docs/operations.md), and those of
the last requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import orjson

from common.request.placement import Query
from frontend_svc.config import AuditContent
from frontend_svc.endpoints.record_file import RecordFile
from frontend_svc.endpoints.request_context import EndedRequest, ResponsePart

AUDIT_SCHEMA = "kvmesh.audit.v1"
TRACE_SCHEMA = "kvmesh.request_trace.v1"
# Of a record without texts.
_RECORD_BYTES = 1024
_TEXT_BYTES_PER_TOKEN = 64

Record = Mapping[str, object]


class RequestRecords:
    """Writes the records of ended requests. audit, trace: None: not written. keep: keeps a request
    among the last ones."""

    def __init__(
        self,
        audit: RecordFile | None,
        trace: RecordFile | None,
        content: AuditContent,
        keep: Callable[[EndedRequest], None] = lambda ended: None,
    ) -> None:
        self._keep = keep
        self._audit = audit
        self._trace = trace
        self._has_request = content in ("all", "request")
        self.has_response = audit is not None and content == "all"

        files = {"audit": audit, "request_trace": trace}
        self._files = {name: file for name, file in files.items() if file is not None}

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Returns written and dropped records by file."""
        return {name: (file.written, file.dropped) for name, file in self._files.items()}

    def close(self, timeout_s: float) -> None:
        """Writes what is queued, for at most `timeout_s` a file."""
        for file in self._files.values():
            file.close(timeout_s)

    def request_ended(self, ended: EndedRequest) -> None:
        self._keep(ended)
        progress = ended.context.progress
        if self._audit is not None:
            self._put_audit(self._audit, ended, progress.raw if self._has_request else b"")
        if self._trace is not None:
            for number, (placement, part) in enumerate(
                zip(progress.placements, progress.responses, strict=False)
            ):
                query, is_booked = placement.query, not placement.is_query_only
                if query.total_tokens and is_booked and part.outcome is not None:
                    record = partial(_trace_record, ended, number, query, part)
                    self._trace.put(_RECORD_BYTES + 3 * len(query.prefix_hashes), record)

    def _put_audit(self, audit: RecordFile, ended: EndedRequest, raw: bytes) -> None:
        size = _RECORD_BYTES + len(raw)
        if self.has_response:
            progress = ended.context.progress
            size += len(progress.response_json)
            if ended.outcome is not None and progress.render_stream is not None:
                size += ended.outcome.usage.completion_tokens * _TEXT_BYTES_PER_TOKEN
        audit.put(size, partial(self._audit_record, ended, raw))

    def _audit_record(self, ended: EndedRequest, raw: bytes) -> Record:
        progress, error = ended.context.progress, ended.error
        record: dict[str, object] = {"schema": AUDIT_SCHEMA, **_identity(ended)}
        is_complete = progress.is_response_complete and error is None
        record |= {"status": progress.status, "complete": is_complete}
        if error is not None:
            record |= {"failure": error.reason, "error": error.message}
        if self._has_request:
            record["request"] = _body(raw, is_json=progress.body is not None)
        if self.has_response:
            record["response"] = _response(ended)
        return record


def _identity(ended: EndedRequest) -> dict[str, object]:
    context, body = ended.context, ended.context.progress.body
    record: dict[str, object] = {
        "request_id": context.request_id,
        "received_ms": round(context.tracker.received_ms, 3),
        "total_ms": ended.total_ms,
        "endpoint": context.route.label,
        **context.caller_fields,
    }
    if context.client_id != context.request_id.encode():
        record["x_request_id"] = context.client_id.decode("latin-1")
    if context.span.trace_id:
        record["trace_id"] = context.span.trace_id
    if body is not None:
        record |= {"model": body.model, "stream": body.is_stream}
    return record


def _body(raw: bytes, *, is_json: bool) -> object:
    if not is_json:
        return raw.decode(errors="replace")
    # JSON has line breaks only between its tokens. Not parsed: that would delay the event loop.
    return orjson.Fragment(raw.replace(b"\r", b" ").replace(b"\n", b" "))


def _response(ended: EndedRequest) -> object:
    progress = ended.context.progress
    payload = progress.response_json
    if not payload and progress.render_stream is not None and ended.outcome is not None:
        payload = progress.render_stream(ended.outcome.usage)
    return orjson.Fragment(payload) if payload else None


def _trace_record(ended: EndedRequest, number: int, query: Query, part: ResponsePart) -> Record:
    context = ended.context
    outcome = part.outcome
    assert outcome is not None, "it has ended"
    record: dict[str, object] = {
        "timestamp": round(context.tracker.received_ms),
        "input_length": query.total_tokens,
        "output_length": outcome.usage.completion_tokens,
        # 48 bits are exact in every JSON reader.
        "hash_ids": (np.frombuffer(query.prefix_hashes, dtype="<u8") >> 16).tolist(),
        "block_size": query.block_size,
        "schema": TRACE_SCHEMA,
        **_identity(ended),
        "workers": list(map(str, outcome.worker_ids)),
    }
    if number:
        record["request_id"] = f"{context.request_id}-{number}"
    if part.first_token_at is not None:
        record["ttft_ms"] = round((part.first_token_at - context.started_at_s) * 1000, 1)
    details = outcome.usage.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        record["cached_tokens"] = details.cached_tokens
    if outcome.finish_reason is not None:
        record["finish_reason"] = outcome.finish_reason.value
    if outcome.error is not None:
        record["failure"] = outcome.error.reason
    return record
