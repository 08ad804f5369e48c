"""Workers with a prefix cache but no KV events: routers keep approximate entries, and the engine
agrees.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from common.kv.hashing import HASH_SCHEME_ID, PrefixHasher, hashes_to_bytes
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.preprocessed import PreprocessedRequest, StopConditions, TokenIds
from common.request.token_stream import LegRequest
from common.rpc import channel as rpc
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

BLOCK = 16
FRONTEND = 77
HASHER = PrefixHasher(mesh_key=b"", model="sim", block_size=BLOCK)


class Mesh:
    """Two sim workers without events, and a router that would follow events."""

    def __init__(self, router: RouterApp, workers: Sequence[WorkerApp], session: Any) -> None:
        self.router = router
        self._workers = {app.instance_id: app for app in workers}
        self._session = session
        self._asked = 0

    async def complete(self, tokens: Sequence[int]) -> tuple[pb.Decision, int]:
        """The worker of a prompt, and the prompt's cached tokens there."""
        decision = await self._place(tokens)
        request = PreprocessedRequest(
            token_ids=TokenIds.of(list(tokens)),
            stop_conditions=StopConditions(max_tokens=1, ignore_eos=True),
        )
        runner = self._workers[decision.worker.worker_id].runner
        key = runner.admit(LegRequest(f"r{self._asked}", request=request))
        terminal = await runner.run(key, lambda _: None)
        await self._session.write(pb.SessionRequest(frees=[self._key()]))
        assert terminal.completion_usage is not None
        details = terminal.completion_usage.prompt_tokens_details
        assert details is not None
        return decision, details.cached_tokens or 0

    def _key(self) -> pb.BookingKey:
        return pb.BookingKey(request_id=f"r{self._asked}")

    async def _place(self, tokens: Sequence[int]) -> pb.Decision:
        self._asked += 1
        query = pb.Query(
            model="sim",
            total_tokens=len(tokens),
            prefix_hashes=hashes_to_bytes(HASHER.prefix_hashes(list(tokens))),
            hash_scheme=HASH_SCHEME_ID,
            block_size=BLOCK,
        )
        new = pb.New(id=self._asked, key=self._key(), query=query)
        async with asyncio.timeout(WAIT_S):
            await self._session.write(pb.SessionRequest(news=[new]))
            while not (frame := await self._session.read()).results:
                pass
        (result,) = frame.results
        assert not result.HasField("error"), result.error
        decision: pb.Decision = result.decision
        return decision


@asynccontextmanager
async def mesh() -> AsyncIterator[Mesh]:
    store = MemoryStore()
    config = WorkerConfig(registry="memory", speedup=0.0, kv_events=False)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(
                living(WorkerApp(config, instance_id=one, registry=MemoryRegistry(store)))
            )
            for one in (1, 2)
        ]
        # Recent prefill work would move a prompt's second half: a spread that is not tested here.
        settings = RouterConfig(registry="memory", recent_miss_weight=0.0)
        router = await stack.enter_async_context(
            living(RouterApp(settings, registry=MemoryRegistry(store), rng=Random(1)))
        )
        fleet = router.router.fleet
        await until(
            lambda: all(fleet.is_present(app.instance_id) for app in workers),
            "the router sees the workers",
        )
        channel = await stack.enter_async_context(rpc.channel(router.address))
        call: Any = router_pb2_grpc.RouterServiceStub(channel).Session()
        await stack.enter_async_context(rpc.cancelling(call))
        await call.write(pb.SessionRequest(hello=pb.SessionHello(frontend_id=FRONTEND)))
        yield Mesh(router, workers, call)


def prompt(seed: int, tokens: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 1000) for _ in range(tokens)]


async def test_shared_prefixes_are_routed_to_the_worker_that_has_them_without_kv_events() -> None:
    async with mesh() as m:
        for topic in range(4):
            beginning = prompt(topic, 8 * BLOCK)
            first, cached = await m.complete(beginning)
            assert (first.predicted_cached_tokens, cached) == (0, 0)
            for turn in range(3):
                again, cached = await m.complete([*beginning, *prompt(100 + turn, 5)])
                assert again.worker == first.worker
                assert again.predicted_cached_tokens == cached == 8 * BLOCK


async def test_decisions_on_approximate_entries_are_labelled_approximate() -> None:
    async with mesh() as m:
        first, _ = await m.complete(prompt(1, 8 * BLOCK))
        async with rpc.channel(m.router.address) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            query = pb.Query(model="sim", token_ids=prompt(1, 8 * BLOCK))
            response = await rpc.unary(
                stub.Explain, pb.ExplainRequest(query=query), timeout_s=WAIT_S
            )
        assert isinstance(response, pb.ExplainResponse)
        assert {row.source_state for row in response.candidates} == {"approx"}
        held = {row.worker.worker_id: row.overlap_blocks for row in response.candidates}
        assert held.pop(first.worker.worker_id) == 8
        assert set(held.values()) == {0}
