"""Processes and the streams between them, in virtual time.

A stream carries messages as bytes, in order, each with a seeded delay, under a window of bytes. It
ends like a gRPC stream: the client sees the server's end or error after the last message, the
server's handler is cancelled when the client leaves, and each side notices a broken link in its own
time, or never.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from common.errors import MeshError, Unavailable, WorkerLost

# Bytes in flight in each direction of a stream (an HTTP/2 window).
WINDOW_BYTES = 64 << 10


class Process:
    """The tasks and streams of one process. A stopped process neither sends nor receives, but keeps
    its state.

    Its tasks continue during a stop, since one loop runs them all; their effects are deferred.
    lag_s: additional delay of its messages in both directions, in seconds.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.lag_s = 0.0
        self._is_stopped = False
        self._held: deque[Callable[[], object]] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.ends: dict[StreamEnd, None] = {}

    @property
    def is_stopped(self) -> bool:
        """Whether it is between `stop` and `resume`."""
        return self._is_stopped

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task of this process."""
        task = asyncio.get_running_loop().create_task(work, name=self.name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def run_or_defer(self, action: Callable[[], object]) -> None:
        """Runs the action now, after the stop, or never if the process is dead by then."""
        if not self.is_alive:
            return
        if self._is_stopped:
            self._held.append(action)
        else:
            action()

    def stop(self) -> None:
        """SIGSTOP."""
        self._is_stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self._is_stopped = False
        while self._held and not self._is_stopped:
            self._held.popleft()()

    def kill(self) -> None:
        """SIGKILL: from now on its actions have no effect. The network handles its links."""
        self.is_alive = False
        self._held.clear()
        for task in tuple(self._tasks):
            task.cancel()

    async def wait_until_gone(self) -> None:
        """Returns when all its tasks have ended."""
        while self._tasks:
            await asyncio.wait(tuple(self._tasks))


@dataclass(slots=True)
class LinkDelay:
    """Delay of the messages of one stream: base_s + an exponential of mean jitter_s.

    Arrivals are rounded up to a grid of quantum_s, so that several events have the same time.
    """

    rng: Random
    base_s: float
    jitter_s: float
    quantum_s: float

    def arrival(self, now: float) -> float:
        at = now + self.base_s
        if self.jitter_s:
            at += self.rng.expovariate(1 / self.jitter_s)
        if self.quantum_s:
            at = -(-at // self.quantum_s) * self.quantum_s
        return max(at, now)


class StreamEnd:
    """One side of a stream. Exactly one task reads it and one writes to it."""

    def __init__(self, owner: Process, path: LinkDelay, window_bytes: int = WINDOW_BYTES) -> None:
        self.owner = owner
        self._window_bytes = window_bytes
        self.peer: StreamEnd | None = None
        self.is_finished = False
        self.bytes_read = 0
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes] = deque()
        self._end_error: MeshError | None = None  # after the inbox, once `_has_ended`
        self._has_ended = False
        self._is_half_closed = False
        self._arrived = asyncio.Event()
        self._has_capacity = asyncio.Event()
        self._in_flight_bytes = 0
        self._last_arrival = 0.0
        self._in_transit: deque[Callable[[StreamEnd], None]] = deque()
        self._is_held = False
        self._held: deque[Callable[[], None]] = deque()
        # Called when the other side, or the link, ended the stream.
        self.on_cut: Callable[[], object] = lambda: None
        owner.ends[self] = None

    async def read(self) -> bytes | None:
        """The next message, None at the end. Raises the error it ended with."""
        while not self._inbox:
            if self._has_ended:
                if self._end_error is not None:
                    raise self._end_error
                return None
            if self._is_half_closed:
                return None
            self._arrived.clear()
            await self._arrived.wait()
        message = self._inbox.popleft()
        self.bytes_read += len(message)
        if self.peer is not None:
            # Real window updates are delayed too; an immediate one changes little and costs
            # nothing.
            self.peer._on_freed(len(message))
        return message

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended it, as far as this side can see."""
        return not (self._has_ended or self.is_finished)

    async def write(self, message: bytes) -> None:
        """Sends a message when the window has capacity. Raises WorkerLost on an ended stream."""
        await self.wait_for_capacity()
        self.push(message)

    async def wait_for_capacity(self) -> None:
        """Returns when the window has capacity. Raises WorkerLost on an ended stream."""
        while self._in_flight_bytes >= self._window_bytes and self.is_open:
            self._has_capacity.clear()
            await self._has_capacity.wait()
        if not self.is_open:
            raise WorkerLost("the stream has ended", retryable=True)

    def push(self, message: bytes) -> None:
        """Sends a message regardless of the window; an ended stream drops it."""
        if self.is_open:
            self._in_flight_bytes += len(message)
            self._send(lambda peer: peer._receive(message))

    def half_close(self) -> None:
        """The other side reads what is left, then None; it may continue to write."""
        if self.is_open:
            self._send(lambda peer: peer._half_closed())

    def finish(self, error: MeshError | None) -> None:
        """Ends the stream from this side: the other side reads what is left, then the end."""
        if self.is_finished:
            return
        self.is_finished = True
        self._has_capacity.set()
        self.owner.run_or_defer(lambda: self._send_end(error))

    def cut(self, error: MeshError | None) -> None:
        """This side receives the end of the stream."""
        if self._has_ended:
            return
        self._has_ended, self._end_error = True, error
        self._arrived.set()
        self._has_capacity.set()
        self.on_cut()

    def hold(self) -> None:
        """Messages to this side wait in the network."""
        self._is_held = True

    def release(self) -> None:
        """The waiting messages arrive."""
        self._is_held = False
        while self._held:
            self._held.popleft()()

    def sever(self) -> None:
        """From now on no message arrives at this side, and no side is notified."""
        peer = self.peer
        self.peer = None
        self._held.clear()
        if peer is not None and peer.peer is self:
            peer.sever()

    def _send_end(self, error: MeshError | None) -> None:
        # Not earlier: if the owner dies during a stop, the other side must notice it.
        self.owner.ends.pop(self, None)
        self._schedule_delivery(lambda peer: peer.cut(error))

    def _send(self, deliver: Callable[[StreamEnd], None]) -> None:
        """Gives a message to the network; it arrives after all earlier messages."""
        self.owner.run_or_defer(lambda: self._schedule_delivery(deliver))

    def _schedule_delivery(self, deliver: Callable[[StreamEnd], None]) -> None:
        self._in_transit.append(deliver)
        lag_s = self.owner.lag_s + (self.peer.owner.lag_s if self.peer is not None else 0.0)
        at = max(self._path.arrival(self._loop.time() + lag_s), self._last_arrival)
        self._last_arrival = at
        self._loop.call_at(at, self._deliver_next)

    def _deliver_next(self) -> None:
        deliver = self._in_transit.popleft()
        peer = self.peer
        if peer is None:
            return
        if peer._is_held:
            peer._held.append(lambda: peer.owner.run_or_defer(lambda: deliver(peer)))
        else:
            peer.owner.run_or_defer(lambda: deliver(peer))

    def _receive(self, message: bytes) -> None:
        self._inbox.append(message)
        self._arrived.set()

    def _half_closed(self) -> None:
        self._is_half_closed = True
        self._arrived.set()

    def _on_freed(self, count: int) -> None:
        self._in_flight_bytes -= count
        if self._in_flight_bytes < self._window_bytes:
            self._has_capacity.set()


Handler = Callable[[StreamEnd], Awaitable[None]]


class SimNetwork:
    """Listeners by address, and the open streams. path: how a stream from a to b behaves."""

    def __init__(
        self, path: Callable[[str, str], LinkDelay], window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._path = path
        self._window_bytes = window_bytes
        self._listeners: dict[str, tuple[Process, Handler, bool]] = {}
        self.refused_after_s = 0.05

    def listen(
        self, address: str, process: Process, handler: Handler, *, is_cancelled: bool = True
    ) -> None:
        """Streams to `address` are given to `handler`; it ends the stream by returning or raising.

        A successor on the same address replaces its predecessor. is_cancelled: whether a handler is
        cancelled when its client leaves, like in grpc.aio; else it reads the end.
        """
        self._listeners[address] = process, handler, is_cancelled

    def is_listening(self, address: str) -> bool:
        """Whether a live process listens there."""
        return address in self._listeners and self._listeners[address][0].is_alive

    def close(self, address: str, process: Process) -> None:
        """The process does not listen there any more. No-op if a successor does."""
        if self._listeners.get(address, (None,))[0] is process:
            del self._listeners[address]

    def dial(self, caller: Process, address: str) -> StreamEnd:
        """The client's end of a new stream; a refused connection shows when it is read."""
        process, handler, is_cancelled = self._listeners.get(address, (None, None, True))
        path = self._path(caller.name, address)
        client = StreamEnd(caller, path, self._window_bytes)
        if process is None or handler is None or not process.is_alive:
            error = Unavailable(f"connection to {address} refused")
            at = path.arrival(asyncio.get_running_loop().time() + self.refused_after_s)
            asyncio.get_running_loop().call_at(at, client.cut, error)
            return client
        server = StreamEnd(process, path, self._window_bytes)
        client.peer, server.peer = server, client
        process.run_or_defer(
            lambda: self._serve(process, handler, server, is_cancelled=is_cancelled)
        )
        return client

    def _serve(
        self, process: Process, handler: Handler, end: StreamEnd, *, is_cancelled: bool
    ) -> None:
        task = process.spawn(_handle(handler, end))
        if not is_cancelled:
            return
        end.on_cut = task.cancel
        if end._has_ended:
            task.cancel()


async def _handle(handler: Handler, end: StreamEnd) -> None:
    error: MeshError | None = None
    try:
        await handler(end)
    except MeshError as raised:
        error = raised
    finally:
        end.finish(error)


def ends_between(near: Process, far: Process) -> list[StreamEnd]:
    """The near ends of the streams between two processes."""
    return [end for end in near.ends if end.peer is not None and end.peer.owner is far]
