"""The responses of one WebSocket: lanes in which events wait, and the end of the connection."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from common.errors import InvalidRequest, MeshError, Overloaded, Unavailable
from frontend_svc.edge.asgi import AsgiApp, Scope
from frontend_svc.edge.websocket import CLOSE_TIMEOUT_S, CloseCode, Notice, WebSocket
from frontend_svc.generation.api import off_loop
from frontend_svc.responses.kept import KeptResponses, Turn
from frontend_svc.websocket.exchange import SocketExchange
from frontend_svc.websocket.messages import (
    CreateEvent,
    EventRefused,
    parse_event,
    refusal,
)

# As OpenAI's: responses of one connection that run at once, and names of lanes that it may use.
RUNNING_MAX: Final = 16
LANES_MAX: Final = 32
# Events of one connection that wait for a response before them.
WAITING_MAX: Final = 64
AGE_LIMIT: Final = "WEBSOCKET_CONNECTION_LIMIT_REACHED"
LANE_LIMIT: Final = "WEBSOCKET_STREAM_LIMIT_REACHED"
# Time for the client to answer the close frame of a shutdown. One that runs a tool does not read,
# and must not delay it.
SHUTDOWN_CLOSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Limits of a connection, from the settings."""

    idle_s: float
    """Without a response; then it is closed."""

    age_s: float
    """After which it takes no more events."""

    ping_s: float
    """Between two pings."""

    waiting_bytes: int
    """Of all events that wait."""


@dataclass(frozen=True, slots=True)
class _End:
    """Why a connection takes no more events."""

    error: MeshError
    code: CloseCode
    reason: str
    within_s: float = CLOSE_TIMEOUT_S


@dataclass(slots=True)
class _Lane:
    """Events of one `stream_id`, of which one runs at a time."""

    name: str | None
    waiting: deque[CreateEvent] = field(default_factory=deque)
    is_busy: bool = False


class ResponsesConnection:
    """Serves the events of a WebSocket. Responses of one lane follow each other; those of different
    lanes run at the same time."""

    def __init__(
        self,
        socket: WebSocket,
        serve: AsgiApp,
        scope: Scope,
        connection_id: str,
        kept: KeptResponses,
        limits: SocketLimits,
    ) -> None:
        """
        - serve: the application of `POST /v1/responses`.
        - scope: of the handshake.
        - connection_id: the ids of its requests begin with it.
        """
        self._socket = socket
        self._serve = serve
        self._scope = scope
        self._id = connection_id
        self._kept = kept
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[str | None, _Lane] = {}
        self._permits = asyncio.Semaphore(RUNNING_MAX)
        self._busy_lanes = 0
        self._waiting = self._waiting_bytes = 0
        self._end: _End | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self.responses = 0
        """Events that were served, also with an error."""

    async def run(self) -> None:
        """Returns when the connection has ended, and its responses with it."""
        age_timer = self._loop.call_later(self._limits.age_s, self._expire)
        self._await_event()
        try:
            async with asyncio.TaskGroup() as tasks:
                pings = tasks.create_task(self._ping())
                while (message := await self._socket.receive()) is not None:
                    # A client that does not read errors sends no more events.
                    await self._socket.writable()
                    if isinstance(message, Notice):
                        self._shut_down()
                    elif isinstance(message, MeshError):
                        self._socket.send(refusal(message))
                    elif (lane := self._take(await self._parse(message))) is not None:
                        tasks.create_task(self._run_lane(lane))
                    # Hundreds of short messages may wait, and none of these steps does.
                    await asyncio.sleep(0)
                pings.cancel()
        finally:
            age_timer.cancel()
            self._stop_idle_timer()

    async def _parse(self, message: bytes) -> CreateEvent | None:
        try:
            return await off_loop(len(message), parse_event, message)
        except EventRefused as refused:
            self._socket.send(refused.answer)
            return None

    def _take(self, event: CreateEvent | None) -> _Lane | None:
        """Lets an event wait in its lane. Returns the lane if nothing runs in it."""
        if event is None:
            return None
        if (error := self._problem(event)) is not None:
            self._socket.send(refusal(error, event.stream_id))
            return None
        lane = self._lanes.setdefault(event.stream_id, _Lane(event.stream_id))
        lane.waiting.append(event)
        self._waiting += 1
        self._waiting_bytes += len(event.body)
        if lane.is_busy:
            return None
        lane.is_busy = True
        self._busy_lanes += 1
        self._stop_idle_timer()
        return lane

    def _problem(self, event: CreateEvent) -> MeshError | None:
        """Returns why an event is refused; None if it is not."""
        if self._end is not None:
            return self._end.error
        names = self._lanes.keys() - {None}
        if event.stream_id is not None and event.stream_id not in names and len(names) == LANES_MAX:
            text = f"Invalid 'stream_id': the connection has used {LANES_MAX} others, its limit."
            return InvalidRequest(text, "stream_id", reason=LANE_LIMIT)
        if self._waiting == WAITING_MAX:
            text = f"{WAITING_MAX} events of this connection wait, its limit"
            return Overloaded(1.0, f"{text}; wait for the end of a response")
        size = self._waiting_bytes + len(event.body)
        if self._waiting and size > self._limits.waiting_bytes:
            limit = self._limits.waiting_bytes >> 20
            text = f"the events of this connection that wait would have more than {limit} MB"
            return Overloaded(1.0, f"{text}; wait for the end of a response")
        return None

    async def _run_lane(self, lane: _Lane) -> None:
        """Serves the events of a lane until none waits."""
        while lane.waiting:
            async with self._permits:
                event = lane.waiting.popleft()
                self._waiting -= 1
                self._waiting_bytes -= len(event.body)
                if self._end is not None:
                    self._socket.send(refusal(self._end.error, event.stream_id))
                elif self._socket.is_open:
                    await self._respond(event)
        lane.is_busy = False
        self._busy_lanes -= 1
        if not self._busy_lanes:
            self._close_if_ended()
            self._await_event()

    async def _respond(self, event: CreateEvent) -> None:
        self.responses += 1
        turn = Turn(self._kept, event.stream_id, event.generates)
        exchange = SocketExchange(self._socket, event, turn)
        scope = exchange.scope(self._scope, f"{self._id}-{self.responses}")
        await self._serve(scope, exchange.receive, exchange.send)

    async def _ping(self) -> None:
        while True:  # until the connection has ended
            await asyncio.sleep(self._limits.ping_s)
            self._socket.ping()

    def _expire(self) -> None:
        """Ends a connection that has reached its age, after the responses that run."""
        text = f"the connection is older than {self._limits.age_s:g} s, its limit; connect again"
        error = InvalidRequest(text, reason=AGE_LIMIT)
        if not self._busy_lanes:
            self._socket.send(refusal(error))
        self._finish(_End(error, CloseCode.GOING_AWAY, text))

    def _shut_down(self) -> None:
        text = "this frontend is shutting down; connect again"
        error = Unavailable(text, 1.0)
        self._finish(_End(error, CloseCode.SERVICE_RESTART, text, SHUTDOWN_CLOSE_S))

    def _finish(self, end: _End) -> None:
        """Takes no more events, and closes as soon as no response runs."""
        self._end = self._end or end
        if not self._busy_lanes:
            self._close_if_ended()

    def _close_if_ended(self) -> None:
        if self._end is not None:
            end = self._end
            self._socket.close(end.code, end.reason, within_s=end.within_s)

    def _await_event(self) -> None:
        """Starts the time in which the next event must arrive."""
        self._stop_idle_timer()
        if self._socket.is_open:
            self._idle_timer = self._loop.call_later(self._limits.idle_s, self._on_idle)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _on_idle(self) -> None:
        text = f"no event arrived for {self._limits.idle_s:g} s"
        self._socket.close(CloseCode.GOING_AWAY, text)
