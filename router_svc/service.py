"""RouterService over grpc.aio: translates messages to core calls and results to messages.

A session has one reader, which applies each frame as a whole to the core, and one writer, which
sends all results since its last write as one frame: a slow link gets larger frames.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from itertools import islice, starmap
from random import Random
from typing import Any

import grpc
import grpc.aio
import structlog

from common.errors import (
    Conflict,
    InternalError,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    Unimplemented,
)
from common.rpc.claimed_id import check_claimed_id
from common.runtime import telemetry
from common.streams.writer import FrameWriter
from common.wire.errors import error_to_proto
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from router_svc.core.admission import QueuedRequest
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.replicas import Replicas
from router_svc.core.router import RECENT_MAX, Router
from router_svc.decisions import DRAINING_REASON, Decisions
from router_svc.hashing import HasherCache
from router_svc.metrics import Metrics
from router_svc.proto import (
    booking_from_proto,
    booking_to_proto,
    candidate_to_proto,
    decision_to_proto,
    key_from_proto,
    load_to_proto,
    pool_to_proto,
    query_from_proto,
)
from router_svc.replication_sync import PeerSync
from router_svc.tracing import DecisionSpans

LOG = structlog.get_logger(__name__)

SERVICE_NAME = "kvmesh.router.v1.RouterService"
# Results that may wait for the peer to read; above it, the session reads no further frame.
OUTBOX_RESULTS_MAX = 8192
# The parts of a response's id that are not the id of its request: the prefix, and the frontend
# after a `resp_` id.
_NOT_REQUEST_ID = re.compile(r"^(chat)?cmpl-|^resp_|(?<=^resp_[0-9a-f]{32})[0-9a-f]{16}$")
# Queries that are decided in one turn of the event loop; about 25 ms. Their results leave then.
QUERIES_PER_SLICE = 256

Context = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """One router process. clock: the core's, seconds. track_output_blocks: frontends send them."""

    def __init__(
        self,
        router: Router,
        router_id: int,
        metrics: Metrics,
        *,
        rng: Random,
        hasher_cache: HasherCache | None = None,
        spans: DecisionSpans | None = None,
        peers: PeerSync | None = None,
        replicas: Replicas | None = None,
        track_output_blocks: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._router_id = router_id
        self._metrics = metrics
        self._rng = rng
        self._clock = clock
        self._peers = peers
        self._replicas = replicas
        self._track_output_blocks = track_output_blocks
        self.decisions = Decisions(
            router,
            metrics,
            rng=rng,
            hasher_cache=HasherCache(b"") if hasher_cache is None else hasher_cache,
            spans=DecisionSpans() if spans is None else spans,
            clock=clock,
        )
        self._outboxes: set[_SessionOutbox] = set()

    def end_sessions(self) -> None:
        """Sends pending results and closes every session and stream of a peer. A session with
        queued requests ends with ROUTER_DRAINING, so that its frontend routes them elsewhere.
        """
        self.decisions.close()
        for outbox in self._outboxes:
            outbox.writer.close()
        if self._peers is not None:
            self._peers.close()

    # grpc.aio takes coroutines that write to the context; the generated types know generators only.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[router_pb2.SessionRequest], context: Context
    ) -> None:
        outbox = _SessionOutbox()
        self._outboxes.add(outbox)
        try:
            await outbox.writer.serve(self._read_session(request_iterator, outbox), context.write)
        finally:
            self._outboxes.discard(outbox)

    async def Route(
        self, request: router_pb2.RouteRequest, context: Context
    ) -> router_pb2.RouteResponse:
        key = _key_of(request) if request.book else None
        _require_query(request.HasField("query"), "query")
        trace = telemetry.current_traceparent() or ""
        record = await self._await_decision(request.query, key, trace)
        decision = decision_to_proto(record.decision, self._router.fleet)
        return router_pb2.RouteResponse(decision=decision)

    async def _await_decision(
        self, query: router_pb2.Query, key: BookingKey | None, traceparent: str
    ) -> DecisionRecord:
        """Returns the decision, also of a queued request. Nothing stays booked if the caller
        cancels."""
        late_result: asyncio.Future[DecisionRecord | MeshError]
        late_result = asyncio.get_running_loop().create_future()
        reply = self.decisions.submit(query, key, None, traceparent, late_result.set_result)
        if isinstance(reply, DecisionRecord):
            return reply
        try:
            late_decision = await asyncio.shield(late_result)
        except asyncio.CancelledError:
            if not self.decisions.withdraw(reply) and isinstance(
                late_result.result(), DecisionRecord
            ):
                self._router.load_tracker.free(reply.key)
            raise
        if isinstance(late_decision, MeshError):
            raise late_decision
        return late_decision

    async def PotentialLoads(
        self, request: router_pb2.PotentialLoadsRequest, context: Context
    ) -> router_pb2.PotentialLoadsResponse:
        _require_query(request.HasField("query"), "query")
        query = self.decisions.with_hashes(query_from_proto(request.query), request.query)
        loads = self._router.potential_loads(query, self._clock())
        queue = self._router.queue
        return router_pb2.PotentialLoadsResponse(
            loads=starmap(load_to_proto, loads.items()),
            pending_count=len(queue),
            pending_tokens=queue.tokens,
        )

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        if bool(request.request_id) == request.HasField("query"):
            raise InvalidRequest("exactly one of request_id and query is required", "request_id")
        now = self._clock()
        if request.request_id:
            record = self._recent_decision(request.request_id)
        else:
            query = self.decisions.with_hashes(query_from_proto(request.query), request.query)
            record = self._router.preview(query, now, self._rng)
        return router_pb2.ExplainResponse(
            decision=decision_to_proto(record.decision, self._router.fleet),
            candidates=map(candidate_to_proto, record.considered),
            selector=record.selector,
            age_ms=round((now - record.made_at) * 1000),
        )

    def _recent_decision(self, request_id: str) -> DecisionRecord:
        # The id of a request or of its response.
        record = self._router.recent(_NOT_REQUEST_ID.sub("", request_id))
        if record is None:
            raise NotFound(
                f"no decision for the request {request_id!r} among the last {RECENT_MAX} of this "
                "router; use the id of its response, or request_id of its log line",
                field="request_id",
            )
        return record

    async def Dump(
        self, request: router_pb2.DumpRequest, context: Context
    ) -> router_pb2.DumpResponse:
        model = request.model
        workers = map(candidate_to_proto, self._router.loads(model, self._clock()))
        bookings = [b for b in self._router.load_tracker if model in ("", b.model)]
        return router_pb2.DumpResponse(
            router_id=self._router_id, bookings=map(booking_to_proto, bookings), workers=workers
        )

    async def Sync(  # type: ignore[override]
        self, request_iterator: AsyncIterator[router_pb2.SyncRequest], context: Context
    ) -> None:
        if self._peers is None:
            raise Unimplemented("this router does not exchange bookings")
        await self._peers.serve(request_iterator, context.write)

    async def Replicas(
        self, request: router_pb2.ReplicasRequest, context: Context
    ) -> router_pb2.ReplicasResponse:
        pools = () if self._replicas is None else self._replicas
        return router_pb2.ReplicasResponse(pools=starmap(pool_to_proto, pools))

    # A session.

    async def _read_session(
        self, frames: AsyncIterator[router_pb2.SessionRequest], outbox: _SessionOutbox
    ) -> None:
        """Reads until the stream ends or violates the protocol; then its bookings are orphans."""
        load_tracker = self._router.load_tracker
        session: int | None = None
        failure: MeshError | None = None
        try:
            async for frame in frames:
                if session is None:
                    frontend_id = _frontend_id_from_hello(frame)
                    session = load_tracker.open_session(
                        frontend_id, frame.hello.generation, self._clock()
                    )
                    self._metrics.sessions.inc()
                    outbox.put_hello_ack(self._hello_ack())
                elif frame.HasField("hello"):
                    raise InvalidRequest("hello is for the first frame only", "hello")
                elif not frame.ListFields():
                    outbox.put_heartbeat()
                await self._apply(frame, frontend_id, session, outbox)
        except MeshError as error:
            failure = error
        finally:
            if session is not None:
                self.decisions.withdraw_session(session)
                orphaned = load_tracker.end_session(session, self._clock())
                if self._replicas is not None:
                    self._replicas.demand.end_session(session)
                self._metrics.sessions.dec()
                LOG.info("session_ended", frontend_id=frontend_id, orphaned=orphaned)
            outbox.writer.close(failure)

    def _hello_ack(self) -> router_pb2.SessionHelloAck:
        queue = self._router.queue.settings
        return router_pb2.SessionHelloAck(
            router_id=self._router_id,
            track_output_blocks=self._track_output_blocks,
            queue_wait_ms=0 if queue.threshold is None else round(queue.wait_max_s * 1000),
        )

    async def _apply(
        self,
        frame: router_pb2.SessionRequest,
        frontend_id: int,
        session: int,
        outbox: _SessionOutbox,
    ) -> None:
        """Applies the parts of a frame in the order of the contract."""
        load_tracker = self._router.load_tracker
        for wire_booking in frame.announced:
            booking = booking_from_proto(wire_booking, frontend_id, "announced")
            try:
                self._router.reregister(booking, session, self._clock())
            except Overloaded as error:
                self._metrics.unclaimed("announce_refused")
                ids = {"frontend_id": frontend_id, "request_id": booking.key.request_id}
                LOG.warning("booking_rejected", **ids, error=error.message)
        new_requests = iter(frame.news)
        while part := list(islice(new_requests, QUERIES_PER_SLICE)):
            replies = (self._reply(new, frontend_id, session, outbox) for new in part)
            await outbox.put([reply for reply in replies if reply is not None])
        if frame.prefills_done:
            load_tracker.ranks.set_time(self._clock())
        for message in frame.prefills_done:
            if not load_tracker.mark_prefill_done(
                key_from_proto(message, frontend_id, "prefills_done")
            ):
                self._metrics.unclaimed("prefill_done")
        for output in frame.outputs:
            decay = output.decay_fraction if output.HasField("decay_fraction") else None
            key = key_from_proto(output.key, frontend_id, "outputs.key")
            if not load_tracker.add_output_blocks(key, output.blocks, decay):
                self._metrics.unclaimed("output")
        for message in frame.frees:
            key = key_from_proto(message, frontend_id, "frees")
            # A queued request has no booking, but peers may hold an orphan of the same key.
            was_queued = self.decisions.cancel_request(key)
            if not load_tracker.free(key) and not was_queued:
                self._metrics.unclaimed("free")
        if frame.HasField("awaiting") and self._replicas is not None:
            self._replicas.demand.replace(session, dict(frame.awaiting.requests))

    def _reply(
        self, new: router_pb2.New, frontend_id: int, session: int, outbox: _SessionOutbox
    ) -> router_pb2.NewResult | None:
        """Returns the result of one query, also if it fails; None if it is queued."""
        number = new.id

        def reply(outcome: DecisionRecord | MeshError) -> None:
            if isinstance(outcome, MeshError) and outcome.reason == DRAINING_REASON:
                outbox.writer.close(outcome)
            else:
                outbox.post(self._result(number, key, outcome))

        try:
            key = key_from_proto(new.key, frontend_id, "news.key")
            _require_query(new.HasField("query"), "news.query")
            booking_key = None if new.query_only else key
            decided = self.decisions.submit(new.query, booking_key, session, new.traceparent, reply)
        except MeshError as error:
            if error.reason != DRAINING_REASON:
                return self._result(number, None, error)
            # The client does not get it: other routers may serve the request. See `end_sessions`.
            outbox.writer.close(error)
            return None
        return None if isinstance(decided, QueuedRequest) else self._result(number, key, decided)

    def _result(
        self, number: int, key: BookingKey | None, outcome: DecisionRecord | MeshError
    ) -> router_pb2.NewResult:
        """Returns the message; an InternalError without a booking if foreign code made it not
        encodable."""
        try:
            if isinstance(outcome, MeshError):
                return router_pb2.NewResult(id=number, error=error_to_proto(outcome))
            decision = decision_to_proto(outcome.decision, self._router.fleet)
            return router_pb2.NewResult(id=number, decision=decision)
        except Exception:
            LOG.exception("result_not_encodable", outcome=type(outcome).__name__)
            if key is not None:
                self._router.load_tracker.free(key)
            error = InternalError("the router's result cannot be encoded")
            return router_pb2.NewResult(id=number, error=error_to_proto(error))


class _SessionOutbox:
    """The send queue of one session."""

    def __init__(self) -> None:
        self._hello_ack: router_pb2.SessionHelloAck | None = None
        self._results: list[router_pb2.NewResult] = []
        self._heartbeat_due = False
        self.writer = FrameWriter(self._next_frame)

    def put_hello_ack(self, hello_ack: router_pb2.SessionHelloAck) -> None:
        self._hello_ack = hello_ack
        self.writer.wake()

    def put_heartbeat(self) -> None:
        """Queues the heartbeat that the peer requested; any frame counts as one."""
        self._heartbeat_due = True
        self.writer.wake()

    def post(self, result: router_pb2.NewResult) -> None:
        """Queues the result of a queued request; the limits of the admission queue bound these."""
        self._results.append(result)
        self.writer.wake()

    async def put(self, results: list[router_pb2.NewResult]) -> None:
        """Queues results. Waits while OUTBOX_RESULTS_MAX are pending."""
        while len(self._results) >= OUTBOX_RESULTS_MAX:
            await self.writer.frame_taken()
        if results:
            self._results += results
            self.writer.wake()
        await asyncio.sleep(0)  # Lets the writer run during a long frame.

    def _next_frame(self) -> router_pb2.SessionResponse | None:
        """Returns all pending results as one frame; None if nothing is due."""
        if not self._results and self._hello_ack is None and not self._heartbeat_due:
            return None
        frame = router_pb2.SessionResponse(hello_ack=self._hello_ack, results=self._results)
        self._hello_ack, self._results, self._heartbeat_due = None, [], False
        return frame


def _frontend_id_from_hello(frame: router_pb2.SessionRequest) -> int:
    if not frame.HasField("hello"):
        raise Conflict("the first frame of a session must carry hello", reason="HELLO_REQUIRED")
    if frame.hello.frontend_id == 0:
        raise InvalidRequest("hello.frontend_id is required", "hello.frontend_id")
    check_claimed_id(frame.hello.frontend_id, "hello.frontend_id")
    return frame.hello.frontend_id


def _key_of(request: router_pb2.RouteRequest) -> BookingKey:
    if request.frontend_id == 0:
        raise InvalidRequest("book requires frontend_id, the owner of the booking", "frontend_id")
    check_claimed_id(request.frontend_id, "frontend_id")
    return key_from_proto(request.key, request.frontend_id, "key")


def _require_query(is_present: bool, field: str) -> None:
    if not is_present:
        raise InvalidRequest(f"{field} is required", field)
