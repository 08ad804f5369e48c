"""A model that workers of two kinds serve: a started response stays with those that can continue
it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.request.preprocessed import PENALTY_PREFIX
from tests.integration.test_server_adapter import expected
from tests.kit.local_mesh import COMPLETIONS, LocalMesh, local_mesh
from tests.kit.model_server import MODEL, ModelServer
from tests.kit.processes import Mesh
from tests.kit.waiting import WAIT_S, until, wait_for
from worker_svc.config import WorkerConfig
from worker_svc.engine_factory import build_engine
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
)
from worker_svc.engines.sim.engine import SimEngine

PROMPT = list(range(20, 60))
# Tokens of a response that has begun.
STARTED = 20


class FileMesh(Mesh):
    """A mesh with one worker process for the servers of a file."""

    def serve(self, *servers: ModelServer) -> None:
        """Makes these the servers, and waits until the frontend has a worker for each."""
        (self.folder / "servers").write_text("".join(f"{one.url}\n" for one in servers))

        def is_complete() -> bool:
            return len(self.known_instance_ids("worker")) == len(servers)

        wait_for(is_complete, f"{len(servers)} servers")

    def is_complete(self) -> bool:
        return bool(self.http.get(f"{self.url}/ready").json()["ready"])

    # Any: JSON.
    def stream(self, found: list[Any], count: int) -> threading.Thread:
        """Reads a stream in a thread: its events."""

        def read() -> None:
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": count, "ignore_eos": True}
            body |= {"stream": True, "nvext": {"extra_fields": ["completion_token_ids"]}}
            url = f"{self.url}/v1/completions"
            with self.http.stream("POST", url, json=body, timeout=60) as response:
                found.extend(
                    json.loads(line[6:])
                    for line in response.iter_lines()
                    if line.startswith("data: {")
                )

        thread = threading.Thread(target=read)
        thread.start()
        return thread


def long_prompts(server: ModelServer) -> list[int]:
    """Lengths of the prompts of clients; those of probes are short."""
    prompts = [one.get("input_ids") or one.get("prompt") for one in server.bodies]
    return [len(one) for one in prompts if one and len(one) >= len(PROMPT)]


@pytest.mark.slow
def test_a_started_stream_continues_on_its_own_engine_or_not_at_all(
    tmp_path: Path,
) -> None:
    count = 600
    with (
        ModelServer("sglang", step_s=0.1) as first,
        ModelServer("sglang", step_s=0.004) as same,
        ModelServer("vllm", step_s=0.004) as other,
    ):
        servers = tmp_path / "servers"
        servers.write_text(f"{first.url}\n")
        flags = ["--engine=openai", f"--server-file={servers}", "--metrics-port=0"]
        # One card for both: less than either states.
        flags.append("--context-length=2000")
        wait = ["--worker-wait-s=1"]
        with FileMesh(tmp_path, workers=1, worker_flags=flags, frontend_flags=wait) as mesh:
            events: list[Any] = []
            thread = mesh.stream(events, count)
            wait_for(lambda: len(events) > 3, "it has tokens of the first server")
            mesh.serve(first, other, same)
            first.close()
            thread.join(60)
            tokens = [one["nvext"]["completion_token_ids"] for one in events if "nvext" in one]
            assert tokens == [expected(PROMPT, count)]
            assert long_prompts(same)
            assert not long_prompts(other)
            # One of its kind is left, and is lost as well.
            events.clear()
            same.step_s = other.step_s = 0.05
            thread = mesh.stream(events, count)
            # The router may have chosen either of the two.
            wait_for(lambda: len(events) > 3, "it has tokens")
            begun_here = same if same.running else other
            rest = other if begun_here is same else same
            begun_here.close()
            thread.join(60)
            names = (begun_here.api, rest.api)
            text = json.dumps(events[-1])
            assert f"its engine ({names[1]}, not {names[0]}, which began the response)" in text
            assert len(events) < count, "it was cut, and did not continue"
            assert mesh.post_completion("new", PROMPT, model=MODEL).status_code == 200


class PenaltySim(SimEngine):
    """A sim. counts_output: whether it states that it counts the output of another worker for
    penalties."""

    def __init__(self, *, counts_output: bool = True) -> None:
        sim = build_engine(WorkerConfig(registry="memory", speedup=20.0))
        assert isinstance(sim, SimEngine), "the default engine"
        super().__init__(sim.config, clock=time.monotonic)
        self.counts_output = counts_output
        self.requests = 0
        # Whether a request stops at STARTED tokens.
        self.is_stuck = False

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        supported = config.supported_fields
        assert supported is not None, "a sim states them"
        hidden = frozenset() if self.counts_output else frozenset({PENALTY_PREFIX})
        return replace(config, supported_fields=supported.difference(hidden))

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.requests += 1
        tokens: list[int] = []
        async with aclosing(super().generate(request, ctx, is_embedding=is_embedding)) as outputs:
            async for output in outputs:
                tokens += output.token_ids
                if not self.is_stuck:
                    yield output
                elif len(tokens) >= STARTED:
                    yield LLMEngineOutput(token_ids=tokens[:STARTED])
                    await ctx.stopped()
                    return


async def test_a_stream_with_penalties_waits_for_a_worker_that_counts_its_output() -> None:
    first, ignores, counts = PenaltySim(), PenaltySim(counts_output=False), PenaltySim()
    model = first.config.model
    body: dict[str, Any] = {"model": model, "prompt": "A list.", "max_tokens": 100}
    body |= {"presence_penalty": 1.0, "frequency_penalty": 0.5, "ignore_eos": True}
    texts: list[str] = []

    async def stream(mesh: LocalMesh) -> None:
        async with mesh.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {"choices": ()}
                texts.extend(choice["text"] for choice in event["choices"])

    async with local_mesh() as mesh, mesh.router(), AsyncExitStack() as own:
        waits, workers = mesh.frontend.gateway.worker_waits, mesh.frontend._models.workers
        await own.enter_async_context(mesh.worker(first))
        whole = (await mesh.complete(**body)).json()["choices"][0]["text"]
        first.is_stuck = True
        streaming = asyncio.create_task(stream(mesh))
        await until(lambda: any(texts), "the response has begun")
        async with mesh.worker(ignores):
            await until(lambda: len(workers(model)) == 2, "the frontend has the second worker")
            await own.aclose()
            await until(lambda: waits.counts(), "the response waits for a worker")
            async with mesh.worker(counts), asyncio.timeout(WAIT_S):
                await streaming
            assert "".join(texts) == whole
            assert (ignores.requests, counts.requests) == (0, 1)
