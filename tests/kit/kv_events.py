"""KV events of a few blocks, and the blocks that an index holds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from common.kv.events import EventKind, Hashes, KvEvent, Source, Tier
from common.kv.index_feed import IndexFeed


def array(keys: Iterable[int]) -> Hashes:
    """Returns block hashes as an array."""
    return np.array(list(keys), dtype=np.uint64)


def stored(*keys: int, tier: Tier = Tier.DEVICE) -> KvEvent:
    """Returns the event of stored blocks."""
    return KvEvent(EventKind.STORED, array(keys), tier)


def removed(*keys: int, tier: Tier = Tier.DEVICE) -> KvEvent:
    """Returns the event of removed blocks."""
    return KvEvent(EventKind.REMOVED, array(keys), tier)


def path(block: int) -> list[int]:
    """Returns the chain of a block in a binary tree: the parent of n is n // 2, the root is 1."""
    blocks = [block]
    while blocks[-1] > 1:
        blocks.append(blocks[-1] // 2)
    return blocks[::-1]


def advertised_blocks(feed: IndexFeed, source: Source) -> set[int]:
    """Returns the hashes of the blocks that a source advertises."""
    index, advertised = feed.advertised(source)
    return {key for _, part in index.chunks(advertised) for key in part.tolist()}
