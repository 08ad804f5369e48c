"""Replication over gRPC: keeps the bookings of the routers in discovery alike.

Each router opens one stream to every other one and sends its own bookings on it, one acknowledged
frame at a time. It receives those of its peers on the streams that they open. `core/replication.py`
decides what to send and how to apply what arrives.

A peer that is silent for the limit of the SYNC rule is lost: its stream is ended, and its bookings
become orphans. Streams are reopened with jitter, so that not all routers dial a restarted one at
once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from random import Random
from typing import Protocol

import structlog

from common.errors import Conflict, InvalidRequest, MeshError, Unavailable
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.rpc import channel as rpc
from common.rpc.claimed_id import check_claimed_id
from common.rpc.stream import open_stream
from common.runtime.tasks import TaskGroup
from common.streams.backoff import Backoff
from common.streams.peer import SilenceWatch, keep_connected
from common.streams.silence import SYNC
from common.streams.writer import FrameWriter
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
REDIAL_S = 0.2

SendResponse = Callable[[router_pb2.SyncResponse], Awaitable[None]]


class Stream(Protocol):
    """The opening end of one Sync call."""

    async def read(self) -> router_pb2.SyncResponse | None:
        """Returns the next response; None at the end. Raises MeshError if the stream failed."""

    async def write(self, frame: router_pb2.SyncRequest) -> None:
        """Sends a frame. Raises MeshError."""


# Opens a Sync call to a router; leaving the context ends it.
OpenSync = Callable[[Instance], AbstractAsyncContextManager[Stream]]


class PeerSync:
    """One router's streams with its peers, which are the other routers in discovery."""

    caught_up: asyncio.Event
    """Set once every peer of the first snapshot has sent its bookings."""

    def __init__(
        self,
        router_id: int,
        load_tracker: LoadTracker,
        affinity: SessionAffinity | None = None,
        overlaps: Overlaps | None = None,
        *,
        open_sync: OpenSync | None = None,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """open_sync: None: over gRPC."""
        self._router_id = router_id
        self._open_sync = open_sync or grpc_syncs()
        self._rng = rng or Random()
        self._clock = clock
        self._peers: Mapping[int, Instance] = {}
        self._peers_changed = asyncio.Event()
        self._readers: set[asyncio.Task[None]] = set()
        self._awaiting_snapshot: set[int] = set()
        self.replica = Replica(load_tracker, affinity, overlaps)
        self.caught_up = asyncio.Event()

    def on_snapshot(self, snapshot: Snapshot, _: SnapshotDiff) -> None:
        """Takes the routers in discovery, perhaps with this one, for `run`."""
        routers = snapshot.of("router")
        self._peers = {router.id: router for router in routers if router.id != self._router_id}
        self._peers_changed.set()

    # Outbound.

    async def run(self) -> None:
        """Keeps a stream to every peer, from the first snapshot until it is cancelled."""
        async with TaskGroup() as tasks:
            outbound: dict[int, asyncio.Task[None]] = {}
            await self._peers_changed.wait()
            self._awaiting_snapshot = set(self._peers)
            self._mark_snapshot_done(None)
            is_first = True
            while True:
                self._peers_changed.clear()
                peers = self._peers
                for router_id in outbound.keys() - peers.keys():
                    outbound.pop(router_id).cancel()
                    self._mark_snapshot_done(router_id)
                for router_id in peers.keys() - outbound.keys():
                    # A router that starts dials at once; its peers dial it at random times.
                    work = self._keep_outbound_stream(peers[router_id], is_at_once=is_first)
                    outbound[router_id] = tasks.create_task(work, name=f"sync {router_id}")
                is_first = False
                await self._peers_changed.wait()

    def _mark_snapshot_done(self, router_id: int | None) -> None:
        """Records that the snapshot of a peer is complete, or will never arrive."""
        self._awaiting_snapshot.discard(router_id or 0)
        if not self._awaiting_snapshot:
            self.caught_up.set()

    async def _keep_outbound_stream(self, peer: Instance, *, is_at_once: bool) -> None:
        backoff = Backoff(REDIAL_S, REDIAL_S, self._rng)
        if not is_at_once:
            await asyncio.sleep(backoff.next_s())
            backoff.reset()

        def on_lost(error: Exception, _: float) -> None:
            if isinstance(error, MeshError):
                # One line per outage.
                log = LOG.warning if backoff.failures == 1 else LOG.debug
                log("peer_lost", router_id=peer.id, reason=str(error))
            else:
                # No failure of a peer may stop placement decisions.
                LOG.exception("peer_sync_failed", router_id=peer.id)

        await keep_connected(partial(self._run_outbound_stream, peer, backoff), backoff, on_lost)

    async def _run_outbound_stream(self, peer: Instance, backoff: Backoff) -> bool:
        outbound = _OutboundStream(self.replica, self._router_id, peer.id, self._clock)
        try:
            async with self._open_sync(peer) as stream, TaskGroup() as tasks:
                tasks.create_task(outbound.end_when_silent())
                await self._read_snapshot(peer.id, outbound, stream)
                backoff.reset()
                await outbound.send_updates(stream)
        finally:
            outbound.close()
        return False

    async def _read_snapshot(
        self, router_id: int, outbound: _OutboundStream, stream: Stream
    ) -> None:
        is_complete = False
        while not is_complete:
            response = await outbound.read(stream)
            if router_id in self._awaiting_snapshot:
                now = self._clock()
                bookings, session_records, refused = snapshot_from_proto(response)
                self.replica.receive_snapshot(router_id, bookings, now, session_records)
                self.replica.refused += len(refused)
                _log_refused(router_id, refused)
            is_complete = response.ends_snapshot
        self._mark_snapshot_done(router_id)

    # Inbound.

    async def serve(
        self, frames: AsyncIterator[router_pb2.SyncRequest], send_response: SendResponse
    ) -> None:
        """Serves a stream that a peer opened, until it ends. Raises MeshError, also on silence."""
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
                watch = tasks.create_task(inbound.silence.run())
                reader.add_done_callback(lambda _: watch.cancel())
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
        finally:
            inbound.close_stream()

    def close(self) -> None:
        for reader in tuple(self._readers):
            reader.cancel()


class _OutboundStream:
    """A stream to a peer. Each frame is sent after the response to the one before."""

    def __init__(
        self, replica: Replica, router_id: int, peer_id: int, clock: Callable[[], float]
    ) -> None:
        self._replica = replica
        self._router_id = router_id
        self._peer_id = peer_id
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._writer = FrameWriter(self._due_updates)
        self._outbound = replica.open_outbound(self._writer.wake)
        self._silence = SilenceWatch(SYNC.limit_s, "response from the peer", clock=clock)
        self._is_response_due = True  # The snapshot.

    async def end_when_silent(self) -> None:
        """Raises Unavailable if the peer owes a response for too long."""
        self._silence.restart()
        await self._silence.run(lambda: self._is_response_due)

    async def read(self, stream: Stream) -> router_pb2.SyncResponse:
        response = await stream.read()
        if response is None:
            raise Unavailable("the peer closed the stream")
        self._silence.restart()
        return response

    async def send_updates(self, stream: Stream) -> None:
        """Sends what changes until the stream fails. Call it after the snapshot."""
        await self._writer.run(partial(self._exchange, stream))

    def close(self) -> None:
        self._replica.close_outbound(self._outbound)
        self._replica.peer_stream_ended(self._peer_id)

    def _due_updates(self) -> OutboundSync | None:
        due_s = self._outbound.seconds_until_due(self._clock())
        if due_s <= 0:
            return self._outbound
        # A timer without a length would fire again and again if both clocks differ by a rounding.
        self._writer.wake_at(self._loop.time() + max(due_s, BATCH_DELAY_S))
        return None

    async def _exchange(self, stream: Stream, outbound: OutboundSync) -> None:
        """Sends a frame and receives its response. The frame is built last, with all that changed
        meanwhile."""
        await asyncio.sleep(0 if outbound.is_frame_full else BATCH_DELAY_S)
        self._silence.restart()
        self._is_response_due = True
        await stream.write(frame_to_proto(outbound.frame(self._clock()), self._router_id))
        response = await self.read(stream)
        self._is_response_due = False
        self._replica.peer_responded(self._peer_id, self._clock())
        if response.resend:
            outbound.request_full_sync()


class _InboundStream:
    """A stream that a peer opened."""

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
        self.silence = SilenceWatch(SYNC.limit_s, "frame from the peer", clock=clock)
        self._peer_id = self._stream = 0  # Until the first frame.

    async def read(self, frames: AsyncIterator[router_pb2.SyncRequest]) -> None:
        async for message in frames:
            self.silence.restart()
            if not self._peer_id:
                self._identify_peer(message.router_id)
            elif message.router_id != self._peer_id:
                raise InvalidRequest("router_id must not change on a stream", "router_id")
            elif not self._replica.is_current(self._peer_id, self._stream):
                raise Conflict("a newer stream of this router replaced it", reason="REPLACED")
            frame = frame_from_proto(message)
            _log_refused(self._peer_id, (*frame.refused, *frame.refused_uncounted))
            now = self._clock()
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
        check_claimed_id(peer_id, "router_id")
        self._peer_id, self._stream = peer_id, self._replica.stream_opened(peer_id)
        LOG.info("peer_joined", router_id=peer_id)

    def close_stream(self) -> None:
        if self._stream:
            orphaned = self._replica.stream_closed(self._peer_id, self._stream, self._clock())
            LOG.info("peer_left", router_id=self._peer_id, orphaned=orphaned)


def _log_refused(router_id: int, refused: Sequence[InvalidRequest]) -> None:
    """Logs one line per message, whatever the number of wrong entries."""
    if refused:
        reason = refused[0].message
        LOG.warning("peer_entries_refused", router_id=router_id, count=len(refused), reason=reason)


def grpc_syncs(security: rpc.Security = rpc.PLAINTEXT) -> OpenSync:
    """Syncs calls over gRPC, each on a channel of its own."""

    def open_sync(router: Instance) -> AbstractAsyncContextManager[Stream]:
        return open_stream(
            router.stream_address,
            "/kvmesh.router.v1.RouterService/Sync",
            router_pb2.SyncResponse,
            security,
            peer_id=router.id,
        )

    return open_sync
