"""SGLang's KV events, from its real cache and from a publisher that drops some."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TYPE_CHECKING, Any

from common.errors import Conflict
from common.kv.events import EventKind, Source, Tier
from common.kv.hashing import PrefixHasher
from common.runtime.free_ports import free_ports
from tests.sglang.sglang_workers import WAIT_S, greedy_request, until
from worker_svc.engines.contract import GenerateContext, PreprocessedRequest
from worker_svc.kv_events.event_log import PublishedSource
from worker_svc.kv_events.external_events import (
    ExternalEvent,
    PagesCleared,
    PagesRemoved,
    PagesStored,
)
from worker_svc.kv_events.normalizer import Normalizer

if TYPE_CHECKING:
    from worker_svc.engines.sglang.engine import SglangEngine
    from worker_svc.kv_events.zmq_reader import KvEventEndpoints, KvEventReader

BLOCK = 16


def hasher_factory(lora: str, salt: str, block_size: int) -> PrefixHasher:
    return PrefixHasher(
        mesh_key=b"", model="tiny", block_size=block_size, lora_name=lora, cache_salt=salt
    )


class Index:
    """A sink that keeps the published set and asserts that it is prefix-closed.

    `chains`: prefix hashes of all computed prompts. After every published or withdrawn hash the set
    contains a prefix of each chain.
    """

    def __init__(self, engine: SglangEngine) -> None:
        self.feed = PublishedSource(Source(1), Normalizer(engine.kv_event_format, hasher_factory))
        self.held: set[int] = set()
        self.chains: list[list[int]] = []
        self.kinds: set[type] = set()
        self.lost: list[str] = []

    def take(self, events: Iterable[ExternalEvent]) -> None:
        for event in events:
            self.kinds.add(type(event))
            self.feed.apply(event)
            for batch in self.feed.seal_changes():
                for change in batch.events:
                    assert change.tier is Tier.DEVICE
                    self._change(change.kind, change.hashes.tolist())

    def record_loss(self, rank: int, reason: str) -> None:
        self.lost.append(reason)

    def reset(self, rank: int) -> None:
        self.lost.append("reset")

    def _change(self, kind: EventKind, hashes: list[int]) -> None:
        if kind is EventKind.CLEARED:
            self.held.clear()
        for one in hashes:
            if kind is EventKind.STORED:
                self.held.add(one)
            else:
                self.held.remove(one)
            for chain in self.chains:
                if one in chain:
                    present = [name in self.held for name in chain]
                    assert present == sorted(present, reverse=True), "not prefix-closed"

    def matched(self, tokens: Sequence[int]) -> int:
        """Held blocks of the prompt."""
        count = 0
        for name in chain_of(tokens):
            if name not in self.held:
                return count
            count += 1
        return count


def chain_of(tokens: Sequence[int]) -> list[int]:
    hashes: list[int] = hasher_factory("", "", BLOCK).prefix_hashes(list(tokens)).tolist()
    return hashes


@asynccontextmanager
async def following(engine: SglangEngine) -> AsyncIterator[Index]:
    """An index that follows the engine until the end of the test."""
    index = Index(engine)
    before = len(engine._tasks)
    engine.publish_to(index)
    (reader,) = engine._tasks[before:]
    try:
        yield index
    finally:
        engine._tasks.remove(reader)
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader


async def computed(
    engine: SglangEngine, index: Index, request: PreprocessedRequest
) -> tuple[list[int], int]:
    """The output and the cached tokens of the prompt, after the index received all its events."""
    ctx = GenerateContext("kv")
    tokens: list[int] = []
    cached = -1
    async for output in engine.generate(request, ctx):
        tokens += output.token_ids
        if (usage := output.completion_usage) and usage.prompt_tokens_details:
            cached = usage.prompt_tokens_details.cached_tokens or 0
    whole = [*request.token_ids, *tokens[:-1]]  # the KV of the last token is never computed
    index.chains.append(chain_of(whole))
    await until(lambda: index.matched(whole) == len(whole) // BLOCK, "all blocks are published")
    return tokens, cached


def random_prompt(seed: int, tokens: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 4000) for _ in range(tokens)]


def predicted(index: Index, prompt: Sequence[int]) -> int:
    """Cached tokens: whole blocks, and at least one token is always computed."""
    return min(index.matched(prompt), (len(prompt) - 1) // BLOCK) * BLOCK


async def test_published_blocks_match_the_cache_and_predict_cached_tokens(
    engine: SglangEngine,
) -> None:
    async with following(engine) as index:
        base = random_prompt(1, 96)
        prompts = [
            base,
            base,  # a multiple of the block size: the last block is computed again
            [*base, *random_prompt(2, 40)],
            [*base[:50], *random_prompt(3, 30)],
            base[:40],
            random_prompt(4, 7),
        ]
        for prompt in prompts:
            expected = predicted(index, prompt)
            _, cached = await computed(engine, index, greedy_request(prompt, 20))
            assert cached == expected
        assert index.lost == []
        assert index.feed.normalizer.is_incomplete is False


async def test_a_late_subscriber_receives_the_blocks_held_already(engine: SglangEngine) -> None:
    async with following(engine) as first:
        prompt = random_prompt(11, 64)
        await computed(engine, first, greedy_request(prompt, 4))
        async with following(engine) as second:
            await until(
                lambda: second.held == first.held, "the second indexer has replayed all batches"
            )
        assert first.held


async def test_the_set_stays_closed_when_blocks_are_evicted(engine: SglangEngine) -> None:
    async with following(engine) as index:
        shared = random_prompt(20, 320)
        for seed in range(14):
            prompt = [*shared, *random_prompt(100 + seed, 680)]
            await computed(engine, index, greedy_request(prompt, 2))
        await until(lambda: PagesRemoved in index.kinds, "blocks are evicted")
        assert index.matched(shared) == 20  # shared by all, so evicted last
        expected = predicted(index, prompt)
        _, cached = await computed(engine, index, greedy_request(prompt, 2))
        assert cached == expected > 900
        assert index.lost == []
        counts = index.feed.normalizer.counts
        # The assumption behind the duplicate policy: a page is reported once until it is removed.
        assert (counts["duplicates"], counts["unknown_removals"]) == (0, 0)


async def test_concurrent_requests_with_a_shared_prefix_report_it_once(
    engine: SglangEngine,
) -> None:
    async with following(engine) as index:
        shared = random_prompt(50, 80)
        prompts = [[*shared, *random_prompt(200 + seed, 10 * seed)] for seed in range(8)]
        index.chains += [chain_of(one) for one in prompts]
        await asyncio.gather(*(computed(engine, index, greedy_request(one, 8)) for one in prompts))
        assert index.lost == []
        assert index.feed.normalizer.counts["duplicates"] == 0


async def test_a_flush_empties_the_published_set(engine: SglangEngine) -> None:
    async with following(engine) as index:
        await computed(engine, index, greedy_request(random_prompt(30, 64), 4))
        # Rejected while the scheduler still holds the last request.
        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(Conflict):
                    await engine.flush_cache()
                    break
                await asyncio.sleep(0.02)
                assert index.held, "a rejected flush changes nothing"
        await until(lambda: not index.held, "all blocks are withdrawn")
        assert PagesCleared in index.kinds


async def test_events_carry_salt_and_adapter_of_a_block(engine: SglangEngine) -> None:
    """The identity in SGLang's events: here the salt; the adapter is a field of its own."""
    prompt = random_prompt(40, 64)
    sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    stored: list[PagesStored] = []

    class Keep(Index):
        def take(self, events: Iterable[ExternalEvent]) -> None:
            known = list(events)
            stored.extend(one for one in known if isinstance(one, PagesStored))
            super().take(known)

    sink = Keep(engine)
    before = len(engine._tasks)
    engine.publish_to(sink)
    (reader,) = engine._tasks[before:]
    for salt in (None, "tenant-a"):
        await engine._engine.async_generate(
            input_ids=prompt, sampling_params=sampling, cache_salt=salt
        )
    salted = chain_of(prompt)
    with_salt = hasher_factory("", "tenant-a", BLOCK).prefix_hashes(prompt).tolist()
    await until(lambda: {*salted, *with_salt} <= sink.held, "both are held, each with its own hash")
    of_prompt = [
        one for one in stored if one.token_ids == greedy_request(prompt).token_ids.little_endian
    ]
    assert [one.salt for one in of_prompt[-2:]] == ["", "tenant-a"]
    assert set(of_prompt[-2].hashes).isdisjoint(of_prompt[-1].hashes)
    engine._tasks.remove(reader)
    reader.cancel()


class LossyPublisher:
    """Publishes like SGLang, except batches that the test drops; `kept` can be replayed."""

    def __init__(self, endpoints: KvEventEndpoints) -> None:
        import zmq.asyncio

        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.PUB)
        self._live.bind(f"tcp://127.0.0.1:{endpoints.port}")
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"tcp://127.0.0.1:{endpoints.replay_port}")
        self.kept: dict[int, bytes] = {}
        self.replays = 0

    async def publish(self, seq: int, *, reaches: bool = True, keep: bool = True) -> None:
        import msgspec

        payload = msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": [seq]}]])
        if keep:
            self.kept[seq] = payload
        if reaches:
            await self._live.send_multipart([b"kv-events", seq.to_bytes(8, "big"), payload])

    async def serve(self) -> None:
        # Ends: the test cancels it.
        while True:
            client, _, first = await self._router.recv_multipart()
            self.replays += 1
            for seq, payload in self.kept.items():
                if seq >= int.from_bytes(first, "big"):
                    number = seq.to_bytes(8, "big")
                    await self._router.send_multipart([client, b"", b"kv-events", number, payload])
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart([client, b"", b"", end, b""])

    def close(self) -> None:
        self._context.destroy(linger=0)


class RecordingSink:
    """A recording sink."""

    def __init__(self) -> None:
        self.removed: list[int] = []
        self.lost: list[str] = []

    def take(self, events: Iterable[ExternalEvent]) -> None:
        for event in events:
            assert isinstance(event, PagesRemoved)
            self.removed += event.hashes

    def record_loss(self, rank: int, reason: str) -> None:
        self.lost.append(reason)

    def reset(self, rank: int) -> None:
        self.lost.append("reset")


@asynccontextmanager
async def lossy() -> AsyncIterator[tuple[LossyPublisher, RecordingSink, KvEventReader]]:
    from worker_svc.kv_events.zmq_reader import KvEventEndpoints, KvEventReader

    port = free_ports(2)
    endpoints = KvEventEndpoints(port, port + 1)
    publisher, sink = LossyPublisher(endpoints), RecordingSink()
    reader = KvEventReader(0, endpoints, sink)
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(publisher.serve()),
        asyncio.create_task(reader.run()),
    ]
    try:
        yield publisher, sink, reader
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        publisher.close()


async def test_missing_batches_are_replayed_in_order() -> None:
    async with lossy() as (publisher, sink, reader):
        await publisher.publish(0)
        await publisher.publish(1, reaches=False)
        await until(lambda: sink.removed == [0, 1], "the first batches are replayed")
        await publisher.publish(2, reaches=False)
        await publisher.publish(3, reaches=False)
        await publisher.publish(4)
        await until(lambda: sink.removed == [0, 1, 2, 3, 4], "the gap is closed")
        # No later batch shows the gap; the idle timeout detects it.
        await publisher.publish(5, reaches=False)
        await until(lambda: sink.removed == [0, 1, 2, 3, 4, 5], "the latest batches are requested")
        assert sink.lost == []
        assert reader.counts["losses"] == 0


async def test_batches_that_are_no_longer_kept_are_reported_as_a_loss() -> None:
    async with lossy() as (publisher, sink, _):
        await publisher.publish(0)
        await until(lambda: sink.removed == [0], "the subscription works")
        await publisher.publish(1, reaches=False, keep=False)
        await publisher.publish(2)
        await until(lambda: sink.removed == [0, 2], "reading continues")
        assert len(sink.lost) == 1
        assert "1 to 1" in sink.lost[0]


async def test_a_malformed_batch_is_a_loss_and_reading_continues() -> None:
    async with lossy() as (publisher, sink, reader):
        await publisher.publish(0)
        await until(lambda: sink.removed == [0], "the subscription works")
        await reader._accept(1, b"\xc1")
        assert len(sink.lost) == 1
        await publisher.publish(2)
        await until(lambda: sink.removed == [0, 2], "reading continues")
