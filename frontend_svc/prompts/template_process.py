"""The chat template of a model, rendered in a process of its own.

A card comes from the registry, and its template is a program: nested loops or a huge string would
stop the event loop. So a process renders it, with limits of processor time, memory and output, and
the kernel ends it if it exceeds them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import orjson
import structlog

from common.errors import Unavailable
from frontend_svc.prompts import template_child
from frontend_svc.prompts.control_tokens import ControlTokens
from frontend_svc.prompts.prompt import Prompt, TemplateError
from frontend_svc.prompts.template_child import (
    LENGTH_BYTES,
    MEMORY_BYTES_MAX,
    RENDER_CPU_S,
    Json,
    frame,
    receive,
)

REPLY_BYTES_MAX: Final = 512 << 20
RECEIVE_BYTES: Final = 256 << 10
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
        self._restart_task: asyncio.Task[None] | None = None
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
        """See `ChatTemplate.prompt`. Raises TemplateError also if the template exceeds a limit, and
        Unavailable if the process does not respond in time."""
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
        if self._process.is_running:
            self._send_batch()
        else:
            self._restart_task = asyncio.create_task(self._restart())

    def _send_batch(self) -> None:
        try:
            requests = b",".join([request for request, _ in self._batch])
            data = frame(b'{"requests":[%b]}' % requests)
        except Exception as error:  # they are too large together, or for the memory
            self._fail_batch(error)
            return
        self._process.call(data, self._on_reply)

    async def _restart(self) -> None:
        try:
            await asyncio.to_thread(self._process.start)
        except Exception as error:  # also of a system without memory for a process
            self._fail_batch(error)
        else:
            self._send_batch()

    def _on_reply(self, reply: Json | None) -> None:
        """reply: of the batch; None: the process was ended."""
        if reply is not None:
            batch, self._batch = self._batch, []
            for (_, future), rendered in zip(batch, reply["replies"], strict=True):
                if not future.done():
                    future.set_result(rendered)
            self._render_next()
        elif self._is_suspect_rendered:
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
    """Those whose requests have not ended."""
    return [one for one in waiting if not one[1].done()]


def _expire(future: asyncio.Future[Json]) -> None:
    if not future.done():
        future.set_exception(Unavailable("the chat template is busy with other prompts", 1.0))


class _Process:
    """The process, if it runs, and the socket that connects it. load: its first request.

    Calls belong to one event loop; the process is started and ended in any thread, between calls.
    """

    def __init__(self, load: bytes) -> None:
        self._load = load
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = -1  # a file descriptor
        # That watches the socket, from the first call on.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_reply: Callable[[Json | None], None] | None = None
        self._unsent = memoryview(b"")
        self._received = bytearray()

    @property
    def is_running(self) -> bool:
        return self._socket >= 0

    def start(self) -> Json:
        """Starts it with its first request, and returns the reply. Raises TemplateError."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", template_child.__name__, str(theirs.fileno())],
                    env={"PYTHONPATH": os.pathsep.join(sys.path)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # without the signals of a terminal
                )
            ours.settimeout(LOAD_TIMEOUT_S)
            try:
                ours.sendall(self._load)
                reply = receive(ours)
                if "error" in reply:
                    raise TemplateError(reply["error"])
            except OSError as error:
                self.end()
                text = f"it could not be loaded within its limits of time and memory ({error})"
                raise TemplateError(f"chat template: {text}") from error
            except TemplateError:
                self.end()
                raise
            ours.setblocking(False)
            self._socket = ours.detach()
        return reply

    def call(self, request: bytes, on_reply: Callable[[Json | None], None]) -> None:
        """Sends a request, and calls `on_reply` once, later; with None if the process ends."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # For all calls: to watch the socket anew for each takes longer than to read a reply.
            self._loop = loop
            loop.add_reader(self._socket, self._receive)
        self._on_reply = on_reply
        self._received = bytearray()
        self._unsent = memoryview(request)
        self._send()
        if self._unsent:
            loop.add_writer(self._socket, self._send_rest)

    def _send_rest(self) -> None:
        self._send()
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._socket)

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._socket, self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            if self._process is not None:
                self._process.kill()  # `_receive` sees the end
            self._unsent = memoryview(b"")
        if not self._unsent:
            self._unsent = memoryview(b"")  # without the request

    def _receive(self) -> None:
        try:
            part = os.read(self._socket, RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._received += part
        size = int.from_bytes(self._received[:LENGTH_BYTES], "big")
        if not part or self._on_reply is None or size > REPLY_BYTES_MAX:
            self._stop()
        elif len(self._received) >= LENGTH_BYTES + size:
            received, self._received = self._received, bytearray()
            try:
                reply = orjson.loads(memoryview(received)[LENGTH_BYTES:])
            except orjson.JSONDecodeError:
                self._stop()
                return
            on_reply, self._on_reply = self._on_reply, None
            on_reply(reply)

    def _stop(self) -> None:
        """Ends it if it has not ended, and the call in progress."""
        assert self._loop is not None, "it watches the socket"
        if self._process is not None:
            log.warning("template_process_ended", cpu_s=RENDER_CPU_S, bytes=MEMORY_BYTES_MAX)
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._loop = None
        self.end()
        on_reply, self._on_reply = self._on_reply, None
        if on_reply is not None:
            on_reply(None)

    def end(self) -> None:
        """Ends it, if it runs."""
        # A loop that watches the socket reads its end, and closes it then.
        is_watched = self._loop is not None and not self._loop.is_closed()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if not is_watched:
            descriptor, self._socket = self._socket, -1
            if descriptor >= 0:
                os.close(descriptor)
