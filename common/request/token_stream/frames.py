"""Frames of the Attach stream, their size limits, and the interfaces of its two ends. Pure.

The rules (a)-(i) are defined in `kvmesh/engine/v1/engine.proto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import Conflict, InvalidRequest, MeshError
from common.kv.load import Load
from common.request.preprocessed import (
    CompletionUsage,
    FinishReason,
    PrefillResult,
    PreprocessedRequest,
    TokenLogprob,
    TraceLink,
)
from common.streams.silence import ATTACH

# Unless HelloAck states another one. The ends of the stream measure the silence.
HEARTBEAT_S = ATTACH.heartbeat_s
CREDIT_BYTES = 1 << 20
FRAME_BYTES = 256 << 10
PROMPT_PART_BYTES = 64 << 10
# Largest prompt that a worker assembles; far above any context length.
PROMPT_BYTES_MAX = 64 << 20
# Limits of a worker for prompts that have not arrived completely.
ARRIVING_BYTES_MAX_PER_STREAM = 2 * PROMPT_BYTES_MAX
ARRIVING_BYTES_MAX = 4 * PROMPT_BYTES_MAX
# A frontend's frame of FRAME_BYTES has at most 256.
SUBMITS_PER_FRAME_MAX = 1024


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a frontend; fields: `Hello` in the proto."""

    frontend_id: int
    expected_worker_id: int
    stream_seq: int


@dataclass(frozen=True, slots=True)
class HelloAck:
    """First frame of a worker; fields: `HelloAck` in the proto."""

    worker_id: int
    heartbeat_s: float = HEARTBEAT_S
    credit_bytes: int = CREDIT_BYTES


@dataclass(frozen=True, slots=True)
class LegRequest:
    """The work of one leg. Exactly one of `request`, `chat_json`, `completion_json` is set.

    request.token_ids: of any length; the link splits it into parts.
    timeout_s: seconds left for the leg; None: the worker's own limit.
    phase: "prefill", "decode", "embedding" (the prompt's vector is its one chunk), or "".
    """

    request_id: str
    attempt: int = 0
    timeout_s: float | None = None
    traceparent: str = ""
    span_id: str = ""
    tenant: str = ""
    priority: int | None = None
    request: PreprocessedRequest | None = None
    chat_json: bytes | None = None
    completion_json: bytes | None = None
    phase: str = ""


@dataclass(slots=True)
class Submit:
    """A leg request with its slot and the first part of its prompt (u32 LE).

    prompt_bytes: size of the whole prompt, 0 if `prompt` is the whole.
    error: set if the request cannot be read; the worker rejects the slot, the stream goes on.
    """

    slot: int
    leg_request: LegRequest
    prompt: bytes = b""
    prompt_bytes: int = 0
    error: InvalidRequest | None = None


@dataclass(frozen=True, slots=True)
class PromptPart:
    slot: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class AbortSlot:
    """Ends a slot that is not needed: the message, and the command of the worker's link."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    slot: int
    error: MeshError


@dataclass(frozen=True, slots=True)
class JsonChunk:
    slot: int
    index: int
    json: bytes


@dataclass(frozen=True, slots=True)
class Terminal:
    """The end of a slot. error: set if it failed; total_tokens: size of the whole output."""

    slot: int
    finish_reason: FinishReason | None
    error: MeshError | None = None
    usage: CompletionUsage | None = None
    prefill_result: PrefillResult | None = None
    worker_trace_link: TraceLink | None = None
    stop_reason_json: str = ""
    total_tokens: int = 0


@dataclass(slots=True)
class RequestFrame:
    """One frame from frontend to worker."""

    hello: Hello | None = None
    submits: list[Submit] = field(default_factory=list)
    prompt_parts: list[PromptPart] = field(default_factory=list)
    aborts: list[AbortSlot] = field(default_factory=list)
    acked_bytes: int = 0
    heartbeat: bool = False


@dataclass(slots=True)
class ResponseFrame:
    """One frame from worker to frontend. Tokens are a struct of arrays (h)."""

    hello_ack: HelloAck | None = None
    accepted: list[int] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    token_id: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Sequence[TokenLogprob]]] = field(default_factory=list)
    chunks: list[JsonChunk] = field(default_factory=list)
    terminals: list[Terminal] = field(default_factory=list)
    sent_bytes: int = 0
    heartbeat: Sequence[Load] = ()


class LegSink(Protocol):
    """Receives the events of one slot at the frontend, in the order of rule (c)."""

    def accepted(self) -> None:
        """Records that the worker accepted the request."""

    def rejected(self, error: MeshError) -> None:
        """Records that the worker rejected the request and ran nothing. The last call."""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Takes the next tokens; logprobs: one per token, or none."""

    def chunk(self, json: bytes) -> None:
        """Takes the next chunk of a pass-through request, or the vector of an embedding."""

    def terminal(self, terminal: Terminal) -> None:
        """Records the end of the slot. The last call."""

    def lost(self, error: MeshError) -> None:
        """Records the end of the stream; the worker's progress is unknown. The last call."""


def protocol_violation(rule: str, message: str) -> InvalidRequest:
    """Returns the error that ends a stream after a violation of the rule of that letter."""
    return InvalidRequest(
        f"Attach rule ({rule}): {message}", reason="ATTACH_BREACH", metadata={"rule": rule}
    )


def wrong_worker_error(actual: int, expected: int) -> Conflict:
    return Conflict(
        f"Attach rule (a): this is worker {actual}, not {expected}",
        reason="WRONG_WORKER",
        metadata={"rule": "a"},
    )
