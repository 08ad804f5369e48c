"""Input of the KV index: sources, batches of events, snapshots. Pure.

The sets of a source are canonical: prefix hashes of `common/kv/hashing.py`, prefix-closed after
every event (a block is stored after its parent and removed before it), cumulative over tiers
(device; device and host; all three). `worker_svc/kv_events/normalizer.py` ensures this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

EMPTY_HASHES: Hashes = np.empty(0, dtype=np.uint64)
# Largest number of hashes in one snapshot chunk.
SNAPSHOT_CHUNK_BLOCKS = 4096


class Tier(IntEnum):
    """Location of a block. A block on a tier counts for all tiers of higher numbers too."""

    DEVICE = 0
    HOST = 1
    DISK = 2


SOURCE_STATES = frozenset({"exact", "gapped", "stale", "degraded", "gone"})


class EventKind(IntEnum):
    """Effect of an event; numbers as on the wire."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True)
class Partition:
    """Key of an index: blocks of different partitions never match."""

    model: str
    block_size: int
    hash_scheme: int
    adapter_version: int = 0


class Source(NamedTuple):
    """One rank of one worker incarnation."""

    worker_id: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KvEvent:
    """One change. hashes: shallow first if stored, deep first if removed, empty if cleared."""

    kind: EventKind
    hashes: Hashes = field(default_factory=lambda: EMPTY_HASHES)
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class EventBatch:
    """Changes of one source, in order.

    epoch: grows if the engine's cache is reset or events are lost for good; a new epoch begins with
    an empty set. sequence: contiguous within an epoch, from 1.
    """

    source: Source
    epoch: int
    sequence: int
    events: Sequence[KvEvent]


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Position of a source. sequence 0: no batch of the epoch yet.

    degraded: events were lost for good; the source advertises a subset of its blocks.
    """

    source: Source
    epoch: int
    sequence: int
    degraded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotChunk:
    """Part of the set of a source after (epoch, sequence); the last chunk installs the set."""

    source: Source
    epoch: int
    sequence: int
    hashes: Hashes
    tier: Tier = Tier.DEVICE
    first: bool = False
    last: bool = False


class SourceStatus(NamedTuple):
    """State of a source: exact, gapped, stale, degraded or gone; with a reason."""

    state: str
    reason: str = ""
