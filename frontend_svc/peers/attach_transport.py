"""Attach streams over gRPC, as frames."""

from __future__ import annotations

import asyncio
from typing import Protocol

import grpc.aio

from common.errors import WorkerLost
from common.request.token_stream import RequestFrame, ResponseFrame
from common.rpc import channel as rpc
from common.rpc.interceptors import mesh_error_from_rpc
from common.wire.token_stream import request_frame_to_proto, response_frame_from_proto
from kvmesh.engine.v1 import engine_pb2_grpc


class Transport(Protocol):
    """One open Attach stream, which `close` ends in any state. `read` returns None at its end.
    `write` returns when the transport can take the next frame. Both raise MeshError if it failed.
    """

    async def read(self) -> ResponseFrame | None: ...
    async def write(self, frame: RequestFrame) -> None: ...
    async def close(self) -> None: ...


class Dialer(Protocol):
    """Opens Attach streams to workers. Raises MeshError."""

    async def dial(self, address: str) -> Transport: ...


class GrpcTransport:
    """Attach over gRPC. The stream owns its channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        self._call = stub.Attach()

    async def read(self) -> ResponseFrame | None:
        message = await rpc.read(self._call)
        return None if message is None else response_frame_from_proto(message)

    async def write(self, frame: RequestFrame) -> None:
        await rpc.confirm_peer(self._call)
        try:
            await self._call.write(request_frame_to_proto(frame))
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from error
        except asyncio.InvalidStateError as error:  # the call is done; `read` raises its status
            raise WorkerLost("the stream has ended", retryable=True) from error

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


class GrpcDialer:
    """Opens Attach streams over gRPC."""

    def __init__(self, security: rpc.Security = rpc.PLAINTEXT) -> None:
        self._security = security

    async def dial(self, address: str) -> Transport:
        return GrpcTransport(rpc.channel(address, security=self._security))
