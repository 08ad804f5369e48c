"""A frontend with its HTTP API, and workers and routers that join it, in one process.

Everything uses real sockets on loopback and one memory registry:

    async with local_mesh() as mesh:
        async with mesh.worker(RecordingEngine()):
            response = await mesh.complete(prompt=[5, 6], max_tokens=2)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import httpx

from common.registry.instances import Instance
from common.registry.registry import MemoryRegistry, MemoryStore, Registry
from frontend_svc.app import FrontendApp
from frontend_svc.config import FrontendConfig
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import LLMEngine

NS = "default"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Any: JSON.
Json = Any


class LocalMesh:
    """A running frontend and a client of its HTTP API. connect: opens the registry of the mesh."""

    def __init__(
        self, connect: Callable[[], Registry], frontend: FrontendApp, http: httpx.AsyncClient
    ) -> None:
        self.connect = connect
        self.frontend = frontend
        self.http = http

    @asynccontextmanager
    async def worker(
        self, engine: LLMEngine | None = None, **settings: Any
    ) -> AsyncIterator[WorkerApp]:
        """A worker whose model the frontend serves; by default the sim."""
        config = WorkerConfig(registry="memory", speedup=0.0, canary_idle_s=0.0, **settings)
        app = WorkerApp(config, registry=self.connect(), engine=engine)
        async with living(app):
            await self.serves(app._instance().model)
            yield app

    @asynccontextmanager
    async def echo(self) -> AsyncIterator[WorkerApp]:
        """A worker with the echo engine that is not in the registry; see `pass_through`."""
        config = WorkerConfig(registry="memory", engine="echo", canary_idle_s=0.0)
        app = WorkerApp(config, registry=self.connect())
        async with living(app, registered=False):
            yield app

    @asynccontextmanager
    async def router(self, **settings: Any) -> AsyncIterator[RouterApp]:
        """A router that the frontend uses."""
        config = RouterConfig(registry="memory", **settings)
        app = RouterApp(config, registry=self.connect(), rng=Random(1))
        async with living(app):
            await until(lambda: self.frontend._router.is_connected, "the frontend uses the router")
            yield app

    @asynccontextmanager
    async def joined(self, instance: Instance) -> AsyncIterator[None]:
        """This registration, as another process would write it."""
        registry = self.connect()
        lease = await registry.register(instance)
        try:
            yield
        finally:
            await lease.close()
            await registry.close()

    async def models(self) -> list[str]:
        """The models that the frontend lists."""
        listed: Json = (await self.http.get("/v1/models")).json()["data"]
        return [one["id"] for one in listed]

    async def serves(self, *names: str) -> None:
        """Waits until the frontend lists these models, and maybe others."""
        await until(self._lists(set(names)), f"{names} are served")

    async def no_longer_serves(self, name: str) -> None:
        async def is_gone() -> bool:
            return name not in await self.models()

        await until(is_gone, f"{name} is removed")

    def _lists(self, names: set[str]) -> Callable[[], Any]:
        async def are_listed() -> bool:
            return names <= set(await self.models())

        return are_listed

    async def health(self) -> Json:
        return (await self.http.get("/health")).json()

    async def complete(self, **body: Json) -> httpx.Response:
        """A completion of the model `m`, unless the body names another."""
        return await self.http.post(COMPLETIONS, json={"model": "m", "prompt": [5, 6, 7], **body})

    async def chat(self, text: str = "hi", **body: Json) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.http.post(CHAT, json={"model": "m", "messages": messages, **body})

    async def scrape(self) -> str:
        return (await self.http.get("/metrics")).text


def registration(number: int, model: str = "m", checksum: str = "", **more: Any) -> Instance:
    """An entry of a worker in discovery."""
    return Instance(
        number, NS, "worker", "", "127.0.0.1:1", model=model, card_checksum=checksum, **more
    )


def pass_through(app: WorkerApp, model: str, model_type: str) -> Instance:
    """The registration of a worker without card that takes OpenAI bodies of one kind."""
    instance = app._instance()
    return replace(instance, model=model, card_checksum="", meta={"model_type": model_type})


@asynccontextmanager
async def local_mesh(
    connect: Callable[[], Registry] | None = None, **settings: Any
) -> AsyncIterator[LocalMesh]:
    """A frontend without canaries. connect: opens the registry of the mesh; None: a new one in
    memory. settings: of its configuration."""
    if connect is None:
        store = MemoryStore()

        def connect() -> Registry:
            return MemoryRegistry(store)

    settings = {"canary_interval_s": 0.0, **settings}
    config = FrontendConfig(registry="memory", http_port=0, **settings)
    frontend = FrontendApp(config, registry=connect())
    async with (
        living(frontend, grace_s=1.0),
        httpx.AsyncClient(
            base_url=f"http://{frontend.http_address}", trust_env=False, timeout=WAIT_S
        ) as http,
    ):
        yield LocalMesh(connect, frontend, http)
