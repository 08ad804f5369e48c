"""Compares what a source claims here with what its worker says it has published.

Both sides go on changing, so the comparison leaves out every block that was touched by a batch
between the two positions, or while either side was being read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from common.errors import MeshError, Unavailable
from common.kv.events import NO_HASHES, Event, EventKind, Hashes, Source, Tier
from common.rpc import channel as rpc
from common.rpc.interceptors import raising_mesh_errors
from common.wire.kv import TIER_NAMES, hashes_of
from indexer_svc.ingest import Ingest
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc

LIST_S = 20.0
CATCH_UP_S = 2.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """Blocks claimed and not held; held and not claimed; both. error: why there is none."""

    source: Source
    extra: int = 0
    missing: int = 0
    equal: int = 0
    error: str = ""


@dataclass(slots=True)
class _Listing:
    """A set as one side tells it, after (epoch, sequence)."""

    epoch: int
    sequence: int
    blocks: dict[Tier, Hashes]


async def compare(
    ingest: Ingest, source: Source, address: str | None, security: rpc.Security
) -> Comparison:
    """One source of the feed against its worker at `address`."""
    try:
        if address is None:
            raise Unavailable("its worker is not in discovery")
        theirs = await _list_theirs(source, address, security)
        await _until_at_least(ingest, source, theirs)
        ours = await _list_ours(ingest, source)
        touched = _touched(ingest, source, ours, theirs)
    except MeshError as error:
        return Comparison(source, error=error.message)
    return await asyncio.to_thread(_counted, source, ours, theirs, touched)


async def _list_theirs(source: Source, address: str, security: rpc.Security) -> _Listing:
    channel = rpc.channel(address, security=security)
    parts: dict[Tier, list[Hashes]] = {}
    at: tuple[int, int] | None = None
    try:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        request = engine_pb2.ListKvBlocksRequest(dp_rank=source.dp_rank)
        call = stub.ListKvBlocks(request, timeout=LIST_S, metadata=rpc.call_metadata(security))
        with raising_mesh_errors():
            async with rpc.cancelling(call):
                async for part in call:
                    if at not in (None, (part.epoch, part.sequence)):
                        raise Unavailable("the worker's list has parts of several moments")
                    at = (part.epoch, part.sequence)
                    tier = TIER_NAMES.get(part.tier)
                    if tier is None:
                        raise Unavailable(f"the worker lists the unknown tier {part.tier!r}")
                    parts.setdefault(tier, []).append(
                        hashes_of(part.prefix_hashes, "prefix_hashes")
                    )
    finally:
        await channel.close()
    if at is None:
        raise Unavailable("the worker's list does not say where it stands")
    return _Listing(*at, _merged(parts))


async def _until_at_least(ingest: Ingest, source: Source, theirs: _Listing) -> None:
    deadline = asyncio.get_running_loop().time() + CATCH_UP_S
    while True:
        _require(ingest, source)
        at = ingest.feed.position(source)
        if (at.epoch, at.sequence) >= (theirs.epoch, theirs.sequence):
            return
        if asyncio.get_running_loop().time() >= deadline:
            raise Unavailable(
                f"the index stands at {at.epoch}/{at.sequence}, the worker at"
                f" {theirs.epoch}/{theirs.sequence}"
            )
        await asyncio.sleep(POLL_S)


def _require(ingest: Ingest, source: Source) -> None:
    if source not in ingest.feed:
        raise Unavailable("the source is gone")
    if ingest.feed.is_load_only(source):
        raise Unavailable(ingest.feed.status(source).reason)


async def _list_ours(ingest: Ingest, source: Source) -> _Listing:
    parts: dict[Tier, list[Hashes]] = {}
    async with ingest.exclusive():
        _require(ingest, source)
        at = ingest.feed.position(source)
        index, claims = ingest.feed.claims(source)
        chunks = index.chunks(claims)
    while True:
        async with ingest.exclusive():
            tier, hashes = next(chunks, (Tier.DEVICE, None))
        if hashes is None:
            break
        parts.setdefault(tier, []).append(hashes)
        await asyncio.sleep(0)
    if claims.retired:
        raise Unavailable("it was cleared while it was compared")
    return _Listing(at.epoch, at.sequence, _merged(parts))


def _touched(ingest: Ingest, source: Source, ours: _Listing, theirs: _Listing) -> Hashes:
    """Blocks of all batches after the older of the two positions."""
    if source not in ingest.feed or ours.epoch != theirs.epoch:
        raise Unavailable("it was cleared while it was compared")
    at = ingest.feed.position(source)
    oldest = min(ours.sequence, theirs.sequence)
    if (at.epoch, at.sequence) == (ours.epoch, oldest):
        return NO_HASHES
    history = ingest.histories.get(source)
    batches = None if history is None else history.since(theirs.epoch, oldest)
    if batches is None:
        raise Unavailable("it changed too much while it was compared")
    events: list[Event] = [event for batch in batches for event in batch.events]
    if any(event.kind is EventKind.CLEARED for event in events):
        raise Unavailable("it was cleared while it was compared")
    return np.concatenate([NO_HASHES, *(event.hashes for event in events)])


def _counted(source: Source, ours: _Listing, theirs: _Listing, touched: Hashes) -> Comparison:
    extra = missing = equal = 0
    for tier in Tier:
        here = np.setdiff1d(ours.blocks.get(tier, NO_HASHES), touched)
        there = np.setdiff1d(theirs.blocks.get(tier, NO_HASHES), touched)
        both = len(np.intersect1d(here, there, assume_unique=True))
        equal += both
        extra += len(here) - both
        missing += len(there) - both
    return Comparison(source, extra, missing, equal)


def _merged(parts: dict[Tier, list[Hashes]]) -> dict[Tier, Hashes]:
    return {tier: np.concatenate(hashes) for tier, hashes in parts.items()}
