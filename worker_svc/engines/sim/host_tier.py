"""The host tier of the simulated engine: blocks that the device has evicted. Pure.

A named block is on the device or on the host. It leaves the device after its children, and returns
with all its ancestors, so a parent on the host arrived there after its children: the oldest block
on the host has no child, and is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a report of a stored block needs; as in `PagesStored`."""

    token_ids: bytes
    lora_name: str
    salt: str


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block on the host. parent: its name, None for the first block of a prompt."""

    parent: int | None
    content: BlockContent
    is_intact: bool


class HostTier:
    """At most `capacity` blocks, at least 1."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # In the order of arrival.
        self._blocks: OrderedDict[int, HostBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: int) -> bool:
        return name in self._blocks

    def chain_length(self, names: Sequence[int], parent: int | None) -> int:
        """Returns how many of `names`, from the first on, are here as a chain after `parent`."""
        links = zip((parent, *names), names, strict=False)
        return sum(1 for _ in takewhile(lambda link: self._follows(*link), links))

    def _follows(self, parent: int | None, name: int) -> bool:
        block = self._blocks.get(name)
        return block is not None and block.parent == parent

    def take(self, names: Sequence[int]) -> list[HostBlock]:
        """Removes and returns blocks."""
        return [self._blocks.pop(name) for name in names]

    def put(self, name: int, block: HostBlock) -> int | None:
        """Adds a block. Returns the name of the one that it replaces, None if there was room."""
        self._blocks[name] = block
        return self._blocks.popitem(last=False)[0] if len(self._blocks) > self._capacity else None

    def discard(self, names: Sequence[int]) -> list[int]:
        """Removes the blocks that are here. Returns their names."""
        return [name for name in names if self._blocks.pop(name, None) is not None]

    def clear(self) -> list[int]:
        """Removes all blocks. Returns their names."""
        names = list(self._blocks)
        self._blocks.clear()
        return names
