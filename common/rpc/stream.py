"""Client streams: one RPC on a connection of its own (`message_stream.py`).

Their servers are ours and those of grpc.aio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode

from common.errors import MeshError, Unavailable
from common.rpc.authentication import PeerCheck, prove_stream
from common.rpc.call_context import outgoing_metadata
from common.rpc.channel import (
    CONNECT_TIMEOUT_S,
    MESSAGE_BYTES_MAX,
    METADATA_BYTES_MAX,
    Security,
)
from common.rpc.http2.ends import ClientCall
from common.rpc.message_stream import MessageStream
from common.rpc.roles import server_role
from common.rpc.status import mesh_error_from_status
from common.runtime.mesh_auth import MeshSecret

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


class GrpcStream(MessageStream[ClientCall, ResponseT], Generic[RequestT, ResponseT]):
    """The messages of one streaming call. One task reads or delivers, one writes.

    peer: what the peer must prove before it receives a message; None: nothing.
    """

    def __init__(
        self,
        headers: list[tuple[str, str]],
        response_type: type[ResponseT],
        peer: PeerCheck | None,
    ) -> None:
        call = ClientCall(
            headers, message_bytes_max=MESSAGE_BYTES_MAX, header_bytes_max=METADATA_BYTES_MAX
        )
        super().__init__(call, response_type.FromString)
        self._peer = peer
        self._refusal: MeshError | None = None
        self._receiver: Callable[[ResponseT], None] | None = None

    async def read(self) -> ResponseT | None:
        """Returns the next message; None at the end. Raises MeshError if the stream failed."""
        call = self._call
        while not call.messages:
            if call.is_behind:
                self._await_turn()
            elif call.status is not None:
                self._raise_failure()
                return None
            await self._wait_to_read()
        message = self._take_message()
        self._send()
        return message

    async def deliver(self, receiver: Callable[[ResponseT], None]) -> None:
        """Calls `receiver` with each message as it arrives, without a task step; returns at the
        end. Raises the MeshError of a stream that failed, and what `receiver` raises."""
        self._reader = self._loop.create_future()
        self._receiver = receiver
        self._deliver()
        try:
            await self._reader
        finally:
            self._reader = self._receiver = None
        self._raise_failure()

    def _deliver(self) -> None:
        """Passes the messages that have arrived to the receiver of `deliver`, if there is one."""
        call, reader = self._call, self._reader
        try:
            while self._receiver is not None and call.messages:
                self._receiver(self._take_message())
        except Exception as error:
            self._receiver = None
            if reader is not None and not reader.done():
                reader.set_exception(error)
        self._send()
        if self._receiver is not None and call.is_behind:
            self._await_turn()
        elif self._receiver is None or call.status is not None:
            self._wake(reader)

    def __aiter__(self) -> AsyncIterator[ResponseT]:
        return self._messages()

    async def write(self, message: RequestT) -> None:
        """Sends a message; returns when the next one can be sent. Raises the MeshError of a stream
        that failed, and Unavailable after its end."""
        await self.confirmed()
        self._call.send(message.SerializeToString())
        await self._drained()

    async def confirmed(self) -> None:
        """Returns once the peer has proved what it must. Raises MeshError if it does not."""
        while self._peer is not None and self._call.status is None:
            await self._wait_to_write()
        if self._call.status is not None:
            self._raise_failure()
            raise Unavailable("the stream has ended")

    async def done_writing(self) -> None:
        """Half-closes the stream."""
        self._call.half_close()
        await self._drained()

    def done(self) -> bool:
        """Returns whether the call has ended."""
        return self._call.status is not None

    def close(self) -> None:
        """Ends the call in any state."""
        self._call.cancel()
        self._send()
        self._close_transport()

    def _on_received(self) -> None:
        call = self._call
        if self._peer is not None and (call.headers or call.status):
            error = self._peer.error(call.headers)
            if error is None:
                self._peer = None
            else:
                call.drop_messages()
                if call.status is None or call.status.code is StatusCode.OK:
                    self._refusal = error
                call.cancel()
        self._deliver()

    def _raise_failure(self) -> None:
        """Raises the error of a stream that failed."""
        if self._refusal is not None:
            raise self._refusal
        status = self._call.status
        if status is not None and status.code is not StatusCode.OK:
            raise mesh_error_from_status(status.code, status.message, status.details)

    async def _messages(self) -> AsyncIterator[ResponseT]:
        while (message := await self.read()) is not None:
            yield message


@asynccontextmanager
async def open_stream(
    address: str,
    method: str,
    response_type: type[ResponseT],
    security: Security,
    request: Message | None = None,
    *,
    peer_id: int = 0,
) -> AsyncIterator[GrpcStream[Message, ResponseT]]:
    """A call on a new connection; the context ends both. Raises MeshError without a connection.

    address: `host:port`.
    method: `/package.Service/Method`.
    request: the only one, of a method that streams its responses alone.
    peer_id: of the instance at the address, which proves it if its id has a key; 0: unknown.
    """
    stream = await connect(address, method, response_type, security, peer_id=peer_id)
    try:
        if request is not None:
            await stream.write(request)
            await stream.done_writing()
        yield stream
    finally:
        stream.close()


async def connect(
    address: str,
    method: str,
    response_type: type[ResponseT],
    security: Security,
    *,
    peer_id: int = 0,
) -> GrpcStream[Message, ResponseT]:
    """Returns a stream as `open_stream` does; the caller closes it."""
    secret = None if security.token is None else MeshSecret(security.token)
    proofs, peer = prove_stream(secret, security.members, method, address, peer_id)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    name = security.peer_name(server_role(method))
    headers = [
        (":method", "POST"),
        (":scheme", "https" if security.uses_mutual_tls else "http"),
        (":path", method),
        (":authority", name or address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "kvmesh"),
        *proofs,
        *outgoing_metadata(),
    ]
    context = None if security.files is None else security.files.newest().client_context
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, stream = await asyncio.get_running_loop().create_connection(
                lambda: GrpcStream[Message, ResponseT](headers, response_type, peer),
                host,
                int(port),
                ssl=context,
                server_hostname=None if context is None else name or host,
            )
    except (OSError, TimeoutError, ValueError) as error:  # ValueError: no name of a host
        reason = str(error) or f"no connection within {CONNECT_TIMEOUT_S:g} s"
        raise Unavailable(f"cannot connect to {address}: {reason}") from error
    return stream
