"""An engine's cache events, before they are converted to prefix hashes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, TypeAlias

from common.kv.events import Tier
from common.kv.hashing import PrefixHasher

TOKEN_BYTES = 4


class DuplicatePolicy(StrEnum):
    """Meaning of a second report that a page is stored.

    counted: needs as many removals. idempotent: no effect, one removal is enough.
    """

    COUNTED = "counted"
    IDEMPOTENT = "idempotent"


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages are now held, each the child of the one before.

    Raises ValueError naming the field if sizes disagree.
    """

    hashes: Sequence[int]
    """External, one per page, signed or unsigned 64 bits."""

    parent: int | None
    """External hash of the page before the first; None at the start of a prompt."""

    token_ids: bytes
    """Of all pages, 4 B little endian each."""

    page_size: int
    """Tokens per page."""

    tier: Tier = Tier.DEVICE
    rank: int = 0
    lora: str | None = ""
    """Empty: none; None: unknown."""

    salt: str | None = ""
    """Empty: none; None: unknown."""

    hash_scope: str = ""
    """A namespace of the hashes beyond rank and tier, if they are not unique (a salt)."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size: {self.page_size} is below 1")
        expected_bytes = len(self.hashes) * self.page_size * TOKEN_BYTES
        if len(self.token_ids) != expected_bytes:
            raise ValueError(
                f"token_ids: {len(self.token_ids)} bytes, not {expected_bytes} for "
                f"{len(self.hashes)} pages of {self.page_size} tokens"
            )


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages are no longer held on this tier; in any order."""

    hashes: Sequence[int]
    tier: Tier = Tier.DEVICE
    rank: int = 0
    hash_scope: str = ""


@dataclass(frozen=True, slots=True)
class PagesCleared:
    """The rank's cache is empty, on all tiers."""

    rank: int = 0


ExternalEvent: TypeAlias = PagesStored | PagesRemoved | PagesCleared


def split_event(event: ExternalEvent, pages_max: int) -> Iterator[ExternalEvent]:
    """Yields equivalent events of at most pages_max pages."""
    if isinstance(event, PagesCleared) or len(event.hashes) <= pages_max:
        yield event
        return
    for start in range(0, len(event.hashes), pages_max):
        end = start + pages_max
        hashes = event.hashes[start:end]
        if isinstance(event, PagesRemoved):
            yield replace(event, hashes=hashes)
            continue
        page_bytes = event.page_size * TOKEN_BYTES
        yield replace(
            event,
            hashes=hashes,
            parent=event.hashes[start - 1] if start else event.parent,
            token_ids=event.token_ids[start * page_bytes : end * page_bytes],
        )


class KvEventSink(Protocol):
    """Receives the cache events of an engine."""

    def take(self, events: Iterable[ExternalEvent]) -> None:
        """Applies events, in order; many pages are applied over several turns of the loop."""

    def record_loss(self, rank: int, reason: str) -> None:
        """Records that events of a rank are lost and cannot be repaired."""

    def reset(self, rank: int) -> None:
        """Records that the engine of a rank restarted with an empty cache."""


# Returns the hasher for (lora, salt, tokens per block); None: do not publish such blocks.
HasherFactory: TypeAlias = Callable[[str, str, int], PrefixHasher | None]


@dataclass(frozen=True, slots=True)
class KvEventFormat:
    """How an engine's events are read; its adapter sets it.

    page_size: tokens per page; a divisor or a multiple of block_size. tiers: number of tiers.
    Raises ValueError naming the value that is out of range.
    """

    block_size: int
    page_size: int
    duplicates: DuplicatePolicy
    tiers: int = 1

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.page_size < 1:
            raise ValueError("block_size, page_size: must be at least 1")
        if self.block_size % self.page_size and self.page_size % self.block_size:
            raise ValueError(
                f"page_size: {self.page_size} neither divides block_size {self.block_size} nor is "
                "a multiple of it"
            )
        if not 1 <= self.tiers <= len(Tier):
            raise ValueError(f"tiers: {self.tiers} is not in 1..{len(Tier)}")
