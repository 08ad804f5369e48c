"""The rooms of one engine: the handoffs of its streams.

The machines of `transfer.py` decide; rooms execute their actions on streams, blocks and
connections. `prefill_rooms.py` and `decode_rooms.py` have what only one role does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import structlog

from common.errors import MeshError, Overloaded
from common.request.preprocessed import PreprocessedRequest
from worker_svc.engines.handoff import FULL
from worker_svc.engines.sim.block_manager import BlockTable
from worker_svc.engines.sim.config import SimConfig
from worker_svc.engines.sim.network import Connection, Network
from worker_svc.engines.sim.scheduler import SimScheduler, SimSequence
from worker_svc.engines.sim.stream import Stream
from worker_svc.engines.sim.transfer import (
    Action,
    CloseConnection,
    DecodeMachine,
    EndLeg,
    HandoffOutcome,
    PrefillMachine,
    ReleaseBlocks,
    Send,
)

# Interval of timeout checks.
_TICK_S: Final = 0.05
_COUNTERS: Final = (
    *(outcome.value for outcome in HandoffOutcome),
    *("rooms_opened", "pages_written", "pages_received", "pulls_refused"),
)

M = TypeVar("M", bound=PrefillMachine | DecodeMachine)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RoomSettings:
    """What rooms depend on."""

    config: SimConfig
    scheduler: SimScheduler
    incarnation: int
    """The worker's id."""
    network: Network
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[object]]
    on_changed: Callable[[], None]
    """Called when the scheduler may have work, or blocks became free."""
    fail: Callable[[Stream, MeshError], None]
    """Ends a stream with an error."""
    decode_machine: type[DecodeMachine]


@dataclass(slots=True, eq=False)
class Room(Generic[M]):
    """One end of a handoff."""

    number: int
    machine: M
    stream: Stream | None = None
    """The leg; None while only the peer is present."""
    address: tuple[str, int] = ("", 0)
    """At decode, of the prefill worker."""
    connection: Connection | None = None
    transfer: BlockTable | None = None
    """The room's pinned blocks."""
    writer: asyncio.Task[None] | None = None
    """At prefill, writes the pages."""

    @property
    def leg(self) -> Stream:
        assert self.stream is not None, "the leg has arrived"
        return self.stream


class Rooms(Generic[M]):
    """All rooms of one engine. An aggregated engine has none: its rooms are of this class."""

    endpoint: tuple[str, int] | tuple[None, None] = (None, None)
    """Where decode workers connect to a prefill engine."""

    def __init__(self, settings: RoomSettings) -> None:
        self._settings = settings
        self._config = settings.config.handoff
        self._timeouts = settings.config.handoff.timeouts
        self._blocks = settings.scheduler.blocks
        self._clock = settings.clock
        self._counters: Counter[str] = Counter()
        # Open rooms; a dict keeps the order.
        self._rooms: dict[Room[M], None] = {}
        # Rooms of the present legs.
        self._room_by_sequence: dict[SimSequence, Room[M]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tick_task: asyncio.Task[None] | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def open_rooms(self) -> int:
        return len(self._rooms)

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the ended rooms by `HandoffOutcome`, and other counts."""
        return {name: self._counters[name] for name in _COUNTERS}

    async def listen(self) -> None:
        """Listens for decode workers. Raises InvalidRequest if the address cannot be bound."""

    async def drain(self) -> None:
        """Waits until no handoff or lease is open, at most their longest duration."""
        try:
            async with asyncio.timeout(self._config.timeout_s + self._config.lease_s):
                await self._is_idle.wait()
        except TimeoutError:
            log.warning("sim_engine_drain_timed_out", rooms_open=self.open_rooms)

    async def close(self) -> None:
        """Ends all rooms and closes their connections; no page is written here after it returns."""
        self._abort_all()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for room in tuple(self._rooms):
            self._execute(room, CloseConnection())
            self._execute(room, ReleaseBlocks())
            self._finish(room)

    def open(self, stream: Stream, request: PreprocessedRequest) -> None:
        """Opens the room of a leg that needs one now. Raises InvalidRequest, WorkerLost, Conflict
        or Overloaded."""

    def start_pulls(self) -> None:
        """Starts the transfers to decode legs for which the scheduler has allocated blocks."""

    def hand_over(self, stream: Stream, transfer: BlockTable) -> None:
        """Hands the KV of a computed prompt to its leg's room, or leases it. transfer: its pinned
        blocks; unpinned here."""

    def detach(self, stream: Stream) -> None:
        """Separates a finished leg from its room, if it has one: a lease outlives its leg."""
        self._room_by_sequence.pop(stream.sequence, None)

    def abort(self, stream: Stream) -> None:
        """Aborts the room of a leg that left, if it has one."""
        room = self._room_by_sequence.pop(stream.sequence, None)
        if room is not None:
            self._abort(room)
        if self._config.role != "aggregated":
            self._settings.on_changed()  # its place may have blocked the queue

    def _abort(self, room: Room[M]) -> None:
        """Aborts a room; no effect on an ended one."""

    def _abort_all(self) -> None:
        for room in tuple(self._rooms):
            self._abort(room)

    def _open(self, room: Room[M]) -> Room[M]:
        """Returns the room, opened. Raises Overloaded."""
        if self.open_rooms >= self._config.rooms_max:
            raise Overloaded(
                1.0,
                f"too many handoffs: {self.open_rooms}/{self._config.rooms_max}; retry after 1 s",
                reason=FULL,
            )
        self._rooms[room] = None
        self._counters["rooms_opened"] += 1
        self._is_idle.clear()
        if self._tick_task is None:
            self._tick_task = self._spawn(self._tick())
        return room

    async def _tick(self) -> None:
        while self._rooms:
            await self._settings.sleep(_TICK_S)
            now = self._clock()
            for room in tuple(self._rooms):
                self._execute_all(room, room.machine.tick(now))
        self._tick_task = None

    def _execute_all(self, room: Room[M], actions: list[Action]) -> None:
        for action in actions:
            self._execute(room, action)
        if room.machine.is_over:
            self._finish(room)

    def _execute(self, room: Room[M], action: Action) -> None:
        match action:
            case Send(message):
                if room.connection is not None:
                    room.connection.send(message)
            case ReleaseBlocks():
                if room.transfer is not None:
                    self._blocks.unpin(room.transfer)
                    room.transfer = None
                    self._settings.on_changed()
            case CloseConnection():
                if room.connection is not None:
                    room.connection.close()
            case EndLeg(MeshError() as error):
                self._settings.fail(room.leg, error)
            case _:
                self._execute_for_role(room, action)

    def _execute_for_role(self, room: Room[M], action: Action) -> None:
        """Executes an action of one role's machine."""

    def _finish(self, room: Room[M]) -> None:
        if room in self._rooms:
            del self._rooms[room]
            outcome = room.machine.outcome or HandoffOutcome.FORCED
            self._counters[outcome.value] += 1
            self._on_ended(room, outcome)
            if not self._rooms:
                self._is_idle.set()

    def _on_ended(self, room: Room[M], outcome: HandoffOutcome) -> None:
        """Handles the end of a room, once for each."""

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="sim-handoff")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sim_handoff_failed", exc_info=error)
