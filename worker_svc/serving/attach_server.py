"""The worker's end of Attach: per stream a `WorkerLink`, a reader, a writer and its slots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import structlog

from common.errors import Conflict, MeshError, WorkerLost
from common.request.preprocessed import PreprocessedRequest, RoutingHints, TokenIds
from common.request.prompt_logprobs import dump_parts
from common.request.token_stream import (
    AbortSlot,
    ArrivingPrompts,
    RequestFrame,
    ResponseFrame,
    StartSlot,
    WorkerLink,
)
from common.rpc.claimed_id import check_claimed_id
from common.runtime.tasks import TaskGroup
from common.streams.peer import SilenceWatch
from common.streams.silence import ATTACH
from common.streams.writer import FrameWriter
from worker_svc.engines.contract import LLMEngineOutput
from worker_svc.serving.probe import probe_request
from worker_svc.serving.runner import Runner
from worker_svc.serving.step_limit import TICK_S

# Time for the first tokens of a request to share the frame of its acceptance.
ACCEPTANCE_DELAY_S = 0.002
# Time for the current write to finish before a failed stream closes.
FINAL_WRITE_TIMEOUT_S = 0.1

log = structlog.get_logger()

Read = Callable[[], Awaitable[RequestFrame | None]]
Write = Callable[[ResponseFrame], Awaitable[None]]


class _StreamClosed(Exception):
    """The stream ends normally: either side closed it."""


class AttachStream:
    """One stream. `serve` returns after the stream has ended and all its tasks have stopped."""

    def __init__(
        self,
        worker_id: int,
        runner: Runner,
        read: Read,
        write: Write,
        arriving: ArrivingPrompts | None = None,
    ) -> None:
        self._runner = runner
        self._read = read
        self._write = write
        self._loop = asyncio.get_running_loop()
        self.link = WorkerLink(worker_id, self._loop.time(), arriving=arriving)
        self._writer = FrameWriter(self._next_frame)
        self._silence = SilenceWatch(
            ATTACH.limit_s,
            "message from the frontend",
            clock=self._loop.time,
            error=partial(WorkerLost, retryable=True),
        )
        # Of the slots in which `_run` has not ended.
        self._keys: dict[int, int] = {}
        self._tasks: TaskGroup | None = None
        self._is_ending = False

    async def serve(self, on_hello: Callable[[AttachStream], None]) -> None:
        """Reads, writes and runs slots. Raises MeshError if the frontend breaks the protocol."""
        try:
            async with TaskGroup() as self._tasks:
                self._tasks.create_task(self._writer.run(self._write))
                self._tasks.create_task(self._tick())
                try:
                    await self._read_frames(on_hello)
                except MeshError as error:
                    await self._close_with(error)
                await self._close_with(_StreamClosed())
        except _StreamClosed:
            return
        finally:
            self.link.close()
            for key in self._keys.values():  # a cancelled task may not have made its first step
                self._runner.discard(key)

    def replace(self) -> None:
        """Ends this stream because the same frontend opened a newer one."""
        self._close(Conflict("a newer stream of this frontend took over", reason="REPLACED"))

    def end(self) -> None:
        """Ends the stream after its slots have ended and the last frame is written."""
        self._is_ending = True
        self._writer.wake()

    def _close(self, error: Exception) -> None:
        """Drops queued frames and lets the writer raise the error: grpc cannot send a status during
        a write."""
        self.link.close()
        self._writer.close(error)

    async def _close_with(self, error: Exception) -> NoReturn:
        self._close(error)
        # A peer that reads nothing does not receive the status either.
        await asyncio.sleep(FINAL_WRITE_TIMEOUT_S)
        raise error

    async def _read_frames(self, on_hello: Callable[[AttachStream], None]) -> None:
        while (frame := await self._read()) is not None:
            is_first_frame = self.link.hello is None
            now = self._loop.time()
            self._silence.restart()
            commands = self.link.receive(frame, now)
            if is_first_frame:
                on_hello(self)
            for command in commands:
                self._apply_command(command)
            if commands:
                self._writer.wake_at(now + ACCEPTANCE_DELAY_S)
            else:
                self._writer.wake()

    def _apply_command(self, command: StartSlot | AbortSlot) -> None:
        assert self._tasks is not None
        match command:
            case StartSlot():
                self._start(command)
            case AbortSlot(slot, reason) if (key := self._keys.get(slot)) is not None:
                self._tasks.create_task(self._runner.abort(key, reason))

    def _start(self, start: StartSlot) -> None:
        assert self._tasks is not None
        request = start.leg_request.request
        if request is not None and len(request.token_ids.little_endian) != len(start.prompt):
            request.token_ids = TokenIds(start.prompt)
        try:
            if request is not None and request.is_probe:
                start.leg_request.request = probe_request(self._runner.engine, request)
            elif request is not None and self._runner.has_ranks:
                _name_rank(request)
            key = self._runner.admit(start.leg_request)
        except MeshError as error:
            self.link.reject(start.slot, error)
            self._writer.wake()
            return
        self.link.accept(start.slot)
        self._keys[start.slot] = key
        self._tasks.create_task(self._run(start.slot, key))

    async def _run(self, slot: int, key: int) -> None:
        link, wake = self.link, self._writer.wake

        def emit(output: LLMEngineOutput) -> None:
            if output.prompt_logprobs:
                for part in dump_parts(output.prompt_logprobs):
                    link.chunk(slot, part)
            if output.token_ids:
                link.tokens(slot, output.token_ids, output.logprobs)
            if output.chunk_json is not None:
                link.chunk(slot, output.chunk_json)
            wake()

        try:
            terminal = await self._runner.run(key, emit)
        except MeshError as error:
            link.end(slot, None, error=error)
        else:
            emit(terminal)
            link.end(
                slot,
                terminal.finish_reason,
                usage=terminal.completion_usage,
                prefill_result=terminal.prefill_result,
                worker_trace_link=terminal.worker_trace_link,
            )
        finally:
            self._keys.pop(slot, None)
        wake()

    def _next_frame(self) -> ResponseFrame | None:
        runner = self._runner
        frame = self.link.next_frame(self._loop.time(), runner.loads, runner.engine_failure)
        if frame is None and self._is_ending and not self.link.open_slots:
            self._writer.close(_StreamClosed())
        return frame

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._loop.time()
            self._runner.observe_steps(now)
            try:
                self._silence.check()
            except MeshError as error:
                await self._close_with(error)
            for abort in self.link.expire(now):
                self._apply_command(abort)
            self._writer.wake()


class AttachServer:
    """All Attach streams of a worker; at most one per frontend process."""

    def __init__(self, worker_id: int, runner: Runner) -> None:
        self._worker_id = worker_id
        self._runner = runner
        self._streams: dict[int, AttachStream] = {}
        self._arriving = ArrivingPrompts()

    @property
    def open_slots(self) -> int:
        return sum(stream.link.open_slots for stream in self._streams.values())

    def end(self) -> None:
        """Ends each stream after its slots have ended and its last frame is written."""
        for stream in self._streams.values():
            stream.end()

    async def serve(self, read: Read, write: Write) -> None:
        """Serves one stream until it ends. Raises MeshError if the frontend breaks the protocol."""
        stream = AttachStream(self._worker_id, self._runner, read, write, self._arriving)
        try:
            await stream.serve(self._register_stream)
        except MeshError as error:
            log.info("attach_failed", reason=error.reason, message=error.message)
            raise
        finally:
            hello = stream.link.hello
            if hello is not None and self._streams.get(hello.frontend_id) is stream:
                del self._streams[hello.frontend_id]

    def _register_stream(self, stream: AttachStream) -> None:
        hello = stream.link.hello
        assert hello is not None, "called after the hello"
        check_claimed_id(hello.frontend_id, "hello.frontend_id")
        previous = self._streams.get(hello.frontend_id)
        if previous is not None:
            assert previous.link.hello is not None
            if previous.link.hello.stream_seq > hello.stream_seq:
                raise Conflict("a newer stream of this frontend is open", reason="REPLACED")
            previous.replace()
        self._streams[hello.frontend_id] = stream


def _name_rank(request: PreprocessedRequest) -> None:
    """Names the rank of a leg: frontends leave out rank 0, and an engine would choose any."""
    routing = request.routing or RoutingHints()
    if routing.dp_rank is None:
        request.routing = replace(routing, dp_rank=0)
