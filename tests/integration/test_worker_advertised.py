"""A router uses the properties that a worker advertises in discovery."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from common.errors import InvalidRequest, NotFound
from common.registry.instances import Instance
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.placement import Query
from common.request.preprocessed import RoutingConstraints, RoutingHints
from common.runtime.config import ConfigError, read_config
from frontend_svc.models.model_watch import ModelEntry, plan_tables
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit.apps import living
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

NS = "default"


@asynccontextmanager
async def registered(*flags: str) -> AsyncIterator[MemoryRegistry]:
    """The registry of one sim worker as its peers see it."""
    flags = ("--registry=memory", "--speedup=0", *flags)
    config = read_config(WorkerConfig, "WORKER", {}, flags)[0]
    store = MemoryStore()
    async with living(WorkerApp(config, registry=MemoryRegistry(store))):
        watcher = MemoryRegistry(store)
        try:
            yield watcher
        finally:
            await watcher.close()


@asynccontextmanager
async def advertised(*flags: str) -> AsyncIterator[Router]:
    """A router that has discovered one sim worker."""
    router = Router(SELECTORS["kv"]())
    async with registered(*flags) as registry:
        router.update(await registry.snapshot(NS), 0.0)
        yield router


def placed(router: Router, **hints: Any) -> Instance:
    query = Query("sim", 10, routing=RoutingHints(**hints))
    decision = router.decide(query, None, 0.0, Random(0))
    candidate = router.fleet.candidate(decision.decision.worker)
    assert candidate is not None
    return candidate.instance


async def test_adapters_and_taints_of_a_worker_reach_the_router() -> None:
    async with advertised("--loras=fr,de", "--taints=zone=a,fast") as router:
        needs = RoutingConstraints(required_taints=frozenset({"zone=a", "fast"}))
        worker = placed(router, lora_name="fr", routing_constraints=needs)
        assert worker.loras == {"fr", "de"}
        assert worker.taints == {"zone=a", "fast"}
        assert Instance.from_json(worker.to_json()) == worker
        with pytest.raises(NotFound) as rejected:
            placed(router, lora_name="it")
        assert rejected.value.reason == "UNKNOWN_ADAPTER"


async def test_a_worker_without_adapters_serves_the_base_model_only() -> None:
    async with advertised() as router:
        assert placed(router).loras == frozenset()
        with pytest.raises(NotFound):
            placed(router, lora_name="fr")


@pytest.mark.parametrize(
    ("flags", "tables"),
    [
        ([], ["chat", "completions", "embeddings"]),
        (["--serve=embedding"], ["embeddings"]),
        (["--serve=completions"], ["completions"]),
        (["--serve=chat"], ["chat"]),
        (["--serve=completions,chat"], ["chat", "completions"]),
    ],
)
async def test_a_frontend_opens_the_endpoints_that_a_worker_advertises(
    flags: list[str], tables: list[str]
) -> None:
    async with registered(*flags) as registry:
        (instance,) = (await registry.snapshot(NS)).of("worker")
        card = await registry.get_card(instance.card_checksum)
        assert list(plan_tables(ModelEntry.of(instance), card)) == tables


@pytest.mark.parametrize("kinds", ["chat,prefill", "Chat", "embeddings"])
def test_endpoints_that_a_token_worker_cannot_serve_are_rejected(kinds: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        read_config(WorkerConfig, "WORKER", {}, [f"--serve={kinds}"])
    assert any("serve" in problem for problem in rejected.value.problems)


async def test_an_engine_without_embeddings_does_not_start_as_a_worker_of_embeddings() -> None:
    with pytest.raises(InvalidRequest, match="the engine serves chat, completions") as rejected:
        async with registered("--engine=echo", "--serve=chat,embedding"):
            pass
    assert rejected.value.field == "serve"


def test_engines_without_configurable_adapters_reject_the_flag() -> None:
    with pytest.raises(ConfigError) as rejected:
        read_config(WorkerConfig, "WORKER", {}, ["--engine=echo", "--loras=fr"])
    assert any("loras" in problem for problem in rejected.value.problems)
