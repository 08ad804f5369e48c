"""The reader of an engine's events: long replays, dropped batches, and its own failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which `make setup` installs")
pytest.importorskip("msgspec", reason="needs msgspec, which `make setup` installs")

import zmq.asyncio

from common.errors import WorkerLost
from common.kv.events import Source
from common.kv.hashing import PrefixHasher
from tests.integration.engine_wire import BLOCK, EngineWire, removed, stored
from tests.kit.waiting import WAIT_S, until
from worker_svc.engines.sglang.config import SglangConfig
from worker_svc.engines.sglang.engine import SglangEngine
from worker_svc.kv_events import zmq_reader
from worker_svc.kv_events.event_log import PublishedSource
from worker_svc.kv_events.external_events import (
    DuplicatePolicy,
    ExternalEvent,
    KvEventFormat,
    PagesRemoved,
    PagesStored,
)
from worker_svc.kv_events.normalizer import Normalizer
from worker_svc.kv_events.zmq_reader import (
    BUFFERED_BATCHES,
    SOCKET_QUEUE_MIN,
    TOPIC,
    YIELD_INTERVAL_S,
    KvEventEndpoints,
    KvEventReader,
)

HASHER = PrefixHasher(mesh_key=b"", model="m", block_size=BLOCK)


class RecordingSink:
    """A sink that records, and fails on request."""

    def __init__(self) -> None:
        self.hashes: list[int] = []
        self.lost: list[str] = []
        self.fails_at: int | None = None

    def take(self, events: Iterable[ExternalEvent]) -> None:
        for event in events:
            assert isinstance(event, PagesRemoved)
            if self.fails_at in event.hashes:
                raise RuntimeError("the sink is broken")
            self.hashes += event.hashes

    def record_loss(self, rank: int, reason: str) -> None:
        self.lost.append(reason)

    def reset(self, rank: int) -> None:
        self.lost.append("reset")


@asynccontextmanager
async def reading(wire: EngineWire, sink: RecordingSink) -> AsyncIterator[KvEventReader]:
    """Runs a reader of the wire until the end of the block."""
    reader = KvEventReader(0, wire.endpoints, sink)
    tasks = [asyncio.create_task(reader.run()), asyncio.create_task(wire.serve())]
    try:
        yield reader
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        wire.close()


async def kept(wire: EngineWire, count: int) -> list[int]:
    """Adds batches that the engine keeps for replay but has not published."""
    first = wire.sequence
    for n in range(first, first + count):
        await wire.publish(removed(n), reaches=False)
    return list(range(wire.sequence))


class DroppingWire(EngineWire):
    """Drops from each replay what a ROUTER drops: a "hole", its "tail", or that and its "end"."""

    def __init__(self, drops: str) -> None:
        super().__init__()
        self._drops = drops

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        client, _, first = await router.recv_multipart()
        self.replays += 1
        requested = [one for one in self._kept if one[0] >= int.from_bytes(first, "big")]
        sent, remaining = requested[:SOCKET_QUEUE_MIN], requested[SOCKET_QUEUE_MIN:]
        if self._drops == "hole":
            sent += remaining[100:]
        for sequence, payload in sent:
            number = sequence.to_bytes(8, "big")
            await router.send_multipart([client, b"", TOPIC.encode(), number, payload])
        if not (self._drops == "end" and remaining):
            end = (-1).to_bytes(8, "big", signed=True)
            await router.send_multipart([client, b"", b"", end, b""])


@pytest.mark.slow
@pytest.mark.parametrize("drops", ["hole", "tail", "end"])
async def test_batches_dropped_from_a_long_replay_are_requested_again(
    drops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if drops == "end":  # detected only by silence
        monkeypatch.setattr(zmq_reader, "REPLAY_TIMEOUT_S", 0.2)
    wire, sink = DroppingWire(drops), RecordingSink()
    sent_hashes = await kept(wire, 3 * SOCKET_QUEUE_MIN)
    async with reading(wire, sink) as reader:
        await until(lambda: len(sink.hashes) == len(sent_hashes), "all batches are replayed")
        assert sink.hashes == sent_hashes, "in order, each once"
        assert wire.replays >= 3
        await kept(wire, 1)
        await wire.publish(removed(wire.sequence))
        await until(lambda: len(sink.hashes) == wire.sequence, "later batches arrive too")
        assert sink.hashes == list(range(wire.sequence))
        assert sink.lost == []
        assert reader.counts["losses"] == 0


@pytest.mark.slow
async def test_a_replay_of_all_kept_batches_loses_none() -> None:
    wire, sink = EngineWire(), RecordingSink()
    sent_hashes = await kept(wire, BUFFERED_BATCHES)
    async with reading(wire, sink):
        await until(lambda: len(sink.hashes) == len(sent_hashes), "all batches are replayed")
        assert sink.hashes == sent_hashes
        assert sink.lost == []


async def test_a_gap_of_batches_that_are_no_longer_kept_is_a_loss() -> None:
    wire, sink = EngineWire(keeps=3), RecordingSink()
    async with reading(wire, sink) as reader:
        await wire.publish(removed(0))
        await until(lambda: sink.hashes == [0], "the subscription works")
        await kept(wire, 5)
        await wire.publish(removed(6))
        await until(lambda: sink.hashes[-1] == 6, "reading continues")
        assert sink.hashes == [0, 4, 5, 6]
        assert len(sink.lost) == 1
        assert reader.counts["unanswered"] == 0


class Slow(RecordingSink):
    """Records the batches accepted between two loop turns, each taking half of the time slice."""

    def __init__(self) -> None:
        super().__init__()
        self.in_turn = 0
        self.most_in_turn = 0
        self.most_pages = 0

    def take(self, events: Iterable[ExternalEvent]) -> None:
        before = len(self.hashes)
        super().take(events)
        self.most_pages = max(self.most_pages, len(self.hashes) - before)
        if not self.in_turn:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self.in_turn += 1
        self.most_in_turn = max(self.most_in_turn, self.in_turn)
        # Sleep: the events of a message take this time.
        time.sleep(YIELD_INTERVAL_S / 2)

    def _next_turn(self) -> None:
        self.in_turn = 0


@pytest.mark.slow
async def test_a_long_replay_yields_to_the_loop() -> None:
    """Batches that wait in the socket are received without yielding."""
    wire, sink = EngineWire(), Slow()
    sent_hashes = await kept(wire, 200)
    async with reading(wire, sink):
        await until(lambda: sink.hashes == sent_hashes, "all batches are replayed")
    # On any machine: each batch takes half of the time slice or more.
    assert sink.most_in_turn <= 3


async def test_an_event_of_very_many_pages_yields_to_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt of 131,072 tokens in pages of one blocked the loop for a third of a second."""
    monkeypatch.setattr(zmq_reader, "PAGES_PER_PART_MAX", 10)
    wire, sink = EngineWire(), Slow()
    async with reading(wire, sink):
        await wire.publish(removed(*range(95)), removed(*range(100, 105)))
        await until(lambda: len(sink.hashes) == 100, "all batches are accepted")
    assert sink.hashes == [*range(95), *range(100, 105)]
    assert sink.most_pages == 10
    assert sink.most_in_turn <= 3


async def test_batches_that_are_known_already_yield_to_the_loop_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a replay, thousands of batches may wait that arrived over the live socket meanwhile."""
    monkeypatch.setattr(zmq_reader, "YIELD_INTERVAL_S", -1.0)
    reader = KvEventReader(0, KvEventEndpoints(1, None), RecordingSink())
    turns = 0

    async def others() -> None:
        nonlocal turns
        # Ends: the test cancels it.
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    reader._next_seq = 50
    for seq in range(50):
        await reader._accept(seq, b"")
    other.cancel()
    assert turns >= 49


async def test_a_split_event_is_equivalent_to_the_whole_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Keeps(RecordingSink):
        def __init__(self) -> None:
            super().__init__()
            rules = KvEventFormat(BLOCK, BLOCK, DuplicatePolicy.IDEMPOTENT)
            self.feed = PublishedSource(
                Source(1), Normalizer(rules, lambda lora, salt, size: HASHER)
            )

        def take(self, events: Iterable[ExternalEvent]) -> None:
            for event in events:
                assert not isinstance(event, PagesStored) or len(event.hashes) <= 7
                self.feed.apply(event)
            self.feed.seal_changes()

        def held(self) -> set[int]:
            return {
                name for part in self.feed.event_log.snapshot() for name in part.hashes.tolist()
            }

    monkeypatch.setattr(zmq_reader, "PAGES_PER_PART_MAX", 7)
    wire, keeps = EngineWire(), Keeps()
    tokens = list(range(BLOCK * 50))
    names = HASHER.prefix_hashes(tokens).tolist()
    async with reading(wire, keeps):
        await wire.publish(stored(range(50), None, tokens))
        await until(lambda: keeps.feed.normalizer.published_blocks == 50, "all blocks are held")
        assert keeps.held() == set(names)
        await wire.publish(removed(*range(49, 19, -1)))
        await until(lambda: keeps.feed.normalizer.published_blocks == 20, "the end was dropped")
        assert keeps.held() == set(names[:20])
        assert not keeps.feed.normalizer.is_incomplete


@pytest.mark.slow
async def test_a_reader_that_fails_reports_a_loss_and_starts_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_reader, "IDLE_S", 0.05)
    wire, sink = EngineWire(), RecordingSink()
    sink.fails_at = 1
    async with reading(wire, sink):
        for n in range(2):
            await wire.publish(removed(n))
        await until(lambda: sink.lost, "it fails")
        assert "the sink is broken" in sink.lost[0]
        await wire.publish(removed(2))
        await until(lambda: sink.hashes == [0, 2], "reading continues after the failed batch")
        assert len(sink.lost) == 1


@pytest.mark.slow
async def test_an_engine_is_lost_if_its_event_reader_ends() -> None:
    """Otherwise its events would stop without an error."""

    class Broken(RecordingSink):
        def record_loss(self, rank: int, reason: str) -> None:
            raise RuntimeError("the report fails too")

    wire, sink = EngineWire(), Broken()
    sink.fails_at = 0
    engine = SglangEngine(SglangConfig())
    engine._engine_failure = asyncio.get_running_loop().create_future()
    engine._endpoints = wire.endpoints
    serving = asyncio.create_task(wire.serve())
    try:
        engine.publish_to(sink)
        await wire.publish(removed(0))
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(WorkerLost, match="task sglang kv events 0 failed"):
                await engine.wait_for_failure()
    finally:
        await engine.cleanup()
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        wire.close()


async def test_a_reader_that_is_cancelled_at_the_end_loses_nothing() -> None:
    wire, sink = EngineWire(), RecordingSink()
    engine = SglangEngine(SglangConfig())
    engine._engine_failure = asyncio.get_running_loop().create_future()
    engine._endpoints = wire.endpoints
    engine.publish_to(sink)
    (reader,) = engine._tasks
    reader.cancel()
    await asyncio.wait([reader])
    assert not engine._engine_failure.done()
    assert sink.lost == []
    await engine.cleanup()
    wire.close()
