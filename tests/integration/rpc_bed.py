"""A gRPC server on loopback whose handlers a test chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health
from opentelemetry import trace

from common.rpc import channel as rpc
from common.rpc import interceptors
from common.rpc.stream_server import StreamServer

Handler = Callable[[bytes, Any], Awaitable[bytes]]


@dataclass
class RunningServer:
    """A server that runs `handle` for calls of every shape, and a channel to it."""

    handle: Handler
    calls: interceptors.RunningCalls = field(default_factory=interceptors.RunningCalls)
    security: rpc.Security = rpc.PLAINTEXT
    tracer: trace.Tracer | None = None
    port: int = 0
    server: grpc.aio.Server | None = None
    streams: StreamServer | None = None
    channel: grpc.aio.Channel | None = None

    def method(self, shape: str, name: str | None = None) -> Any:
        assert self.channel is not None
        return getattr(self.channel, shape)(f"/test.Echo/{name or shape}")

    async def stop(self, grace_s: float | None) -> None:
        if self.server is not None:
            await self.server.stop(grace_s)
        if self.streams is not None:
            self.streams.refuse()
            await self.calls.wait_idle(grace_s or 0)
            await self.streams.close()

    async def call(self, shape: str, request: bytes = b"hi", **options: Any) -> list[bytes]:
        """The responses of one call."""
        sent = iter([request]) if shape.startswith("stream") else request
        call = self.method(shape)(sent, timeout=options.pop("timeout", 10), **options)
        if shape.endswith("unary"):
            return [await call]
        return [message async for message in call]


def handlers_by_method(service: RunningServer) -> dict[str, Any]:
    async def unary_unary(request: bytes, context: Any) -> bytes:
        return await service.handle(request, context)

    async def unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield await service.handle(request, context)

    async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
        return await service.handle(b"".join([part async for part in requests]), context)

    async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> None:
        await context.write(b"first")
        async for part in requests:
            await context.write(await service.handle(part, context))

    return {
        "unary_unary": grpc.unary_unary_rpc_method_handler(unary_unary),
        "unary_stream": grpc.unary_stream_rpc_method_handler(unary_stream),
        "stream_unary": grpc.stream_unary_rpc_method_handler(stream_unary),
        "stream_stream": grpc.stream_stream_rpc_method_handler(stream_stream),
        "Attach": grpc.unary_stream_rpc_method_handler(unary_stream),
    }


def handlers(service: RunningServer) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler("test.Echo", handlers_by_method(service))


@asynccontextmanager
async def serving_streams(handle: Handler, **options: Any) -> AsyncIterator[RunningServer]:
    """The same on a `StreamServer`, without unary calls, health and reflection."""
    service = RunningServer(handle, **options)
    addresses: set[str] = set()
    server = service.streams = StreamServer(
        security=service.security, addresses=addresses, calls=service.calls
    )
    server.add_registered_method_handlers("test.Echo", handlers_by_method(service))
    service.port = server.bind("127.0.0.1", 0)
    addresses |= rpc.own_addresses("127.0.0.1", service.port)
    await server.start()
    try:
        yield service
    finally:
        await server.close()


@asynccontextmanager
async def serving(handle: Handler, **options: Any) -> AsyncIterator[RunningServer]:
    client = options.pop("client", None)
    service = RunningServer(handle, **options)
    addresses: set[str] = set()
    server = service.server = rpc.server(
        security=service.security, addresses=addresses, calls=service.calls, tracer=service.tracer
    )
    server.add_generic_rpc_handlers((handlers(service),))
    servicer = health.aio.HealthServicer()
    rpc.add_health(server, servicer)
    rpc.enable_reflection(server, ["test.Echo"])
    service.port = rpc.bind(server, "127.0.0.1", 0, security=service.security)
    addresses |= rpc.own_addresses("127.0.0.1", service.port)
    await server.start()
    service.channel = rpc.channel(f"127.0.0.1:{service.port}", security=client or service.security)
    try:
        yield service
    finally:
        await service.channel.close()
        await server.stop(None)


async def echo(request: bytes, _context: object) -> bytes:
    return request
