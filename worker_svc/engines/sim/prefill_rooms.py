"""Rooms of a prefill engine: each hands the KV of one prompt to a decode engine.

A transfer takes its latency, then `bytes / bandwidth` on the link of the worker, which its
transfers share in turns of `chunk_pages`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from common.errors import Conflict, InvalidRequest, MeshError
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
from worker_svc.engines.sim.messages import Done, Drop, Fail, Pull, Write
from worker_svc.engines.sim.network import Connection
from worker_svc.engines.sim.rooms import Rooms, RoomSettings
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


@dataclass(slots=True, eq=False)
class PrefillHandoff:
    """A room at prefill. transfer: pinned blocks. on_end: called with an error, None: success."""

    room: int
    machine: PrefillMachine
    on_end: Callable[[MeshError | None], None] | None = None
    connection: Connection | None = None
    transfer: BlockTable | None = None
    prompt_tokens: int | None = None
    stamps: list[int] = field(default_factory=list)
    done: Done | None = None
    writer: asyncio.Task[None] | None = None


class PrefillRooms(Rooms[PrefillHandoff]):
    """The rooms of a prefill engine."""

    def __init__(self, settings: RoomSettings) -> None:
        super().__init__(settings)
        self._timing = settings.timing
        self._handoff_by_room: dict[int, PrefillHandoff] = {}
        # Reasons of the last ended rooms, oldest first.
        self._ended_rooms: OrderedDict[int, str] = OrderedDict()
        self._last_lease_number = 0
        self._open_connections = 0
        self._link_free_at = 0.0
        self._port = 0
        self._is_closed = False

    async def listen(self) -> None:
        """Listens for decode workers. Raises InvalidRequest if the address cannot be bound."""
        config = self._config
        try:
            self._port = await self._settings.network.listen(
                config.host, config.port, self._on_connection
            )
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {config.host}:{config.port}: {error}", "bootstrap_port"
            ) from None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Returns the address that decode workers dial."""
        return self._config.advertise_host or self._config.host, self._port

    async def close(self) -> None:
        self._is_closed = True
        self._settings.network.close()
        await super().close()

    def attach_leg(
        self, room: int, prompt_tokens: int, on_end: Callable[[MeshError | None], None]
    ) -> PrefillHandoff:
        """Attaches the prefill leg of a room. Raises WorkerLost, Conflict or Overloaded."""
        if (reason := self._ended_rooms.get(room)) is not None:
            raise handoff_error(reason)
        handoff = self._handoff_by_room.get(room)
        if handoff is not None and not handoff.machine.can_attach_leg:
            raise Conflict(f"room {room} is in use by another prefill leg", reason=ROOM_TAKEN)
        handoff = handoff or self._open(room)
        pull = handoff.machine.pull
        if pull is not None and pull.tokens != prompt_tokens:
            self._execute_all(handoff, handoff.machine.reject(MISMATCH))
            raise handoff_error(MISMATCH)
        handoff.prompt_tokens, handoff.on_end = prompt_tokens, on_end
        self._execute_all(handoff, handoff.machine.attach_leg(self._clock()))
        return handoff

    def on_prompt_computed(
        self, handoff: PrefillHandoff, transfer: BlockTable, stamps: list[int], done: Done
    ) -> None:
        """Starts the handoff of a computed prompt. transfer: its pinned blocks; unpinned here."""
        handoff.transfer, handoff.stamps, handoff.done = transfer, stamps, done
        self._execute_all(handoff, handoff.machine.on_prompt_computed(self._clock()))

    def lease(
        self, transfer: BlockTable, stamps: list[int], prompt_tokens: int, done: Done
    ) -> PrefillHandoff:
        """Keeps a computed prompt until decode pulls it, by its `room`. May raise Overloaded."""
        self._last_lease_number += 1
        room = (self._settings.incarnation + self._last_lease_number * 0x9E3779B97F4A7C15) % 2**63
        handoff = self._open(room)
        handoff.prompt_tokens = prompt_tokens
        self.on_prompt_computed(handoff, transfer, stamps, done)
        return handoff

    def abort(self, handoff: PrefillHandoff) -> None:
        handoff.on_end = None
        self._execute_all(handoff, handoff.machine.abort())

    def _execute_for_role(self, handoff: PrefillHandoff, action: Action) -> None:
        match action:
            case StartWriting():
                handoff.writer = self._spawn(self._write_pages(handoff))
                # Not in the task: a task cancelled before its first step runs no code.
                handoff.writer.add_done_callback(
                    lambda _: self._execute_all(handoff, handoff.machine.on_writing_stopped())
                )
            case StopWriting():
                assert handoff.writer is not None, "writing was started"
                handoff.writer.cancel()
            case EndLeg(error) if handoff.on_end is not None:
                handoff.on_end(error)

    def _open(self, room: int) -> PrefillHandoff:
        self._check_capacity()
        handoff = PrefillHandoff(room, PrefillMachine(self._timeouts, self._clock()))
        self._handoff_by_room[room] = handoff
        self._on_opened(handoff)
        return handoff

    def _on_ended(self, handoff: PrefillHandoff, outcome: HandoffOutcome) -> None:
        del self._handoff_by_room[handoff.room]
        self._record_ended(handoff.room, _REASONS.get(outcome, PEER_ABORTED))

    def _record_ended(self, room: int, reason: str) -> None:
        self._ended_rooms[room] = reason
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
            case Drop(room):
                self._on_drop(room)
            case Pull() as pull:
                await self._serve_pull(connection, pull)

    def _on_drop(self, room: int) -> None:
        handoff = self._handoff_by_room.get(room)
        if handoff is not None:
            self._execute_all(handoff, handoff.machine.on_peer_dropped())
        elif room not in self._ended_rooms:
            self._record_ended(room, PEER_ABORTED)

    async def _serve_pull(self, connection: Connection, pull: Pull) -> None:
        try:
            handoff = self._accept_pull(connection, pull)
        except MeshError as error:
            self._reject(connection, error.reason)
            return
        try:
            while not handoff.machine.is_over:
                message = await connection.receive()
                if message is None:
                    return
                self._execute_all(handoff, handoff.machine.receive(self._clock(), message))
        finally:
            self._execute_all(handoff, handoff.machine.on_connection_lost())

    def _accept_pull(self, connection: Connection, pull: Pull) -> PrefillHandoff:
        """Returns the room of a Pull, attached. Raises MeshError if the Pull is rejected."""
        if (reason := self._ended_rooms.get(pull.room)) is not None:
            raise handoff_error(reason)
        handoff = self._handoff_by_room.get(pull.room)
        if handoff is not None and handoff.machine.pull is not None:
            raise handoff_error(ROOM_TAKEN)
        if not self._is_compatible(pull, handoff):
            if handoff is not None:
                self._execute_all(handoff, handoff.machine.reject(MISMATCH))
            raise handoff_error(MISMATCH)
        handoff = handoff or self._open(pull.room)
        handoff.connection = connection
        self._execute_all(handoff, handoff.machine.attach_peer(self._clock(), pull))
        return handoff

    def _is_compatible(self, pull: Pull, handoff: PrefillHandoff | None) -> bool:
        size = self._blocks.block_size
        is_valid = pull.block_size == size and len(pull.pages) == -(-pull.tokens // size)
        return is_valid and (handoff is None or pull.tokens == handoff.prompt_tokens)

    def _reject(self, connection: Connection, reason: str) -> None:
        self._counters["pulls_refused"] += 1
        connection.send(Fail(reason))
        connection.close()

    async def _write_pages(self, handoff: PrefillHandoff) -> None:
        """Runs the modelled transfer: reads the room's blocks, writes decode's pages."""
        machine, connection, transfer = handoff.machine, handoff.connection, handoff.transfer
        assert connection is not None, "a transfer has a connection"
        assert transfer is not None, "a transfer has blocks"
        assert handoff.done is not None, "a computed prompt has a first token"
        assert machine.pull is not None, "a transfer has a Pull"
        pages, size = machine.pull.pages, self._config.chunk_pages
        try:
            await self._wait_for_link(machine, self._timing.scaled(self._config.latency_s))
            rows = zip(transfer.blocks, handoff.stamps, strict=True)
            for start in range(0, len(pages), size):
                part = pages[start : start + size]
                await self._wait_for_link(machine, self._reserve_link_s(len(part)))
                # The stamp that is read is sent: a corrupt block arrives corrupt.
                stamps = [
                    stamp if self._blocks.read(block) == block.stamp else -1
                    for block, stamp in islice(rows, len(part))
                ]
                connection.send(Write(part, stamps))
                self._counters["pages_written"] += len(part)
                await connection.flushed()
            connection.send(handoff.done)
        except OSError:
            self._execute_all(handoff, machine.on_connection_lost())
            return
        machine.on_done_sent(self._clock())

    async def _wait_for_link(self, machine: PrefillMachine, wait_s: float) -> None:
        machine.extend_deadline(self._clock(), wait_s)
        await self._settings.sleep(wait_s)

    def _reserve_link_s(self, pages: int) -> float:
        """Reserves the link for `pages` more pages. Returns the seconds until they are sent."""
        now = self._clock()
        size = pages * self._blocks.block_size * self._config.bytes_per_token
        duration_s = self._timing.scaled(size / (self._config.gb_per_s * 1e9))
        self._link_free_at = max(now, self._link_free_at) + duration_s
        return self._link_free_at - now
