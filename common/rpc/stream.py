"""Client streams: one RPC on a channel of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeAlias, TypeVar

import grpc.aio

from common.errors import Unavailable
from common.rpc import channel as rpc

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
StreamingCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[RequestT, ResponseT] | grpc.aio.StreamStreamCall[RequestT, ResponseT]"
)


class GrpcStream(Generic[RequestT, ResponseT]):
    """The messages of one streaming call."""

    def __init__(self, call: StreamingCall[RequestT, ResponseT]) -> None:
        self._call: Any = call

    async def read(self) -> ResponseT | None:
        """The next message; None at the end. Raises MeshError if the stream failed."""
        message: ResponseT | None = await rpc.read(self._call)
        return message

    async def write(self, message: RequestT) -> None:
        """Send a message. Raises Unavailable after the end; `read` then raises its cause."""
        await rpc.confirm_peer(self._call)
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Unavailable("the stream has ended") from error


@asynccontextmanager
async def open_stream(
    address: str,
    open_call: Callable[[grpc.aio.Channel], StreamingCall[RequestT, ResponseT]],
    security: rpc.Security,
) -> AsyncIterator[GrpcStream[RequestT, ResponseT]]:
    """The call that `open_call` makes on a new channel; the context ends call and channel."""
    channel = rpc.channel(address, security=security)
    try:
        async with rpc.cancelling(open_call(channel)) as call:
            yield GrpcStream(call)
    finally:
        await channel.close()
