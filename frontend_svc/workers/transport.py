"""Attach streams over gRPC, as frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import Message

from common.request.token_stream import RequestFrame, ResponseFrame
from common.rpc import channel as rpc
from common.rpc.stream import GrpcStream, connect
from common.wire.token_stream import request_frame_to_proto, response_frame_from_proto
from kvmesh.engine.v1 import engine_pb2


class Transport(Protocol):
    """One open Attach stream, which `close` ends in any state. `deliver` calls `receive` with each
    frame as it arrives, and returns at the end; it raises what `receive` raises. `write` returns
    when the transport can take the next frame. Both raise MeshError if the stream failed.
    """

    async def deliver(self, receive: Callable[[ResponseFrame], None]) -> None: ...
    async def write(self, frame: RequestFrame) -> None: ...
    async def close(self) -> None: ...


class Dialer(Protocol):
    """Opens Attach streams to workers. Raises MeshError."""

    async def dial(self, address: str, worker_id: int) -> Transport: ...


class GrpcTransport:
    """Attach over gRPC, on a connection of its own."""

    def __init__(self, stream: GrpcStream[Message, engine_pb2.AttachResponse]) -> None:
        self._stream = stream

    async def deliver(self, receive: Callable[[ResponseFrame], None]) -> None:
        await self._stream.deliver(lambda message: receive(response_frame_from_proto(message)))

    async def write(self, frame: RequestFrame) -> None:
        await self._stream.write(request_frame_to_proto(frame))

    async def close(self) -> None:
        self._stream.close()


class GrpcDialer:
    """Opens Attach streams over gRPC."""

    def __init__(self, security: rpc.Security = rpc.PLAINTEXT) -> None:
        self._security = security

    async def dial(self, address: str, worker_id: int) -> Transport:
        method = "/kvmesh.engine.v1.EngineService/Attach"
        return GrpcTransport(
            await connect(
                address, method, engine_pb2.AttachResponse, self._security, peer_id=worker_id
            )
        )
