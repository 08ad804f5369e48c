"""KV events recorded from a real indexer, played back into an index and another indexer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import indexer_svc.tools.record
from common.errors import Unavailable
from common.kv.events import (
    EventBatch,
    EventKind,
    KvEvent,
    Partition,
    SnapshotChunk,
    Source,
    SourceStatus,
)
from common.kv.hashing import PrefixHasher
from common.kv.index_feed import IndexFeed
from common.registry.registry import MemoryRegistry, MemoryStore
from common.runtime.tasks import TaskGroup
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig
from indexer_svc.core.recording import IndexLost, RecordingEnd, RecordingEntry
from indexer_svc.core.subscriber import StatusUpdate
from indexer_svc.ingest import GONE_GRACE_S
from indexer_svc.tools.playback import play_into_local_index, play_to_indexer
from indexer_svc.tools.record import Recorder, record
from indexer_svc.tools.recording_file import (
    HEADER,
    BrokenRecording,
    RecordingReader,
    entries_of,
)
from kvmesh.indexer.v1.indexer_pb2 import SubscribeResponse
from tests.kit.apps import living
from tests.kit.recordings import recorded
from tests.kit.waiting import WAIT_S, until
from worker_svc.kv_events.event_log import PublishedSource
from worker_svc.kv_events.external_events import (
    DuplicatePolicy,
    KvEventFormat,
    PagesCleared,
    PagesRemoved,
    PagesStored,
)
from worker_svc.kv_events.normalizer import Normalizer
from worker_svc.kv_events.publisher import Publisher

NS = "default"
BLOCK = 4
MB = 1_000_000
CHAIN = 8
RANKS = 2


def blocks_of(feed: IndexFeed) -> dict[Source, set[int]]:
    held = {}
    for source in feed.sources():
        index, advertised = feed.advertised(source)
        held[source] = {key for _, part in index.chunks(advertised) for key in part.tolist()}
    return held


def hasher_factory(lora: str, salt: str, block_size: int) -> PrefixHasher:
    return PrefixHasher(mesh_key=b"", model="m", block_size=block_size)


class Worker:
    """A real publisher; the test supplies the engine's events."""

    def __init__(self, worker_id: int, store: MemoryStore) -> None:
        rules = KvEventFormat(BLOCK, BLOCK, DuplicatePolicy.IDEMPOTENT)
        feeds = {
            rank: PublishedSource(Source(worker_id, rank), Normalizer(rules, hasher_factory))
            for rank in range(RANKS)
        }
        self.held: list[set[int]] = [set() for _ in range(RANKS)]
        self.publisher = Publisher(
            worker_id,
            Partition("m", BLOCK, 1),
            feeds,
            lambda: (),
            MemoryRegistry(store),
            NS,
            rng=Random(worker_id),
        )

    def store(self, rank: int, chain: int) -> None:
        self.held[rank].add(chain)
        tokens = b"".join(value.to_bytes(4, "little") for value in self._tokens(chain))
        hashes = range(chain * CHAIN, (chain + 1) * CHAIN)
        self.publisher.take([PagesStored(hashes, None, tokens, BLOCK, rank=rank)])

    def remove(self, rank: int, chain: int) -> None:
        self.held[rank].discard(chain)
        hashes = range((chain + 1) * CHAIN - 1, chain * CHAIN - 1, -1)
        self.publisher.take([PagesRemoved(hashes, rank=rank)])

    def disturb(self, rng: Random) -> None:
        rank = rng.randrange(RANKS)
        match rng.choices(("store", "remove", "clear", "reset"), (70, 25, 3, 2))[0]:
            case "store":
                self.store(rank, rng.randrange(500))
            case "remove" if self.held[rank]:
                self.remove(rank, rng.choice(sorted(self.held[rank])))
            case "clear":
                self.held[rank].clear()
                self.publisher.take([PagesCleared(rank)])
            case "reset":
                self.held[rank].clear()
                self.publisher.reset(rank)

    def is_in(self, feed: IndexFeed) -> bool:
        """Whether the index has all that the engine reported, also what waits for its batch."""
        ledgers = [one.event_log for one in self.publisher.sources.values()]
        return self.publisher._publish_timer is None and all(
            one.source in feed
            and feed.position(one.source) == one.state
            and feed.status(one.source).state == "exact"
            for one in ledgers
        )

    @staticmethod
    def _tokens(chain: int) -> Sequence[int]:
        return [chain, *range(1, CHAIN * BLOCK)]


def indexer(store: MemoryStore, port: int = 0) -> AbstractAsyncContextManager[IndexerApp]:
    config = IndexerConfig(registry="memory", port=port)
    return living(IndexerApp(config, registry=MemoryRegistry(store)), grace_s=0.5)


@asynccontextmanager
async def publishing(workers: Sequence[Worker]) -> AsyncIterator[None]:
    async with TaskGroup() as tasks:
        running = [tasks.create_task(worker.publisher.run()) for worker in workers]
        try:
            yield
        finally:
            for one in running:
                one.cancel()


@asynccontextmanager
async def recording(path: Path, address: str, **settings: Any) -> AsyncIterator[Recorder]:
    with path.open("xb") as file:
        recorder = Recorder(file, settings.get("bytes_max", 100 * MB), time.monotonic)
        task = asyncio.create_task(record(address, recorder))
        try:
            yield recorder
        finally:
            task.cancel()
            await asyncio.wait({task})
            recorder.flush()


def is_copy(copy: IndexFeed, feed: IndexFeed) -> bool:
    exact = all(copy.status(source).state == "exact" for source in copy.sources())
    return exact and blocks_of(copy) == blocks_of(feed)


def stands_where(recorder: Recorder, feed: IndexFeed) -> bool:
    return {state for state in recorder.positions.states() if state.sequence} == {
        state for state in feed.positions() if state.sequence
    }


@pytest.mark.slow
@pytest.mark.row("S1-22")
@pytest.mark.parametrize("seed", range(2))
async def test_playback_rebuilds_the_recorded_index_locally_and_at_an_indexer(
    tmp_path: Path, seed: int
) -> None:
    rng, store, path = Random(seed), MemoryStore(), tmp_path / "events"
    workers = [Worker(n, store) for n in range(1, 4)]
    for worker in workers:
        for chain in range(1500):  # Snapshots of more than one part.
            worker.store(0, 1000 + chain)
    async with publishing(workers):
        async with indexer(store) as app:
            port = int(app.address.rsplit(":", 1)[1])
            feed = app.ingest.feed
            await until(lambda: all(w.is_in(feed) for w in workers), "the index is filled")
            async with recording(path, app.address) as recorder:
                for _ in range(300):
                    rng.choice(workers).disturb(rng)
                    if rng.random() < 0.2:
                        await asyncio.sleep(0)
                await until(lambda: all(w.is_in(feed) for w in workers), "the index has caught up")
                await until(lambda: stands_where(recorder, feed), "all events are recorded")
        assert recorder.recording_stats.losses == 0
        played = IndexFeed()
        playback_stats = await play_into_local_index(path, played)
        assert blocks_of(played) == blocks_of(feed)
        assert playback_stats.blocks == feed.blocks
        assert not playback_stats.has_ended, "the recording has no end entry"
        assert (playback_stats.messages, playback_stats.is_cut) == (
            recorder.recording_stats.messages,
            False,
        )
        async with indexer(MemoryStore(), port) as other:
            replaying = asyncio.create_task(play_to_indexer(path, other.address, hold_s=WAIT_S))
            copied = other.ingest.feed
            await until(
                lambda: replaying.done() or is_copy(copied, feed),
                "the source is published, and exact",
            )
            assert not replaying.done(), replaying.exception()
            replaying.cancel()
            await asyncio.wait({replaying})


@pytest.mark.slow
async def test_a_recorder_resumes_after_the_loss_of_its_indexer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer_svc.tools.record, "RETRY_S", 0.01)
    store, path = MemoryStore(), tmp_path / "events"
    worker = Worker(1, store)
    async with publishing([worker]), indexer(store) as app:
        port = int(app.address.rsplit(":", 1)[1])
        async with recording(path, app.address) as recorder:
            worker.store(0, 1)
            await until(lambda: recorder.positions.states(), "the event is recorded")
            await app.drain(0.5)
            await until(lambda: recorder.recording_stats.losses == 1, "the loss is recorded")
            await app.deregister()
            await app.close()
            worker.store(0, 2)
            worker.remove(0, 1)
            async with indexer(store, port) as again:
                await until(
                    lambda: worker.is_in(again.ingest.feed), "the indexer is available again"
                )
                worker.store(1, 3)
                await until(lambda: worker.is_in(again.ingest.feed), "recording continues")
                await until(
                    lambda: stands_where(recorder, again.ingest.feed), "all events are recorded"
                )
                held = blocks_of(again.ingest.feed)
    played = IndexFeed()
    await play_into_local_index(path, played)
    assert blocks_of(played) == held
    async with indexer(MemoryStore()) as other:
        playback_stats = await play_to_indexer(path, other.address)
        assert blocks_of(other.ingest.feed) == held
        assert playback_stats.sources == RANKS


async def test_a_recording_ends_at_its_size_limit_with_an_error(tmp_path: Path) -> None:
    store, path = MemoryStore(), tmp_path / "events"
    worker = Worker(1, store)
    async with publishing([worker]), indexer(store) as app:
        with path.open("xb") as file:
            recorder = Recorder(file, 10_000, time.monotonic)
            task = asyncio.create_task(record(app.address, recorder))
            for chain in range(200):
                worker.store(0, chain)
                await asyncio.sleep(0)
            await asyncio.wait({task}, timeout=WAIT_S)
            assert isinstance(task.exception(), Unavailable)
            assert recorder.recording_stats.is_full
            recorder.end()
    assert path.stat().st_size <= 10_000
    playback_stats = await play_into_local_index(path, IndexFeed())
    assert playback_stats.has_ended


async def test_playback_at_speed_1_keeps_the_recorded_pace(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(HEADER + recorded(0.4, RecordingEnd()))
    assert (await play_into_local_index(path, IndexFeed(), speed=2.0)).seconds >= 0.2
    path.write_bytes(HEADER + recorded(3600.0, RecordingEnd()))
    assert (await play_into_local_index(path, IndexFeed())).seconds < 3600.0


async def test_an_invalid_recording_is_rejected_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "events"
    known, batch = status(0, 0, "exact"), stored(0, 0, 1, 1)
    async with indexer(MemoryStore()) as app:
        for data, number in (
            (HEADER + batch, 1),
            (HEADER + known + batch + b"\4\0\0\0rust", 3),
            (b"", 0),
        ):
            path.write_bytes(data)
            for replaying in (
                play_to_indexer(path, app.address),
                play_into_local_index(path, IndexFeed()),
            ):
                with pytest.raises(BrokenRecording) as error:
                    await replaying
                assert error.value.number == number
        assert app.ingest.feed.sources() == []


def status(t: float, rank: int, state: str) -> bytes:
    update = StatusUpdate(Source(1, rank), Partition("m", BLOCK, 1), SourceStatus(state))
    return recorded(t, update)


def stored(t: float, rank: int, sequence: int, *blocks: int) -> bytes:
    event = KvEvent(EventKind.STORED, np.array(blocks, dtype=np.uint64))
    return recorded(t, EventBatch(Source(1, rank), 1, sequence, [event]))


async def test_a_rank_that_leaves_a_worker_leaves_the_other_index_too(tmp_path: Path) -> None:
    path = tmp_path / "events"
    snapshot = [
        SnapshotChunk(Source(1, 0), 1, 2, np.array([n], dtype=np.uint64), first=first, last=last)
        for n, first, last in ((1, True, False), (3, False, True))
    ]
    path.write_bytes(
        HEADER
        + (status(0, 0, "exact") + status(0, 1, "exact"))
        + (stored(0.1, 0, 1, 1, 2) + stored(0.1, 1, 1, 7, 8))
        # Rank 1 leaves during a snapshot of rank 0 and comes back later.
        + (recorded(0.2, snapshot[0]) + status(0.2, 1, "gone") + recorded(0.2, snapshot[1]))
    )
    for blocks, more in ((2, b""), (3, status(0.3, 1, "exact") + stored(0.3, 1, 1, 9))):
        path.write_bytes(path.read_bytes() + more)
        assert (await play_into_local_index(path, IndexFeed())).blocks == blocks
        async with indexer(MemoryStore()) as app:
            await play_to_indexer(path, app.address)
            assert app.ingest.feed.blocks == blocks


async def test_a_rank_comes_back_during_the_snapshot_of_another_rank(tmp_path: Path) -> None:
    path = tmp_path / "events"
    source = Source(1, 0)
    begins, ends = (
        recorded(
            0.3, SnapshotChunk(source, 1, 2, np.array([n], dtype=np.uint64), first=f, last=not f)
        )
        for n, f in ((1, True), (3, False))
    )
    whole = SnapshotChunk(Source(1, 1), 1, 5, np.array([9], dtype=np.uint64), first=True, last=True)
    back = status(0.3, 1, "gapped") + recorded(0.3, whole) + status(0.3, 1, "exact")
    left = status(0.2, 1, "gone")
    path.write_bytes(
        (HEADER + status(0, 0, "exact") + status(0, 1, "exact"))
        + (stored(0.1, 0, 1, 1, 2) + stored(0.1, 1, 1, 7, 8))
        # Dropped for lack of memory: its blocks are removed, its load is kept.
        + (left + status(0.2, 1, "degraded") + left)
        + (begins + status(0.3, 1, "gone") + back + ends)
    )
    assert (await play_into_local_index(path, IndexFeed())).blocks == 3
    async with indexer(MemoryStore()) as app:
        await play_to_indexer(path, app.address)
        assert app.ingest.feed.blocks == 3


@pytest.mark.slow
async def test_playback_keeps_a_worker_without_entries_after_an_index_loss(tmp_path: Path) -> None:
    path = tmp_path / "events"
    quiet_s = 2 * GONE_GRACE_S
    path.write_bytes(
        HEADER
        + (status(0, 0, "exact") + stored(0.1, 0, 1, 1, 2) + recorded(0.2, IndexLost()))
        + (status(0.3, 0, "exact") + stored(quiet_s, 0, 2, 3))
    )
    async with indexer(MemoryStore()) as app:
        await play_to_indexer(path, app.address, speed=1.0)
        assert app.ingest.feed.blocks == 3


@pytest.mark.slow
@pytest.mark.row("S1-22")
async def test_the_commands_record_until_a_signal_and_play_back(tmp_path: Path) -> None:
    store, path = MemoryStore(), tmp_path / "events"
    worker = Worker(1, store)
    async with publishing([worker]), indexer(store) as app:
        worker.store(0, 1)
        recorder = await started("record", "--indexer", app.address, "--out", str(path))
        await until(lambda: holds_blocks(path), "it records")
        recorder.send_signal(signal.SIGTERM)
        summary = await ended(recorder)
        assert (summary["error"], summary["is_full"], summary["losses"]) == ("", False, 0)
        assert await ended(await started("record", "--indexer", "x:1", "--out", str(path)), 1) == {}
        here = await ended(await started("playback", "--recording", str(path)))
        assert (here["blocks"], here["has_ended"], here["is_cut"]) == (CHAIN, True, False)
        dumped = await output_of(await started("playback", "--recording", str(path), "--to-json"))
        messages = [json.loads(line) for line in dumped.splitlines()]
        assert len(messages) == here["messages"]
        assert "prefix_hashes" in dumped
        assert messages[-1]["ended"]
    # A crash may truncate the last message; the others are valid.
    path.write_bytes(_read(path)[:-3])
    async with indexer(MemoryStore()) as other:
        flags = ["--recording", str(path), "--indexer", other.address]
        there = await ended(await started("playback", *flags))
        assert (there["sources"], there["has_ended"], there["is_cut"]) == (RANKS, False, True)
        assert other.ingest.feed.blocks == CHAIN
        path.write_bytes(b"rust\n" + _read(path))
        assert await ended(await started("playback", *flags), 1) == {}


async def test_a_recorder_ends_after_silence_and_not_after_few_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    received = asyncio.Event()

    def record_entries(message: SubscribeResponse) -> Iterator[RecordingEntry]:
        received.set()
        return entries_of(message)

    monkeypatch.setattr(indexer_svc.tools.record, "entries_of", record_entries)
    monkeypatch.setattr(indexer_svc.tools.record, "time", Clock)
    monkeypatch.setattr(indexer_svc.tools.record, "RETRY_S", 0.01)
    store = MemoryStore()
    async with indexer(store) as app:
        port = int(app.address.rsplit(":", 1)[1])
        async with recording(tmp_path / "events", app.address) as recorder:
            await until(received.is_set, "it receives")
            now += 2 * indexer_svc.tools.record.INDEXER_TIMEOUT_S  # An indexer of an empty mesh.
            await app.drain(0.5)
            await app.deregister()
            await app.close()
            worker = Worker(1, store)
            async with publishing([worker]), indexer(store, port):
                worker.store(0, 1)
                await until(recorder.positions.states, "the index receives events again")


@pytest.mark.slow
async def test_a_full_disk_ends_a_recording_with_its_last_line_and_status_1(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events"
    store = MemoryStore()
    worker = Worker(1, store)
    for chain in range(2000):
        worker.store(0, chain)
    async with indexer(store) as app, publishing([worker]):
        flags = ("--indexer", app.address, "--out", str(path))
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", 'ulimit -f 8; exec "$@"', "sh"),
            # Without -B, the limit would truncate the byte code that Python caches, too.
            *(sys.executable, "-B", "-m", "indexer_svc.tools.record", *flags),
            env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(WAIT_S):
            out, errors = await process.communicate()
    assert process.returncode == 1, errors.decode()
    summary = json.loads(out.decode().splitlines()[-1])
    assert "File too large" in summary["error"]


def holds_blocks(path: Path) -> bool:
    if not (path.exists() and path.stat().st_size):
        return False
    with path.open("rb") as file:
        return any(
            isinstance(entry, EventBatch | SnapshotChunk) for _, entry in RecordingReader(file)
        )


def _read(path: Path) -> bytes:
    return path.read_bytes()


async def started(command: str, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"indexer_svc.tools.{command}", *flags),
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process, status: int = 0) -> dict[str, Any]:
    """Return the final JSON of a command; empty if it ended with an error."""
    out = await output_of(process, status)
    if status:
        return {}
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    return summary


async def output_of(process: asyncio.subprocess.Process, status: int = 0) -> str:
    try:
        async with asyncio.timeout(WAIT_S):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == status, errors.decode()
    assert errors or not status
    return out.decode()
