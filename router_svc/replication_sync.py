"""Sync over gRPC: keeps the books of the routers in discovery alike.

Each router opens one stream to every other one, tells its own bookings on it frame by frame, each
answered before the next, and hears those of others on the streams that they open. What to tell and
what words mean is decided in `core/replica.py`.

A peer that answers nothing for SILENT_S, or tells nothing for so long, is lost: its stream is ended
here, and its bookings are orphans. Streams are opened again with jitter, so that routers do not all
dial one that came back in the same moment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from random import Random
from typing import Protocol

import grpc.aio
import structlog

from common.errors import Conflict, InvalidRequest, MeshError, Unavailable
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.runtime.tasks import TaskGroup
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.replication import OutboundSync, Replica
from router_svc.core.sessions import SessionAffinity
from router_svc.proto import (
    booking_to_proto,
    frame_from_proto,
    frame_to_proto,
    session_record_to_proto,
    snapshot_from_proto,
)

LOG = structlog.get_logger(__name__)

# Changes are gathered so long before they are told: a frame costs more than what is in it.
BATCH_DELAY_S = 0.01
# Three digests that did not come, or an answer that did not.
SILENCE_TIMEOUT_S = 3.0
REDIAL_S = 0.2
TICK_S = 0.1

SendResponse = Callable[[router_pb2.SyncResponse], Awaitable[None]]


class Stream(Protocol):
    """One Sync call, at the end that opened it."""

    async def read(self) -> router_pb2.SyncResponse | None:
        """The next answer; None at the end. Raises MeshError when it failed."""

    async def write(self, frame: router_pb2.SyncRequest) -> None:
        """Send a frame. Raises MeshError."""


# Opens a Sync call to a router; leaving the context ends it.
OpenSync = Callable[[Instance], AbstractAsyncContextManager[Stream]]


class PeerSync:
    """One router's streams with its peers.

    routers: those of discovery now, this one perhaps among them. open_sync: how to reach one; by
    default over gRPC. caught_up: set once every peer that was there when `run` began has said what
    it has booked.
    """

    def __init__(
        self,
        router_id: int,
        routers: Callable[[], Sequence[Instance]],
        book: LoadTracker,
        affinity: SessionAffinity | None = None,
        *,
        open_sync: OpenSync | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router_id = router_id
        self._routers = routers
        self._open_sync = open_sync or grpc_syncs()
        self._rng = rng or Random()
        self._clock = clock
        self._change_event = asyncio.Event()
        self._readers: set[asyncio.Task[None]] = set()
        self._awaiting_snapshot: set[int] = set()
        self.replica = Replica(book, self._change_event.set, affinity)
        self.caught_up = asyncio.Event()

    # Telling.

    async def run(self) -> None:
        """Keep a stream to every peer of discovery; ends by cancellation only."""
        async with TaskGroup() as tasks:
            outbound: dict[int, asyncio.Task[None]] = {}
            self._awaiting_snapshot = set(self._peers())
            self._mark_snapshot_done(None)
            is_first = True
            while True:
                peers = self._peers()
                for router_id in outbound.keys() - peers.keys():
                    outbound.pop(router_id).cancel()
                    self._mark_snapshot_done(router_id)
                for router_id in peers.keys() - outbound.keys():
                    # A newcomer finds its peers waiting; they do not all dial it at once.
                    delay_s = 0.0 if is_first else self._reconnect_delay_s()
                    work = self._keep_outbound_stream(peers[router_id], delay_s)
                    outbound[router_id] = tasks.create_task(work, name=f"sync {router_id}")
                is_first = False
                await asyncio.sleep(TICK_S)

    def _peers(self) -> dict[int, Instance]:
        return {r.id: r for r in self._routers() if r.id != self._router_id}

    def _reconnect_delay_s(self) -> float:
        return REDIAL_S * (0.5 + self._rng.random())

    def _mark_snapshot_done(self, router_id: int | None) -> None:
        """That peer's snapshot is in, or will never be."""
        self._awaiting_snapshot.discard(router_id or 0)
        if not self._awaiting_snapshot:
            self.caught_up.set()

    async def _keep_outbound_stream(self, peer: Instance, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        was_connected = True
        while True:
            outbound = self.replica.open_outbound()
            try:
                async with self._open_sync(peer) as stream:
                    await self._read_snapshot(peer.id, stream)
                    was_connected = True
                    await self._send_updates(peer.id, stream, outbound)
            except MeshError as error:
                # One line for a peer that is down, however long.
                log = LOG.warning if was_connected else LOG.debug
                log("peer_lost", router_id=peer.id, reason=str(error))
                was_connected = False
            except Exception:
                # Whatever ails a peer, decisions go on.
                LOG.exception("telling a peer failed", router_id=peer.id)
            finally:
                self.replica.told(outbound)
                self.replica.peer_stream_ended(peer.id)
            await asyncio.sleep(self._reconnect_delay_s())

    async def _read_snapshot(self, router_id: int, stream: Stream) -> None:
        is_complete = False
        while not is_complete:
            response = await _read_response(stream)
            if router_id in self._awaiting_snapshot:
                now = self._clock()
                bookings, session_records, refused = snapshot_from_proto(response)
                self.replica.receive_snapshot(router_id, bookings, now, session_records)
                self.replica.refused += len(refused)
                _log_refused(router_id, refused)
            is_complete = response.ends_snapshot
        self._mark_snapshot_done(router_id)

    async def _send_updates(self, router_id: int, stream: Stream, outbound: OutboundSync) -> None:
        """Until the stream fails."""
        while True:
            frame = outbound.frame(self._clock())
            await stream.write(frame_to_proto(frame, self._router_id))
            response = await _read_response(stream)
            self.replica.peer_responded(router_id, self._clock())
            if response.resend:
                outbound.request_full_sync()
            await self._wait_for_changes(outbound)

    async def _wait_for_changes(self, outbound: OutboundSync) -> None:
        """Returns when it is time for the next frame."""
        if outbound.is_frame_full:
            await asyncio.sleep(0)
            return
        due_s = outbound.seconds_until_due(self._clock())
        if due_s > 0:
            self._change_event.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await self._change_event.wait()
        await asyncio.sleep(BATCH_DELAY_S)

    # Hearing.

    async def serve(
        self, frames: AsyncIterator[router_pb2.SyncRequest], send_response: SendResponse
    ) -> None:
        """One stream that a peer opened, until it ends. Raises MeshError, also for silence."""
        for part in self.replica.snapshot():
            bookings = map(booking_to_proto, part)
            await send_response(
                router_pb2.SyncResponse(router_id=self._router_id, snapshot=bookings)
            )
        for session_records in self.replica.snapshot_session_records(self._clock()):
            told = map(session_record_to_proto, session_records)
            await send_response(
                router_pb2.SyncResponse(router_id=self._router_id, snapshot_bindings=told)
            )
        await send_response(router_pb2.SyncResponse(router_id=self._router_id, ends_snapshot=True))
        inbound = _InboundStream(self.replica, self._router_id, send_response, self._clock)
        try:
            async with TaskGroup() as tasks:
                reader = tasks.create_task(inbound.read(frames))
                watch = tasks.create_task(inbound.end_when_silent())
                reader.add_done_callback(lambda _: watch.cancel())
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
        finally:
            inbound.close_stream()

    def close(self) -> None:
        """End the streams that peers opened."""
        for reader in tuple(self._readers):
            reader.cancel()


class _InboundStream:
    """One stream that a peer opened. peer_id: 0 until its first frame."""

    def __init__(
        self,
        replica: Replica,
        router_id: int,
        send_response: SendResponse,
        clock: Callable[[], float],
    ) -> None:
        self._replica = replica
        self._router_id = router_id
        self._send_response = send_response
        self._clock = clock
        self._last_received_at = clock()
        self._peer_id = self._stream = 0

    async def read(self, frames: AsyncIterator[router_pb2.SyncRequest]) -> None:
        async for message in frames:
            self._last_received_at = self._clock()
            if not self._peer_id:
                self._identify_peer(message.router_id)
            elif message.router_id != self._peer_id:
                raise InvalidRequest("router_id must not change on a stream", "router_id")
            elif not self._replica.is_current(self._peer_id, self._stream):
                raise Conflict("a newer stream of this router took its place", reason="REPLACED")
            frame = frame_from_proto(message)
            _log_refused(self._peer_id, (*frame.refused, *frame.refused_session_records))
            resend = self._replica.apply_frame(
                self._peer_id, self._stream, frame, self._last_received_at
            )
            if resend:
                LOG.warning("peer_differs", router_id=self._peer_id, sequence=frame.sequence)
            response = router_pb2.SyncResponse(
                router_id=self._router_id, acked_sequence=frame.sequence, resend=resend
            )
            await self._send_response(response)

    def _identify_peer(self, peer_id: int) -> None:
        if peer_id in (0, self._router_id):
            raise InvalidRequest("router_id must be the sending router's", "router_id")
        self._peer_id, self._stream = peer_id, self._replica.stream_opened(peer_id)
        LOG.info("peer_joined", router_id=peer_id)

    async def end_when_silent(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._clock() - self._last_received_at > SILENCE_TIMEOUT_S:
                raise Unavailable(
                    f"the peer said nothing for {SILENCE_TIMEOUT_S:g} s", reason="SILENT"
                )

    def close_stream(self) -> None:
        if self._stream:
            orphaned = self._replica.stream_closed(self._peer_id, self._stream, self._clock())
            LOG.info("peer_left", router_id=self._peer_id, orphaned=orphaned)


def _log_refused(router_id: int, refused: Sequence[InvalidRequest]) -> None:
    """One line, however many entries are wrong."""
    if refused:
        reason = refused[0].message
        LOG.warning("peer_entries_refused", router_id=router_id, count=len(refused), reason=reason)


async def _read_response(stream: Stream) -> router_pb2.SyncResponse:
    try:
        async with asyncio.timeout(SILENCE_TIMEOUT_S):
            response = await stream.read()
    except TimeoutError:
        raise Unavailable(f"the peer answered nothing for {SILENCE_TIMEOUT_S:g} s") from None
    if response is None:
        raise Unavailable("the peer closed the stream")
    return response


def grpc_syncs(security: rpc.Security = rpc.PLAINTEXT) -> OpenSync:
    """Sync calls over gRPC. The channel belongs to the call and dies with it."""

    @asynccontextmanager
    async def open_sync(router: Instance) -> AsyncIterator[Stream]:
        channel = rpc.channel(router.address, security=security)
        stub = router_pb2_grpc.RouterServiceStub(channel)
        try:
            call = stub.Sync(metadata=rpc.call_metadata(security))
            async with rpc.cancelling(call):
                yield _GrpcStream(call)
        finally:
            await channel.close()

    return open_sync


class _GrpcStream:
    def __init__(
        self, call: grpc.aio.StreamStreamCall[router_pb2.SyncRequest, router_pb2.SyncResponse]
    ) -> None:
        self._call = call

    async def read(self) -> router_pb2.SyncResponse | None:
        """See Stream."""
        return await rpc.read(self._call)

    async def write(self, frame: router_pb2.SyncRequest) -> None:
        """See Stream."""
        try:
            await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Unavailable("the stream to the peer has ended") from error
