"""Measure the KV index in process and over gRPC; the last line is JSON.

    PYTHONPATH=protos:. python bench/bench_index.py [--blocks 1048576] [--workers 64]

In process, on one thread:

- `hash_us_8192_tokens`: prefix hashes of 8,192 token ids, blocks of 16, median;
- `ingest_blocks_per_s`: distinct blocks by CPU time, in chains of 512 of one event batch each,
  dealt to the workers; `ingest_64_blocks_per_s`: in batches of 64; `longest_batch_ms`: of 512;
- `bytes_per_block`: growth of the resident memory by that ingest;
- `match_us_512_blocks_64_workers`: each query is another prompt of 512 blocks, of which every
  worker holds the same prefix, half of it or more; `match_depths_us`: each other worker holds a
  prefix of another length; `match_one_worker_us`, `match_miss_us`: one worker or none; medians.

Over gRPC, wall-clock time, with an indexer process:

- `rpc_ingest_blocks_per_s`: the same batches, one Publish stream per worker, until all are applied;
- `rpc_match_p50_us`: MatchStream, one question at a time, prompts as above.

With DYNAMO_PYTHON, the Python of an environment with ai-dynamo, `dynamo_*` are figures of its
binding (`bench/dynamo_binding.py`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from bench.index_mesh import BLOCK_SIZE, PARTITION, WAIT_S, IndexerProcess
from bench.measure import dynamo_figures, parse_settings, print_report, rss_mb
from common.kv.events import EventBatch, EventKind, Hashes, KvEvent, Source, SourcePosition
from common.kv.hashing import PrefixHasher, hashes_to_bytes
from common.kv.index_feed import IndexFeed, run_all_steps
from common.wire.kv import batch_to_proto, partition_to_proto, source_state_to_proto
from kvmesh.indexer.v1 import indexer_pb2

CHAIN_BLOCKS = 512
SHARED_PROMPTS = 128
QUERIES = 2000


class Data:
    """chains: distinct, shape (count, CHAIN_BLOCKS). shared: prompts that all workers hold; uneven:
    prompts that they hold to various depths.
    """

    def __init__(self, blocks: int, workers: int) -> None:
        self._rng = np.random.default_rng(7)
        self.sources = [Source(1 + number) for number in range(workers)]
        self.chains = self._random_chains(blocks // CHAIN_BLOCKS)
        self.shared = self._random_chains(SHARED_PROMPTS)
        self.uneven = self._random_chains(SHARED_PROMPTS)

    def batches(self, size: int = CHAIN_BLOCKS) -> Iterator[EventBatch]:
        """The chains, dealt to the workers, as batches of `size` blocks each."""
        sequences = dict.fromkeys(self.sources, 0)
        for number, chain in enumerate(self.chains):
            source = self.sources[number % len(self.sources)]
            for at in range(0, CHAIN_BLOCKS, size):
                sequences[source] += 1
                event = KvEvent(EventKind.STORED, chain[at : at + size])
                yield EventBatch(source, 1, sequences[source], [event])

    def shared_batch(self, source: Source, sequence: int) -> EventBatch:
        """What a worker holds of the prompts that are not dealt."""
        number = source.worker_id
        depth = CHAIN_BLOCKS // 2 + number if number % 2 else CHAIN_BLOCKS // 4
        prefixes = [*self.shared, *(prompt[:depth] for prompt in self.uneven)]
        events = [KvEvent(EventKind.STORED, prefix) for prefix in prefixes]
        return EventBatch(source, 1, sequence, events)

    def queries(self, prompts: npt.NDArray[np.uint64], count: int = QUERIES) -> list[Hashes]:
        """Returns prompts of which the last blocks, at most half of them, are not in the index."""
        found = []
        for number in range(count):
            query = prompts[number % len(prompts)].copy()
            unknown = int(self._rng.integers(1, CHAIN_BLOCKS // 2))
            query[-unknown:] = self._random_chains(1)[0, :unknown]
            found.append(query)
        return found

    def _random_chains(self, count: int) -> npt.NDArray[np.uint64]:
        return self._rng.integers(1, 2**64, (count, CHAIN_BLOCKS), dtype=np.uint64)


def main() -> None:
    settings = parse_settings(__doc__, blocks=1 << 20, workers=64)
    data = Data(settings.blocks, settings.workers)
    result = measure_process(data) | {"hash_us_8192_tokens": measure_hash()}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result |= runner.run(measure_rpc(data))
    result |= dynamo_figures("index")
    print_report("index", vars(settings) | {"chain": CHAIN_BLOCKS}, result)


def measure_hash() -> float:
    hasher = PrefixHasher(mesh_key=b"key", model="bench", block_size=BLOCK_SIZE)
    prompts = np.random.default_rng(1).integers(0, 128_000, (500, 8192), dtype=np.uint32)
    return _median_us(hasher.prefix_hashes, list(prompts))


def measure_process(data: Data) -> dict[str, object]:
    small_s, _ = _apply(_new_feed(data), data.batches(64))
    gc.collect()
    before_mb = rss_mb(os.getpid())
    feed = _new_feed(data)
    ingest_s, longest_s = _apply(feed, data.batches())
    used_mb = rss_mb(os.getpid()) - before_mb
    for source in data.sources:
        batch = data.shared_batch(source, feed.position(source).sequence + 1)
        run_all_steps(feed.apply(batch, 0.0))
    queries = {
        "match_us_512_blocks_64_workers": data.queries(data.shared),
        "match_depths_us": data.queries(data.uneven),
        "match_one_worker_us": data.queries(data.chains),
        "match_miss_us": [query[::-1].copy() for query in data.queries(data.chains)],
    }
    first = queries["match_us_512_blocks_64_workers"]
    assert all(len(feed.match(PARTITION, query)) == len(data.sources) for query in first)
    figures: dict[str, object] = {
        "ingest_blocks_per_s": round(data.chains.size / ingest_s),
        "ingest_64_blocks_per_s": round(data.chains.size / small_s),
        "longest_batch_ms": round(longest_s * 1e3, 2),
        "bytes_per_block": round(used_mb * 1e6 / data.chains.size),
    }
    for name, prompts in queries.items():
        figures[name] = _median_us(lambda query: feed.match(PARTITION, query), prompts)
    return figures


async def measure_rpc(data: Data) -> dict[str, object]:
    frames: dict[Source, list[indexer_pb2.PublishRequest]] = {s: [] for s in data.sources}
    for batch in data.batches():
        frames[batch.source].append(indexer_pb2.PublishRequest(batch=batch_to_proto(batch)))
    with tempfile.TemporaryDirectory() as folder:
        indexer = IndexerProcess(Path(folder) / "registry")
        await indexer.start()
        try:
            async with indexer.stub() as stub:
                return await _measure_calls(indexer, stub, data, frames)
        finally:
            await indexer.kill()


async def _measure_calls(
    indexer: IndexerProcess,
    stub: Any,
    data: Data,
    frames: dict[Source, list[indexer_pb2.PublishRequest]],
) -> dict[str, object]:
    streams = {}
    for source in data.sources:
        streams[source] = stub.Publish()
        hello = indexer_pb2.PublishHello(
            worker_id=source.worker_id,
            partition=partition_to_proto(PARTITION),
            sources=[source_state_to_proto(SourcePosition(source, 1, 0))],
        )
        await streams[source].write(indexer_pb2.PublishRequest(hello=hello))

    async def publish(source: Source) -> None:
        for frame in frames[source]:
            await streams[source].write(frame)

    await _await_applied(stub, 0, len(streams))
    started_at = time.perf_counter()
    await asyncio.gather(*map(publish, streams))
    await _await_applied(stub, sum(map(len, frames.values())), len(streams))
    ingest_s = time.perf_counter() - started_at
    for source, stream in streams.items():
        message = batch_to_proto(data.shared_batch(source, len(frames[source]) + 1))
        await stream.write(indexer_pb2.PublishRequest(batch=message))
    await _await_applied(stub, sum(map(len, frames.values())) + len(streams), len(streams))
    queries = data.queries(data.shared)
    times = [match_time async for match_time in _match_times(indexer, queries, len(streams))]
    for stream in streams.values():
        stream.cancel()
    return {
        "rpc_ingest_blocks_per_s": round(data.chains.size / ingest_s),
        "rpc_match_p50_us": round(statistics.median(times) * 1e6),
        "rpc_match_p99_us": round(statistics.quantiles(times, n=100)[-1] * 1e6),
    }


async def _await_applied(stub: Any, batches: int, sources: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        stats = await stub.Stats(indexer_pb2.StatsRequest(), timeout=10.0)
        if stats.batches_applied >= batches and len(stats.sources) == sources:
            return
        assert time.monotonic() < deadline, f"{stats.batches_applied}/{batches} batches"
        await asyncio.sleep(0.005)


async def _match_times(
    indexer: IndexerProcess, queries: Sequence[Hashes], matches: int
) -> AsyncIterator[float]:
    method = "/kvmesh.indexer.v1.IndexerService/MatchStream"
    async with indexer.stream(method, indexer_pb2.MatchStreamResponse) as stream:
        for number, query in enumerate(queries):
            request = indexer_pb2.MatchRequest(
                partition=partition_to_proto(PARTITION), prefix_hashes=hashes_to_bytes(query)
            )
            question = indexer_pb2.MatchQuestion(id=number, request=request)
            started_at = time.perf_counter()
            await stream.write(indexer_pb2.MatchStreamRequest(questions=[question]))
            frame = await stream.read()
            yield time.perf_counter() - started_at
            assert frame is not None
            (answer,) = frame.answers
            assert answer.id == number
            assert len(answer.response.matches) == matches


def _new_feed(data: Data) -> IndexFeed:
    feed = IndexFeed()
    for source in data.sources:
        feed.register_source(PARTITION, SourcePosition(source, 1, 0), 0.0)
    return feed


def _apply(feed: IndexFeed, batches: Iterator[EventBatch]) -> tuple[float, float]:
    """CPU seconds of all batches, and of the slowest one."""
    total_s = slowest_s = 0.0
    for batch in batches:
        started_at = time.thread_time()
        run_all_steps(feed.apply(batch, 0.0))
        spent_s = time.thread_time() - started_at
        total_s, slowest_s = total_s + spent_s, max(slowest_s, spent_s)
        feed.take_events()
    return total_s, slowest_s


# Any: an argument of the call.
def _median_us(call: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    times = []
    for argument in arguments:
        started_at = time.perf_counter()
        call(argument)
        times.append(time.perf_counter() - started_at)
    return round(statistics.median(times) * 1e6, 1)


if __name__ == "__main__":
    main()
