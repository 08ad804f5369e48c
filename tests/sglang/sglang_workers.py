"""Worker processes, requests, and waiting: shared by the SGLang tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

from common.request.preprocessed import (
    BootstrapInfo,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
    TokenIds,
)
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from common.wire.preprocessed import to_proto
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc

REPOSITORY = Path(__file__).parents[2]
START_S = 480.0
WAIT_S = 60.0
# Sixteen concurrent pairs on a busy machine wait for KV pages for seconds.
HANDOFF_S = 7.0


def greedy_request(
    prompt: Sequence[int], max_tokens: int | None = 16, **parts: Any
) -> PreprocessedRequest:
    """A greedy request. parts: other fields, or `stop` for stop conditions except max_tokens."""
    stop = parts.pop("stop", StopConditions(ignore_eos=True))
    return PreprocessedRequest(
        token_ids=TokenIds.of(prompt),
        **{
            "stop_conditions": replace(stop, max_tokens=max_tokens),
            "sampling_options": SamplingOptions(temperature=0.0),
            **parts,
        },
    )


async def until(condition: Callable[[], object], what: str, limit_s: float = WAIT_S) -> float:
    """Seconds until the condition was true."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() - began < limit_s, f"never: {what}"
        await asyncio.sleep(0.002)
    return loop.time() - began


@dataclass(slots=True)
class Generated:
    """A whole response over gRPC."""

    token_ids: list[int]
    last: pb.GenerateResponse


class WorkerProcess:
    """`python -m worker_svc`, by default with SGLang, detected by its ready line."""

    def __init__(
        self, role: str, process: asyncio.subprocess.Process, ready_fd: int, log: Path
    ) -> None:
        self.role = role
        self.process = process
        self.instance_id = 0
        self._ready_fd = ready_fd
        self._log = log
        self._channel: grpc.aio.Channel | None = None

    @staticmethod
    @asynccontextmanager
    async def started(
        role: str,
        *,
        model: Path | None,
        folder: Path,
        engine_args: Mapping[str, Any],
        name: str = "",
        engine: str = "sglang",
        more_flags: Sequence[str] = (),
    ) -> AsyncIterator[WorkerProcess]:
        """A starting worker, stopped on exit. Its log is <folder>/<name or role>.log.

        model: None for an engine with a model of its own.
        """
        ready_fd, theirs = os.pipe()
        flags: dict[str, Any] = {
            "--engine": engine,
            "--role": role,
            **({"--model-path": model, "--tool-call-parser": "hermes"} if model else {}),
            "--model-name": "tiny",
            "--registry": "file",
            "--registry-path": folder / "registry",
            "--ready-fd": theirs,
            "--handoff-timeout-s": HANDOFF_S,
            **({"--engine-args": json.dumps(engine_args)} if engine_args else {}),
            "--canary-idle-s": 2,
            "--notice-s": 0,
            "--drain-s": 2,
        }
        arguments = [*(str(one) for pair in flags.items() for one in pair), *more_flags]
        path = folder / f"{name or role}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "worker_svc", *arguments),
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'protos'}:{REPOSITORY}"},
                pass_fds=(theirs,),
                stderr=log,
                stdout=log,
            )
        os.close(theirs)
        worker = WorkerProcess(role, process, ready_fd, path)
        try:
            yield worker
        finally:
            await worker.end()

    async def ready(self) -> None:
        """Returns when it serves."""
        line = "{}"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                with os.fdopen(self._ready_fd) as pipe:
                    line = await asyncio.to_thread(pipe.readline)
        ready = json.loads(line or "{}")
        log = self._log.read_text()[-4000:]
        assert "addresses" in ready, f"the {self.role} worker did not start: {log}"
        self.instance_id = int(ready["instance_id"])
        self._channel = rpc.channel(ready["addresses"]["grpc"])

    @property
    def stub(self) -> Any:
        """The gRPC stub. Any: the stub's types are those of blocking channels."""
        assert self._channel is not None, "not ready"
        return engine_pb2_grpc.EngineServiceStub(self._channel)

    async def end(self) -> int:
        """Stops it if it still runs; returns its exit status."""
        if self._channel is not None:
            await self._channel.close()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), WAIT_S)
            except TimeoutError:
                self.process.kill()
        return await self.process.wait()

    async def info(self) -> pb.GetInfoResponse:
        """Its GetInfo response."""
        info: pb.GetInfoResponse = await rpc.unary(
            self.stub.GetInfo, pb.GetInfoRequest(), timeout_s=WAIT_S
        )
        return info

    async def rooms_open(self) -> int:
        """Open handoffs."""
        load_response: pb.GetLoadResponse = await rpc.unary(
            self.stub.GetLoad, pb.GetLoadRequest(), timeout_s=WAIT_S
        )
        return sum(load.rooms_open for load in load_response.loads)

    async def running(self, count: int) -> None:
        """Returns when it computes this many requests."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            load_response: pb.GetLoadResponse = await rpc.unary(
                self.stub.GetLoad, pb.GetLoadRequest(), timeout_s=WAIT_S
            )
            if sum(load.running for load in load_response.loads) == count:
                return
            assert loop.time() - began < WAIT_S, f"not {count} are running: {load_response.loads}"
            await asyncio.sleep(0.02)

    async def settled(self, rooms: int = 0) -> None:
        """Returns when this many handoffs are open."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (found := await self.rooms_open()) != rooms:
            assert loop.time() - began < WAIT_S, f"{found} rooms stay open, not {rooms}"
            await asyncio.sleep(0.02)

    async def generate(
        self, request: PreprocessedRequest, request_id: str, timeout_s: float = 60.0
    ) -> Generated:
        """The whole response. Raises MeshError."""
        message = pb.GenerateRequest(request=to_proto(request), request_id=request_id)
        call = self.stub.Generate(message, timeout=timeout_s)
        tokens: list[int] = []
        last = pb.GenerateResponse()
        try:
            async for last in call:
                tokens += last.token_ids
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from None
        finally:
            call.cancel()
        return Generated(tokens, last)

    def scheduler_pids(self) -> list[int]:
        """Its SGLang scheduler processes."""
        import psutil  # type: ignore[import-untyped]

        return [
            child.pid
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "scheduler" in " ".join(child.cmdline())
        ]


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def make_bootstrap_info(info: pb.GetInfoResponse, room: int) -> BootstrapInfo:
    """The rendezvous of the legs."""
    return BootstrapInfo(info.bootstrap_host, info.bootstrap_port, room)
