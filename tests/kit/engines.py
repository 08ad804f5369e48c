"""Engines whose outputs a test writes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from common.kv.load import Load
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)

Script = Callable[[PreprocessedRequest, GenerateContext], AsyncGenerator[LLMEngineOutput, None]]


async def two_tokens(
    request: PreprocessedRequest, ctx: GenerateContext
) -> AsyncGenerator[LLMEngineOutput, None]:
    """The default script."""
    yield chunk.token(300)
    yield chunk.token(301)
    yield chunk.length()


class RecordingEngine:
    """Keeps every request, context and call. script: what `generate` yields."""

    def __init__(self, script: Script = two_tokens, **config: Any) -> None:
        self.requests: list[PreprocessedRequest] = []
        self.contexts: list[GenerateContext] = []
        self.calls: list[str] = []
        self._script = script
        self._config = {"model": "m", "context_length": 4096, "kv_cache_block_size": 16, **config}
        self.worker_ids: list[int] = []

    async def start(self, worker_id: int) -> EngineConfig:
        self.calls.append("start")
        self.worker_ids.append(worker_id)
        return EngineConfig(**self._config)

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.calls.append("generate")
        self.requests.append(request)
        self.contexts.append(ctx)
        try:
            async for output in self._script(request, ctx):
                yield output
        finally:
            self.calls.append("closed")

    async def abort(self, ctx: GenerateContext) -> None:
        self.calls.append("abort")

    async def drain(self) -> None:
        self.calls.append("drain")

    async def cleanup(self) -> None:
        self.calls.append("cleanup")

    def loads(self) -> Sequence[Load]:
        return (Load(engine_step=1),)
