"""Compares the indexed blocks of a source with the list of its worker.

Both sides change meanwhile, so the comparison excludes every block that a batch touched between the
two positions or while either side was read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from common.errors import MeshError, Unavailable
from common.kv.events import EMPTY_HASHES, EventKind, Hashes, KvEvent, Source, Tier
from common.rpc import channel as rpc
from common.rpc.status import map_rpc_errors
from common.wire.kv import TIER_BY_NAME, hashes_from_wire
from indexer_svc.ingest import Ingest
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc

LIST_TIMEOUT_S = 20.0
CATCH_UP_TIMEOUT_S = 2.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """extra: blocks only in the index; missing: only at the worker. error: "" if compared."""

    source: Source
    extra: int = 0
    missing: int = 0
    equal: int = 0
    error: str = ""


@dataclass(slots=True)
class _BlockListing:
    """The set of one side after (epoch, sequence)."""

    epoch: int
    sequence: int
    blocks: dict[Tier, Hashes]


async def compare(
    ingest: Ingest, source: Source, address: str | None, security: rpc.Security
) -> Comparison:
    """Compares one source of the feed with its worker at `address`."""
    try:
        if address is None:
            raise Unavailable("its worker is not registered")
        worker_listing = await _list_worker_blocks(source, address, security)
        await _wait_for_position(ingest, source, worker_listing)
        index_listing = await _list_index_blocks(ingest, source)
        touched_blocks = _touched_blocks(ingest, source, index_listing, worker_listing)
    except MeshError as error:
        return Comparison(source, error=error.message)
    listings = (index_listing, worker_listing)
    return await asyncio.to_thread(_compare_blocks, source, *listings, touched_blocks)


async def _list_worker_blocks(
    source: Source, address: str, security: rpc.Security
) -> _BlockListing:
    channel = rpc.channel(address, role="worker", security=security)
    parts: dict[Tier, list[Hashes]] = {}
    at: tuple[int, int] | None = None
    try:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        request = engine_pb2.ListKvBlocksRequest(dp_rank=source.dp_rank)
        call = stub.ListKvBlocks(request, timeout=LIST_TIMEOUT_S)
        with map_rpc_errors():
            async with rpc.cancelling(call):
                async for part in call:
                    if at not in (None, (part.epoch, part.sequence)):
                        raise Unavailable("the worker's list has parts of several positions")
                    at = (part.epoch, part.sequence)
                    tier = TIER_BY_NAME.get(part.tier)
                    if tier is None:
                        raise Unavailable(f"the worker's list has the unknown tier {part.tier!r}")
                    hashes = hashes_from_wire(part.prefix_hashes, "prefix_hashes")
                    parts.setdefault(tier, []).append(hashes)
    finally:
        await channel.close()
    if at is None:
        raise Unavailable("the worker's list has no position")
    return _BlockListing(*at, _concatenate(parts))


async def _wait_for_position(ingest: Ingest, source: Source, worker_listing: _BlockListing) -> None:
    deadline = asyncio.get_running_loop().time() + CATCH_UP_TIMEOUT_S
    while True:
        _require_indexed(ingest, source)
        at = ingest.feed.position(source)
        if (at.epoch, at.sequence) >= (worker_listing.epoch, worker_listing.sequence):
            return
        if asyncio.get_running_loop().time() >= deadline:
            raise Unavailable(
                f"the index is at {at.epoch}/{at.sequence}, the worker at"
                f" {worker_listing.epoch}/{worker_listing.sequence}"
            )
        await asyncio.sleep(POLL_S)


def _require_indexed(ingest: Ingest, source: Source) -> None:
    if source not in ingest.feed:
        raise Unavailable("the source is gone")
    if ingest.feed.is_load_only(source):
        raise Unavailable(ingest.feed.status(source).reason)


async def _list_index_blocks(ingest: Ingest, source: Source) -> _BlockListing:
    parts: dict[Tier, list[Hashes]] = {}
    async with ingest.exclusive():
        _require_indexed(ingest, source)
        at = ingest.feed.position(source)
        index, advertised = ingest.feed.advertised(source)
        chunks = index.chunks(advertised)
    while True:
        async with ingest.exclusive():
            tier, hashes = next(chunks, (Tier.DEVICE, None))
        if hashes is None:
            break
        parts.setdefault(tier, []).append(hashes)
        await asyncio.sleep(0)
    if advertised.retired:
        raise Unavailable("the source was cleared during the comparison")
    return _BlockListing(at.epoch, at.sequence, _concatenate(parts))


def _touched_blocks(
    ingest: Ingest, source: Source, index_listing: _BlockListing, worker_listing: _BlockListing
) -> Hashes:
    """Returns the blocks of all batches after the older of the two positions."""
    if source not in ingest.feed or index_listing.epoch != worker_listing.epoch:
        raise Unavailable("the source was cleared during the comparison")
    at = ingest.feed.position(source)
    oldest = min(index_listing.sequence, worker_listing.sequence)
    if (at.epoch, at.sequence) == (index_listing.epoch, oldest):
        return EMPTY_HASHES
    history = ingest.histories.get(source)
    batches = None if history is None else history.batches_since(worker_listing.epoch, oldest)
    if batches is None:
        raise Unavailable("the source changed too much during the comparison")
    events: list[KvEvent] = [event for batch in batches for event in batch.events]
    if any(event.kind is EventKind.CLEARED for event in events):
        raise Unavailable("the source was cleared during the comparison")
    return np.concatenate([EMPTY_HASHES, *(event.hashes for event in events)])


def _compare_blocks(
    source: Source,
    index_listing: _BlockListing,
    worker_listing: _BlockListing,
    touched_blocks: Hashes,
) -> Comparison:
    extra = missing = equal = 0
    for tier in Tier:
        index_hashes = np.setdiff1d(index_listing.blocks.get(tier, EMPTY_HASHES), touched_blocks)
        worker_hashes = np.setdiff1d(worker_listing.blocks.get(tier, EMPTY_HASHES), touched_blocks)
        both = len(np.intersect1d(index_hashes, worker_hashes, assume_unique=True))
        equal += both
        extra += len(index_hashes) - both
        missing += len(worker_hashes) - both
    return Comparison(source, extra, missing, equal)


def _concatenate(parts: dict[Tier, list[Hashes]]) -> dict[Tier, Hashes]:
    return {tier: np.concatenate(hashes) for tier, hashes in parts.items()}
