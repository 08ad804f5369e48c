"""The network side of handoffs: rooms, connections and modelled transfers.

The machines of `transfer.py` decide; this module executes their actions. A transfer takes its
latency, then `bytes / bandwidth` on the link of the prefill worker, which its transfers share in
turns of `chunk_pages`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import structlog

from common.errors import Conflict, InvalidRequest, MeshError, Overloaded
from worker_svc.engines.handoff import (
    EXPIRED,
    FULL,
    MISMATCH,
    NO_PARTNER,
    PEER_ABORTED,
    ROOM_TAKEN,
    handoff_error,
)
from worker_svc.engines.sim.block_manager import BlockManager, BlockTable
from worker_svc.engines.sim.config import SimHandoffConfig
from worker_svc.engines.sim.messages import (
    Done,
    Drop,
    Fail,
    Message,
    Pull,
    Write,
    from_bytes,
    to_bytes,
)
from worker_svc.engines.sim.network import Connection, Listener, Network
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.transfer import (
    Action,
    CloseConnection,
    DecodeMachine,
    Dial,
    EndLeg,
    HandoffOutcome,
    KvArrived,
    PrefillMachine,
    ReleaseBlocks,
    Send,
    SendDrop,
    StartWriting,
    StopWriting,
)

# Interval of timeout checks.
TICK_S: Final = 0.05
# Ended rooms that are remembered, so that a late leg fails at once.
_ENDED_ROOMS_MAX: Final = 4096
# Time to send the pending Drops at shutdown.
_DROP_TIMEOUT_S: Final = 0.5
_COUNTERS: Final = {
    HandoffOutcome.HANDED_OVER: "rooms_handed_over",
    HandoffOutcome.ABORTED: "rooms_aborted",
    HandoffOutcome.FAILED: "rooms_failed",
    HandoffOutcome.TIMED_OUT: "rooms_timed_out",
    HandoffOutcome.EXPIRED: "leases_expired",
    HandoffOutcome.FORCED: "aborts_forced",
}
# Reason sent to a leg that arrives after the end of its room; PEER_ABORTED for other outcomes.
_REASONS: Final = {
    HandoffOutcome.HANDED_OVER: ROOM_TAKEN,
    HandoffOutcome.TIMED_OUT: NO_PARTNER,
    HandoffOutcome.EXPIRED: EXPIRED,
}
_EXTRA_COUNTERS: Final = ("rooms_opened", "pages_written", "pages_received", "pulls_refused")

log = structlog.get_logger()


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


Handoff = PrefillHandoff | DecodeHandoff


class HandoffManager:
    """All rooms of one engine.

    incarnation: the worker's id. timing: its speedup scales transfers. on_released: called when
    blocks become free. decode_machine: of decode's end. idle: set while no room is open.

    Counters: each ended room counts once in `rooms_handed_over`, `rooms_aborted` (its own leg
    left), `rooms_failed` (the peer failed), `rooms_timed_out`, `leases_expired` or `aborts_forced`
    (the peer did not confirm an Abort).
    """

    def __init__(
        self,
        config: SimHandoffConfig,
        blocks: BlockManager,
        *,
        incarnation: int,
        timing: Timing,
        network: Network,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        on_released: Callable[[], None],
        decode_machine: type[DecodeMachine] = DecodeMachine,
    ) -> None:
        self._config = config
        self._timeouts = config.timeouts
        self._blocks = blocks
        self._incarnation = incarnation
        self._timing = timing
        self._network = network
        self._clock = clock
        self._sleep = sleep
        self._on_released = on_released
        self._decode_machine = decode_machine
        self._counters: Counter[str] = Counter()
        # Open rooms of both ends; dicts keep the order.
        self._handoffs: dict[Handoff, None] = {}
        self._prefill_handoffs: dict[int, PrefillHandoff] = {}
        # Reasons of the last ended rooms, oldest first.
        self._ended_rooms: OrderedDict[int, str] = OrderedDict()
        self._last_lease_number = 0
        self._open_connections = 0
        self._link_free_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._drop_tasks: set[asyncio.Task[None]] = set()
        self._tick_task: asyncio.Task[None] | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._listener: Listener | None = None
        self._is_closed = False

    async def listen(self) -> None:
        """Listens for decode workers. Raises InvalidRequest if the address cannot be bound."""
        config = self._config
        try:
            self._listener = await self._network.listen(config.host, config.port, self._serve)
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {config.host}:{config.port}: {error}", "bootstrap_port"
            ) from None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Returns the address that decode workers dial."""
        assert self._listener is not None, "prefill engines listen"
        return self._config.advertise_host or self._config.host, self._listener.port

    @property
    def open_rooms(self) -> int:
        return len(self._handoffs)

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the counters of the class docstring, and a few more."""
        return {name: self._counters[name] for name in (*_COUNTERS.values(), *_EXTRA_COUNTERS)}

    async def close(self) -> None:
        """Ends all rooms and closes their connections; no page is written here after it returns."""
        self._is_closed = True
        if self._listener is not None:
            await self._listener.close()
        for handoff in tuple(self._handoffs):
            self.abort(handoff)
        if self._drop_tasks:
            await asyncio.wait(tuple(self._drop_tasks), timeout=_DROP_TIMEOUT_S)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for handoff in tuple(self._handoffs):
            self._finish(handoff, [CloseConnection(), ReleaseBlocks()])

    def attach_leg(
        self, room: int, prompt_tokens: int, on_end: Callable[[MeshError | None], None]
    ) -> PrefillHandoff:
        """Attaches the prefill leg of a room. Raises WorkerLost, Conflict or Overloaded."""
        if (reason := self._ended_rooms.get(room)) is not None:
            raise handoff_error(reason)
        handoff = self._prefill_handoffs.get(room)
        if handoff is not None and not handoff.machine.can_attach_leg:
            raise Conflict(f"room {room} is in use by another prefill leg", reason=ROOM_TAKEN)
        handoff = handoff or self._open_prefill(room)
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
        room = (self._incarnation + self._last_lease_number * 0x9E3779B97F4A7C15) % 2**63
        handoff = self._open_prefill(room)
        handoff.prompt_tokens = prompt_tokens
        self.on_prompt_computed(handoff, transfer, stamps, done)
        return handoff

    def open_decode_handoff(
        self,
        address: tuple[str, int],
        room: int,
        *,
        on_arrival: Callable[[Done], None],
        on_end: Callable[[MeshError], None],
    ) -> DecodeHandoff:
        """Opens a room for a decode leg that waits for blocks (`start_pull`). Raises Overloaded."""
        self._check_capacity()
        machine = self._decode_machine(self._timeouts, self._clock())
        handoff = DecodeHandoff(room, address, machine, on_arrival, on_end)
        self._on_opened(handoff)
        return handoff

    def start_pull(self, handoff: DecodeHandoff, transfer: BlockTable, prompt_tokens: int) -> None:
        """Starts the pull of a decode leg. transfer: its pinned blocks; unpinned here."""
        handoff.transfer = transfer
        handoff.pull = Pull(
            handoff.room,
            self._incarnation,
            prompt_tokens,
            self._blocks.block_size,
            [block.page for block in transfer.blocks],
        )
        self._execute_all(handoff, handoff.machine.start_pull())

    def abort(self, handoff: Handoff) -> None:
        """Aborts the room of a leg that left; no effect on an ended room."""
        if isinstance(handoff, PrefillHandoff):
            handoff.on_end = None
            self._execute_all(handoff, handoff.machine.abort())
        else:
            self._execute_all(handoff, handoff.machine.abort(self._clock()))

    # Actions of the machines.

    def _execute_all(self, handoff: Handoff, actions: list[Action]) -> None:
        for action in actions:
            self._execute(handoff, action)
        if handoff.machine.is_over:
            self._finish(handoff, [])

    def _execute(self, handoff: Handoff, action: Action) -> None:
        match action:
            case Send(message):
                if handoff.connection is not None:
                    handoff.connection.send(to_bytes(message))
            case ReleaseBlocks():
                if handoff.transfer is not None:
                    self._blocks.unpin(handoff.transfer)
                    handoff.transfer = None
                    self._on_released()
            case CloseConnection():
                if handoff.connection is not None:
                    handoff.connection.close()
            case _ if isinstance(handoff, PrefillHandoff):
                self._execute_prefill(handoff, action)
            case _:
                self._execute_decode(handoff, action)

    def _execute_prefill(self, handoff: PrefillHandoff, action: Action) -> None:
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

    def _execute_decode(self, handoff: DecodeHandoff, action: Action) -> None:
        match action:
            case Dial():
                self._spawn(self._run_decode(handoff))
            case SendDrop():
                task = self._spawn(self._send_drop(handoff))
                self._drop_tasks.add(task)
                task.add_done_callback(self._drop_tasks.discard)
            case KvArrived(done):
                handoff.on_arrival(done)
            case EndLeg(error):
                assert error is not None, "decode succeeds by an arrival"
                handoff.on_end(error)

    def _finish(self, handoff: Handoff, actions: list[Action]) -> None:
        for action in actions:
            self._execute(handoff, action)
        if handoff not in self._handoffs:
            return
        del self._handoffs[handoff]
        outcome = handoff.machine.outcome or HandoffOutcome.FORCED
        if isinstance(handoff, PrefillHandoff):
            del self._prefill_handoffs[handoff.room]
            self._record_ended(handoff.room, _REASONS.get(outcome, PEER_ABORTED))
        self._counters[_COUNTERS[outcome]] += 1
        if not self._handoffs:
            self.idle.set()

    def _record_ended(self, room: int, reason: str) -> None:
        self._ended_rooms[room] = reason
        while len(self._ended_rooms) > _ENDED_ROOMS_MAX:
            self._ended_rooms.popitem(last=False)

    # Rooms, tasks and time.

    def _open_prefill(self, room: int) -> PrefillHandoff:
        self._check_capacity()
        handoff = PrefillHandoff(room, PrefillMachine(self._timeouts, self._clock()))
        self._prefill_handoffs[room] = handoff
        self._on_opened(handoff)
        return handoff

    def _check_capacity(self) -> None:
        if self.open_rooms >= self._config.rooms_max:
            raise Overloaded(
                1.0,
                f"too many handoffs: {self.open_rooms}/{self._config.rooms_max}; retry after 1 s",
                reason=FULL,
            )

    def _on_opened(self, handoff: Handoff) -> None:
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
            await self._sleep(TICK_S)
            now = self._clock()
            for handoff in tuple(self._handoffs):
                self._execute_all(handoff, handoff.machine.tick(now))
            if not self._handoffs:
                self._tick_task = None
                return

    # Prefill.

    async def _serve(self, connection: Connection) -> None:
        if self._is_closed or self._open_connections >= self._config.rooms_max:
            self._reject(connection, FULL)
            return
        self._open_connections += 1
        task = asyncio.current_task()
        assert task is not None, "this runs in a task"
        self._tasks.add(task)
        try:
            message = None
            with contextlib.suppress(TimeoutError):  # a silent connection is closed
                async with asyncio.timeout(self._config.timeout_s):
                    message = await self._receive_message(connection)
            match message:
                case Drop(room):
                    self._on_drop(room)
                case Pull() as pull:
                    await self._serve_pull(connection, pull)
                case _:
                    connection.close()
        finally:
            self._tasks.discard(task)
            self._open_connections -= 1

    async def _receive_message(self, connection: Connection) -> Message | None:
        frame = await connection.receive()
        if frame is None:
            return None
        try:
            return from_bytes(frame)
        except InvalidRequest as error:
            log.warning("handoff_frame_invalid", error=error.message)
            return None

    def _on_drop(self, room: int) -> None:
        handoff = self._prefill_handoffs.get(room)
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
                message = await self._receive_message(connection)
                if message is None:
                    return
                self._execute_all(handoff, handoff.machine.receive(self._clock(), message))
        finally:
            self._execute_all(handoff, handoff.machine.on_connection_lost())

    def _accept_pull(self, connection: Connection, pull: Pull) -> PrefillHandoff:
        """Returns the room of a Pull, attached. Raises MeshError if the Pull is rejected."""
        if (reason := self._ended_rooms.get(pull.room)) is not None:
            raise handoff_error(reason)
        handoff = self._prefill_handoffs.get(pull.room)
        if handoff is not None and handoff.machine.pull is not None:
            raise handoff_error(ROOM_TAKEN)
        if not self._is_compatible(pull, handoff):
            if handoff is not None:
                self._execute_all(handoff, handoff.machine.reject(MISMATCH))
            raise handoff_error(MISMATCH)
        handoff = handoff or self._open_prefill(pull.room)
        handoff.connection = connection
        self._execute_all(handoff, handoff.machine.attach_peer(self._clock(), pull))
        return handoff

    def _is_compatible(self, pull: Pull, handoff: PrefillHandoff | None) -> bool:
        size = self._blocks.block_size
        is_valid = pull.block_size == size and len(pull.pages) == -(-pull.tokens // size)
        return is_valid and (handoff is None or pull.tokens == handoff.prompt_tokens)

    def _reject(self, connection: Connection, reason: str) -> None:
        self._counters["pulls_refused"] += 1
        connection.send(to_bytes(Fail(reason)))
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
                connection.send(to_bytes(Write(part, stamps)))
                self._counters["pages_written"] += len(part)
                await connection.flushed()
            connection.send(to_bytes(handoff.done))
        except OSError:
            self._execute_all(handoff, machine.on_connection_lost())
            return
        machine.on_done_sent(self._clock())

    async def _wait_for_link(self, machine: PrefillMachine, wait_s: float) -> None:
        machine.extend_deadline(self._clock(), wait_s)
        await self._sleep(wait_s)

    def _reserve_link_s(self, pages: int) -> float:
        """Reserves the link for `pages` more pages. Returns the seconds until they are sent."""
        now = self._clock()
        size = pages * self._blocks.block_size * self._config.bytes_per_token
        duration_s = self._timing.scaled(size / (self._config.gb_per_s * 1e9))
        self._link_free_at = max(now, self._link_free_at) + duration_s
        return self._link_free_at - now

    # Decode.

    async def _run_decode(self, handoff: DecodeHandoff) -> None:
        machine = handoff.machine
        try:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    connection = handoff.connection = await self._network.dial(*handoff.address)
            except OSError as error:
                log.info("handoff_dial_failed", address=handoff.address, error=str(error))
                return
            assert handoff.pull is not None, "a leg has blocks before it dials"
            self._execute_all(handoff, machine.on_connected(handoff.pull))
            while not machine.is_over:
                message = await self._receive_message(connection)
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
                connection = await self._network.dial(*handoff.address)
        except OSError:  # prefill then times out
            log.info("handoff_drop_not_sent", room=handoff.room)
            return
        connection.send(to_bytes(Drop(handoff.room)))
        connection.close()
