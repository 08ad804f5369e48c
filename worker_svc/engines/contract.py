"""The engine contract: the interface between a worker and an inference engine.

Life cycle: construct → `start` → `generate`* (concurrent) → `abort`? → `drain` → `cleanup`. An
engine author can import everything from here. `validate_stream` enforces the rules of the output
stream; the framework passes every stream through it.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from common.errors import (
    INVALID_OUTPUT,
    InternalError,
    InvalidRequest as InvalidRequest,
    MeshError as MeshError,
    Overloaded as Overloaded,
    PromptTooLong as PromptTooLong,
    Unavailable as Unavailable,
    Unsupported as Unsupported,
    WorkerLost as WorkerLost,
)
from common.kv.load import Load as Load
from common.registry.card import ModelInput
from common.registry.instances import KvIndex
from common.request.embedding import Vector as Vector
from common.request.media import MediaInput as MediaInput
from common.request.preprocessed import (
    BootstrapInfo as BootstrapInfo,
    CompletionUsage as CompletionUsage,
    FinishReason as FinishReason,
    OutputOptions as OutputOptions,
    PrefillResult as PrefillResult,
    PreprocessedRequest as PreprocessedRequest,
    SamplingOptions as SamplingOptions,
    StopConditions as StopConditions,
    TokenLogprob as TokenLogprob,
    TraceLink as TraceLink,
    unsupported_fields as unsupported_fields,
    usage as usage,
)
from worker_svc.kv_events.external_events import KvEventFormat, KvEventSink

# `kv_events_off_reason` of an engine that reuses prefixes but is configured not to report them.
KV_EVENTS_OFF = "kv_events is off"
# Token ids are below it.
_ID_LIMIT = 2**32


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Properties of a started engine. None means not advertised, never zero.

    kv_cache_block_size: tokens per block; with None KV routing falls back to load.
    bootstrap_host, bootstrap_port: handoff address of a prefill engine; published only together.
    transfer_group: engines with equal groups can move KV between each other.
    local_prefill: whether a decode engine can compute prompts itself.
    loras: loaded adapters, which requests may name.
    kv_index: "events" (the engine reports its pages), "approx" (it reuses prefixes without reports;
    routers keep approximate entries) or "none" (no reuse, or approximate entries would be useless).
    kv_index_reason: why kv_index is not "events".
    kinds: requests that the engine serves, of "chat", "completions", "embedding" and "score".
    kinds_on_request: further ones, which it serves if the worker is configured to.
    embedding_size, shorter_embeddings, media: see `ModelCard`.
    template_texts: what the chat template of the card prints instead of a text of the model's own.
    supported_fields: of requests, as in `unsupported_fields`; with None an unsupported one is
    refused only after a worker was chosen.
    model_input: "text" if requests pass through to the engine, which takes no token ids.
    model_folder: where the tokenizer is, if the engine has learned that; None: as configured.
    server_address: host:port of the server that runs already, for gateways that send it requests of
    their own; "" if there is none. It expects `model` in bodies.
    software: the engine that computes tokens, for example "vllm": a started response continues only
    on a worker with the same one, since another one rounds differently. "": the configured engine.
    serves_in_order: whether a waiting request never starts after a later one without a higher
    priority. Then one that was overtaken counts as lost although others wait.
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
    kv_index: KvIndex = "none"
    kv_index_reason: str = ""
    dp_size: int = 1
    kinds: tuple[str, ...] = ("chat", "completions")
    kinds_on_request: tuple[str, ...] = ()
    embedding_size: int | None = None
    shorter_embeddings: bool = False
    media: Mapping[str, MediaInput] = field(default_factory=dict)
    template_texts: Mapping[str, str] = field(default_factory=dict)
    supported_fields: frozenset[str] | None = None
    serves_in_order: bool = False
    model_input: ModelInput = "tokens"
    model_folder: Path | None = None
    server_address: str = ""
    software: str = ""

    @property
    def advertised_name(self) -> str:
        """Returns the public model name."""
        return self.served_model_name or self.model

    @property
    def disaggregated_endpoint(self) -> tuple[str, int] | None:
        """Returns host and port of the handoff; None unless both are set."""
        if self.bootstrap_host is None or self.bootstrap_port is None:
            return None
        return self.bootstrap_host, self.bootstrap_port


class EngineContext:
    """Stop and kill signals of one request.

    After `stop_generating` the stream ends with finish reason cancelled. `kill` also means that the
    stream has no reader any more.
    """

    def __init__(self, request_id: str, reason: str = "") -> None:
        self.id = request_id
        self.stop_reason = reason
        self._stopped = asyncio.Event()
        self._killed = asyncio.Event()
        self._stop_callbacks: list[Callable[[], None]] = []

    @property
    def is_stopped(self) -> bool:
        """Whether the request was stopped or killed."""
        return self._stopped.is_set()

    @property
    def is_killed(self) -> bool:
        return self._killed.is_set()

    async def stopped(self) -> None:
        await self._stopped.wait()

    def call_on_stop(self, callback: Callable[[], None]) -> None:
        """Calls back at the stop; at once if the request was stopped. Costs no task, as waiting for
        `stopped` beside the output does."""
        if self.is_stopped:
            callback()
        else:
            self._stop_callbacks.append(callback)

    async def killed(self) -> None:
        await self._killed.wait()

    def stop_generating(self, reason: str = "") -> None:
        """Stops the request. Idempotent; the first reason stays."""
        if not self.is_stopped:
            self.stop_reason = reason
            self._stopped.set()
            for callback in self._stop_callbacks:
                callback()

    def kill(self, reason: str = "") -> None:
        """Stops the request and marks its stream as unread."""
        self._killed.set()
        self.stop_generating(reason)


class GenerateContext(EngineContext):
    """An EngineContext plus data of the framework. Tasks may keep it when `generate` has ended."""

    first_token: asyncio.Event | None
    """Fires at the first token, from either leg; None except on decode legs."""
    traceparent: str
    """Of the caller; "" if not traced."""
    priority: int | None
    tenant: str

    def __init__(
        self,
        request_id: str,
        first_token: asyncio.Event | None = None,
        *,
        traceparent: str = "",
        priority: int | None = None,
        tenant: str = "",
        on_preparing: Callable[[bool], None] | None = None,
    ) -> None:
        """on_preparing: called when `preparing` begins (True) and ends (False)."""
        super().__init__(request_id)
        self.first_token = first_token
        self.traceparent = traceparent
        self.priority = priority
        self.tenant = tenant
        self._on_preparing = on_preparing

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Marks work before the request enters the engine's queue, such as the decoding of media.

        The request does not count as lost meanwhile, however many others are prepared before it;
        the engine bounds the time itself.
        """
        if self._on_preparing is not None:
            self._on_preparing(True)
        try:
            yield
        finally:
            if self._on_preparing is not None:
                self._on_preparing(False)

    def notify_first_token(self) -> None:
        """Signals the first token. Idempotent; no effect on legs other than decode.

        The framework calls it at the first tokens, an engine only if they travel another way.
        """
        if self.first_token is not None:
            self.first_token.set()


@dataclass(frozen=True, slots=True)
class LLMEngineOutput:
    """One chunk of an engine's stream; the terminal one if `finish_reason` is set.

    text: set by engines that detokenize. chunk_json: one OpenAI chunk of a pass-through request.
    disaggregated_params: JSON value that a prefill leg hands to its decode leg.
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
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """Of the prompt's tokens from the second on, in order, before the first token of the output."""

    @property
    def prefill_result(self) -> PrefillResult | None:
        """What a prefill leg hands to its decode leg, with the details of the prompt in its usage;
        None for other legs."""
        if self.disaggregated_params is None:
            return None
        counts = self.completion_usage
        details = counts.prompt_tokens_details if counts is not None else None
        return PrefillResult(self.disaggregated_params, details)

    def with_tokens(self, token_ids: Sequence[int]) -> Self:
        return replace(self, token_ids=tuple(token_ids))

    def with_usage(self, completion_usage: CompletionUsage) -> Self:
        return replace(self, completion_usage=completion_usage)


class chunk:
    """Constructors of chunks, as a namespace: `chunk.token(42)`, `chunk.stop()`."""

    @staticmethod
    def token(token_id: int) -> LLMEngineOutput:
        """Returns a chunk with one token, not terminal."""
        return LLMEngineOutput(token_ids=(token_id,))

    @staticmethod
    def cancelled() -> LLMEngineOutput:
        """Returns the terminal chunk of a stopped request."""
        return LLMEngineOutput(finish_reason=FinishReason.CANCELLED)

    @staticmethod
    def stop() -> LLMEngineOutput:
        """Returns the terminal chunk at a stop token or string."""
        return LLMEngineOutput(finish_reason=FinishReason.STOP)

    @staticmethod
    def length() -> LLMEngineOutput:
        """Returns the terminal chunk at max_tokens or at the context length."""
        return LLMEngineOutput(finish_reason=FinishReason.LENGTH)

    @staticmethod
    def error(message: str) -> LLMEngineOutput:
        """Returns the terminal chunk of an untyped failure; for a typed one raise a MeshError."""
        return LLMEngineOutput(finish_reason=FinishReason.ERROR, error=message)


@runtime_checkable
class LLMEngine(Protocol):
    """An inference engine. All methods may be called while `generate` runs."""

    async def start(self, worker_id: int) -> EngineConfig:
        """Prepares the engine; may take minutes (log the progress). Raises MeshError.

        worker_id: unique in the mesh, constant for the engine's life.
        """

    def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields chunks, then exactly one chunk with a finish reason.

        A raised MeshError is terminal too and reaches the client with its type. Between chunks the
        engine checks `ctx`; once stopped it ends with finish reason cancelled. An early `aclose` of
        the generator releases all resources of the request; `abort` is not called then.
        """

    async def abort(self, ctx: GenerateContext) -> None:
        """Handles an explicit stop or kill; not called when the caller closes the stream."""

    async def drain(self) -> None:
        """Waits for KV transfers in flight. Called once before `cleanup`, still in discovery."""

    async def cleanup(self) -> None:
        """Stops the engine; idempotent. Called once if `start` was called or raised."""

    def loads(self) -> Sequence[Load]:
        """Returns the load of each rank. Must be cheap: called many times per second."""


@runtime_checkable
class CountingEngine(Protocol):
    """An engine with counters, which GetInfo and /metrics show as `engine_<name>`."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the counts since start, by name."""


@runtime_checkable
class PagedEngine(Protocol):
    """An engine that reports the pages of its cache (`kv_index` is "events").

    kv_event_format: how its events are read. kv_events_off_reason: why it reports nothing, "" if it
    reports; with KV_EVENTS_OFF it still reuses prefixes. Both are final when `start` returns.
    """

    kv_event_format: KvEventFormat
    kv_events_off_reason: str

    def publish_to(self, sink: KvEventSink) -> None:
        """Reports changes of the cache to the sink, beginning with the present content.

        Called once, directly after `start`, in the event loop, where the sink must be called too.
        """


@runtime_checkable
class PassThroughEngine(Protocol):
    """An engine that accepts OpenAI bodies unchanged."""

    def generate_pass_through(
        self, kind: str, body: bytes, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """As `generate`, but chunks carry `chunk_json`. kind: "chat" or "completion"."""


@runtime_checkable
class EmbeddingEngine(Protocol):
    """An engine that computes embeddings."""

    async def embed(self, request: PreprocessedRequest, ctx: GenerateContext) -> Vector | None:
        """Returns the vector of the prompt, of length 1; None if `ctx` was stopped.

        Only the prompt and its routing count. Cancelling the call releases all resources. Raises
        MeshError.
        """


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that scores pairs of texts."""

    async def score(self, request: PreprocessedRequest, ctx: GenerateContext) -> float | None:
        """Returns the score of the prompt, a pair that the tokenizer has joined; finite, greater if
        the texts fit better. None if `ctx` was stopped.

        Only the prompt and its routing count. Cancelling the call releases all resources. Raises
        MeshError.
        """


@runtime_checkable
class FailureReportingEngine(Protocol):
    """An engine that can fail outside of a request."""

    async def wait_for_failure(self) -> None:
        """Waits for such a failure and raises WorkerLost. Called after `start`."""


@runtime_checkable
class ProbedEngine(Protocol):
    """An engine with probes of its own. They replace those of the worker and of the frontends."""

    def probe_request(self) -> PreprocessedRequest:
        """Returns the request of a probe; it is sent with `is_probe` set.

        It must be short, need no other worker, and show that the engine can serve requests: the
        worker is excluded while the engine fails at it. Called for each probe.
        """


@runtime_checkable
class FlushableEngine(Protocol):
    """An engine that can drop its prefix cache."""

    async def flush_cache(self) -> int:
        """Drops the cached KV blocks that no request uses, and reports them as removed.

        Returns how many; 0 also if the engine does not count. Raises Conflict if it cannot now.
        """


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that loads and unloads LoRA adapters while it runs.

    Both methods return all adapters that are loaded afterwards. uri: as in LoadLoraRequest.
    """

    async def load_lora(self, name: str, uri: str) -> frozenset[str]:
        """Loads an adapter that is not loaded. Raises InvalidRequest or Unimplemented."""

    async def unload_lora(self, name: str) -> frozenset[str]:
        """Unloads a loaded adapter. Raises Unimplemented."""


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its memory. Its `generate` raises Unavailable while it sleeps."""

    async def sleep(self) -> None:
        """Releases the memory; called without requests and transfers. Raises Unimplemented."""

    async def wake(self) -> None:
        """Allocates the memory again."""


class OutputRules:
    """The rules of one output stream: call `check` with each output, then `end`.

    vocab_size: token ids are below it; None: not known.
    max_tokens: the most tokens of the output; None: no limit.
    """

    __slots__ = ("_has_terminal", "_ids_below", "_request_id", "_tokens_left")

    def __init__(
        self, request_id: str, *, vocab_size: int | None = None, max_tokens: int | None = None
    ) -> None:
        self._request_id = request_id
        self._ids_below = _ID_LIMIT if vocab_size is None else vocab_size
        self._tokens_left = math.inf if max_tokens is None else max_tokens
        self._has_terminal = False

    def check(self, output: LLMEngineOutput) -> None:
        """Raises InternalError with INVALID_OUTPUT if the output breaks a rule."""
        if self._has_terminal:
            raise self._broken("chunk after the terminal chunk")
        if output.finish_reason is not None:
            self._has_terminal = True
        if token_ids := output.token_ids:
            largest = token_ids[0]
            if len(token_ids) > 1 or type(largest) is not int or largest < 0:
                largest = self._largest(token_ids)
            if largest >= self._ids_below:
                text = f"token id {largest} is outside of the vocabulary of {self._ids_below} ids"
                raise self._broken(text)
            self._tokens_left -= len(token_ids)
            if self._tokens_left < 0:
                raise self._broken(f"{-self._tokens_left} tokens more than max_tokens")
        if output.logprobs:
            self._check_logprobs(output)
        if output.chunk_json is not None and not isinstance(output.chunk_json, bytes):
            raise self._broken("chunk_json is no bytes")

    def _largest(self, token_ids: Sequence[int]) -> int:
        """Returns the largest of several ids, at the speed of C."""
        try:
            return max(array("I", token_ids))
        except (OverflowError, TypeError):
            raise self._broken("a token id is no integer from 0 to 2**32 - 1") from None

    def _check_logprobs(self, output: LLMEngineOutput) -> None:
        logprobs = output.logprobs
        if len(logprobs) != len(output.token_ids):
            text = f"{len(logprobs)} log probabilities for {len(output.token_ids)} tokens"
            raise self._broken(text)
        tops = [top for logprob in logprobs for top in logprob.top]
        ids = [logprob.token_id for logprob in logprobs]
        values = [logprob.logprob for logprob in logprobs] + [top.logprob for top in tops]
        try:
            are_finite = all(map(math.isfinite, values))
        except (OverflowError, TypeError):
            raise self._broken("a log probability is no number") from None
        if not are_finite:
            raise self._broken("a log probability is not finite")
        if (largest := self._largest(ids)) >= self._ids_below:
            raise self._broken(f"log probability of token id {largest} outside of the vocabulary")
        # A model may have logits for more ids than its tokenizer, and rank one of them second.
        if tops:
            self._largest([top.token_id for top in tops])

    def end(self) -> None:
        """Raises InternalError with INVALID_OUTPUT if the stream had no terminal chunk."""
        if not self._has_terminal:
            raise self._broken("stream ended without a terminal chunk")

    def _broken(self, rule: str) -> InternalError:
        text = f"request {self._request_id}: invalid output of the engine: {rule}"
        return InternalError(text, reason=INVALID_OUTPUT)


async def validate_stream(
    stream: AsyncIterator[LLMEngineOutput], *, request_id: str
) -> AsyncGenerator[LLMEngineOutput, None]:
    """Yields the stream. Closing this generator closes the engine's.

    Raises InternalError if the stream breaks one of the `OutputRules`.
    """
    rules = OutputRules(request_id)
    try:
        async for output in stream:
            rules.check(output)
            yield output
        rules.end()
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
