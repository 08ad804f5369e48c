"""The rooms of a decode engine: each pulls the KV of one prompt from a prefill engine.

A leg has `bootstrap_info`, or the `prefill_result` of a completed prefill, and responds with all
tokens.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from common.request.preprocessed import PreprocessedRequest
from worker_svc.engines.sim.jobs import kv_location
from worker_svc.engines.sim.messages import Drop, Pull, Write
from worker_svc.engines.sim.rooms import Room, Rooms, RoomSettings
from worker_svc.engines.sim.stream import Stream
from worker_svc.engines.sim.transfer import Action, DecodeMachine, Dial, KvArrived, SendDrop

# Time to send the pending Drops at shutdown.
_DROP_TIMEOUT_S: Final = 0.5

log = structlog.get_logger()


class DecodeRooms(Rooms[DecodeMachine]):
    """The rooms of a decode engine."""

    def __init__(self, settings: RoomSettings) -> None:
        super().__init__(settings)
        self._drop_tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        self._abort_all()
        if self._drop_tasks:
            await asyncio.wait(tuple(self._drop_tasks), timeout=_DROP_TIMEOUT_S)
        await super().close()

    def open(self, stream: Stream, request: PreprocessedRequest) -> None:
        if stream.sequence.job.is_remote:
            address, number = kv_location(request)
            machine = self._settings.decode_machine(self._timeouts, self._clock())
            room = self._open(Room(number, machine, stream, address))
            self._room_by_sequence[stream.sequence] = room

    def start_pulls(self) -> None:
        for sequence in self._settings.scheduler.take_allocated():
            room = self._room_by_sequence[sequence]
            room.transfer, sequence.transfer = sequence.transfer, None
            self._execute_all(room, room.machine.start_pull())

    def _abort(self, room: Room[DecodeMachine]) -> None:
        self._execute_all(room, room.machine.abort(self._clock()))

    def _execute_for_role(self, room: Room[DecodeMachine], action: Action) -> None:
        match action:
            case Dial():
                self._spawn(self._run(room))
            case SendDrop():
                task = self._spawn(self._send_drop(room))
                self._drop_tasks.add(task)
                task.add_done_callback(self._drop_tasks.discard)
            case KvArrived(done):
                self._settings.scheduler.on_kv_arrived(
                    room.leg.sequence, done.token, done.cached_tokens
                )
                self._settings.on_changed()
                room.leg.wake()

    async def _run(self, room: Room[DecodeMachine]) -> None:
        machine = room.machine
        try:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    connection = await self._settings.network.dial(*room.address)
            except OSError as error:
                log.info("handoff_dial_failed", address=room.address, error=str(error))
                return
            room.connection = connection
            self._execute_all(room, machine.on_connected(self._pull(room)))
            while not machine.is_over:
                message = await connection.receive()
                # After its end the room's pages belong to other blocks; close the connection.
                if message is None or machine.is_over:
                    return
                if isinstance(message, Write) and not self._apply_write(message):
                    return
                self._execute_all(room, machine.receive(self._clock(), message))
        finally:
            if not machine.is_over:
                self._execute_all(room, machine.on_connection_lost())
            if room.connection is not None:
                room.connection.close()

    def _pull(self, room: Room[DecodeMachine]) -> Pull:
        return Pull(
            room.number,
            self._settings.incarnation,
            room.leg.sequence.prompt_tokens,
            self._blocks.block_size,
            [block.page for block in room.transfer.blocks] if room.transfer else [],
        )

    def _apply_write(self, message: Write) -> bool:
        """Writes the pages, whatever their owner. Returns False for an unknown page."""
        try:
            for page, stamp in zip(message.pages, message.stamps, strict=True):
                self._blocks.write(page, stamp)
        except (IndexError, ValueError):
            log.warning("handoff_page_unknown", pages=len(message.pages))
            return False
        self._counters["pages_received"] += len(message.pages)
        return True

    async def _send_drop(self, room: Room[DecodeMachine]) -> None:
        try:
            async with asyncio.timeout(self._config.abort_s):
                connection = await self._settings.network.dial(*room.address)
        except OSError:  # prefill then times out
            log.info("handoff_drop_not_sent", room=room.number)
            return
        connection.send(Drop(room.number))
        connection.close()
