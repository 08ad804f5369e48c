"""Send queues of streams with one writer each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from common.errors import MeshError
from common.kv.events import Source, SourcePosition
from common.kv.index_feed import ResendRequest
from common.wire.kv import source_state_to_proto
from kvmesh.indexer.v1 import indexer_pb2

# Acknowledgements are collected for this long; requests are sent at once.
ACK_EVERY_S = 0.05
# Queued answers of a MatchStream at which its requests are no longer read.
QUEUED_ANSWERS_MAX = 4096


class _Outbox:
    """failure: the error that ends the stream, or None."""

    def __init__(self) -> None:
        self.failure: MeshError | None = None
        self._is_closed = False
        self._has_items = asyncio.Event()

    def close(self, failure: MeshError | None = None) -> None:
        """Close the queue; `next_frame` returns what is left, then None."""
        self.failure = self.failure or failure
        self._is_closed = True
        self._has_items.set()


class PublisherOutbox(_Outbox):
    """Send queue of a Publish stream; bounded, because newer entries replace older ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._acked: dict[Source, SourcePosition] = {}
        self._resends: dict[Source, ResendRequest] = {}
        self._shrink_blocks = 0
        self._must_send_now = asyncio.Event()
        self._written_at = clock()

    def acknowledge(self, state: SourcePosition) -> None:
        """Queue the position of the last applied batch of a source."""
        self._acked[state.source] = state
        self._has_items.set()

    def resend(self, resend: ResendRequest) -> None:
        self._resends[resend.source] = resend
        self._send_now()

    def shrink(self, blocks: int) -> None:
        self._shrink_blocks = blocks
        self._send_now()

    def discard_all(self) -> None:
        """Drop all entries, because the peer has left."""
        self._acked.clear()
        self._resends.clear()
        self._shrink_blocks = 0

    def close(self, failure: MeshError | None = None) -> None:
        super().close(failure)
        self._must_send_now.set()

    async def next_frame(self) -> indexer_pb2.PublishResponse | None:
        """Wait for entries and return all of them as one frame; None at the end."""
        await self._has_items.wait()
        if not self._must_send_now.is_set():
            left_s = self._written_at + ACK_EVERY_S - self._clock()
            # After the time-out the acknowledgements are due.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, left_s)):
                    await self._must_send_now.wait()
        if not (self._acked or self._resends or self._shrink_blocks):
            assert self._is_closed, "woken without entries"
            return None
        frame = indexer_pb2.PublishResponse(
            acked=map(source_state_to_proto, self._acked.values()),
            shrink_blocks=self._shrink_blocks,
        )
        for resend in self._resends.values():
            frame.resends.add(
                dp_rank=resend.source.dp_rank,
                epoch=resend.epoch,
                from_sequence=resend.from_sequence,
            )
        self.discard_all()
        self._written_at = self._clock()
        if not self._is_closed:
            self._has_items.clear()
            self._must_send_now.clear()
        return frame

    def _send_now(self) -> None:
        self._has_items.set()
        self._must_send_now.set()


class MatchOutbox(_Outbox):
    """Send queue of a MatchStream."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: list[indexer_pb2.MatchAnswer] = []
        self._frame_taken = asyncio.Event()

    async def put(self, answers: list[indexer_pb2.MatchAnswer]) -> None:
        """Queue answers; waits while QUEUED_ANSWERS_MAX or more are queued."""
        while len(self._answers) >= QUEUED_ANSWERS_MAX:
            self._frame_taken.clear()
            await self._frame_taken.wait()
        self._answers += answers
        self._has_items.set()
        await asyncio.sleep(0)  # Lets the writer run, also within a long frame.

    async def next_frame(self) -> indexer_pb2.MatchStreamResponse | None:
        """Wait for answers and return all of them as one frame; None at the end."""
        await self._has_items.wait()
        if not self._answers:
            assert self._is_closed, "woken without answers"
            return None
        frame = indexer_pb2.MatchStreamResponse(answers=self._answers)
        self._answers = []
        if not self._is_closed:
            self._has_items.clear()
        self._frame_taken.set()
        return frame
