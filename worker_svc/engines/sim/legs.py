"""The legs of a simulated engine's requests: joins its streams with the rooms of its role.

`transfer.py` has the protocol of prefill and decode, `rooms.py` the network. A prefill leg responds
with one token, in its terminal chunk. With `bootstrap_info` it ends when decode has the KV. Without
it (handoff mode "completed", max_tokens 1) it ends when the prompt is computed, and the KV is
leased to decode, unless that token ended the output: then `disaggregated_params` are absent. A
decode leg has `bootstrap_info`, or the `prefill_result` of a completed prefill, and responds with
all tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from common.errors import MeshError
from common.request.preprocessed import FinishReason, PreprocessedRequest
from worker_svc.engines.sim.block_manager import BlockManager, BlockTable
from worker_svc.engines.sim.decode_rooms import DecodeHandoff, DecodeRooms
from worker_svc.engines.sim.jobs import kv_location
from worker_svc.engines.sim.messages import Done, page_stamps
from worker_svc.engines.sim.prefill_rooms import PrefillHandoff, PrefillRooms
from worker_svc.engines.sim.scheduler import SimScheduler, SimSequence
from worker_svc.engines.sim.stream import Stream

EngineRooms = PrefillRooms | DecodeRooms
_NO_COUNTERS: Final[Mapping[str, int]] = {}

log = structlog.get_logger()


class HandoffLegs:
    """Opens, starts and ends the handoffs of streams. rooms: None for an aggregated engine, which
    has no handoffs. on_changed: called when the scheduler may have work. fail: ends a stream with
    an error.
    """

    def __init__(
        self,
        rooms: EngineRooms | None,
        scheduler: SimScheduler,
        blocks: BlockManager,
        *,
        on_changed: Callable[[], None],
        fail: Callable[[Stream, MeshError], None],
    ) -> None:
        self._rooms = rooms
        self._scheduler = scheduler
        self._blocks = blocks
        self._on_changed = on_changed
        self._fail = fail

    @property
    def open_rooms(self) -> int:
        return self._rooms.open_rooms if self._rooms else 0

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the counters of `Rooms`; none for an aggregated engine."""
        return self._rooms.counters if self._rooms else _NO_COUNTERS

    @property
    def endpoint(self) -> tuple[str, int] | tuple[None, None]:
        """Returns the address of a prefill engine's rooms."""
        return self._rooms.endpoint if isinstance(self._rooms, PrefillRooms) else (None, None)

    async def drain(self, timeout_s: float) -> None:
        """Waits until no handoff or lease is open."""
        if self._rooms is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._rooms.idle.wait()
        except TimeoutError:
            log.warning("sim_engine_drain_timed_out", rooms_open=self.open_rooms)

    async def close(self) -> None:
        if self._rooms is not None:
            await self._rooms.close()

    def open(self, stream: Stream, request: PreprocessedRequest) -> None:
        """Opens the room of a leg that needs one now. Raises MeshError as the rooms do."""
        job, bootstrap = stream.sequence.job, request.bootstrap_info
        match self._rooms:
            case DecodeRooms() as rooms if job.is_remote:
                stream.handoff = rooms.open(
                    *kv_location(request),
                    on_arrival=lambda done: self._on_kv_arrived(stream, done),
                    on_end=lambda error: self._fail(stream, error),
                )
            case PrefillRooms() as rooms if job.is_handed_over and bootstrap is not None:
                stream.handoff = rooms.attach_leg(
                    bootstrap.bootstrap_room,
                    len(request.token_ids),
                    lambda error: self._on_leg_end(rooms, stream, error),
                )

    def start_pulls(self, streams: Mapping[SimSequence, Stream]) -> None:
        """Starts the transfers to decode legs whose blocks the scheduler has allocated."""
        for sequence in self._scheduler.take_allocated():
            handoff, transfer = streams[sequence].handoff, sequence.transfer
            assert isinstance(self._rooms, DecodeRooms), "only decode legs are remote"
            assert isinstance(handoff, DecodeHandoff), "remote sequences have a room"
            assert transfer is not None, "allocated blocks are pinned"
            sequence.transfer = None
            self._rooms.start_pull(handoff, transfer, sequence.prompt_tokens)

    def hand_over(self, stream: Stream, transfer: BlockTable) -> None:
        """Hands the KV of a computed prompt to the leg's room, or leases it."""
        rooms, sequence = self._rooms, stream.sequence
        assert isinstance(rooms, PrefillRooms), "only prefill legs are handed over"
        sequence.transfer = None
        done = Done(sequence.first_token, sequence.cached_tokens or 0)
        stamps = page_stamps(sequence.job.prompt, self._blocks.block_size, sequence.job.lora_name)
        if isinstance(stream.handoff, PrefillHandoff):
            rooms.on_prompt_computed(stream.handoff, transfer, stamps, done)
            return
        if sequence.end is not FinishReason.LENGTH:  # complete: there is no decode leg
            self._blocks.unpin(transfer)
            stream.is_awaiting_handoff = False
            return
        try:
            stream.handoff = rooms.lease(transfer, stamps, sequence.prompt_tokens, done)
        except MeshError as error:
            self._blocks.unpin(transfer)
            stream.error = error
            return
        stream.is_awaiting_handoff = False
        host, port = rooms.endpoint
        stream.params = {
            "host": host,
            "port": port,
            "transfer_id": f"{stream.handoff.room:016x}",
        }

    def abort(self, stream: Stream) -> None:
        """Aborts the leg's room, if it has one."""
        handoff, stream.handoff = stream.handoff, None
        match self._rooms:
            case DecodeRooms() as rooms if isinstance(handoff, DecodeHandoff):
                rooms.abort(handoff)
            case PrefillRooms() as rooms if isinstance(handoff, PrefillHandoff):
                rooms.abort(handoff)
            case None:
                return
        self._on_changed()  # its place may have blocked the queue

    def _on_kv_arrived(self, stream: Stream, done: Done) -> None:
        self._scheduler.on_kv_arrived(stream.sequence, done.token, done.cached_tokens)
        self._on_changed()
        stream.wake()

    def _on_leg_end(self, rooms: PrefillRooms, stream: Stream, error: MeshError | None) -> None:
        if error is not None:
            self._fail(stream, error)
            return
        assert stream.handoff is not None, "the room was the leg's"
        host, port = rooms.endpoint
        stream.params = {
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": stream.handoff.room,
        }
        stream.is_awaiting_handoff = False
        stream.wake()
