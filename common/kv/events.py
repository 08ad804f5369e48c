"""What the KV index is told: sources, batches of events, snapshots (pure).

The sets of a source are canonical: prefix hashes of `common/kv/hashing.py`, prefix-closed after
every
event (a block is announced after its parent and withdrawn before it), cumulative over tiers
(device; device and host; and disk). `worker_svc/kv_events/normalizer.py` makes them so; everybody
else
may rely on it.
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
# Most hashes in one chunk of a snapshot.
SNAPSHOT_CHUNK_BLOCKS = 4096


class Tier(IntEnum):
    """Where a block lies. A block on a tier counts for all tiers above that number too."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class EventKind(IntEnum):
    """What an event does; numbers as on the wire."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True)
class Partition:
    """What separates indexes: blocks of different partitions never match."""

    model: str
    block_size: int
    hash_scheme: int
    adapter_version: int = 0


class Source(NamedTuple):
    """Where events come from: one rank of one worker incarnation."""

    worker_id: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KvEvent:
    """One change. hashes: stored shallow first, removed deep first, none when cleared."""

    kind: EventKind
    hashes: Hashes = field(default_factory=lambda: EMPTY_HASHES)
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class EventBatch:
    """Changes of one source in the order they happened.

    epoch: grows when the engine's cache is reset or events are lost beyond repair; a new epoch
    begins with an empty set. sequence: contiguous within an epoch, from 1.
    """

    source: Source
    epoch: int
    sequence: int
    events: Sequence[KvEvent]


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Where a source stands. sequence 0: nothing of that epoch yet.

    degraded: events were lost beyond repair; what is claimed is still held, but not all is claimed.
    """

    source: Source
    epoch: int
    sequence: int
    degraded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotChunk:
    """Part of a source's set after (epoch, sequence); swapped in when the last part is there."""

    source: Source
    epoch: int
    sequence: int
    hashes: Hashes
    tier: Tier = Tier.DEVICE
    first: bool = False
    last: bool = False


class SourceStatus(NamedTuple):
    """How far a source can be trusted: exact, gapped, stale, degraded or gone; and why."""

    state: str
    reason: str = ""
