"""The harness of the conformance checks: engines under test, requests, and raw streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from common.errors import MeshError
from common.request.preprocessed import TokenIds
from worker_svc.engines.contract import (
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from worker_svc.kv_events.external_events import (
    ExternalEvent,
    PagesCleared,
    PagesRemoved,
    PagesStored,
)

WORKER_ID = 0x5EED
# Interval of checks for a condition.
POLL_S = 0.01

T = TypeVar("T")


class CheckFailed(Exception):
    """The engine violates a rule; the message has the details."""


class CheckSkipped(Exception):
    """The rule does not apply to this engine; the message has the reason."""


def require(condition: object, message: str) -> None:
    """Raises CheckFailed with the message unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


@dataclass(slots=True)
class TimeLimits:
    """Time limits of an engine, in seconds, for one operation each.

    stop_s: to end a stopped or closed stream; the mesh relies on the default.
    """

    start_s: float = 600.0
    answer_s: float = 60.0
    stop_s: float = 0.25
    end_s: float = 30.0


@dataclass(slots=True)
class StreamResult:
    """One recorded stream. error: the exception that ended it, if any."""

    chunks: list[LLMEngineOutput] = field(default_factory=list)
    error: Exception | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.chunks[-1].finish_reason if self.chunks else None


@dataclass(slots=True)
class PageEventChecker:
    """A sink that records violations of the event rules. held: by rank, tier and hash_scope.

    page_size: tokens per page in the engine's event format.
    """

    page_size: int
    held: set[tuple[int, int, str, int]] = field(default_factory=set)
    events: list[ExternalEvent] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def take(self, events: Iterable[ExternalEvent]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case PagesStored():
                    self._store(event)
                case PagesRemoved():
                    self._remove(event)
                case PagesCleared(rank):
                    self.held = {page for page in self.held if page[0] != rank}

    def record_loss(self, rank: int, reason: str) -> None:
        self.violations.append(f"events of rank {rank} were lost: {reason}")

    def reset(self, rank: int) -> None:
        self.violations.append(f"rank {rank} was reset, but the engine did not restart")

    def _store(self, event: PagesStored) -> None:
        if event.page_size != self.page_size:
            self.violations.append(
                f"a page of {event.page_size} tokens was stored, the format has {self.page_size}"
            )
        key = (event.rank, int(event.tier), event.hash_scope)
        if event.parent is not None and (*key, event.parent) not in self.held:
            self.violations.append(f"pages were stored below {event.parent}, which is not held")
        self.held |= {(*key, item) for item in event.hashes}

    def _remove(self, event: PagesRemoved) -> None:
        for item in event.hashes:
            key = (event.rank, int(event.tier), event.hash_scope, item)
            if key not in self.held:
                self.violations.append(f"page {item} was removed, which is not held")
            self.held.discard(key)


class EngineHarness:
    """One engine under test. make_engine: constructs another.

    was_started: whether `start` was called, so that `cleanup` is due. config: the result of
    `start`. page_checker: the sink of the engine's events, if it publishes.
    """

    def __init__(self, make_engine: Callable[[], LLMEngine], limits: TimeLimits) -> None:
        self.make_engine = make_engine
        self.limits = limits
        self.engine = make_engine()
        self.was_started = False
        self.config: EngineConfig | None = None
        self.page_checker: PageEventChecker | None = None
        self._request_count = 0

    @property
    def engine_config(self) -> EngineConfig:
        """Returns the result of `start`. Raises CheckSkipped if the engine did not start."""
        if self.config is None:
            raise CheckSkipped("the engine did not start")
        return self.config

    def require_started(self) -> None:
        """Raises CheckSkipped if the engine did not start."""
        assert self.engine_config is not None

    def require_aggregated(self) -> None:
        """Raises CheckSkipped if the engine runs prefill or decode legs only."""
        if not self.engine_config.local_prefill:
            raise CheckSkipped("the engine runs prefill or decode legs only")

    def ctx(self) -> GenerateContext:
        self._request_count += 1
        return GenerateContext(f"conformance-{self._request_count}")

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """Returns token ids of any vocabulary: 3 to 99, different for each seed."""
        return [3 + (seed * 31 + at * (7 + seed % 5) + at // 13) % 97 for at in range(tokens)]

    def request(
        self, prompt: Sequence[int], max_tokens: int | None, **parts: object
    ) -> PreprocessedRequest:
        """Returns a greedy request that ends at max_tokens only."""
        request = PreprocessedRequest(
            token_ids=TokenIds.of(prompt),
            stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
            sampling_options=SamplingOptions(temperature=0.0),
        )
        return replace(request, **parts)  # type: ignore[arg-type]

    def long_request(self) -> PreprocessedRequest:
        """Returns a request that is too long to end before it is stopped, if possible."""
        limit = self.engine_config.context_length or 4096
        prompt = self.prompt(max(1, min(512, limit // 4)), seed=9)
        return self.request(prompt, max(1, min(100_000, limit // 2)))

    async def run_request(
        self,
        request: PreprocessedRequest,
        ctx: GenerateContext | None = None,
        *,
        on_chunk: Callable[[LLMEngineOutput], Awaitable[None]] | None = None,
    ) -> StreamResult:
        """Runs a request to its end. Raises CheckFailed if it takes too long."""
        stream_result = StreamResult()
        async with aclosing(self.engine.generate(request, ctx or self.ctx())) as stream:
            work = self._collect(stream, stream_result, on_chunk)
            await run_within(self.limits.answer_s, work, "the stream did not end")
        return stream_result

    async def _collect(
        self,
        stream: AsyncGenerator[LLMEngineOutput, None],
        stream_result: StreamResult,
        on_chunk: Callable[[LLMEngineOutput], Awaitable[None]] | None,
    ) -> None:
        try:
            async for output in stream:
                stream_result.chunks.append(output)
                if on_chunk is not None:
                    await on_chunk(output)
        except CheckFailed:
            raise
        except Exception as error:
            stream_result.error = error

    async def expect_success(self, request: PreprocessedRequest) -> StreamResult:
        """Runs a request. Raises CheckFailed if it fails."""
        stream_result = await self.run_request(request)
        check_success(stream_result)
        return stream_result

    async def expect_refusal(self, request: PreprocessedRequest) -> MeshError:
        """Returns the MeshError that rejects a request. Raises CheckFailed without one."""
        stream_result = await self.run_request(request)
        error = stream_result.error
        require(error is not None, "it was not rejected")
        if not isinstance(error, MeshError):
            raise CheckFailed(f"it was rejected with {type(error).__name__}, not a MeshError")
        require(not stream_result.chunks, "chunks arrived before the rejection")
        return error

    async def wait_until_idle(self) -> None:
        """Returns when no request runs or waits. Raises CheckFailed if that takes too long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.end_s
        while busy := [
            load for load in self.engine.loads() if load.running or load.waiting or load.rooms_open
        ]:
            require(loop.time() < deadline, f"the engine is not idle: {busy}")
            await asyncio.sleep(POLL_S)


async def run_within(limit_s: float, work: Awaitable[T], message: str) -> T:
    """Returns the result. Raises CheckFailed with the message if it takes longer."""
    timeout = asyncio.timeout(limit_s)
    try:
        async with timeout:
            return await work
    except TimeoutError:
        if timeout.expired():
            raise CheckFailed(f"{message} within {limit_s:g} s") from None
        raise


def check_cancelled(stream_result: StreamResult) -> None:
    """Raises CheckFailed unless the stream ended with one cancelled chunk."""
    check_success(stream_result)
    reason = stream_result.finish_reason
    require(reason is FinishReason.CANCELLED, f"it ended with {reason}")


def check_success(stream_result: StreamResult) -> None:
    """Raises CheckFailed unless the stream ended with exactly one terminal chunk without error."""
    error = stream_result.error
    require(error is None, f"it failed with {type(error).__name__}: {error}")
    ends = [at for at, chunk in enumerate(stream_result.chunks) if chunk.finish_reason is not None]
    require(ends, "the stream ended without a terminal chunk")
    require(len(ends) == 1, f"the stream had {len(ends)} terminal chunks")
    require(ends[0] == len(stream_result.chunks) - 1, "a chunk arrived after the terminal chunk")
    last = stream_result.chunks[-1]
    is_error = last.finish_reason is FinishReason.ERROR
    require(not is_error, f"it ended with an error chunk: {last.error}")
