"""The index of many workers: memory, and the time of a match and of a stored prompt.

Every worker holds a system prompt of SYSTEM_BLOCKS, one of the tenants' prompts of TENANT_BLOCKS,
and conversations of PRIVATE_BLOCKS each; a part of these is held by two workers.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from bench.measure import rss_mb
from common.kv.events import Hashes, Source
from common.kv.prefix_index import PrefixIndex

SYSTEM_BLOCKS, TENANT_BLOCKS, PRIVATE_BLOCKS = 32, 64, 128
# Tenants; each worker has one of them at a time.
TENANTS = 200
SHARED_BY_TWO = 0.25
MATCHES = 200


@dataclass(frozen=True, slots=True)
class IndexCosts:
    """of a held block: one that n workers hold counts n times."""

    blocks: int
    bytes_per_block: float
    store_us: float
    """Of a held block."""

    match_us: float
    """Of a prompt whose system prompt every worker holds."""


def measure(workers: int, blocks: int, pid: int) -> IndexCosts:
    """blocks: held by each worker, about."""
    rng = np.random.default_rng(5)
    system = _hashes(rng, SYSTEM_BLOCKS)
    tenants = [np.concatenate((system, _hashes(rng, TENANT_BLOCKS))) for _ in range(TENANTS)]
    gc.collect()
    before_mb = rss_mb(pid)
    index = PrefixIndex()
    prompts: list[Hashes] = []
    last, spent_s = system, 0.0
    sources = [index.add_source(Source(number + 1)) for number in range(workers)]
    for number, source in enumerate(sources):
        index.set_visible(source, True)
        tenant = tenants[number % TENANTS]
        chains = [tenant]
        while sum(map(len, chains)) < blocks:
            if rng.random() < SHARED_BY_TWO:
                chains.append(last)
                continue
            chains.append(np.concatenate((tenant, _hashes(rng, PRIVATE_BLOCKS))))
            last = chains[-1]
        prompts.append(chains[-1])
        began = time.thread_time()
        for chain in chains:
            index.store(source, chain)
        spent_s += time.thread_time() - began
    gc.collect()
    used_mb = rss_mb(pid) - before_mb
    times: list[float] = []
    for at in rng.integers(0, workers, MATCHES).tolist():
        began = time.thread_time()
        index.match(prompts[at])
        times.append(time.thread_time() - began)
    return IndexCosts(
        index.blocks,
        used_mb * 1e6 / index.blocks,
        spent_s / index.blocks * 1e6,
        median(times) * 1e6,
    )


def _hashes(rng: np.random.Generator, count: int) -> Hashes:
    return rng.integers(1, 2**64, count, dtype=np.uint64)
