"""Replication over gRPC: keeps the bookings of the routers in discovery alike.

Each router opens one stream to every other one and sends its own bookings on it, one acknowledged
frame at a time. It receives those of its peers on the streams that they open. `core/replication.py`
decides what to send and how to apply what arrives.

A peer that sends no response or no frame for SILENCE_TIMEOUT_S is lost: its stream is ended, and
its bookings become orphans. Streams are reopened with jitter, so that not all routers dial a
restarted one at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from random import Random
from typing import Protocol

import structlog

from common.errors import Conflict, InvalidRequest, MeshError, Unavailable
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.stream import open_stream
from common.runtime.tasks import TaskGroup
from kvmesh.router.v1 import router_pb2
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.overlap import Overlaps
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

# Changes are batched: a frame costs more than its content.
BATCH_DELAY_S = 0.01
# Three missing digests, or one missing response.
SILENCE_TIMEOUT_S = 3.0
REDIAL_S = 0.2
TICK_S = 0.1

SendResponse = Callable[[router_pb2.SyncResponse], Awaitable[None]]


class Stream(Protocol):
    """The opening end of one Sync call."""

    async def read(self) -> router_pb2.SyncResponse | None:
        """The next response; None at the end. Raises MeshError if the stream failed."""

    async def write(self, frame: router_pb2.SyncRequest) -> None:
        """Send a frame. Raises MeshError."""


# Opens a Sync call to a router; leaving the context ends it.
OpenSync = Callable[[Instance], AbstractAsyncContextManager[Stream]]


class PeerSync:
    """One router's streams with its peers. routers: those in discovery, perhaps with this one.
    open_sync: by default over gRPC. caught_up: set once every peer present when `run` began has
    sent its snapshot.
    """

    def __init__(
        self,
        router_id: int,
        routers: Callable[[], Sequence[Instance]],
        load_tracker: LoadTracker,
        affinity: SessionAffinity | None = None,
        overlaps: Overlaps | None = None,
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
        self.replica = Replica(load_tracker, self._change_event.set, affinity, overlaps)
        self.caught_up = asyncio.Event()

    # Outbound.

    async def run(self) -> None:
        """Keep a stream to every peer in discovery; ends only by cancellation."""
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
                    # A router that starts dials at once; its peers dial it at random times.
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
        """That peer's snapshot is complete, or will never arrive."""
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
                # One line per outage.
                log = LOG.warning if was_connected else LOG.debug
                log("peer_lost", router_id=peer.id, reason=str(error))
                was_connected = False
            except Exception:
                # No failure of a peer may stop placement decisions.
                LOG.exception("peer_sync_failed", router_id=peer.id)
            finally:
                self.replica.close_outbound(outbound)
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
        """Runs until the stream fails."""
        while True:
            frame = outbound.frame(self._clock())
            await stream.write(frame_to_proto(frame, self._router_id))
            response = await _read_response(stream)
            self.replica.peer_responded(router_id, self._clock())
            if response.resend:
                outbound.request_full_sync()
            await self._wait_for_changes(outbound)

    async def _wait_for_changes(self, outbound: OutboundSync) -> None:
        """Returns when the next frame is due."""
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

    # Inbound.

    async def serve(
        self, frames: AsyncIterator[router_pb2.SyncRequest], send_response: SendResponse
    ) -> None:
        """Serve a stream that a peer opened, until it ends. Raises MeshError, also on silence."""
        response = partial(router_pb2.SyncResponse, router_id=self._router_id)
        for part in self.replica.snapshot():
            await send_response(response(snapshot=map(booking_to_proto, part)))
        for session_records in self.replica.snapshot_session_records(self._clock()):
            records = map(session_record_to_proto, session_records)
            await send_response(response(snapshot_bindings=records))
        await send_response(response(ends_snapshot=True))
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
        for reader in tuple(self._readers):
            reader.cancel()


class _InboundStream:
    """A stream that a peer opened. peer_id: 0 until its first frame."""

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
                raise Conflict("a newer stream of this router replaced it", reason="REPLACED")
            frame = frame_from_proto(message)
            _log_refused(self._peer_id, (*frame.refused, *frame.refused_uncounted))
            now = self._last_received_at
            resend = self._replica.apply_frame(self._peer_id, self._stream, frame, now)
            if resend:
                LOG.warning("peer_state_differs", router_id=self._peer_id, sequence=frame.sequence)
            response = router_pb2.SyncResponse(
                router_id=self._router_id, acked_sequence=frame.sequence, resend=resend
            )
            await self._send_response(response)

    def _identify_peer(self, peer_id: int) -> None:
        if peer_id in (0, self._router_id):
            error = f"router_id must be the id of the sender, not {peer_id}"
            raise InvalidRequest(error, "router_id")
        self._peer_id, self._stream = peer_id, self._replica.stream_opened(peer_id)
        LOG.info("peer_joined", router_id=peer_id)

    async def end_when_silent(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._clock() - self._last_received_at > SILENCE_TIMEOUT_S:
                error = f"no frame from the peer for {SILENCE_TIMEOUT_S:g} s"
                raise Unavailable(error, reason="SILENT")

    def close_stream(self) -> None:
        if self._stream:
            orphaned = self._replica.stream_closed(self._peer_id, self._stream, self._clock())
            LOG.info("peer_left", router_id=self._peer_id, orphaned=orphaned)


def _log_refused(router_id: int, refused: Sequence[InvalidRequest]) -> None:
    """One line per message, whatever the number of wrong entries."""
    if refused:
        reason = refused[0].message
        LOG.warning("peer_entries_refused", router_id=router_id, count=len(refused), reason=reason)


async def _read_response(stream: Stream) -> router_pb2.SyncResponse:
    try:
        async with asyncio.timeout(SILENCE_TIMEOUT_S):
            response = await stream.read()
    except TimeoutError:
        raise Unavailable(f"no response from the peer for {SILENCE_TIMEOUT_S:g} s") from None
    if response is None:
        raise Unavailable("the peer closed the stream")
    return response


def grpc_syncs(security: rpc.Security = rpc.PLAINTEXT) -> OpenSync:
    """Sync calls over gRPC, each on a channel of its own."""

    def open_sync(router: Instance) -> AbstractAsyncContextManager[Stream]:
        return open_stream(
            router.stream_address,
            "/kvmesh.router.v1.RouterService/Sync",
            router_pb2.SyncResponse,
            security,
        )

    return open_sync
