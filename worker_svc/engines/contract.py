"""The engine contract: what a worker asks of an inference engine.

Life: construct → `start` → `generate`* (concurrent) → `abort`? → `drain` → `cleanup`.
Everything an engine author needs is importable from here. `validate_stream` enforces the rules of
the
output stream; a framework which forwards a stream always goes through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

from common.errors import (
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    PromptTooLong,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.kv.load import Load
from common.request.preprocessed import (
    BootstrapInfo,
    CompletionUsage,
    FinishReason,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
    TokenLogprob,
    TraceLink,
    unsupported_fields,
    usage,
)
from worker_svc.kv_events.normalizer import KvEventFormat, KvEventSink

__all__ = [
    "KV_EVENTS_OFF",
    "BootstrapInfo",
    "CompletionUsage",
    "CountingEngine",
    "EngineConfig",
    "EngineContext",
    "FinishReason",
    "GenerateContext",
    "InvalidRequest",
    "KvEventFormat",
    "KvEventSink",
    "LLMEngine",
    "LLMEngineOutput",
    "Load",
    "MeshError",
    "FailureReportingEngine",
    "OutputOptions",
    "Overloaded",
    "PagedEngine",
    "PassThroughEngine",
    "PrefillResult",
    "PreprocessedRequest",
    "PromptTooLong",
    "SamplingOptions",
    "StopConditions",
    "TokenLogprob",
    "TraceLink",
    "Unavailable",
    "Unsupported",
    "WorkerLost",
    "chunk",
    "unsupported_fields",
    "usage",
    "validate_stream",
]


# The `kv_events_off_reason` of an engine that reuses prefixes and was told not to say so.
KV_EVENTS_OFF = "kv_events is off"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine says of itself when it has started. None: not advertised, never zero.

    kv_cache_block_size: tokens a block; None makes KV routing fall back to load.
    bootstrap_host, bootstrap_port: where prefill hands KV over; published only together.
    transfer_group: engines with equal groups can move KV between each other.
    local_prefill: a decode engine that can compute prompts itself.
    loras: adapters that are loaded, which requests may name.
    kv_index: "events" (KV events are published), "approx" (prefixes are reused, and nobody is told:
    routers guess) or "none" (nothing is reused, or it is no use to guess); kv_index_reason says why
    not events.
    """

    model: str = ""
    served_model_name: str | None = None
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    transfer_group: str = ""
    local_prefill: bool = True
    loras: frozenset[str] = frozenset()
    kv_index: str = "none"
    kv_index_reason: str = ""
    dp_size: int = 1

    @property
    def advertised_name(self) -> str:
        """The public model name."""
        return self.served_model_name or self.model

    @property
    def disaggregated_endpoint(self) -> tuple[str, int] | None:
        """Host and port of the handoff, when both are there."""
        if self.bootstrap_host is None or self.bootstrap_port is None:
            return None
        return self.bootstrap_host, self.bootstrap_port


class EngineContext:
    """One request's control: who asks for its end, and how hard.

    `stop_generating` asks for a graceful end: the stream yields a terminal chunk with finish
    reason cancelled. `kill` means that nobody listens any more.
    """

    def __init__(self, request_id: str, reason: str = "") -> None:
        self.id = request_id
        self.stop_reason = reason
        self._stopped = asyncio.Event()
        self._killed = asyncio.Event()

    @property
    def is_stopped(self) -> bool:
        """Whether an end was asked for, in either way."""
        return self._stopped.is_set()

    @property
    def is_killed(self) -> bool:
        """Whether nobody listens any more."""
        return self._killed.is_set()

    async def stopped(self) -> None:
        """Returns once an end was asked for."""
        await self._stopped.wait()

    async def killed(self) -> None:
        """Returns once nobody listens any more."""
        await self._killed.wait()

    def stop_generating(self, reason: str = "") -> None:
        """Asks for a graceful end. Idempotent; the first reason stays."""
        if not self.is_stopped:
            self.stop_reason = reason
            self._stopped.set()

    def kill(self, reason: str = "") -> None:
        """Says that nobody listens any more."""
        self.stop_generating(reason)
        self._killed.set()


class GenerateContext:
    """An EngineContext with what only the framework adds; usable wherever a context is.

    first_token: set on decode legs; fires when the first token is there, from whichever side.
    traceparent: of the caller; empty when not traced.
    """

    def __init__(
        self,
        inner: EngineContext,
        first_token: asyncio.Event | None = None,
        *,
        traceparent: str = "",
        priority: int | None = None,
        tenant: str = "",
    ) -> None:
        self._inner = inner
        self._first_token = first_token
        self.traceparent = traceparent
        self.priority = priority
        self.tenant = tenant

    def __getattr__(self, name: str) -> Any:  # delegation: whatever the context grows is reachable
        return getattr(self._inner, name)

    @property
    def id(self) -> str:
        """The request's id."""
        return self._inner.id

    @property
    def is_stopped(self) -> bool:
        """Whether an end was asked for."""
        return self._inner.is_stopped

    async def stopped(self) -> None:
        """Returns once an end was asked for."""
        await self._inner.stopped()

    def inner_arc(self) -> EngineContext:
        """The context itself, for tasks that outlive `generate`."""
        return self._inner

    def notify_first_token(self) -> None:
        """Says that the first token is there. Idempotent; nothing happens on other legs.

        The framework says so at the first chunk with tokens; engines call it only when the first
        token travels another way.
        """
        if self._first_token is not None:
            self._first_token.set()

    def first_token_sender(self) -> asyncio.Event | None:
        """The signal itself, for the framework; None on all but decode legs."""
        return self._first_token


@dataclass(frozen=True, slots=True)
class LLMEngineOutput:
    """One chunk of an engine's stream. `finish_reason` makes it the terminal one.

    text: set by engines which detokenise themselves. chunk_json: one OpenAI chunk of a pass-through
    request. disaggregated_params: what a prefill leg hands to its decode leg (JSON value).
    """

    token_ids: Sequence[int] = ()
    text: str | None = None
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    completion_usage: CompletionUsage | None = None
    disaggregated_params: Any = None
    error: str | None = None
    worker_trace_link: TraceLink | None = None
    chunk_json: bytes | None = None

    def with_tokens(self, token_ids: Sequence[int]) -> Self:
        """The same chunk with these tokens instead."""
        return replace(self, token_ids=tuple(token_ids))

    def with_usage(self, completion_usage: CompletionUsage) -> Self:
        """The same chunk with this usage."""
        return replace(self, completion_usage=completion_usage)


class chunk:
    """Constructors of chunks; reads as a namespace: `chunk.token(42)`, `chunk.stop()`."""

    @staticmethod
    def token(token_id: int) -> LLMEngineOutput:
        """One token, not the last chunk."""
        return LLMEngineOutput(token_ids=(token_id,))

    @staticmethod
    def cancelled() -> LLMEngineOutput:
        """The end after a stop was asked for."""
        return LLMEngineOutput(finish_reason=FinishReason.CANCELLED)

    @staticmethod
    def stop() -> LLMEngineOutput:
        """The end at a stop token or string."""
        return LLMEngineOutput(finish_reason=FinishReason.STOP)

    @staticmethod
    def length() -> LLMEngineOutput:
        """The end at max_tokens or the context's end."""
        return LLMEngineOutput(finish_reason=FinishReason.LENGTH)

    @staticmethod
    def error(message: str) -> LLMEngineOutput:
        """The end by a failure whose type is not known; raise a MeshError where it is."""
        return LLMEngineOutput(finish_reason=FinishReason.ERROR, error=message)


class LLMEngine(Protocol):
    """An inference engine. All methods may be called concurrently with `generate`."""

    async def start(self, worker_id: int) -> EngineConfig:
        """Gets ready to generate; may take minutes (log progress). Raises MeshError.

        worker_id: unique in the mesh, the same for the engine's whole life.
        """

    def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """The output of one request: chunks, then exactly one with a finish reason.

        A MeshError raised instead is terminal too and keeps its type up to the client. Between
        chunks the engine watches `ctx`; once stopped it ends with finish reason cancelled. Closing
        the generator early (`aclose`) releases everything the request held: `abort` is not called
        then.
        """

    async def abort(self, ctx: GenerateContext) -> None:
        """Called on an explicit stop or kill, never for a dropped stream."""

    async def drain(self) -> None:
        """Waits for KV transfers in flight. Called once, before cleanup, still in discovery."""

    async def cleanup(self) -> None:
        """Ends the engine. Called once if `start` was called, also if that raised; idempotent."""

    def loads(self) -> Sequence[Load]:
        """Load of every rank now. Cheap: called many times a second."""


@runtime_checkable
class CountingEngine(Protocol):
    """An engine that counts what it does: shown by GetInfo and /metrics as `engine_<name>`."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts since start, by name."""


@runtime_checkable
class PagedEngine(Protocol):
    """An engine that reports the pages of its cache (`kv_index` is "events").

    kv_rules: how its events are to be read. kv_silence: why there are none; "": there are. Where it
    is KV_EVENTS_OFF prefixes are reused all the same. Both hold from the end of `start` on.
    """

    kv_event_format: KvEventFormat
    kv_events_off_reason: str

    def publish_to(self, sink: KvEventSink) -> None:
        """From now on the sink is told what the cache holds, beginning with what it holds now.

        Called once, right after `start`, in the event loop, as the sink must be.
        """


@runtime_checkable
class PassThroughEngine(Protocol):
    """An engine that takes OpenAI bodies as they are (S0's Chat and Completion workers)."""

    def generate_pass_through(
        self, kind: str, body: bytes, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """As `generate`; chunks carry `chunk_json`. kind: "chat" or "completion"."""


@runtime_checkable
class FailureReportingEngine(Protocol):
    """An engine that can end without having been asked to."""

    async def wait_for_failure(self) -> None:
        """Raises WorkerLost when it does. Called after `start`."""


async def validate_stream(
    stream: AsyncIterator[LLMEngineOutput], *, request_id: str
) -> AsyncGenerator[LLMEngineOutput, None]:
    """The stream, held to the contract: raises Bug on an item after the terminal one or without it.

    Closing this generator closes the engine's.
    """
    has_terminal = False
    try:
        async for output in stream:
            if has_terminal:
                raise InternalError(
                    f"request {request_id}: the engine sent a chunk after its terminal one"
                )
            has_terminal = output.finish_reason is not None
            yield output
        if not has_terminal:
            raise InternalError(
                f"request {request_id}: the engine's stream ended without a terminal chunk"
            )
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
