"""What is queued for the streams of publishers and of match queries, as one frame at a time."""

from __future__ import annotations

import asyncio

from common.kv.events import Source, SourcePosition
from common.kv.index_feed import ResendRequest
from common.streams.writer import TIMER_RESOLUTION_S, FrameWriter
from common.wire.kv import source_state_to_proto
from kvmesh.indexer.v1 import indexer_pb2

# Acknowledgements are collected for this long; requests are sent at once.
ACK_EVERY_S = 0.05
# Queued answers of a MatchStream at which its requests are no longer read.
QUEUED_ANSWERS_MAX = 4096


class PublisherOutbox:
    """Queue of a Publish stream; bounded, because newer entries replace older ones."""

    def __init__(self) -> None:
        self.writer = FrameWriter(self._next_frame)
        self._acked: dict[Source, SourcePosition] = {}
        self._resends: dict[Source, ResendRequest] = {}
        self._shrink_blocks = 0
        self._now = asyncio.get_running_loop().time
        self._acks_due_at = self._now() + ACK_EVERY_S

    def acknowledge(self, state: SourcePosition) -> None:
        """Queues the position of the last applied batch of a source."""
        self._acked[state.source] = state
        self.writer.wake_at(self._acks_due_at)

    def resend(self, resend: ResendRequest) -> None:
        self._resends[resend.source] = resend
        self.writer.wake()

    def shrink(self, blocks: int) -> None:
        self._shrink_blocks = blocks
        self.writer.wake()

    def discard_all(self) -> None:
        """Drops all entries, because the peer has left."""
        self._acked.clear()
        self._resends.clear()
        self._shrink_blocks = 0

    def _next_frame(self) -> indexer_pb2.PublishResponse | None:
        """Returns all entries as one frame, once one of them is due."""
        if not (self._resends or self._shrink_blocks):
            if not self._acked:
                return None
            is_due = self._now() > self._acks_due_at - TIMER_RESOLUTION_S
            if not is_due and not self.writer.is_closed:
                self.writer.wake_at(self._acks_due_at)
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
        self._acks_due_at = self._now() + ACK_EVERY_S
        return frame


class MatchOutbox:
    """Queue of a MatchStream."""

    def __init__(self) -> None:
        self.writer = FrameWriter(self._next_frame)
        self._answers: list[indexer_pb2.MatchAnswer] = []

    async def put(self, answers: list[indexer_pb2.MatchAnswer]) -> None:
        """Queues answers; waits while QUEUED_ANSWERS_MAX or more are queued."""
        while len(self._answers) >= QUEUED_ANSWERS_MAX:
            await self.writer.frame_taken()
        self._answers += answers
        self.writer.wake()
        await asyncio.sleep(0)  # Lets the writer run, also within a long frame.

    def _next_frame(self) -> indexer_pb2.MatchStreamResponse | None:
        """Returns all answers as one frame."""
        if not self._answers:
            return None
        frame = indexer_pb2.MatchStreamResponse(answers=self._answers)
        self._answers = []
        return frame
