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
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import orjson
import structlog

from common.errors import Unavailable
from frontend_svc.core.text.control_tokens import ControlTokens
from frontend_svc.core.text.prompt import Prompt, TemplateError
from frontend_svc.models import template_child
from frontend_svc.models.template_child import (
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

# The request, and its reply.
_Waiting = tuple[Json, asyncio.Future[Json]]

log = structlog.get_logger()


class TemplateProcess:
    """A loaded template. variables: that it reads. prints_tools: whether a prompt contains them.
    The process ends with this object, and is started again if it was ended for its limits."""

    def __init__(
        self, source: str, *, bos_token: str | None, eos_token: str | None, control: ControlTokens
    ) -> None:
        """Blocks while the process loads the template. Raises TemplateError if it is invalid."""
        self._load = frame(
            {
                "source": source,
                "bos_token": bos_token,
                "eos_token": eos_token,
                "control_tokens": control.contents,
            }
        )
        self._process = _Process()
        weakref.finalize(self, self._process.end)
        self._waiting: list[_Waiting] = []
        self._batch_task: asyncio.Task[None] | None = None
        loaded = self._start()
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
        request = {
            "messages": messages,
            "tools": tools,
            "template_kwargs": template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "now": now.isoformat(),
        }
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Json] = loop.create_future()
        self._waiting.append((request, future))
        if self._batch_task is None:
            self._batch_task = loop.create_task(self._render_batches())
        try:
            async with asyncio.timeout(RENDER_TIMEOUT_S):
                reply = await future
        except TimeoutError:
            raise Unavailable("the chat template is busy with other prompts", 1.0) from None
        if "error" in reply:
            raise TemplateError(reply["error"])
        pieces = reply["pieces"]
        if pieces is None:
            return Prompt(reply["text"])
        return Prompt("".join(pieces), tuple(pieces))

    async def _render_batches(self) -> None:
        """Renders what waits: all requests of a loop turn in one exchange, so that they also
        continue in one."""
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
                try:
                    await self._render(batch)
                except TemplateError:
                    # One of them exceeded a limit: only that one fails.
                    for one in batch:
                        await self._render_alone(one)
        finally:
            self._batch_task = None
            for _, future in self._waiting:
                future.cancel()

    async def _render_alone(self, one: _Waiting) -> None:
        _, future = one
        try:
            if not future.done():
                await self._render([one])
        except TemplateError as error:
            if not future.done():
                future.set_exception(error)

    async def _render(self, batch: Sequence[_Waiting]) -> None:
        """Raises TemplateError if the process was ended."""
        try:
            reply = await self._call(frame({"requests": [request for request, _ in batch]}))
        except TemplateError:
            raise
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), rendered in zip(batch, reply["replies"], strict=True):
            if not future.done():
                future.set_result(rendered)

    async def _call(self, request: bytes) -> Json:
        loop = asyncio.get_running_loop()
        try:
            if self._process.socket is None:
                await asyncio.to_thread(self._start)
            connection = self._process.socket
            assert connection is not None, "it has started"
            await loop.sock_sendall(connection, request)
            return await _receive_reply(loop, connection)
        except OSError:
            self._process.end()
            log.warning("template_process_ended", cpu_s=RENDER_CPU_S, bytes=MEMORY_BYTES_MAX)
            text = "it exceeded its limits of time, memory or output and was stopped"
            raise TemplateError(f"chat template: {text}") from None
        except BaseException:
            self._process.end()  # its reply would be taken for that of the next request
            raise

    def _start(self) -> Json:
        reply = self._process.start(self._load)
        if "error" in reply:
            self._process.end()
            raise TemplateError(reply["error"])
        return reply


class _Process:
    """The process, if it runs. socket: from when it has loaded its template."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.socket: socket.socket | None = None

    def start(self, load: bytes) -> Json:
        """Starts it with its first request, and returns the reply. Raises TemplateError."""
        ours, theirs = socket.socketpair()
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
            ours.sendall(load)
            reply = receive(ours)
        except OSError as error:
            ours.close()
            self.end()
            text = f"it could not be loaded within its limits of time and memory ({error})"
            raise TemplateError(f"chat template: {text}") from error
        ours.setblocking(False)
        self.socket = ours
        return reply

    def end(self) -> None:
        """Ends it, if it runs. The other end of its socket closes."""
        process, self._process = self._process, None
        if self.socket is not None:
            self.socket.close()
            self.socket = None
        if process is not None:
            process.kill()
            process.wait()


async def _receive_reply(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> Json:
    """Raises OSError if the process ends before the end of its reply, or sends too much."""
    received = bytearray()
    size = LENGTH_BYTES
    while len(received) < size:
        part = await loop.sock_recv(connection, RECEIVE_BYTES)
        if not part:
            raise ConnectionResetError("the process ended")
        received += part
        if size == LENGTH_BYTES and len(received) >= LENGTH_BYTES:
            size += int.from_bytes(received[:LENGTH_BYTES], "big")
            if size > REPLY_BYTES_MAX:
                raise ConnectionAbortedError("the reply is too large")
    reply: Json = orjson.loads(memoryview(received)[LENGTH_BYTES:])
    return reply
