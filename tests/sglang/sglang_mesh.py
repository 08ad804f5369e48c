"""A frontend, a router and an indexer for the SGLang workers, and the responses of clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from common.rpc import channel as rpc
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from tests.kit.processes import Service
from tests.sglang.sglang_workers import WAIT_S, until

MODEL = "tiny"
START_S = 60.0


@dataclass(slots=True)
class Response:
    """The response to one request so far. status 0: none yet."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    # Any: JSON objects.
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    events: int = 0

    @property
    def content(self) -> tuple[str, str | None, int, int]:
        """The parts that are equal for equal responses: text, finish reason, and both counts."""
        assert self.error is None, self.error
        usage = self.usage
        return self.text, self.finish_reason, usage["prompt_tokens"], usage["completion_tokens"]

    def take(self, event: dict[str, Any]) -> None:
        """One event of a stream, or a whole response."""
        self.error = event.get("error")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            result = choice.get("delta") or choice.get("message")
            self.text += (result.get("content") or "") if result else choice.get("text", "")
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.events += 1


class HttpMesh:
    """The services in front of the workers. http: a client of the frontend."""

    def __init__(self, services: dict[str, Service], http: httpx.AsyncClient) -> None:
        self._services = services
        self._request_count = 0
        self.http = http

    @staticmethod
    @asynccontextmanager
    async def started(folder: Path, registry: Path, workers: set[int]) -> AsyncIterator[HttpMesh]:
        """Serves after all `workers` are discovered; stopped on exit."""
        flags = {"indexer": [], "router": [], "frontend": ["--http-port=0"]}
        async with AsyncExitStack() as ended:
            services = {}
            for room, more in flags.items():
                service = Service(room, [f"--registry-path={registry}", *more], folder, room)
                ended.enter_context(closing(service))
                services[room] = service
            for service in services.values():
                await asyncio.to_thread(service.wait_ready, START_S)
            url = services["frontend"].addresses["http"]
            limits = httpx.Limits(max_connections=None)
            http = await ended.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=3 * WAIT_S, trust_env=False, limits=limits)
            )
            mesh = HttpMesh(services, http)
            await mesh.until_known(workers)
            yield mesh

    @property
    def port(self) -> int:
        """The HTTP port of the frontend."""
        return int(self._services["frontend"].addresses["http"].rsplit(":", 1)[1])

    async def until_known(self, workers: set[int]) -> None:
        """Returns when the frontend is ready and has exactly these workers."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            ready = (await self.http.get("/ready")).json()
            health = (await self.http.get("/health")).json()
            shown = [one for one in health["instances"] if one["service"] == "worker"]
            known = {int(one["id"]) for one in shown}
            if ready["ready"] and known == workers:
                return
            assert loop.time() - began < WAIT_S, f"{ready}; {known} are discovered, not {workers}"
            await asyncio.sleep(0.02)

    async def complete(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int = 24,
        *,
        stream: bool = False,
        worker: int = 0,
        into: Response | None = None,
        name: str = "",
        **fields: Any,
    ) -> Response:
        """Requests one greedy response.

        prompt: token ids (completions) or a user message (chat). worker: an aggregated one to pin.
        into: filled as chunks arrive. name: the request id. fields: more of the body.
        """
        result = into or Response()
        is_chat = isinstance(prompt, str)
        message = {"role": "user", "content": prompt}
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            **({"messages": [message]} if is_chat else {"prompt": prompt}),
            **fields,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if worker:
            body["nvext"] = {"backend_instance_id": worker}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        headers = {"x-request-id": name} if name else {}
        async with self.http.stream("POST", path, json=body, headers=headers) as response:
            result.status = response.status_code
            if not stream or response.status_code != 200:
                result.take(json.loads(await response.aread()))
                return result
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    result.take(json.loads(line.removeprefix("data: ")))
        return result

    async def complete_with_log(
        self, prompt: Sequence[int] | str, **options: Any
    ) -> tuple[Response, dict[str, Any]]:
        """A response and its log line, after it is written. Arguments as `complete`."""
        self._request_count += 1
        name = f"logged-{self._request_count}"
        result = await self.complete(prompt, **options, name=name)
        lines: list[str] = []

        def is_written() -> bool:
            text = self._services["frontend"].log_path.read_text()
            lines[:] = [one for one in text.split("\n")[:-1] if f'"{name}"' in one]
            return bool(lines)

        await until(is_written, f"the line of {name} is in the log")
        (line,) = lines
        return result, json.loads(line)

    async def verify(self) -> dict[int, indexer_pb2.VerifiedSource]:
        """Compares the indexer's entries of each worker with the worker's own."""
        async with self._indexer() as stub:
            content = await rpc.unary(stub.Verify, indexer_pb2.VerifyRequest(), timeout_s=WAIT_S)
        return {row.source.worker_id: row for row in content.sources}

    async def until_verified(
        self, holds: Callable[[dict[int, indexer_pb2.VerifiedSource]], bool], what: str
    ) -> dict[int, indexer_pb2.VerifiedSource]:
        """The first comparison for which `holds` is true."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not holds(found := await self.verify()):
            assert loop.time() - began < WAIT_S, f"never: {what}; {found}"
            await asyncio.sleep(0.02)
        return found

    @asynccontextmanager
    async def _indexer(self) -> AsyncIterator[Any]:
        channel: grpc.aio.Channel = rpc.channel(self._services["indexer"].address)
        try:
            yield indexer_pb2_grpc.IndexerServiceStub(channel)
        finally:
            await channel.close()

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(service.tail(12) for service in self._services.values())
