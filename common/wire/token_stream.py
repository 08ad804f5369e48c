"""Attach frames to and from protobuf; the rules are in `common/request/token_stream`."""

from __future__ import annotations

from common.errors import INVALID_OUTPUT, InternalError, InvalidRequest
from common.request.preprocessed import (
    CompletionUsage,
    PrefillResult,
    TokenLogprob,
    TraceLink,
)
from common.request.token_stream import (
    ENGINE_FAILURE_CHARS_MAX,
    AbortSlot,
    Hello,
    HelloAck,
    JsonChunk,
    LegRequest,
    PromptPart,
    Rejected,
    RequestFrame,
    ResponseFrame,
    Terminal,
)
from common.wire.errors import error_from_proto, error_to_proto
from common.wire.load import load_from_proto, load_to_proto
from common.wire.preprocessed import (
    dataclass_from_proto,
    dataclass_to_proto,
    finish_reason_from_proto,
    finish_reason_to_proto,
    from_proto,
)
from kvmesh.engine.v1 import engine_pb2

_PHASE_TO_PROTO = {
    "": engine_pb2.PHASE_UNSPECIFIED,
    "prefill": engine_pb2.PHASE_PREFILL,
    "decode": engine_pb2.PHASE_DECODE,
    "embedding": engine_pb2.PHASE_EMBEDDING,
    "score": engine_pb2.PHASE_SCORE,
}
_PHASE_FROM_PROTO = {number: name for name, number in _PHASE_TO_PROTO.items()}
_TIMEOUT_MS_MAX = 2**32 - 1


def request_frame_to_proto(frame: RequestFrame) -> engine_pb2.AttachRequest:
    """Returns the message of a frame from frontend to worker."""
    message = engine_pb2.AttachRequest(acked_bytes=frame.acked_bytes, heartbeat=frame.heartbeat)
    if frame.hello is not None:
        message.hello.frontend_id = frame.hello.frontend_id
        message.hello.expected_worker_id = frame.hello.expected_worker_id
        message.hello.stream_seq = frame.hello.stream_seq
    for slot, leg_request in frame.submits:
        _submit_to_proto(slot, leg_request, message.submits.add())
    for part in frame.prompt_parts:
        message.prompt_parts.add(slot=part.slot, offset=part.offset, token_ids_le=part.data)
    for abort in frame.aborts:
        message.aborts.add(slot=abort.slot, reason=abort.reason)
    return message


def _submit_to_proto(slot: int, leg_request: LegRequest, message: engine_pb2.Submit) -> None:
    message.slot = slot
    for name in ("request_id", "attempt", "traceparent", "span_id", "tenant"):
        setattr(message, name, getattr(leg_request, name))
    message.phase = _PHASE_TO_PROTO[leg_request.phase]
    message.prompt_bytes = leg_request.prompt_bytes
    if leg_request.timeout_s is not None:
        message.timeout_ms = max(1, round(min(leg_request.timeout_s * 1000, _TIMEOUT_MS_MAX)))
    if leg_request.priority is not None:
        message.priority = leg_request.priority
    if (request := leg_request.changed_request()) is not None:
        dataclass_to_proto(request, message.preprocessed)
    elif leg_request.chat_json is not None:
        message.chat_json = leg_request.chat_json
    elif leg_request.completion_json is not None:
        message.completion_json = leg_request.completion_json


def request_frame_from_proto(message: engine_pb2.AttachRequest) -> RequestFrame:
    """Returns a frame from frontend to worker; `error` is set in a leg that cannot be read."""
    frame = RequestFrame(acked_bytes=message.acked_bytes, heartbeat=message.heartbeat)
    if message.HasField("hello"):
        hello = message.hello
        frame.hello = Hello(hello.frontend_id, hello.expected_worker_id, hello.stream_seq)
    frame.submits = [_submit_from_proto(submit) for submit in message.submits]
    frame.prompt_parts = [
        PromptPart(part.slot, part.offset, part.token_ids_le) for part in message.prompt_parts
    ]
    frame.aborts = [AbortSlot(abort.slot, abort.reason) for abort in message.aborts]
    return frame


def _submit_from_proto(message: engine_pb2.Submit) -> tuple[int, LegRequest]:
    try:
        return message.slot, _leg_request_from_proto(message)
    except InvalidRequest as error:
        # One invalid request must not end the stream of all others.
        size = message.prompt_bytes
        unreadable = LegRequest(message.request_id, message.attempt, prompt_bytes=size, error=error)
        return message.slot, unreadable


def _leg_request_from_proto(message: engine_pb2.Submit) -> LegRequest:
    payload = message.WhichOneof("payload")
    if payload is None:
        raise InvalidRequest("payload is required", "payload")
    if not message.request_id:
        raise InvalidRequest("request_id is required", "request_id")
    if message.phase not in _PHASE_FROM_PROTO:
        raise InvalidRequest(f"phase has the unknown value {message.phase}", "phase")
    return LegRequest(
        request_id=message.request_id,
        attempt=message.attempt,
        timeout_s=message.timeout_ms / 1000 if message.HasField("timeout_ms") else None,
        traceparent=message.traceparent,
        span_id=message.span_id,
        tenant=message.tenant,
        priority=message.priority if message.HasField("priority") else None,
        request=from_proto(message.preprocessed) if payload == "preprocessed" else None,
        chat_json=message.chat_json if payload == "chat_json" else None,
        completion_json=message.completion_json if payload == "completion_json" else None,
        phase=_PHASE_FROM_PROTO[message.phase],
        prompt_bytes=message.prompt_bytes,
    )


def response_frame_to_proto(frame: ResponseFrame) -> engine_pb2.AttachResponse:
    """Returns the message of a frame from worker to frontend."""
    message = engine_pb2.AttachResponse(
        accepted=frame.accepted,
        slot=frame.slot,
        start=frame.start,
        count=frame.count,
        token_id=frame.token_id,
        sent_bytes=frame.sent_bytes,
    )
    if frame.hello_ack is not None:
        message.hello_ack.worker_id = frame.hello_ack.worker_id
        message.hello_ack.heartbeat_ms = round(frame.hello_ack.heartbeat_s * 1000)
        message.hello_ack.credit_bytes = frame.hello_ack.credit_bytes
    for rejected in frame.rejected:
        message.rejected.add(slot=rejected.slot, error=error_to_proto(rejected.error))
    for slot, logprobs in frame.logprobs:
        entry = message.logprobs.add(slot=slot)
        for logprob in logprobs:
            dataclass_to_proto(logprob, entry.logprobs.add())
    for chunk in frame.chunks:
        message.chunks.add(slot=chunk.slot, index=chunk.index, json=chunk.json)
    for terminal in frame.terminals:
        _add_terminal(terminal, message.terminals.add())
    if frame.heartbeat:
        message.heartbeat.extend(load_to_proto(load) for load in frame.heartbeat)
        message.engine_failure = frame.engine_failure
    return message


def _add_terminal(terminal: Terminal, message: engine_pb2.Terminal) -> None:
    try:
        _terminal_to_proto(terminal, message)
    except Exception as error:
        # The values are an engine's. One request must not end the stream of all others.
        message.Clear()
        text = f"the engine's terminal chunk cannot be encoded: {type(error).__name__}"
        failure = InternalError(text, reason=INVALID_OUTPUT)
        ended = Terminal(terminal.slot, None, error=failure, total_tokens=terminal.total_tokens)
        _terminal_to_proto(ended, message)


def _terminal_to_proto(terminal: Terminal, message: engine_pb2.Terminal) -> None:
    message.slot = terminal.slot
    if terminal.finish_reason is not None:
        message.finish_reason = finish_reason_to_proto(terminal.finish_reason)
    message.total_tokens = terminal.total_tokens
    message.stop_reason_json = terminal.stop_reason_json
    if terminal.error is not None:
        message.error.CopyFrom(error_to_proto(terminal.error))
    if terminal.usage is not None:
        dataclass_to_proto(terminal.usage, message.usage)
    if terminal.prefill_result is not None:
        dataclass_to_proto(terminal.prefill_result, message.prefill_result)
    if terminal.worker_trace_link is not None:
        dataclass_to_proto(terminal.worker_trace_link, message.worker_trace_link)


def response_frame_from_proto(message: engine_pb2.AttachResponse) -> ResponseFrame:
    """Returns a frame from worker to frontend. Raises InvalidRequest with the invalid field."""
    frame = ResponseFrame(sent_bytes=message.sent_bytes)
    if message.accepted:
        frame.accepted = list(message.accepted)
    if message.slot or message.token_id:  # most frames have only tokens, or none
        frame.slot = list(message.slot)
        frame.start = list(message.start)
        frame.count = list(message.count)
        frame.token_id = list(message.token_id)
    if message.HasField("hello_ack"):
        ack = message.hello_ack
        frame.hello_ack = HelloAck(ack.worker_id, ack.heartbeat_ms / 1000, ack.credit_bytes)
    frame.rejected = [Rejected(r.slot, error_from_proto(r.error)) for r in message.rejected]
    frame.logprobs = [
        (entry.slot, [dataclass_from_proto(TokenLogprob, logprob) for logprob in entry.logprobs])
        for entry in message.logprobs
    ]
    frame.chunks = [JsonChunk(chunk.slot, chunk.index, chunk.json) for chunk in message.chunks]
    frame.terminals = list(map(_terminal_from_proto, message.terminals))
    frame.heartbeat = tuple(load_from_proto(load) for load in message.heartbeat)
    if frame.heartbeat:
        frame.engine_failure = message.engine_failure[:ENGINE_FAILURE_CHARS_MAX]
    return frame


def _terminal_from_proto(message: engine_pb2.Terminal) -> Terminal:
    has = message.HasField
    has_failed = has("error") and not message.finish_reason
    return Terminal(
        slot=message.slot,
        finish_reason=None if has_failed else finish_reason_from_proto(message.finish_reason),
        error=error_from_proto(message.error) if has("error") else None,
        usage=dataclass_from_proto(CompletionUsage, message.usage) if has("usage") else None,
        prefill_result=(
            dataclass_from_proto(PrefillResult, message.prefill_result)
            if has("prefill_result")
            else None
        ),
        worker_trace_link=(
            dataclass_from_proto(TraceLink, message.worker_trace_link)
            if has("worker_trace_link")
            else None
        ),
        stop_reason_json=message.stop_reason_json,
        total_tokens=message.total_tokens,
    )
