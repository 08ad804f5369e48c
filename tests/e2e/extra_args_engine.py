"""An engine that declares `extra_args`: with `{"reverse": true}` it returns the prompt's tokens in
reverse order, else in order.

    python -m worker_svc --engine tests.e2e.extra_args_engine:make FLAGS...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from common.request.preprocessed import TokenIds
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
)
from worker_svc.engines.echo import EchoConfig, EchoEngine


class ReversingEngine(EchoEngine):
    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        assert config.supported_fields is not None
        return replace(config, supported_fields=config.supported_fields | {"extra_args"})

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        args, tokens = request.extra_args, request.token_ids
        if isinstance(args, dict) and args.get("reverse"):
            tokens = TokenIds.of(tokens.tolist()[::-1])
        async for output in super().generate(
            replace(request, token_ids=tokens, extra_args=None), ctx
        ):
            yield output


def make(config: WorkerConfig) -> ReversingEngine:
    return ReversingEngine(EchoConfig(model=config.default_model_name))
