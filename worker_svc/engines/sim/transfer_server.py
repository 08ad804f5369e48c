"""The network side of the simulated engine's handoffs: rooms, connections, modelled transfers.

`core/handoff.py` decides; this carries out. A frame is its length (u32, little endian) and a
message. A transfer takes its latency, then `bytes / bandwidth` on the link of the prefill worker,
which all its transfers share in turns of `chunk_pages`.

The wire promises one thing that the machines rely on: after `Connection.close` nothing is received.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import structlog

from common.errors import Conflict, InvalidRequest, MeshError, Overloaded
from common.registry.instances import Role
from worker_svc.engines.sim.block_manager import BlockManager, Holding
from worker_svc.engines.sim.transfer import (
    EXPIRED,
    FULL,
    MISMATCH,
    NO_PARTNER,
    PEER_ABORTED,
    ROOM_TAKEN,
    Action,
    Arrived,
    DecodeRoom,
    Dial,
    Done,
    Drop,
    End,
    Fail,
    Hangup,
    Limits,
    Message,
    Outcome,
    PrefillRoom,
    Pull,
    Release,
    Send,
    StartWriting,
    StopWriting,
    TellDropped,
    Write,
    from_bytes,
    lost,
    to_bytes,
)

FRAME_BYTES_MAX: Final = 4 << 20
# How often rooms look at the time.
TICK_S: Final = 0.05
# Rooms that are over are remembered, so that a leg which comes too late hears it at once.
_ENDED_ROOMS_MAX: Final = 4096
# How long an engine that ends takes to say that legs, which had not pulled yet, are gone.
_LAST_WORDS_S: Final = 0.5
_LENGTH: Final = struct.Struct("<I")
_COUNTERS: Final = {
    Outcome.HANDED_OVER: "rooms_handed_over",
    Outcome.ABORTED: "rooms_aborted",
    Outcome.FAILED: "rooms_failed",
    Outcome.TIMED_OUT: "rooms_timed_out",
    Outcome.EXPIRED: "leases_expired",
    Outcome.FORCED: "aborts_forced",
}
# What is said to whoever comes to a room that ended so; to others, that it was given up.
_REASONS: Final[Mapping[Outcome | None, str]] = {
    Outcome.HANDED_OVER: ROOM_TAKEN,
    Outcome.TIMED_OUT: NO_PARTNER,
    Outcome.EXPIRED: EXPIRED,
}
_OWN_COUNTERS: Final = ("rooms_opened", "pages_written", "pages_received", "pulls_refused")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SimHandoffConfig:
    """Prefill and decode.

    role: which legs this engine takes. mode: "bootstrap" advertises host and port, so that both
    legs start at once; "completed" advertises none: prefill ends first, and its
    `disaggregated_params` say where decode finds the KV. host, port: where prefill listens; port 0
    is any. advertise_host: as peers dial it; "" is `host`. transfer_group: engines of equal groups
    can move KV between each other; "" names the model and the block size. local_prefill: whether
    a decode engine computes prompts that come without a handoff.

    gb_per_s: 10^9 bytes a second over the link of a prefill worker. bytes_per_token: of KV.
    latency_s: of each transfer. chunk_pages: written at once.

    timeout_s: how long a leg waits for its partner, and a partner may be silent. abort_s: how long
    the pages of an aborted leg wait for the peer's word. lease_s: how long a completed prefill
    keeps its KV. rooms_max: rooms and connections open at once.
    Raises ValueError where a value is out of its range.
    """

    role: Role = "aggregated"
    mode: Literal["bootstrap", "completed"] = "bootstrap"
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    transfer_group: str = ""
    local_prefill: bool = True
    gb_per_s: float = 25.0
    bytes_per_token: int = 131_072
    latency_s: float = 1e-3
    chunk_pages: int = 64
    timeout_s: float = 10.0
    abort_s: float = 2.0
    lease_s: float = 30.0
    rooms_max: int = 4096

    def __post_init__(self) -> None:
        for name in ("gb_per_s", "timeout_s", "abort_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0")
        for name in ("chunk_pages", "rooms_max", "bytes_per_token"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1")
        if self.latency_s < 0:
            raise ValueError("latency_s: must not be negative")
        if not 0 <= self.port < 65536:
            raise ValueError("port: must be in 0..65535")

    @property
    def limits(self) -> Limits:
        """The times of a room."""
        return Limits(self.timeout_s, self.abort_s, self.lease_s)


class Connection(Protocol):
    """A stream of frames between two engines; one task reads it."""

    def send(self, frame: bytes) -> None:
        """Sends as soon as it can, in order. A connection that is gone swallows it."""

    async def flushed(self) -> None:
        """Returns when there is room for more. Raises OSError when the connection is gone."""

    async def receive(self) -> bytes | None:
        """The next frame; None for ever once either side has closed or the link is broken."""

    def close(self) -> None:
        """Nothing is received any more; what was sent still leaves."""


Serve = Callable[[Connection], Awaitable[None]]


class Listener(Protocol):
    """What accepts connections."""

    @property
    def port(self) -> int:
        """Where."""

    async def close(self) -> None:
        """Accepts no more."""


class Network(Protocol):
    """How engines reach each other; another one runs them in virtual time."""

    async def listen(self, host: str, port: int, serve: Serve) -> Listener:
        """Serves each connection until `serve` returns, then closes it. Raises OSError."""

    async def dial(self, host: str, port: int) -> Connection:
        """Raises OSError."""


class _TcpConnection:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, linger_s: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._linger_s = linger_s
        self._is_closed = False

    def send(self, frame: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(frame)) + frame)

    async def flushed(self) -> None:
        await self._writer.drain()

    async def receive(self) -> bytes | None:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                log.warning("handoff_frame_too_long", bytes=length)
                return None
            frame = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return None if self._is_closed else frame

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._writer.close()
        # A peer that reads nothing must not keep the last words here for ever.
        asyncio.get_running_loop().call_later(self._linger_s, self._writer.transport.abort)


class _TcpListener:
    def __init__(self, server: asyncio.Server) -> None:
        self._server = server

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()


class TcpNetwork:
    """Real sockets. linger_s: how long last words may take to leave."""

    def __init__(self, linger_s: float = 2.0) -> None:
        self._linger_s = linger_s
        self._serving: dict[asyncio.Future[None], Connection] = {}

    async def listen(self, host: str, port: int, serve: Serve) -> Listener:
        """As `Network.listen`."""

        # The server complains about callbacks of its own that are cancelled.
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = _TcpConnection(reader, writer, self._linger_s)
            task = asyncio.ensure_future(serve(connection))
            self._serving[task] = connection
            task.add_done_callback(self._served)

        return _TcpListener(await asyncio.start_server(accepted, host, port, backlog=1024))

    def _served(self, task: asyncio.Future[None]) -> None:
        self._serving.pop(task).close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sim_handoff_failed", exc_info=error)

    async def dial(self, host: str, port: int) -> Connection:
        """As `Network.dial`."""
        reader, writer = await asyncio.open_connection(host, port)
        return _TcpConnection(reader, writer, self._linger_s)


@dataclass(slots=True, eq=False)
class PrefillSide:
    """A room at prefill, with all that belongs to it. transfer: its pinned blocks.

    on_end: the leg's end; None is a good one.
    """

    room: int
    machine: PrefillRoom
    on_end: Callable[[MeshError | None], None] | None = None
    connection: Connection | None = None
    transfer: Holding | None = None
    prompt_tokens: int | None = None
    stamps: list[int] = field(default_factory=list)
    done: Done | None = None
    writer: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class DecodeSide:
    """A room at decode. on_arrival: the KV is there; on_end: it is not going to be."""

    room: int
    address: tuple[str, int]
    machine: DecodeRoom
    on_arrival: Callable[[Done], None] | None = None
    on_end: Callable[[MeshError], None] | None = None
    connection: Connection | None = None
    transfer: Holding | None = None
    pull: Pull | None = None


Side = PrefillSide | DecodeSide


class Handoffs:
    """All rooms of one engine.

    incarnation: the worker's id. speedup: as in `Timing`. on_released: blocks came back, or a
    sequence may go on. decode_room: the machine of decode's end.

    Counters: every room that was opened and is over is one of `rooms_handed_over`,
    `rooms_aborted` (its own leg left), `rooms_failed` (the peer did), `rooms_timed_out`,
    `leases_expired` and `aborts_forced` (the peer did not answer an Abort).
    """

    def __init__(
        self,
        config: SimHandoffConfig,
        blocks: BlockManager,
        *,
        incarnation: int,
        speedup: float,
        network: Network,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]],
        on_released: Callable[[], None],
        decode_room: type[DecodeRoom] = DecodeRoom,
    ) -> None:
        self._config = config
        self._limits = config.limits
        self._blocks = blocks
        self._incarnation = incarnation
        self._speedup = speedup
        self._network = network
        self._clock = clock
        self._sleep = sleep
        self._on_released = on_released
        self._decode_room = decode_room
        self._counters: Counter[str] = Counter()
        self._prefills: dict[int, PrefillSide] = {}
        self._decodes: dict[DecodeSide, None] = {}
        # Why the rooms of late are over, oldest first.
        self._ended: OrderedDict[int, str] = OrderedDict()
        self._last_transfer = 0
        self._connections = 0
        self._link_free_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropping: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._listener: Listener | None = None
        self._is_closed = False

    async def listen(self) -> None:
        """Starts to accept decode workers. Raises InvalidRequest when the port cannot be had."""
        config = self._config
        try:
            self._listener = await self._network.listen(config.host, config.port, self._serve)
        except OSError as error:
            raise InvalidRequest(
                f"cannot listen on {config.host}:{config.port}: {error}", "bootstrap_port"
            ) from None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Where decode workers find this one."""
        assert self._listener is not None, "prefill engines listen"
        return self._config.advertise_host or self._config.host, self._listener.port

    @property
    def open_rooms(self) -> int:
        """Rooms of both ends that are not over."""
        return len(self._prefills) + len(self._decodes)

    @property
    def counters(self) -> Mapping[str, int]:
        """See the class."""
        return {name: self._counters[name] for name in (*_COUNTERS.values(), *_OWN_COUNTERS)}

    async def idle(self) -> None:
        """Returns once no room is open."""
        await self._idle.wait()

    async def close(self) -> None:
        """Ends all rooms at once and hangs up; nothing is written here any more."""
        self._is_closed = True
        if self._listener is not None:
            await self._listener.close()
        for side in tuple(self._prefills.values()):
            self._do(side, side.machine.abort())
        for decode in tuple(self._decodes):
            self.abort(decode)
        if self._dropping:
            await asyncio.wait(tuple(self._dropping), timeout=_LAST_WORDS_S)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        left: list[Side] = [*self._prefills.values(), *self._decodes]
        for one in left:
            self._over(one, [Hangup(), Release()])

    def enter(self, room: int, prompt_tokens: int) -> PrefillSide:
        """The prefill leg of a room is there; whoever calls sets `on_end` at once.

        Raises WorkerLost, Conflict or Overloaded.
        """
        if (reason := self._ended.get(room)) is not None:
            raise lost(reason)
        side = self._prefills.get(room)
        if side is not None and not side.machine.awaits_leg:
            raise Conflict(f"room {room} is another prefill leg's", reason=ROOM_TAKEN)
        side = side or self._new_prefill(room)
        if side.machine.has_peer and side.machine.pull.tokens != prompt_tokens:
            self._do(side, side.machine.refuse(MISMATCH))
            raise lost(MISMATCH)
        side.prompt_tokens = prompt_tokens
        self._do(side, side.machine.enter(self._clock()))
        return side

    def compute(self, side: PrefillSide, transfer: Holding, stamps: list[int], done: Done) -> None:
        """The prompt of a room is computed. transfer: its pinned blocks, unpinned here."""
        side.transfer, side.stamps, side.done = transfer, stamps, done
        self._do(side, side.machine.compute(self._clock()))

    def lease(
        self, transfer: Holding, stamps: list[int], prompt_tokens: int, done: Done
    ) -> PrefillSide:
        """Keeps a computed prompt for whoever pulls it, by the id in `room`.

        Raises Overloaded, and takes nothing then.
        """
        self._last_transfer += 1
        room = (self._incarnation + self._last_transfer * 0x9E3779B97F4A7C15) % 2**63
        side = self._new_prefill(room)
        side.prompt_tokens = prompt_tokens
        self.compute(side, transfer, stamps, done)
        return side

    def open_decode(self, address: tuple[str, int], room: int) -> DecodeSide:
        """A decode leg is there, and waits for blocks (`place`).

        Whoever calls sets `on_arrival` and `on_end` at once. Raises Overloaded.
        """
        self._check_room()
        machine = self._decode_room(self._limits, self._clock())
        side = DecodeSide(room, address, machine)
        self._decodes[side] = None
        self._opened()
        return side

    def place(self, side: DecodeSide, transfer: Holding, prompt_tokens: int) -> None:
        """The decode leg has its blocks. transfer: them, pinned; unpinned here."""
        side.transfer = transfer
        side.pull = Pull(
            side.room,
            self._incarnation,
            prompt_tokens,
            self._blocks.block_size,
            [block.page for block in transfer.blocks],
        )
        self._do(side, side.machine.place())

    def abort(self, side: Side) -> None:
        """The leg has left. A room that is over is left alone."""
        if isinstance(side, PrefillSide):
            side.on_end = None
            self._do(side, side.machine.abort())
        else:
            self._do(side, side.machine.abort(self._clock()))

    # What the machines ask for.

    def _do(self, side: Side, actions: list[Action]) -> None:
        for action in actions:
            self._act(side, action)
        if side.machine.is_over:
            self._over(side, [])

    def _act(self, side: Side, action: Action) -> None:
        match action:
            case Send(message):
                if side.connection is not None:
                    side.connection.send(to_bytes(message))
            case Release():
                self._release(side)
            case Hangup():
                if side.connection is not None:
                    side.connection.close()
            case _ if isinstance(side, PrefillSide):
                self._act_at_prefill(side, action)
            case _:
                self._act_at_decode(side, action)

    def _act_at_prefill(self, side: PrefillSide, action: Action) -> None:
        match action:
            case StartWriting():
                side.writer = self._spawn(self._write_pages(side))
                # Not in the task itself: one that is cancelled before its first step runs nothing.
                side.writer.add_done_callback(lambda _: self._do(side, side.machine.stopped()))
            case StopWriting():
                assert side.writer is not None, "it was started"
                side.writer.cancel()
            case End(error):
                on_end, side.on_end = side.on_end, None
                if on_end is not None:
                    on_end(error)
            case _:
                raise AssertionError(f"prefill does not do {action}")

    def _act_at_decode(self, side: DecodeSide, action: Action) -> None:
        match action:
            case Dial():
                self._spawn(self._talk(side))
            case TellDropped():
                task = self._spawn(self._tell_dropped(side))
                self._dropping.add(task)
                task.add_done_callback(self._dropping.discard)
            case Arrived(done):
                assert side.on_arrival is not None, "it was set when the leg came"
                side.on_arrival(done)
            case End(error):
                assert error is not None, "decode's good end is an arrival"
                assert side.on_end is not None, "it was set when the leg came"
                side.on_end(error)
            case _:
                raise AssertionError(f"decode does not do {action}")

    def _release(self, side: Side) -> None:
        transfer, side.transfer = side.transfer, None
        if transfer is not None:
            self._blocks.unpin(transfer)
            self._on_released()

    def _over(self, side: Side, actions: list[Action]) -> None:
        for action in actions:
            self._act(side, action)
        if isinstance(side, PrefillSide):
            if self._prefills.get(side.room) is not side:
                return
            del self._prefills[side.room]
            outcome = side.machine.outcome
            self._remember(side.room, _REASONS.get(outcome, PEER_ABORTED))
        else:
            if side not in self._decodes:
                return
            del self._decodes[side]
            outcome = side.machine.outcome
        self._counters[_COUNTERS[outcome or Outcome.FORCED]] += 1
        if not self.open_rooms:
            self._idle.set()

    def _remember(self, room: int, reason: str) -> None:
        self._ended[room] = reason
        while len(self._ended) > _ENDED_ROOMS_MAX:
            self._ended.popitem(last=False)

    # Rooms, tasks and time.

    def _new_prefill(self, room: int) -> PrefillSide:
        self._check_room()
        side = self._prefills[room] = PrefillSide(room, PrefillRoom(self._limits, self._clock()))
        self._opened()
        return side

    def _check_room(self) -> None:
        if self.open_rooms >= self._config.rooms_max:
            raise Overloaded(1.0, "this worker has all the handoffs it can hold", reason=FULL)

    def _opened(self) -> None:
        self._counters["rooms_opened"] += 1
        self._idle.clear()
        if self._ticker is None:
            self._ticker = self._spawn(self._tick())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="sim-handoff")
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sim_handoff_failed", exc_info=error)

    async def _tick(self) -> None:
        while True:
            await self._sleep(TICK_S)
            now = self._clock()
            sides: list[Side] = [*self._prefills.values(), *self._decodes]
            for side in sides:
                self._do(side, side.machine.tick(now))
            if not self.open_rooms:
                self._ticker = None
                return

    # Prefill.

    async def _serve(self, connection: Connection) -> None:
        """One connection of a decode worker."""
        if self._is_closed or self._connections >= self._config.rooms_max:
            self._refuse(connection, FULL)
            return
        self._connections += 1
        task = asyncio.current_task()
        assert task is not None, "this runs in a task"
        self._tasks.add(task)
        try:
            first = await self._first(connection)
            match first:
                case Drop(room):
                    self._drop(room)
                case Pull():
                    await self._serve_pull(connection, first)
                case _:
                    connection.close()
        finally:
            self._tasks.discard(task)
            self._connections -= 1

    async def _first(self, connection: Connection) -> Message | None:
        with contextlib.suppress(TimeoutError):  # then it says nothing, and is closed
            async with asyncio.timeout(self._config.timeout_s):
                return await self._hear(connection)
        return None

    async def _hear(self, connection: Connection) -> Message | None:
        frame = await connection.receive()
        if frame is None:
            return None
        try:
            return from_bytes(frame)
        except InvalidRequest as error:
            log.warning("handoff_frame_bad", error=error.message)
            return None

    def _drop(self, room: int) -> None:
        side = self._prefills.get(room)
        if side is not None:
            self._do(side, side.machine.drop())
        elif room not in self._ended:
            self._remember(room, PEER_ABORTED)

    async def _serve_pull(self, connection: Connection, pull: Pull) -> None:
        try:
            side = self._joined(connection, pull)
        except MeshError as error:
            self._refuse(connection, error.reason)
            return
        try:
            while not side.machine.is_over:
                message = await self._hear(connection)
                if message is None:
                    actions = side.machine.lose()
                else:
                    actions = side.machine.hear(self._clock(), message)
                self._do(side, actions)
                if message is None:
                    return
        finally:
            self._do(side, side.machine.lose())

    def _joined(self, connection: Connection, pull: Pull) -> PrefillSide:
        """The room a Pull is for, joined. Raises what it is refused with."""
        if (reason := self._ended.get(pull.room)) is not None:
            raise lost(reason)
        side = self._prefills.get(pull.room)
        if side is not None and side.machine.has_peer:
            raise lost(ROOM_TAKEN)
        if not self._fits(pull, side):
            if side is not None:
                self._do(side, side.machine.refuse(MISMATCH))
            raise lost(MISMATCH)
        side = side or self._new_prefill(pull.room)
        side.connection = connection
        self._do(side, side.machine.join(self._clock(), pull))
        return side

    def _fits(self, pull: Pull, side: PrefillSide | None) -> bool:
        expected = self._blocks.block_size
        if pull.block_size != expected or len(pull.pages) != -(-pull.tokens // expected):
            return False
        return side is None or pull.tokens == side.prompt_tokens

    def _refuse(self, connection: Connection, reason: str) -> None:
        self._counters["pulls_refused"] += 1
        connection.send(to_bytes(Fail(reason)))
        connection.close()

    async def _write_pages(self, side: PrefillSide) -> None:
        """The modelled transfer: reads the room's blocks, writes decode's pages."""
        machine, connection, transfer = side.machine, side.connection, side.transfer
        assert connection is not None, "a transfer goes to somebody"
        assert transfer is not None, "a transfer has blocks"
        assert side.done is not None, "a computed prompt has a first token"
        pages, size = side.machine.pull.pages, self._config.chunk_pages
        try:
            await self._pass(machine, self._scaled(self._config.latency_s))
            for start in range(0, len(pages), size):
                part = pages[start : start + size]
                await self._pass(machine, self._reserve(len(part)))
                blocks = transfer.blocks[start : start + size]
                # What is read is what is there: a block that is not intact arrives as it is.
                stamps = [
                    stamp if self._blocks.read(block) == block.stamp else -1
                    for block, stamp in zip(blocks, side.stamps[start : start + size], strict=True)
                ]
                connection.send(to_bytes(Write(part, stamps)))
                self._counters["pages_written"] += len(part)
                await connection.flushed()
            connection.send(to_bytes(side.done))
        except OSError:
            self._do(side, machine.lose())
            return
        self._do(side, machine.sent(self._clock()))

    async def _pass(self, machine: PrefillRoom, wait_s: float) -> None:
        machine.wrote(self._clock(), wait_s)
        await self._sleep(wait_s)

    def _reserve(self, pages: int) -> float:
        """Seconds until the link has carried that many more pages."""
        now = self._clock()
        size = pages * self._blocks.block_size * self._config.bytes_per_token
        took = self._scaled(size / (self._config.gb_per_s * 1e9))
        self._link_free_at = max(now, self._link_free_at) + took
        return self._link_free_at - now

    def _scaled(self, seconds: float) -> float:
        return seconds / self._speedup if self._speedup else 0.0

    # Decode.

    async def _talk(self, side: DecodeSide) -> None:
        """Decode's side of one room."""
        machine = side.machine
        try:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    connection = side.connection = await self._network.dial(*side.address)
            except OSError as error:
                log.info("handoff_dial_failed", address=side.address, error=str(error))
                return
            assert side.pull is not None, "a leg is placed before it dials"
            self._do(side, machine.connected(side.pull))
            while not machine.is_over:
                message = await self._hear(connection)
                # Once the room is over its pages are somebody else's: the connection is closed.
                if message is None or machine.is_over:
                    return
                if isinstance(message, Write) and not self._write(message):
                    return
                self._do(side, machine.hear(self._clock(), message))
        finally:
            if not machine.is_over:
                self._do(side, machine.lose())
            if side.connection is not None:
                side.connection.close()

    def _write(self, message: Write) -> bool:
        """Writes where it is told to, whoever has the pages now; False where no page is."""
        try:
            for page, stamp in zip(message.pages, message.stamps, strict=True):
                self._blocks.write(page, stamp)
        except IndexError:
            log.warning("handoff_page_unknown", pages=len(message.pages))
            return False
        self._counters["pages_received"] += len(message.pages)
        return True

    async def _tell_dropped(self, side: DecodeSide) -> None:
        try:
            async with asyncio.timeout(self._config.abort_s):
                connection = await self._network.dial(*side.address)
        except OSError:  # then prefill finds out by its own time-out
            log.info("handoff_drop_unsaid", room=side.room)
            return
        connection.send(to_bytes(Drop(side.room)))
        connection.close()


__all__ = [
    "NO_PARTNER",
    "Connection",
    "DecodeSide",
    "Handoffs",
    "Listener",
    "Network",
    "PrefillSide",
    "SimHandoffConfig",
    "TcpNetwork",
]
