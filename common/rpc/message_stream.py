"""Messages of one RPC on an HTTP/2 connection of its own, on a transport of the event loop.

Such RPCs live as long as their peers, and carry all tokens, decisions and KV events. So they use
HTTP/2 ends of our own (`http2/`) in place of grpc.aio (ADR 0029, 0038). `stream.py` has the end
of clients, `stream_server.py` that of servers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from google.protobuf.message import DecodeError
from grpc import StatusCode

from common.errors import InternalError, MeshError
from common.rpc.channel import KEEPALIVE_INTERVAL_S, KEEPALIVE_TIMEOUT_S
from common.rpc.http2.call import Http2Call

# Silence of the peer is measured in ticks, so that a stall of this process counts as one.
TICK_S = KEEPALIVE_TIMEOUT_S
_PING_TICKS = round(KEEPALIVE_INTERVAL_S / TICK_S)
# After the end of a call, the peer has this long to take what is left.
CLOSE_TIMEOUT_S = 1.0

CallT = TypeVar("CallT", bound=Http2Call)
ReceivedT = TypeVar("ReceivedT")


class MessageStream(asyncio.Protocol, ABC, Generic[CallT, ReceivedT]):
    """The messages of one call. One task reads, one writes. What arrives is handled in turns of
    bounded size (`http2/call.py`); between two of them, the event loop serves other connections.

    parse: a received message; it raises DecodeError. wrong_message: raised then.
    """

    wrong_message: type[MeshError] = InternalError

    def __init__(self, call: CallT, parse: Callable[[bytes], ReceivedT]) -> None:
        self._call = call
        self._parse = parse
        self._loop = asyncio.get_running_loop()
        self._is_paused = False
        self._next_turn: asyncio.Handle | None = None
        self._is_reading_paused = False
        self._silent_ticks = 0
        # Set on each change that a task may wait for.
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle

    # Calls of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        has_frames = self._call.receive(data)
        self._on_received()
        self._send()
        self._wake(self._writer)
        if has_frames:
            self._pause_reading()
            self._await_turn()

    def connection_lost(self, error: Exception | None) -> None:
        reason = "was closed" if error is None else f"was lost: {error}"
        self._fail(f"the connection {reason}")

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._wake(self._writer)

    # For both ends.

    @abstractmethod
    def _on_received(self) -> None:
        """Handles what the call has received from the connection."""

    def _await_turn(self) -> None:
        """Handles the next part of what has arrived in the next turn of the event loop."""
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._next_turn = None
        was_paused, self._is_reading_paused = self._is_reading_paused, False
        self.data_received(b"")
        if was_paused and not self._is_reading_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _pause_reading(self) -> None:
        self._is_reading_paused = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def _take_message(self) -> ReceivedT:
        try:
            return self._parse(self._call.take_message())
        except DecodeError as error:
            raise self.wrong_message("a message of another type") from error

    def _tick(self) -> None:
        self._silent_ticks += 1
        if self._silent_ticks > _PING_TICKS + 1:
            self._fail(f"the peer is silent for {self._silent_ticks * TICK_S:g} s")
            self._transport.abort()
            return
        if not self._is_paused:
            # Otherwise the peer does not take the responses to its frames.
            self._call.begin_period()
        if self._silent_ticks >= _PING_TICKS:
            self._call.ping()
            self._send()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _fail(self, text: str) -> None:
        self._timer.cancel()
        self._call.end(StatusCode.UNAVAILABLE, text)
        self._wake(self._reader)
        self._wake(self._writer)

    def _send(self) -> None:
        # uvloop raises for a write after the end of the connection.
        if (output := self._call.take_output()) and not self._transport.is_closing():
            self._transport.write(output)

    def _close_transport(self) -> None:
        self._timer.cancel()
        self._transport.close()
        self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    async def _drained(self) -> None:
        self._send()
        while (self._is_paused or self._call.is_blocked) and self._call.status is None:
            await self._wait_to_write()

    async def _wait_to_read(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    async def _wait_to_write(self) -> None:
        self._writer = self._loop.create_future()
        try:
            await self._writer
        finally:
            self._writer = None

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
