"""Concurrent events and queries: the events of each worker apply in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from common.kv.events import Hashes, Partition
from common.kv.index_feed import STEP_BLOCKS_MAX, IndexFeed
from common.registry.registry import MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from common.runtime.tasks import TaskGroup
from common.wire.kv import message_parts, partition_to_proto
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig
from kvmesh.indexer.v1 import indexer_pb2 as pb
from kvmesh.indexer.v1 import indexer_pb2_grpc
from tests.integration.subscription import apply_subscription_message
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until

PARTITION = Partition("m", 16, 1)
WORKERS = range(1, 6)
# Blocks of the chain; above STEP_BLOCKS, so that a batch is applied in several slices.
LENGTH = 3000
STRIDE = 100
ROUNDS = 3
CHAIN: Hashes = np.arange(1, LENGTH + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def event(kind: pb.EventKind.ValueType, hashes: Hashes) -> pb.Event:
    return pb.Event(kind=kind, prefix_hashes=hashes.tobytes())


def story() -> list[pb.EventBatch]:
    """The chain grows by STRIDE per batch, then shrinks by halves; ROUNDS times."""
    batches = []
    for _ in range(ROUNDS):
        for start in range(0, LENGTH, STRIDE):
            grown = event(pb.EVENT_KIND_STORED, CHAIN[start : start + STRIDE])
            batches.append([grown])
        half = LENGTH // 2
        batches.append([event(pb.EVENT_KIND_REMOVED, CHAIN[half:][::-1].copy())])
        batches.append([event(pb.EVENT_KIND_REMOVED, CHAIN[:half][::-1].copy())])
    return [
        pb.EventBatch(epoch=1, sequence=number, events=events)
        for number, events in enumerate(batches, 1)
    ]


def depths_in_order() -> list[int]:
    """Every depth of the sequence, in slices of STEP_BLOCKS_MAX."""
    depths = [0]
    for _ in range(ROUNDS):
        depths += range(STRIDE, LENGTH + 1, STRIDE)
        for half in (LENGTH // 2, 0):
            while depths[-1] > half:
                depths.append(max(half, depths[-1] - STEP_BLOCKS_MAX))
    return depths


def is_led_through(seen: Sequence[int], depths: Sequence[int]) -> bool:
    """Whether the observed depths have this order; repeats are allowed."""
    at = 0
    for depth in seen:
        while at < len(depths) and depths[at] != depth:
            at += 1
        if at == len(depths):
            return False
    return True


async def publish(stub: Any, worker_id: int, depths: Sequence[dict[int, list[int]]]) -> None:
    """Send the sequence and wait for its last acknowledgement.

    Once, with the whole chain stored, it waits until all readers have observed it.
    """
    batches = story()
    hello = pb.PublishRequest()
    hello.hello.worker_id = worker_id
    hello.hello.partition.CopyFrom(partition_to_proto(PARTITION))
    hello.hello.sources.add(epoch=1).source.worker_id = worker_id
    call = stub.Publish()
    async with rpc.cancelling(call), asyncio.timeout(WAIT_S):
        await call.write(hello)
        for batch in batches:
            await call.write(pb.PublishRequest(batch=batch))
            if batch.sequence == LENGTH // STRIDE:
                await until(
                    lambda: all(LENGTH in seen[worker_id] for seen in depths),
                    "all readers observed the chain",
                )
        async for response in call:
            assert not response.resends, "all depths are in order"
            if any(state.sequence == len(batches) for state in response.acked):
                return


async def query_depths(stub: Any, seen: dict[int, list[int]], is_over: Callable[[], bool]) -> None:
    """Query the chain repeatedly; records each worker's depth in the order of responses."""
    call = stub.MatchStream()
    async with rpc.cancelling(call):
        number = 0
        # Ends: all batches are applied, or a task of the test failed.
        while not is_over():
            number += 1
            question = pb.MatchQuestion(id=number)
            question.request.partition.CopyFrom(partition_to_proto(PARTITION))
            question.request.prefix_hashes = CHAIN.tobytes()
            await call.write(pb.MatchStreamRequest(questions=[question]))
            (response,) = (await call.read()).answers
            depths = {row.source.worker_id: row.device_blocks for row in response.response.matches}
            for worker_id in WORKERS:
                seen[worker_id].append(depths.get(worker_id, 0))


async def follow(
    stub: Any, feed: IndexFeed, seen: dict[int, list[int]], caught_up: asyncio.Event
) -> None:
    """A router's replica; records the sequence of every batch."""
    call = stub.Subscribe(pb.SubscribeRequest())
    async with rpc.cancelling(call):
        async for message in call:
            for _ in apply_subscription_message(feed, message, 0.0):
                pass
            for part in message_parts(message):
                if part.caught_up:
                    caught_up.set()
                if part.HasField("batch"):
                    seen[part.source.worker_id].append(part.batch.sequence)


@pytest.mark.slow
@pytest.mark.row("S1-55")
async def test_events_of_a_worker_are_applied_in_order_while_matches_run() -> None:
    batches = story()
    depths: list[dict[int, list[int]]] = [{w: [] for w in WORKERS} for _ in range(2)]
    sequences: dict[int, list[int]] = {worker_id: [] for worker_id in WORKERS}
    copy = IndexFeed()
    indexer = IndexerApp(IndexerConfig(registry="memory"), registry=MemoryRegistry(MemoryStore()))
    async with living(indexer) as app, AsyncExitStack() as stack:
        stubs = [
            indexer_pb2_grpc.IndexerServiceStub(
                await stack.enter_async_context(rpc.channel(app.address))
            )
            for _ in range(3)
        ]
        is_over = False
        async with TaskGroup() as tasks:
            asking = [
                tasks.create_task(query_depths(stub, seen, lambda: is_over))
                for stub, seen in zip(stubs, depths, strict=False)
            ]
            caught_up = asyncio.Event()
            following = tasks.create_task(follow(stubs[2], copy, sequences, caught_up))
            # Earlier batches would arrive as snapshots.
            async with asyncio.timeout(WAIT_S):
                await caught_up.wait()
            async with TaskGroup() as writers:
                for worker_id in WORKERS:
                    writers.create_task(publish(stubs[worker_id % 3], worker_id, depths))
            last = len(batches)
            await until(
                lambda: all(last in seen for seen in sequences.values()),
                "the replica has all batches",
            )
            is_over = True
            await asyncio.wait(asking)
            following.cancel()
        assert app.ingest.feed.blocks == 0, "all stored blocks were removed, in order"
    for worker_id in WORKERS:
        assert sequences[worker_id] == list(range(1, len(batches) + 1)), "each once, in order"
        # If two batches were swapped, a part of the chain would be missing and limit the depth.
        for observed in depths:
            assert is_led_through(observed[worker_id], depths_in_order())
    assert copy.blocks == 0


def test_the_order_check_detects_reordered_events() -> None:
    depths = depths_in_order()
    assert is_led_through([0, 0, 100, 3000, 3000, 1500, 0, 2900, 0], depths)
    assert not is_led_through([0, 150], depths), "this depth is between two batches"
    assert not is_led_through([200, 100, 200, 100, 200, 100, 200], depths), (
        "the chain never shrinks like this"
    )
