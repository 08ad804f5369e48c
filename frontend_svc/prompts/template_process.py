"""The chat template of a model, rendered in a process of its own.

A card comes from the registry, and its template is a program: nested loops or a huge string would
stop the event loop. So a process renders it, with limits of processor time, memory and output, and
the kernel ends it if it exceeds them.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

import orjson
import structlog

from common.errors import Unavailable
from common.trials.child_process import (
    LENGTH_BYTES,
    TEMPLATE,
    end_child,
    frame,
    receive,
    start_child,
    unexpected_ends,
)
from frontend_svc.prompts import template_child
from frontend_svc.prompts.control_tokens import ControlTokens
from frontend_svc.prompts.prompt import Prompt, TemplateError
from frontend_svc.prompts.template_child import MEMORY_BYTES_MAX, RENDER_CPU_S, Json

REPLY_BYTES_MAX: Final = 512 << 20
# Prompts of one exchange with the process.
BATCH_MAX: Final = 64
# Time to wait for a process that gets no processor, or has other prompts to render.
LOAD_TIMEOUT_S: Final = 20.0
RENDER_TIMEOUT_S: Final = 30.0

# The JSON of a request, and its reply.
_Waiting = tuple[bytes, asyncio.Future[Json]]

log = structlog.get_logger()


class TemplateProcess:
    """A loaded template. variables: that it reads. prints_tools: whether a prompt contains them.
    The process ends with this object, and is started again if it was ended for its limits."""

    def __init__(
        self, source: str, *, bos_token: str | None, eos_token: str | None, control: ControlTokens
    ) -> None:
        """Blocks while the process loads the template. Raises TemplateError if it is invalid."""
        load = {
            "source": source,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "control_tokens": control.contents,
        }
        self._process = _Process(frame(orjson.dumps(load)))
        weakref.finalize(self, self._process.end)
        self._waiting: list[_Waiting] = []
        # What the process renders.
        self._batch: list[_Waiting] = []
        # The prompts of a batch whose process was ended. Each is rendered alone, so that only the
        # one that exceeded a limit fails: the process may also have ended for another reason.
        self._suspects: list[_Waiting] = []
        self._is_suspect_rendered = False
        self._connect_task: asyncio.Task[None] | None = None
        loaded = self._process.start()
        self.variables = frozenset[str](loaded["variables"])
        self.prints_tools = bool(loaded["prints_tools"])

    async def prompt(
        self,
        # Any: JSON.
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool,
        now: datetime,
    ) -> Prompt:
        """Returns the prompt, as `ChatTemplate.prompt`. Raises TemplateError also if the template
        exceeds a limit, and Unavailable if the process does not respond in time."""
        request = orjson.dumps(
            {
                "messages": messages,
                "tools": tools,
                "template_kwargs": template_kwargs,
                "add_generation_prompt": add_generation_prompt,
                "now": now.isoformat(),
            }
        )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Json] = loop.create_future()
        if not (self._waiting or self._batch or self._suspects):
            # All prompts of a loop turn in one exchange, so that they also continue in one.
            loop.call_soon(self._render_next)
        self._waiting.append((request, future))
        timer = loop.call_later(RENDER_TIMEOUT_S, _expire, future)
        try:
            reply = await future
        finally:
            timer.cancel()
        if "error" in reply:
            raise TemplateError(reply["error"])
        pieces = reply["pieces"]
        if pieces is None:
            return Prompt(reply["text"])
        return Prompt("".join(pieces), tuple(pieces))

    def _render_next(self) -> None:
        """Sends what waits to the process, as one batch."""
        self._suspects, self._waiting = _open(self._suspects), _open(self._waiting)
        self._is_suspect_rendered = bool(self._suspects)
        if self._suspects:
            self._batch = [self._suspects.pop()]
        else:
            self._batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
        if not self._batch:
            return
        if self._process.is_connected:
            self._send_batch()
        else:
            self._connect_task = asyncio.create_task(self._connect())

    def _send_batch(self) -> None:
        try:
            requests = b",".join([request for request, _ in self._batch])
            data = frame(b'{"requests":[%b]}' % requests)
        except Exception as error:  # they are too large together, or for the memory
            self._fail_batch(error)
            return
        self._process.call(data, self._on_reply)

    async def _connect(self) -> None:
        try:
            await self._process.connect()
        except Exception as error:  # also of a system without memory for a process
            self._fail_batch(error)
        else:
            self._send_batch()

    def _on_reply(self, reply: Json | None) -> None:
        """Handles the reply to the batch; None: the process was ended."""
        if reply is not None:
            batch, self._batch = self._batch, []
            for (_, future), rendered in zip(batch, reply["replies"], strict=True):
                if not future.done():
                    future.set_result(rendered)
            self._render_next()
        elif self._is_suspect_rendered or (len(self._batch) == 1 and self._process.was_late):
            text = "it exceeded its limits of time, memory or output and was stopped"
            self._fail_batch(TemplateError(f"chat template: {text}"))
        else:
            self._suspects = self._batch
            self._render_next()

    def _fail_batch(self, error: Exception) -> None:
        batch, self._batch = self._batch, []
        for _, future in batch:
            if not future.done():
                future.set_exception(error)
        self._render_next()


def _open(waiting: list[_Waiting]) -> list[_Waiting]:
    """Returns the prompts whose requests have not ended."""
    return [prompt for prompt in waiting if not prompt[1].done()]


def _expire(future: asyncio.Future[Json]) -> None:
    if not future.done():
        future.set_exception(Unavailable("the chat template is busy with other prompts", 1.0))


class _Process(asyncio.Protocol):
    """The process, if it runs, and the connection to it. load: its first request.

    Started and ended in any thread, and ended also while it is connected; all else belongs to the
    event loop.
    """

    def __init__(self, load: bytes) -> None:
        self._load = load
        self._process: subprocess.Popen[bytes] | None = None
        # Until `connect`.
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        # The task ends with the connection.
        self._connection_task: asyncio.Task[None]
        self._is_lost: asyncio.Event
        self._on_reply: Callable[[Json | None], None] | None = None
        self._received = bytearray()
        # Whether the last process was ended at its limit of processor time.
        self.was_late = False

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    def start(self) -> Json:
        """Starts the process with its first request, and returns the reply. Raises
        TemplateError."""
        self._process, ours = start_child(template_child.__name__)
        with ours:
            ours.settimeout(LOAD_TIMEOUT_S)
            try:
                ours.sendall(self._load)
                reply: Json = orjson.loads(receive(ours))
                if "error" in reply:
                    raise TemplateError(reply["error"])
            except OSError as error:
                self.end()
                text = f"it could not be loaded within its limits of time and memory ({error})"
                raise TemplateError(f"chat template: {text}") from error
            except TemplateError:
                self.end()
                raise
            self._socket = socket.socket(fileno=ours.detach())
        self._socket.setblocking(False)
        return reply

    async def connect(self) -> None:
        """Connects the process to the event loop; starts it again if it has ended."""
        if self._socket is None:
            await asyncio.to_thread(self.start)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    def call(self, request: bytes, on_reply: Callable[[Json | None], None]) -> None:
        """Sends a request, and calls `on_reply` once, later; with None if the process ends."""
        self._on_reply = on_reply
        # uvloop raises for a write after the end of the connection.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = None
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        self._is_lost = asyncio.Event()
        self._connection_task = asyncio.create_task(self._close_with_loop(self._transport))

    def data_received(self, data: bytes) -> None:
        self._received += data
        size = int.from_bytes(self._received[:LENGTH_BYTES], "big")
        if self._on_reply is None or size > REPLY_BYTES_MAX:
            self._abort()
        elif len(self._received) >= LENGTH_BYTES + size:
            received, self._received = self._received, bytearray()
            try:
                reply = orjson.loads(memoryview(received)[LENGTH_BYTES:])
            except orjson.JSONDecodeError:
                self._abort()
                return
            on_reply, self._on_reply = self._on_reply, None
            on_reply(reply)

    def connection_lost(self, error: Exception | None) -> None:
        process = self._process
        if process is not None:
            log.warning("template_process_ended", cpu_s=RENDER_CPU_S, bytes=MEMORY_BYTES_MAX)
            unexpected_ends[TEMPLATE] += 1
        self.end()
        self.was_late = process is not None and process.returncode == -signal.SIGPROF
        self._is_lost.set()
        self._transport = None
        self._received = bytearray()
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(None)

    async def _close_with_loop(self, transport: asyncio.Transport) -> None:
        """Closes the connection if the event loop ends, which cancels its tasks."""
        try:
            await self._is_lost.wait()
        except asyncio.CancelledError:
            self.end()
            transport.abort()
            raise

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Ends the process, if it runs. The event loop reads the end of its connection then."""
        process, self._process = self._process, None
        if process is not None:
            end_child(process)
        own_socket, self._socket = self._socket, None
        if own_socket is not None:
            own_socket.close()
