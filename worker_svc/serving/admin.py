"""AdminService over gRPC: operations on a worker. The interceptor authorises the caller.

A drained worker is out of discovery and refuses requests; `Resume` undoes that. Operations that
change the worker run one at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from contextlib import suppress
from typing import Any, Protocol

import grpc.aio

from common.errors import Conflict, Unimplemented
from kvmesh.engine.v1 import admin_pb2, admin_pb2_grpc
from worker_svc.adapters.loaded import LoadedAdapters
from worker_svc.engines.contract import FlushableEngine, SleepingEngine
from worker_svc.serving.runner import Runner

# Interval of checks for open KV transfers.
TRANSFER_POLL_S = 0.05

Context = grpc.aio.ServicerContext[Any, Any]


class Membership(Protocol):
    """The worker's entry in discovery."""

    async def deregister(self) -> None:
        """Removes the entry, once other workers hold the adapters that were placed on this one, or
        after a while. Idempotent."""

    async def left(self, timeout_s: float) -> None:
        """Returns when no peer sends work to it any more, after `timeout_s` at most."""

    async def rejoin(self) -> None:
        """Adds the entry if there is none. Raises Conflict if the process stops."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The operations of one worker.

    adapters: those of the engine; None: it cannot load any. lock: of all operations that change
    the worker. notice_s: seconds until the slowest peer has seen a change in discovery.
    """

    def __init__(
        self,
        runner: Runner,
        membership: Membership,
        engine_name: str,
        *,
        adapters: LoadedAdapters | None,
        lock: asyncio.Lock,
        notice_s: float,
    ) -> None:
        self._runner = runner
        self._membership = membership
        self._engine_name = engine_name
        self._adapters = adapters
        self._notice_s = notice_s
        self._lora_ids = itertools.count(1)
        self._is_asleep = False
        self._lock = lock

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        timeout_s = request.timeout_ms / 1000 if request.HasField("timeout_ms") else None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._leave()
                await self._runner.wait_idle()
                while self._transfers:  # noqa: ASYNC110 - engines report no event
                    await asyncio.sleep(TRANSFER_POLL_S)
        return admin_pb2.DrainResponse(
            running=self._runner.open_requests, transfers=self._transfers
        )

    async def _leave(self) -> None:
        async with self._lock:
            if self._runner.is_draining:
                return
            left = asyncio.ensure_future(self._membership.deregister())
            try:
                await asyncio.shield(left)
                # Until then peers may send requests.
                await asyncio.gather(asyncio.sleep(self._notice_s), self._membership.left(math.inf))
            finally:
                await left  # also if the time to wait has passed: that does not undo the drain
                self._runner.is_draining = True

    async def Resume(
        self, request: admin_pb2.ResumeRequest, context: Context
    ) -> admin_pb2.ResumeResponse:
        async with self._lock:
            if self._is_asleep:
                raise Conflict("the engine sleeps; call Wake first")
            was_draining = self._runner.is_draining
            self._runner.is_draining = False  # before a peer sees the worker
            try:
                await self._membership.rejoin()
            except BaseException:
                self._runner.is_draining = was_draining
                raise
        return admin_pb2.ResumeResponse()

    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: Context
    ) -> admin_pb2.FlushCacheResponse:
        engine = self._runner.engine
        if not isinstance(engine, FlushableEngine):
            raise self._unimplemented("FlushCache")
        async with self._lock:
            self._check_idle("retry without traffic, or drain the worker")
            return admin_pb2.FlushCacheResponse(blocks=await engine.flush_cache())

    async def LoadLora(
        self, request: admin_pb2.LoadLoraRequest, context: Context
    ) -> admin_pb2.LoadLoraResponse:
        await self._loaded("LoadLora").load(request.name, request.uri)
        return admin_pb2.LoadLoraResponse(lora_id=next(self._lora_ids))

    async def UnloadLora(
        self, request: admin_pb2.UnloadLoraRequest, context: Context
    ) -> admin_pb2.UnloadLoraResponse:
        await self._loaded("UnloadLora").unload(request.name)
        return admin_pb2.UnloadLoraResponse()

    async def ListLoras(
        self, request: admin_pb2.ListLorasRequest, context: Context
    ) -> admin_pb2.ListLorasResponse:
        return admin_pb2.ListLorasResponse(names=sorted(self._loaded("ListLoras").names))

    async def Sleep(
        self, request: admin_pb2.SleepRequest, context: Context
    ) -> admin_pb2.SleepResponse:
        engine = self._sleeping_engine("Sleep")
        async with self._lock:
            if not self._runner.is_draining:
                raise Conflict("the worker accepts requests; call Drain first")
            self._check_idle("call Drain again")
            if not self._is_asleep:
                await engine.sleep()
                self._is_asleep = True
        return admin_pb2.SleepResponse()

    async def Wake(
        self, request: admin_pb2.WakeRequest, context: Context
    ) -> admin_pb2.WakeResponse:
        engine = self._sleeping_engine("Wake")
        async with self._lock:
            if self._is_asleep:
                await engine.wake()
                self._is_asleep = False
        return admin_pb2.WakeResponse()

    @property
    def _transfers(self) -> int:
        return sum(load.rooms_open for load in self._runner.engine.loads())

    def _check_idle(self, advice: str) -> None:
        if self._runner.open_requests or self._transfers:
            raise Conflict(
                f"{self._runner.open_requests} requests and {self._transfers} KV transfers run;"
                f" {advice}"
            )

    def _loaded(self, operation: str) -> LoadedAdapters:
        if self._adapters is None:
            raise self._unimplemented(operation)
        return self._adapters

    def _sleeping_engine(self, operation: str) -> SleepingEngine:
        engine = self._runner.engine
        if not isinstance(engine, SleepingEngine):
            raise self._unimplemented(operation)
        return engine

    def _unimplemented(self, operation: str) -> Unimplemented:
        return Unimplemented(f"the {self._engine_name} engine does not implement {operation}")
