"""An engine that reports drafted tokens: of each response three accepted and five rejected ones.

python -m worker_svc --engine tests.e2e.drafting_engine:make FLAGS...
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from common.request.preprocessed import CompletionTokensDetails
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import GenerateContext, LLMEngineOutput, PreprocessedRequest
from worker_svc.engines.echo import EchoConfig, EchoEngine

DETAILS = CompletionTokensDetails(accepted_prediction_tokens=3, rejected_prediction_tokens=5)


class DraftingEngine(EchoEngine):
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        async for output in super().generate(request, ctx):
            counts = output.completion_usage
            if counts is not None:
                output = output.with_usage(replace(counts, completion_tokens_details=DETAILS))
            yield output


def make(config: WorkerConfig) -> DraftingEngine:
    return DraftingEngine(EchoConfig(model=config.default_model_name))
