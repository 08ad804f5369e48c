"""What the checks of the conformance kit stand on: engines to try, requests, and raw streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from common.errors import MeshError
from common.kv.load import Load
from common.request.preprocessed import TokenIds
from worker_svc.engines.contract import (
    EngineConfig,
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from worker_svc.kv_events.normalizer import ExternalEvent, PagesCleared, PagesRemoved, PagesStored

WORKER_ID = 0x5EED
# How often a condition is looked at that an engine reaches by itself.
POLL_S = 0.01

T = TypeVar("T")


class Failed(Exception):
    """The engine breaks a rule; the message says which, and what it did."""


class Skipped(Exception):
    """The rule cannot be tried on this engine; the message says why."""


def demand(condition: object, message: str) -> None:
    """Raises Failed with the message unless the condition holds."""
    if not condition:
        raise Failed(message)


@dataclass(slots=True)
class Limits:
    """How long an engine may take, in seconds, for one of each.

    stop_s: to heed a stop, and to let go of a stream; the mesh's own bound by default.
    """

    start_s: float = 600.0
    answer_s: float = 60.0
    stop_s: float = 0.25
    end_s: float = 30.0


@dataclass(slots=True)
class Heard:
    """One stream as it came. error: what it ended with, when that was an exception."""

    chunks: list[LLMEngineOutput] = field(default_factory=list)
    error: Exception | None = None

    @property
    def token_ids(self) -> list[int]:
        """All tokens, in order."""
        return [token for one in self.chunks for token in one.token_ids]

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the last chunk."""
        return self.chunks[-1].finish_reason if self.chunks else None


@dataclass(slots=True)
class Pages:
    """A sink that notes what breaks the rules of events. held: by rank, tier and scope.

    page_size: tokens a page, as the engine's rules have it.
    """

    page_size: int
    held: set[tuple[int, int, str, int]] = field(default_factory=set)
    events: list[ExternalEvent] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def take(self, events: Iterable[ExternalEvent]) -> None:
        """As a KvSink."""
        for event in events:
            self.events.append(event)
            match event:
                case PagesStored():
                    self._store(event)
                case PagesRemoved():
                    self._remove(event)
                case PagesCleared(rank):
                    self.held = {one for one in self.held if one[0] != rank}

    def lose(self, rank: int, why: str) -> None:
        """As a KvSink."""
        self.faults.append(f"events of rank {rank} were lost: {why}")

    def reset(self, rank: int) -> None:
        """As a KvSink."""
        self.faults.append(f"rank {rank} began anew, though the engine went on")

    def _store(self, event: PagesStored) -> None:
        if event.page_size != self.page_size:
            self.faults.append(
                f"a page of {event.page_size} tokens was stored, kv_rules say {self.page_size}"
            )
        key = (event.rank, int(event.tier), event.scope)
        if event.parent is not None and (*key, event.parent) not in self.held:
            self.faults.append(f"pages were stored below {event.parent}, which is not held")
        self.held |= {(*key, one) for one in event.hashes}

    def _remove(self, event: PagesRemoved) -> None:
        for one in event.hashes:
            key = (event.rank, int(event.tier), event.scope, one)
            if key not in self.held:
                self.faults.append(f"page {one} was removed, which is not held")
            self.held.discard(key)


class Bench:
    """One engine under test. make: constructs one more.

    was_started: whether `start` was called, and so `cleanup` has to be; config: what it returned.
    pages: what the engine has told of its cache, where it publishes.
    """

    def __init__(self, make: Callable[[], LLMEngine], limits: Limits) -> None:
        self.make = make
        self.limits = limits
        self.engine = make()
        self.was_started = False
        self.config: EngineConfig | None = None
        self.pages: Pages | None = None
        self._asked = 0

    @property
    def started(self) -> EngineConfig:
        """What the engine said of itself. Raises Skipped when it did not start."""
        if self.config is None:
            raise Skipped("the engine did not start")
        return self.config

    def needs_start(self) -> None:
        """Raises Skipped when the engine did not start."""
        assert self.started is not None

    def needs_whole_answers(self) -> None:
        """Raises Skipped where the engine serves halves of requests only."""
        if not self.started.local_prefill:
            raise Skipped("the engine serves halves of requests: prefill or decode")

    def ctx(self) -> GenerateContext:
        """A request's context, with an id of its own."""
        self._asked += 1
        return GenerateContext(EngineContext(f"conformance-{self._asked}"))

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """Token ids that any vocabulary has: 3 to 99, other ones for another seed."""
        return [3 + (seed * 31 + at * (7 + seed % 5) + at // 13) % 97 for at in range(tokens)]

    def request(
        self, prompt: Sequence[int], max_tokens: int | None, **parts: object
    ) -> PreprocessedRequest:
        """A greedy request that ends at max_tokens only."""
        request = PreprocessedRequest(
            token_ids=TokenIds.of(prompt),
            stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=True),
            sampling_options=SamplingOptions(temperature=0.0),
        )
        return replace(request, **parts)  # type: ignore[arg-type]

    def long_request(self) -> PreprocessedRequest:
        """One that an engine does not end before it is told to, if it can be helped."""
        most = self.started.context_length or 4096
        prompt = self.prompt(max(1, min(512, most // 4)), seed=9)
        return self.request(prompt, max(1, min(100_000, most // 2)))

    async def hear(
        self,
        request: PreprocessedRequest,
        ctx: GenerateContext | None = None,
        *,
        on_chunk: Callable[[LLMEngineOutput], Awaitable[None]] | None = None,
    ) -> Heard:
        """The raw stream, to its very end. Raises Failed when it takes too long."""
        heard = Heard()
        stream = self.engine.generate(request, ctx or self.ctx())
        async with aclosing(stream):
            await within(
                self.limits.answer_s, self._listen(stream, heard, on_chunk), "the stream has no end"
            )
        return heard

    async def _listen(
        self,
        stream: AsyncGenerator[LLMEngineOutput, None],
        heard: Heard,
        on_chunk: Callable[[LLMEngineOutput], Awaitable[None]] | None,
    ) -> None:
        try:
            async for output in stream:
                heard.chunks.append(output)
                if on_chunk is not None:
                    await on_chunk(output)
        except Failed:
            raise
        except Exception as error:
            heard.error = error

    async def answer(self, request: PreprocessedRequest) -> Heard:
        """A stream that ended well. Raises Failed otherwise."""
        heard = await self.hear(request)
        must_end_well(heard)
        return heard

    async def refusal(self, request: PreprocessedRequest) -> MeshError:
        """What a request is refused with. Raises Failed when it is not, or not with a MeshError."""
        heard = await self.hear(request)
        demand(heard.error is not None, "it was not refused")
        demand(
            isinstance(heard.error, MeshError),
            f"it was refused with {type(heard.error).__name__}, which is no MeshError",
        )
        demand(not heard.chunks, "chunks came before the refusal")
        assert isinstance(heard.error, MeshError)
        return heard.error

    def loads(self) -> Sequence[Load]:
        """The engine's load."""
        return self.engine.loads()

    async def at_rest(self) -> None:
        """Returns once nothing runs or waits. Raises Failed when that takes too long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.limits.end_s
        while busy := [one for one in self.loads() if one.running or one.waiting or one.rooms_open]:
            demand(loop.time() < deadline, f"the engine is not at rest: {busy}")
            await asyncio.sleep(POLL_S)


async def within(limit_s: float, work: Awaitable[T], message: str) -> T:
    """The result. Raises Failed with the message when it takes longer."""
    timeout = asyncio.timeout(limit_s)
    try:
        async with timeout:
            return await work
    except TimeoutError:
        if timeout.expired():
            raise Failed(f"{message} within {limit_s:g} s") from None
        raise


def must_end_well(heard: Heard) -> None:
    """Raises Failed unless it ended with exactly one terminal chunk, its last, without error."""
    if heard.error is not None:
        raise Failed(f"it failed with {type(heard.error).__name__}: {heard.error}")
    ends = [at for at, one in enumerate(heard.chunks) if one.finish_reason is not None]
    demand(ends, "the stream ended without a terminal chunk")
    demand(len(ends) == 1, f"the stream had {len(ends)} terminal chunks")
    demand(ends[0] == len(heard.chunks) - 1, "a chunk came after the terminal one")
    last = heard.chunks[-1]
    demand(
        last.finish_reason is not FinishReason.ERROR, f"it ended with an error chunk: {last.error}"
    )
