"""What the indexer owes one publisher, for the one writer of its stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from common.errors import MeshError
from common.kv.events import Source, SourceState
from common.kv.index_feed import Demand
from common.wire.kv import state_to_proto
from kvmesh.indexer.v1 import indexer_pb2

# Acknowledgements gather this long; demands go at once.
ACK_EVERY_S = 0.05


class PublisherOutbox:
    """Bounded by the ranks of a worker: what is newer takes the place of what is older.

    breach: why the stream ends, if it ends with an error.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._acked: dict[Source, SourceState] = {}
        self._demands: dict[Source, Demand] = {}
        self._shrink_blocks = 0
        self._is_closed = False
        self.breach: MeshError | None = None
        self._filled = asyncio.Event()
        self._urgent = asyncio.Event()
        self._written_at = clock()

    def acknowledge(self, state: SourceState) -> None:
        """The batch applied last of a source."""
        self._acked[state.source] = state
        self._filled.set()

    def demand(self, demand: Demand) -> None:
        """Batches are missing."""
        self._demands[demand.source] = demand
        self._hurry()

    def shrink(self, blocks: int) -> None:
        """The index is over budget."""
        self._shrink_blocks = blocks
        self._hurry()

    def drop(self) -> None:
        """The peer has left: what is there has nobody to go to."""
        self._acked.clear()
        self._demands.clear()
        self._shrink_blocks = 0

    def close(self, breach: MeshError | None = None) -> None:
        """What is there is still sent, then `next_frame` says that it is over."""
        self.breach = self.breach or breach
        self._is_closed = True
        self._hurry()

    async def next_frame(self) -> indexer_pb2.PublishResponse | None:
        """All that has gathered, as one frame; None at the end."""
        await self._filled.wait()
        if not self._urgent.is_set():
            left_s = self._written_at + ACK_EVERY_S - self._clock()
            # Out of time, the acknowledgements are due.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._urgent.wait()
        if not (self._acked or self._demands or self._shrink_blocks):
            assert self._is_closed, "woken for nothing"
            return None
        frame = indexer_pb2.PublishResponse(
            acked=map(state_to_proto, self._acked.values()), shrink_blocks=self._shrink_blocks
        )
        for demand in self._demands.values():
            frame.resends.add(
                dp_rank=demand.source.dp_rank,
                epoch=demand.epoch,
                from_sequence=demand.from_sequence,
            )
        self.drop()
        self._written_at = self._clock()
        if not self._is_closed:
            self._filled.clear()
            self._urgent.clear()
        return frame

    def _hurry(self) -> None:
        self._filled.set()
        self._urgent.set()
