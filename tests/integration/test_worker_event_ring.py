"""How many of its KV event batches a running worker keeps for an indexer that joins late."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from common.registry.registry import MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.indexer.v1 import indexer_pb2, indexer_pb2_grpc
from tests.kit.apps import living
from tests.kit.engines import RecordingEngine
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.kv_events import publisher
from worker_svc.kv_events.external_events import DuplicatePolicy, KvEventFormat, PagesStored

BLOCK = 4


class PagedRecordingEngine(RecordingEngine):
    """An engine whose test reports the pages."""

    kv_event_format = KvEventFormat(BLOCK, BLOCK, DuplicatePolicy.IDEMPOTENT)
    kv_events_off_reason = ""
    sink: Any

    def publish_to(self, sink: Any) -> None:
        self.sink = sink


@pytest.fixture(autouse=True)
def _no_spacing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn of the loop publishes its changes."""
    monkeypatch.setattr(publisher, "PUBLISH_SPACING_S", 0.0)
    monkeypatch.setattr(publisher, "SMALL_BATCH_SPACING_S", 0.0)


@pytest.mark.slow
@pytest.mark.row("S1-09", "S1-19")
@pytest.mark.parametrize(("n_batches", "is_replayed"), [(1024, True), (1025, False)])
async def test_a_late_indexer_gets_1024_batches_or_else_a_snapshot(
    n_batches: int, is_replayed: bool
) -> None:
    store = MemoryStore()
    engine = PagedRecordingEngine(kv_cache_block_size=BLOCK, kv_index="events")
    config = WorkerConfig(registry="memory", canary_idle_s=0.0, block_size=BLOCK)
    worker = WorkerApp(config, registry=MemoryRegistry(store), engine=engine)
    async with living(worker):
        for number in range(n_batches):
            tokens = struct.pack("<4I", number, 0, 0, 0)
            engine.sink.take([PagesStored([number], None, tokens, BLOCK)])
            # A batch for each turn of the loop.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        indexer = IndexerApp(IndexerConfig(registry="memory"), registry=MemoryRegistry(store))
        async with (
            living(indexer, grace_s=0.5),
            rpc.channel(indexer.address) as to_indexer,
            rpc.channel(worker.address) as to_worker,
        ):
            stub = indexer_pb2_grpc.IndexerServiceStub(to_indexer)

            async def stats() -> indexer_pb2.StatsResponse:
                found: indexer_pb2.StatsResponse = await rpc.unary(
                    stub.Stats, indexer_pb2.StatsRequest(), timeout_s=WAIT_S
                )
                return found

            async def has_all() -> bool:
                return (await stats()).blocks == n_batches

            await until(has_all, "the indexer has all blocks")
            (source,) = (await stats()).sources
            assert source.state.sequence == n_batches
            info = await rpc.unary(
                engine_pb2_grpc.EngineServiceStub(to_worker).GetInfo,
                engine_pb2.GetInfoRequest(),
                timeout_s=WAIT_S,
            )
            assert (info.counters["kv_snapshots"] == 0) is is_replayed
            assert ((await stats()).batches_applied == n_batches) is is_replayed
