"""Rooms of a decode engine: each pulls the KV of one prompt from a prefill engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from common.errors import MeshError
from worker_svc.engines.sim.block_manager import BlockTable
from worker_svc.engines.sim.messages import Done, Drop, Pull, Write
from worker_svc.engines.sim.network import Connection
from worker_svc.engines.sim.rooms import Rooms, RoomSettings
from worker_svc.engines.sim.transfer import (
    Action,
    DecodeMachine,
    Dial,
    EndLeg,
    KvArrived,
    SendDrop,
)

# Time to send the pending Drops at shutdown.
_DROP_TIMEOUT_S: Final = 0.5

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class DecodeHandoff:
    """A room at decode. on_arrival: called when the KV has arrived. on_end: called if it fails."""

    room: int
    address: tuple[str, int]
    machine: DecodeMachine
    on_arrival: Callable[[Done], None]
    on_end: Callable[[MeshError], None]
    connection: Connection | None = None
    transfer: BlockTable | None = None
    pull: Pull | None = None


class DecodeRooms(Rooms[DecodeHandoff]):
    """The rooms of a decode engine."""

    def __init__(self, settings: RoomSettings) -> None:
        super().__init__(settings)
        self._drop_tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        self._abort_all()
        if self._drop_tasks:
            await asyncio.wait(tuple(self._drop_tasks), timeout=_DROP_TIMEOUT_S)
        await super().close()

    def open(
        self,
        address: tuple[str, int],
        room: int,
        *,
        on_arrival: Callable[[Done], None],
        on_end: Callable[[MeshError], None],
    ) -> DecodeHandoff:
        """Opens a room for a decode leg that waits for blocks (`start_pull`). Raises Overloaded."""
        self._check_capacity()
        machine = self._settings.decode_machine(self._timeouts, self._clock())
        handoff = DecodeHandoff(room, address, machine, on_arrival, on_end)
        self._on_opened(handoff)
        return handoff

    def start_pull(self, handoff: DecodeHandoff, transfer: BlockTable, prompt_tokens: int) -> None:
        """Starts the pull of a decode leg. transfer: its pinned blocks; unpinned here."""
        handoff.transfer = transfer
        handoff.pull = Pull(
            handoff.room,
            self._settings.incarnation,
            prompt_tokens,
            self._blocks.block_size,
            [block.page for block in transfer.blocks],
        )
        self._execute_all(handoff, handoff.machine.start_pull())

    def abort(self, handoff: DecodeHandoff) -> None:
        self._execute_all(handoff, handoff.machine.abort(self._clock()))

    def _execute_for_role(self, handoff: DecodeHandoff, action: Action) -> None:
        match action:
            case Dial():
                self._spawn(self._run(handoff))
            case SendDrop():
                task = self._spawn(self._send_drop(handoff))
                self._drop_tasks.add(task)
                task.add_done_callback(self._drop_tasks.discard)
            case KvArrived(done):
                handoff.on_arrival(done)
            case EndLeg(error):
                assert error is not None, "decode succeeds by an arrival"
                handoff.on_end(error)

    async def _run(self, handoff: DecodeHandoff) -> None:
        machine = handoff.machine
        try:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    connection = handoff.connection = await self._settings.network.dial(
                        *handoff.address
                    )
            except OSError as error:
                log.info("handoff_dial_failed", address=handoff.address, error=str(error))
                return
            assert handoff.pull is not None, "a leg has blocks before it dials"
            self._execute_all(handoff, machine.on_connected(handoff.pull))
            while not machine.is_over:
                message = await connection.receive()
                # After its end the room's pages belong to other blocks; close the connection.
                if message is None or machine.is_over:
                    return
                if isinstance(message, Write) and not self._apply_write(message):
                    return
                self._execute_all(handoff, machine.receive(self._clock(), message))
        finally:
            if not machine.is_over:
                self._execute_all(handoff, machine.on_connection_lost())
            if handoff.connection is not None:
                handoff.connection.close()

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

    async def _send_drop(self, handoff: DecodeHandoff) -> None:
        try:
            async with asyncio.timeout(self._config.abort_s):
                connection = await self._settings.network.dial(*handoff.address)
        except OSError:  # prefill then times out
            log.info("handoff_drop_not_sent", room=handoff.room)
            return
        connection.send(Drop(handoff.room))
        connection.close()
