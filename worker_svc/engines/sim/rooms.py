"""The rooms of one engine: the network side of handoffs, equal for both roles.

The machines of `transfer.py` decide; rooms execute their actions. An engine has the rooms of its
role: `prefill_rooms.py` or `decode_rooms.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog

from common.errors import Overloaded
from worker_svc.engines.handoff import FULL
from worker_svc.engines.sim.block_manager import BlockManager, BlockTable
from worker_svc.engines.sim.config import SimHandoffConfig
from worker_svc.engines.sim.network import Connection, Network
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.transfer import (
    Action,
    CloseConnection,
    DecodeMachine,
    HandoffOutcome,
    PrefillMachine,
    ReleaseBlocks,
    Send,
)

# Interval of timeout checks.
TICK_S: Final = 0.05
_COUNTERS: Final = {
    HandoffOutcome.HANDED_OVER: "rooms_handed_over",
    HandoffOutcome.ABORTED: "rooms_aborted",
    HandoffOutcome.FAILED: "rooms_failed",
    HandoffOutcome.TIMED_OUT: "rooms_timed_out",
    HandoffOutcome.EXPIRED: "leases_expired",
    HandoffOutcome.FORCED: "aborts_forced",
}
_EXTRA_COUNTERS: Final = ("rooms_opened", "pages_written", "pages_received", "pulls_refused")

log = structlog.get_logger()


class Handoff(Protocol):
    """A room at one end. transfer: its pinned blocks."""

    room: int
    connection: Connection | None
    transfer: BlockTable | None

    @property
    def machine(self) -> PrefillMachine | DecodeMachine: ...


H = TypeVar("H", bound=Handoff)


@dataclass(frozen=True, slots=True)
class RoomSettings:
    """What rooms depend on. incarnation: the worker's id. timing: its speedup scales transfers.
    on_released: called when blocks become free. decode_machine: of decode's end.
    """

    config: SimHandoffConfig
    blocks: BlockManager
    incarnation: int
    timing: Timing
    network: Network
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[object]]
    on_released: Callable[[], None]
    decode_machine: type[DecodeMachine]


class Rooms(ABC, Generic[H]):
    """All rooms of one engine. idle: set while no room is open.

    Counters: each ended room counts once in `rooms_handed_over`, `rooms_aborted` (its own leg
    left), `rooms_failed` (the peer failed), `rooms_timed_out`, `leases_expired` or `aborts_forced`
    (the peer did not confirm an Abort).
    """

    def __init__(self, settings: RoomSettings) -> None:
        self._settings = settings
        self._config = settings.config
        self._timeouts = settings.config.timeouts
        self._blocks = settings.blocks
        self._clock = settings.clock
        self._counters: Counter[str] = Counter()
        # Open rooms; a dict keeps the order.
        self._handoffs: dict[H, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tick_task: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def open_rooms(self) -> int:
        return len(self._handoffs)

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the counters of the class docstring, and a few more."""
        return {name: self._counters[name] for name in (*_COUNTERS.values(), *_EXTRA_COUNTERS)}

    async def close(self) -> None:
        """Ends all rooms and closes their connections; no page is written here after it returns."""
        self._abort_all()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for handoff in tuple(self._handoffs):
            self._finish(handoff, [CloseConnection(), ReleaseBlocks()])

    @abstractmethod
    def abort(self, handoff: H) -> None:
        """Aborts the room of a leg that left; no effect on an ended room."""

    @abstractmethod
    def _execute_for_role(self, handoff: H, action: Action) -> None:
        """Executes an action of one role's machine."""

    def _abort_all(self) -> None:
        for handoff in tuple(self._handoffs):
            self.abort(handoff)

    def _execute_all(self, handoff: H, actions: list[Action]) -> None:
        for action in actions:
            self._execute(handoff, action)
        if handoff.machine.is_over:
            self._finish(handoff, [])

    def _execute(self, handoff: H, action: Action) -> None:
        match action:
            case Send(message):
                if handoff.connection is not None:
                    handoff.connection.send(message)
            case ReleaseBlocks():
                if handoff.transfer is not None:
                    self._blocks.unpin(handoff.transfer)
                    handoff.transfer = None
                    self._settings.on_released()
            case CloseConnection():
                if handoff.connection is not None:
                    handoff.connection.close()
            case _:
                self._execute_for_role(handoff, action)

    def _finish(self, handoff: H, actions: list[Action]) -> None:
        for action in actions:
            self._execute(handoff, action)
        if handoff not in self._handoffs:
            return
        del self._handoffs[handoff]
        outcome = handoff.machine.outcome or HandoffOutcome.FORCED
        self._on_ended(handoff, outcome)
        self._counters[_COUNTERS[outcome]] += 1
        if not self._handoffs:
            self.idle.set()

    def _on_ended(self, handoff: H, outcome: HandoffOutcome) -> None:
        """Called once for each room at its end."""

    def _check_capacity(self) -> None:
        if self.open_rooms >= self._config.rooms_max:
            raise Overloaded(
                1.0,
                f"too many handoffs: {self.open_rooms}/{self._config.rooms_max}; retry after 1 s",
                reason=FULL,
            )

    def _on_opened(self, handoff: H) -> None:
        self._handoffs[handoff] = None
        self._counters["rooms_opened"] += 1
        self.idle.clear()
        if self._tick_task is None:
            self._tick_task = self._spawn(self._tick())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="sim-handoff")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sim_handoff_failed", exc_info=error)

    async def _tick(self) -> None:
        while True:
            await self._settings.sleep(TICK_S)
            now = self._clock()
            for handoff in tuple(self._handoffs):
                self._execute_all(handoff, handoff.machine.tick(now))
            if not self._handoffs:
                self._tick_task = None
                return
