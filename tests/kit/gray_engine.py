"""The sim engine with a fault that can begin and end while it runs: it fails without dying.

    python -m worker_svc --engine=tests.kit.gray_engine:build --engine-args=FILE ...

FILE contains the name of a fault, and after a space how many requests there are for each one that
has it (1 by default: every request, probes included). While FILE is missing or empty, the engine is
well. A request keeps the fault with which it began.

    raise       raises an exception that is no MeshError
    lose        sends nothing and computes nothing
    swallow     computes the output and sends nothing
    stall       sends two chunks, computes the rest and sends nothing of it
    endless     sends the whole output and no terminal chunk
    vocabulary  sends an id that the vocabulary does not have, in place of each fourth token
    negative    sends a negative id in place of the second chunk's tokens
    after_end   sends a chunk after the terminal one
    too_many    sends one token more than max_tokens
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

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

FAULTS: Final = (
    *("raise", "lose", "swallow", "stall", "endless"),
    *("vocabulary", "negative", "after_end", "too_many"),
)
FACTORY: Final = "tests.kit.gray_engine:build"
_STALLED_AFTER_CHUNKS: Final = 2
_UNKNOWN_ID: Final = 2**31


class GrayEngine(SimEngine):
    """A sim engine. fault_file: see the module; None: its attribute `fault` has the same content.
    parts: of SimEngine."""

    # Any: arguments of SimEngine.
    def __init__(self, config: SimConfig, fault_file: Path | None = None, **parts: Any) -> None:
        super().__init__(config, **parts)
        self.fault = ""
        self._fault_file = fault_file
        self._requests = 0

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """As SimEngine, with the present fault."""
        fault = self._next_fault()
        if fault == "raise":
            raise RuntimeError("the accelerator reports an illegal memory access")
        if fault == "lose":
            await _wait_for_ever()
        outputs = super().generate(request, ctx, is_embedding=is_embedding)
        count = 0
        async with aclosing(outputs):
            async for output in outputs:
                count += 1
                is_sent = not (
                    fault == "swallow"
                    or (fault == "stall" and count > _STALLED_AFTER_CHUNKS)
                    or (fault == "endless" and output.finish_reason is not None)
                )
                if is_sent:
                    yield _changed(output, fault, count)
                elif fault == "endless" and output.token_ids:
                    yield LLMEngineOutput(token_ids=output.token_ids, logprobs=output.logprobs)
        if fault == "after_end":
            yield chunk.token(300)
        if fault in ("swallow", "stall", "endless"):
            await _wait_for_ever()

    def _next_fault(self) -> str:
        """Returns the fault of the next request; "" for none."""
        if self._fault_file is not None:
            self.fault = self._fault_file.read_text() if self._fault_file.exists() else ""
        words = self.fault.split()
        if not words:
            return ""
        self._requests += 1
        name, every = words[0], int(words[1]) if len(words) > 1 else 1
        return name if self._requests % every == 0 else ""


def _changed(output: LLMEngineOutput, fault: str, count: int) -> LLMEngineOutput:
    """Returns the chunk as the fault changes it. count: its number, from 1."""
    tokens = output.token_ids
    match fault:
        case "vocabulary" if tokens and (count - 1) % 4 == 0:
            return output.with_tokens([_UNKNOWN_ID + count, *tokens[1:]])
        case "negative" if tokens and (count == _STALLED_AFTER_CHUNKS or output.finish_reason):
            return output.with_tokens([-1] * len(tokens))
        case "too_many" if output.finish_reason is not None:
            extra = tokens[-1] if tokens else 300
            return replace(output, token_ids=(*tokens, extra))
    return output


async def _wait_for_ever() -> None:
    await asyncio.Event().wait()


def build(config: WorkerConfig) -> GrayEngine:
    """The factory: an engine with the settings of the sim's. engine_args: path of the file."""
    path = Path(config.engine_args) if config.engine_args else None
    sim = build_engine(config.model_copy(update={"engine": "sim", "engine_args": ""}))
    assert isinstance(sim, SimEngine), "the name is sim"
    return GrayEngine(sim.config, path, clock=time.monotonic)
