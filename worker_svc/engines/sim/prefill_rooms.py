"""The rooms of a prefill engine: each hands the KV of one prompt to a decode engine.

A leg responds with one token, in its terminal chunk. With `bootstrap_info` it ends when decode has
the KV. Without it (handoff mode "completed", max_tokens 1) it ends when the prompt is computed, and
the KV is leased to decode, unless that token ended the output: then `disaggregated_params` are
absent.

A transfer takes its latency, then `bytes / bandwidth` on the link of the worker, which its
transfers share in turns of `chunk_pages`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from itertools import islice
from typing import Final

from common.errors import Conflict, InvalidRequest, MeshError
from common.request.preprocessed import FinishReason, PreprocessedRequest
from worker_svc.engines.handoff import (
    EXPIRED,
    FULL,
    MISMATCH,
    NO_PARTNER,
    PEER_ABORTED,
    ROOM_TAKEN,
    handoff_error,
)
from worker_svc.engines.sim.block_manager import BlockTable
from worker_svc.engines.sim.messages import Done, Drop, Fail, Pull, Write, page_stamps
from worker_svc.engines.sim.network import Connection
from worker_svc.engines.sim.rooms import Room, Rooms, RoomSettings
from worker_svc.engines.sim.stream import Stream
from worker_svc.engines.sim.transfer import (
    Action,
    EndLeg,
    HandoffOutcome,
    PrefillMachine,
    StartWriting,
    StopWriting,
)

# Ended rooms that are remembered, so that a late leg fails at once.
_ENDED_ROOMS_MAX: Final = 4096
# Reason sent to a leg that arrives after the end of its room; PEER_ABORTED for other outcomes.
_REASONS: Final = {
    HandoffOutcome.HANDED_OVER: ROOM_TAKEN,
    HandoffOutcome.TIMED_OUT: NO_PARTNER,
    HandoffOutcome.EXPIRED: EXPIRED,
}


class PrefillRooms(Rooms[PrefillMachine]):
    """The rooms of a prefill engine."""

    def __init__(self, settings: RoomSettings) -> None:
        super().__init__(settings)
        self._room_by_number: dict[int, Room[PrefillMachine]] = {}
        # Reasons of the last ended rooms, oldest first.
        self._ended_rooms: OrderedDict[int, str] = OrderedDict()
        self._last_lease_number = 0
        self._open_connections = 0
        self._link_free_at = 0.0
        self._is_closed = False

    async def listen(self) -> None:
        config = self._config
        try:
            port = await self._settings.network.listen(
                config.host, config.port, self._on_connection
            )
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {config.host}:{config.port}: {error}", "bootstrap_port"
            ) from None
        self.endpoint = config.advertise_host or config.host, port

    async def close(self) -> None:
        self._is_closed = True
        self._settings.network.close()
        await super().close()

    def open(self, stream: Stream, request: PreprocessedRequest) -> None:
        sequence, bootstrap = stream.sequence, request.bootstrap_info
        if bootstrap is None or not sequence.job.is_handed_over:
            return
        number = bootstrap.bootstrap_room
        if (reason := self._ended_rooms.get(number)) is not None:
            raise handoff_error(reason)
        room = self._room_by_number.get(number)
        if room is not None and not room.machine.can_attach_leg:
            raise Conflict(f"room {number} is in use by another prefill leg", reason=ROOM_TAKEN)
        room = room or self._open_numbered(number)
        pull = room.machine.pull
        if pull is not None and pull.tokens != sequence.prompt_tokens:
            self._execute_all(room, room.machine.reject(MISMATCH))
            raise handoff_error(MISMATCH)
        room.stream = stream
        self._room_by_sequence[sequence] = room
        self._execute_all(room, room.machine.attach_leg(self._clock()))

    def hand_over(self, stream: Stream, transfer: BlockTable) -> None:
        sequence = stream.sequence
        sequence.transfer = None
        room = self._room_by_sequence.get(sequence)
        if room is None and sequence.end is not FinishReason.LENGTH:  # there is no decode leg
            self._blocks.unpin(transfer)
            stream.is_awaiting_handoff = False
            return
        try:
            room = room or self._open_lease(stream)
        except MeshError as error:
            self._blocks.unpin(transfer)
            stream.error = error
            return
        room.transfer = transfer
        self._execute_all(room, room.machine.on_prompt_computed(self._clock()))

    def _open_lease(self, stream: Stream) -> Room[PrefillMachine]:
        """Returns a room that keeps a prompt until decode pulls it; its leg ends now. Raises
        Overloaded."""
        self._last_lease_number += 1
        number = (self._settings.incarnation + self._last_lease_number * 0x9E3779B97F4A7C15) % 2**63
        room = self._open_numbered(number)
        room.stream = stream
        self._room_by_sequence[stream.sequence] = room
        host, port = self.endpoint
        stream.params = {"host": host, "port": port, "transfer_id": f"{number:016x}"}
        stream.is_awaiting_handoff = False
        return room

    def _abort(self, room: Room[PrefillMachine]) -> None:
        self._execute_all(room, room.machine.abort())

    def _execute_for_role(self, room: Room[PrefillMachine], action: Action) -> None:
        match action:
            case StartWriting():
                room.writer = self._spawn(self._write_pages(room))
                # Not in the task: a task cancelled before its first step runs no code.
                room.writer.add_done_callback(
                    lambda _: self._execute_all(room, room.machine.on_writing_stopped())
                )
            case StopWriting():
                assert room.writer is not None, "writing was started"
                room.writer.cancel()
            case EndLeg():  # decode has the KV
                host, port = self.endpoint
                room.leg.params = {
                    "bootstrap_host": host,
                    "bootstrap_port": port,
                    "bootstrap_room": room.number,
                }
                room.leg.is_awaiting_handoff = False
                room.leg.wake()

    def _open_numbered(self, number: int) -> Room[PrefillMachine]:
        room = self._open(Room(number, PrefillMachine(self._timeouts, self._clock())))
        self._room_by_number[number] = room
        return room

    def _on_ended(self, room: Room[PrefillMachine], outcome: HandoffOutcome) -> None:
        del self._room_by_number[room.number]
        self._record_ended(room.number, _REASONS.get(outcome, PEER_ABORTED))

    def _record_ended(self, number: int, reason: str) -> None:
        self._ended_rooms[number] = reason
        while len(self._ended_rooms) > _ENDED_ROOMS_MAX:
            self._ended_rooms.popitem(last=False)

    def _on_connection(self, connection: Connection) -> None:
        if self._is_closed or self._open_connections >= self._config.rooms_max:
            self._reject(connection, FULL)
            return

        # Not in the task: a task cancelled before its first step runs no code.
        def on_served(_: asyncio.Task[None]) -> None:
            connection.close()
            self._open_connections -= 1

        self._open_connections += 1
        self._spawn(self._serve(connection)).add_done_callback(on_served)

    async def _serve(self, connection: Connection) -> None:
        message = None
        with contextlib.suppress(TimeoutError):  # a silent connection is closed
            async with asyncio.timeout(self._config.timeout_s):
                message = await connection.receive()
        match message:
            case Drop(number):
                self._on_drop(number)
            case Pull() as pull:
                await self._serve_pull(connection, pull)

    def _on_drop(self, number: int) -> None:
        room = self._room_by_number.get(number)
        if room is not None:
            self._execute_all(room, room.machine.on_peer_dropped())
        elif number not in self._ended_rooms:
            self._record_ended(number, PEER_ABORTED)

    async def _serve_pull(self, connection: Connection, pull: Pull) -> None:
        try:
            room = self._accept_pull(connection, pull)
        except MeshError as error:
            self._reject(connection, error.reason)
            return
        try:
            while not room.machine.is_over:
                message = await connection.receive()
                if message is None:
                    return
                self._execute_all(room, room.machine.receive(self._clock(), message))
        finally:
            self._execute_all(room, room.machine.on_connection_lost())

    def _accept_pull(self, connection: Connection, pull: Pull) -> Room[PrefillMachine]:
        """Returns the room of a Pull, attached. Raises MeshError if the Pull is rejected."""
        if (reason := self._ended_rooms.get(pull.room)) is not None:
            raise handoff_error(reason)
        room = self._room_by_number.get(pull.room)
        if room is not None and room.machine.pull is not None:
            raise handoff_error(ROOM_TAKEN)
        if not self._is_compatible(pull, room):
            if room is not None:
                self._execute_all(room, room.machine.reject(MISMATCH))
            raise handoff_error(MISMATCH)
        room = room or self._open_numbered(pull.room)
        room.connection = connection
        self._execute_all(room, room.machine.attach_peer(self._clock(), pull))
        return room

    def _is_compatible(self, pull: Pull, room: Room[PrefillMachine] | None) -> bool:
        size = self._blocks.block_size
        is_valid = pull.block_size == size and len(pull.pages) == -(-pull.tokens // size)
        return is_valid and (room is None or pull.tokens == room.leg.sequence.prompt_tokens)

    def _reject(self, connection: Connection, reason: str) -> None:
        self._counters["pulls_refused"] += 1
        connection.send(Fail(reason))
        connection.close()

    async def _write_pages(self, room: Room[PrefillMachine]) -> None:
        """Runs the modelled transfer: reads the room's blocks, writes decode's pages."""
        machine, connection, transfer = room.machine, room.connection, room.transfer
        assert connection is not None, "a transfer has a connection"
        assert transfer is not None, "a transfer has blocks"
        assert machine.pull is not None, "a transfer has a Pull"
        pages, size = machine.pull.pages, self._config.chunk_pages
        sequence = room.leg.sequence
        stamps = page_stamps(sequence.job.prompt, self._blocks.block_size, sequence.job.lora_name)
        latency_s = self._settings.config.timing.scaled(self._config.latency_s)
        try:
            await self._wait_for_link(machine, latency_s)
            rows = zip(transfer.blocks, stamps, strict=True)
            for start in range(0, len(pages), size):
                part = pages[start : start + size]
                await self._wait_for_link(machine, self._reserve_link_s(len(part)))
                # The stamp that is read is sent: a corrupt block arrives corrupt.
                sent = [
                    stamp if self._blocks.read(block) == block.stamp else -1
                    for block, stamp in islice(rows, len(part))
                ]
                connection.send(Write(part, sent))
                self._counters["pages_written"] += len(part)
                await connection.flushed()
            connection.send(Done(sequence.first_token, sequence.cached_tokens or 0))
        except OSError:
            self._execute_all(room, machine.on_connection_lost())
            return
        machine.on_done_sent(self._clock())

    async def _wait_for_link(self, machine: PrefillMachine, wait_s: float) -> None:
        machine.extend_deadline(self._clock(), wait_s)
        await self._settings.sleep(wait_s)

    def _reserve_link_s(self, pages: int) -> float:
        """Reserves the link for `pages` more pages. Returns the seconds until they are sent."""
        now = self._clock()
        size = pages * self._blocks.block_size * self._config.bytes_per_token
        duration_s = self._settings.config.timing.scaled(size / (self._config.gb_per_s * 1e9))
        self._link_free_at = max(now, self._link_free_at) + duration_s
        return self._link_free_at - now
