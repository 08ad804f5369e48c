"""Data-parallel ranks of the simulated engine: an engine for each rank, in one worker.

Each rank has a queue, a cache, KV events and a load of its own, and the same model and adapters. A
request runs on the rank that it names, else on one with the fewest requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from common.errors import InvalidRequest
from common.kv.load import Load
from common.request.embedding import Vector
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
)
from worker_svc.engines.sim.config import SimConfig
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.kv_events.external_events import ExternalEvent, KvEventSink


class RankedSimEngine:
    """An `LLMEngine` of `size` simulated engines, at least 2. build: of one rank.

    Counters are the sums of the ranks'.
    """

    def __init__(self, config: SimConfig, size: int, build: Callable[[SimConfig], SimEngine]):
        self.ranks = tuple(build(config) for _ in range(size))
        self.kv_event_format = self.ranks[0].kv_event_format
        self.kv_events_off_reason = self.ranks[0].kv_events_off_reason

    async def start(self, worker_id: int) -> EngineConfig:
        configs = await asyncio.gather(*(rank.start(worker_id) for rank in self.ranks))
        return replace(configs[0], dp_size=len(self.ranks))

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """As `SimEngine.generate`. Raises InvalidRequest for an unknown rank."""
        rank, request = self._rank_of(request)
        async with aclosing(rank.generate(request, ctx)) as outputs:
            async for output in outputs:
                yield output

    async def embed(self, request: PreprocessedRequest, ctx: GenerateContext) -> Vector | None:
        rank, request = self._rank_of(request)
        return await rank.embed(request, ctx)

    async def score(self, request: PreprocessedRequest, ctx: GenerateContext) -> float | None:
        rank, request = self._rank_of(request)
        return await rank.score(request, ctx)

    def _rank_of(self, request: PreprocessedRequest) -> tuple[SimEngine, PreprocessedRequest]:
        """Returns the engine of a request, and the request as that engine takes it."""
        routing = request.routing
        if routing is None or routing.dp_rank is None:
            # Of equal ones the last, so that a leg which has lost its rank is noticed.
            return min(reversed(self.ranks), key=_requests), request
        if routing.dp_rank >= len(self.ranks):
            text = f"this worker has ranks 0 to {len(self.ranks) - 1}, not {routing.dp_rank}"
            raise InvalidRequest(text, "routing.dp_rank")
        rank = self.ranks[routing.dp_rank]
        return rank, replace(request, routing=replace(routing, dp_rank=None))

    async def abort(self, ctx: GenerateContext) -> None:
        """Does nothing, as `SimEngine.abort`."""

    async def drain(self) -> None:
        for rank in self.ranks:
            await rank.drain()

    async def cleanup(self) -> None:
        for rank in self.ranks:
            await rank.cleanup()

    def publish_to(self, sink: KvEventSink) -> None:
        for number, rank in enumerate(self.ranks):
            rank.publish_to(_RankSink(sink, number))

    def loads(self) -> Sequence[Load]:
        return [
            replace(load, dp_rank=number)
            for number, rank in enumerate(self.ranks)
            for load in rank.loads()
        ]

    @property
    def counters(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for rank in self.ranks:
            total.update(rank.counters)
        return total

    async def flush_cache(self) -> int:
        return sum([await rank.flush_cache() for rank in self.ranks])

    async def load_lora(self, name: str, uri: str) -> frozenset[str]:
        return [await rank.load_lora(name, uri) for rank in self.ranks][-1]

    async def unload_lora(self, name: str) -> frozenset[str]:
        return [await rank.unload_lora(name) for rank in self.ranks][-1]

    async def sleep(self) -> None:
        for rank in self.ranks:
            await rank.sleep()

    async def wake(self) -> None:
        for rank in self.ranks:
            await rank.wake()


class _RankSink:
    """Marks the events of one rank."""

    def __init__(self, sink: KvEventSink, rank: int) -> None:
        self._sink = sink
        self._rank = rank

    def take(self, events: Iterable[ExternalEvent]) -> None:
        self._sink.take([replace(event, rank=self._rank) for event in events])

    def record_loss(self, rank: int, reason: str) -> None:
        self._sink.record_loss(self._rank, reason)

    def reset(self, rank: int) -> None:
        self._sink.reset(self._rank)


def _requests(engine: SimEngine) -> int:
    return sum(load.running + load.waiting for load in engine.loads())
