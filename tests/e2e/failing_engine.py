"""The sim engine, failing as a file says: `--engine-args` names the file, and its content is one of

- `` (empty): the engine is well;
- `raise`: it raises at every request and probe;
- `raise at requests`: it raises at every request, and responds to probes;
- `raise midway`: it raises after two tokens of a request, and responds to probes;
- `chunk after the end`: it sends a chunk after the terminal one;
- `raise at poison`: it raises at a prompt that begins with POISON.

    python -m worker_svc --engine tests.e2e.failing_engine:make --engine-args FILE FLAGS...
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from pathlib import Path

from worker_svc.config import WorkerConfig
from worker_svc.engine_factory import build_engine
from worker_svc.engines.contract import (
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)
from worker_svc.engines.sim.config import SimConfig
from worker_svc.engines.sim.engine import SimEngine

POISON = [300, 301, 302]


class FailingEngine(SimEngine):
    def __init__(self, config: SimConfig, mode_path: Path) -> None:
        super().__init__(config, clock=time.monotonic)
        self._mode_path = mode_path

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        mode = self._mode_path.read_text()
        is_poison = request.token_ids.tolist()[: len(POISON)] == POISON
        if (
            mode == "raise"
            or (mode == "raise at requests" and not request.is_probe)
            or (mode == "raise at poison" and is_poison)
        ):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        tokens = 0
        async for output in super().generate(request, ctx, is_embedding=is_embedding):
            tokens += len(output.token_ids)
            yield output
            if mode == "raise midway" and tokens >= 2 and not request.is_probe:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if mode == "chunk after the end":
            yield chunk.token(5)


def make(config: WorkerConfig) -> FailingEngine:
    sim = build_engine(config.model_copy(update={"engine": "sim"}))
    assert isinstance(sim, SimEngine)
    return FailingEngine(sim.config, Path(config.engine_args))
