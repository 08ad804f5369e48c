"""Detects whether a test goes through a running service.

A test does so if, while it runs, a server of the product in this process handles an RPC or an HTTP
request, if the test starts a process of the product, or if such a process runs and the test makes
an RPC, sends an HTTP request, opens a connection or accesses the file or Consul registry. Servers
and processes of tests do not count: they run no module of a service package.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc._channel
import grpc.aio._channel
import httpcore

from common.registry.consul.registry import ConsulRegistry
from common.registry.file import FileRegistry
from common.rpc.interceptors import MeshInterceptor
from frontend_svc.edge import server as http_server

SERVICE_MODULE = re.compile(r"(frontend_svc|router_svc|indexer_svc|worker_svc|meshctl)(\.[\w.]+)?")
_RPC_ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class ServiceTraffic:
    """Counts the calls of this process to services, and those that its own services handle."""

    def __init__(self) -> None:
        self._handled = 0
        self._sent = 0
        self._pids: set[int] = set()

    def begin(self) -> None:
        """Starts a test."""
        self._handled = self._sent = 0
        self._pids = {pid for pid in self._pids if _is_running(pid)}

    @property
    def is_through_service(self) -> bool:
        """Whether the test that began last has gone through a service."""
        return bool(self._handled or (self._sent and self._pids))

    def install(self) -> None:
        """Observes the servers and clients of this process. Call once."""
        self._count_handled_calls()
        self._count_sent_calls()
        self._record_processes()

    def _count_handled_calls(self) -> None:
        intercept = MeshInterceptor.intercept_service

        async def intercept_service(
            interceptor: MeshInterceptor, continuation: Callable[..., Any], details: Any
        ) -> Any:
            async def counting(details: grpc.HandlerCallDetails) -> Any:
                handler = await continuation(details)
                functions = (getattr(handler, arity, None) for arity in _RPC_ARITIES)
                self._handled += any(
                    SERVICE_MODULE.fullmatch(type(getattr(one, "__self__", None)).__module__)
                    for one in functions
                )
                return handler

            return await intercept(interceptor, counting, details)

        wrap_api = http_server._close_connections_on_drain

        def counting_api(api: Any, is_draining: Callable[[], bool]) -> Any:
            serve = wrap_api(api, is_draining)

            async def serve_and_count(scope: Any, receive: Any, send: Any) -> None:
                self._handled += 1
                await serve(scope, receive, send)

            return serve_and_count

        setattr(MeshInterceptor, "intercept_service", intercept_service)  # noqa: B010
        setattr(http_server, "_close_connections_on_drain", counting_api)  # noqa: B010

    def _count_sent_calls(self) -> None:
        for module in (grpc._channel, grpc.aio._channel):
            for name, cls in vars(module).items():
                if name.endswith("MultiCallable") and "__call__" in vars(cls):
                    self._count_calls_of(cls, "__call__")
        self._count_calls_of(httpcore.ConnectionPool, "handle_request")
        self._count_calls_of(httpcore.AsyncConnectionPool, "handle_async_request")
        for registry in (FileRegistry, ConsulRegistry):
            for name in ("register", "snapshot", "watch"):
                self._count_calls_of(registry, name)
        sys.addaudithook(self._on_audit_event)

    def _count_calls_of(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def counting(*args: Any, **kwargs: Any) -> Any:
            self._sent += 1
            return method(*args, **kwargs)

        setattr(owner, name, counting)

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "socket.connect" or (
            event == "subprocess.Popen" and Path(os.fsdecode(args[0])).name in ("grpcurl", "curl")
        ):
            self._sent += 1

    def _record_processes(self) -> None:
        start = subprocess.Popen.__init__

        @functools.wraps(start)
        def start_and_record(popen: Any, args: Any, *more: Any, **kwargs: Any) -> None:
            start(popen, args, *more, **kwargs)
            words = [args] if isinstance(args, str | bytes | os.PathLike) else args
            if any(SERVICE_MODULE.fullmatch(os.fsdecode(word)) for word in words):
                self._pids.add(popen.pid)
                self._sent += 1

        setattr(subprocess.Popen, "__init__", start_and_record)  # noqa: B010


def _is_running(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
