"""RouterService over grpc.aio: messages in, core calls, messages out.

A session has one reader, which applies each frame as a whole to the core, and one writer, which
sends what has gathered since its last write as one frame: an overloaded link makes larger frames.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import grpc
import grpc.aio
import structlog

from common import telemetry
from common.blocks import SCHEME_ID
from common.error_proto import error_to_proto
from common.errors import (
    Bug,
    Conflict,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    Unimplemented,
)
from common.tasks import TaskGroup
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from router_svc.core.load import BookingKey
from router_svc.core.query import Query, block_size_of
from router_svc.core.route import Decision, Router
from router_svc.hashing import Hashers
from router_svc.metrics import Metrics
from router_svc.router_proto import (
    booking_from_proto,
    booking_to_proto,
    candidates_to_proto,
    decision_to_proto,
    key_from_proto,
    potential_load_to_proto,
    query_from_proto,
)
from router_svc.tracing import DecisionSpans, Stopwatch

LOG = structlog.get_logger(__name__)

SERVICE_NAME = "kvmesh.router.v1.RouterService"
# Answers a session may have waiting for its peer to read; above it, nothing more is read from it.
OUTBOX_MAX = 8192
# News decided without letting the loop run; about 5 ms.
SLICE = 256

Context = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """One router process. `clock` is the one that feeds the core, in seconds."""

    def __init__(
        self,
        router: Router,
        router_id: int,
        metrics: Metrics,
        *,
        rng: Random,
        hashers: Hashers | None = None,
        spans: DecisionSpans | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._router_id = router_id
        self._metrics = metrics
        self._rng = rng
        self._clock = clock
        self._hashers = Hashers(b"") if hashers is None else hashers
        self._spans = DecisionSpans() if spans is None else spans
        self._outboxes: set[_Outbox] = set()

    def end_sessions(self) -> None:
        """Send what is answered and close every session, so that frontends go elsewhere."""
        for outbox in self._outboxes:
            outbox.close()

    # grpc.aio takes coroutines that write to the context; the generated types know generators only.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[router_pb2.SessionRequest], context: Context
    ) -> None:
        outbox = _Outbox(self._router_id)
        self._outboxes.add(outbox)
        try:
            async with TaskGroup() as tasks:
                reader = tasks.create_task(self._serve(request_iterator, outbox))
                while (frame := await outbox.next_frame()) is not None:
                    await context.write(frame)
                reader.cancel()
        finally:
            self._outboxes.discard(outbox)
        if outbox.breach is not None:
            raise outbox.breach

    async def Route(
        self, request: router_pb2.RouteRequest, context: Context
    ) -> router_pb2.RouteResponse:
        key = _key_of(request) if request.book else None
        _require_query(request.HasField("query"), "query")
        trace = telemetry.current_traceparent() or ""
        decision = self._decide(request.query, key, None, trace)
        return router_pb2.RouteResponse(decision=decision_to_proto(decision))

    async def PotentialLoads(
        self, request: router_pb2.PotentialLoadsRequest, context: Context
    ) -> router_pb2.PotentialLoadsResponse:
        _require_query(request.HasField("query"), "query")
        query = self._hashed(query_from_proto(request.query), request.query)
        rows = self._router.potential_loads(query, self._clock())
        return router_pb2.PotentialLoadsResponse(loads=map(potential_load_to_proto, rows))

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        if bool(request.request_id) == request.HasField("query"):
            raise InvalidRequest("give either request_id or query", "request_id")
        now = self._clock()
        if request.request_id:
            decision = self._router.recent(request.request_id)
            if decision is None:
                raise NotFound(
                    f"no recent decision for the request {request.request_id!r}",
                    field="request_id",
                )
        else:
            query = self._hashed(query_from_proto(request.query), request.query)
            decision = self._router.preview(query, now, self._rng)
        return router_pb2.ExplainResponse(
            decision=decision_to_proto(decision),
            candidates=candidates_to_proto(decision.considered),
            selector=decision.selector,
            age_ms=round((now - decision.made_at) * 1000),
        )

    async def Dump(
        self, request: router_pb2.DumpRequest, context: Context
    ) -> router_pb2.DumpResponse:
        model = request.model
        workers = candidates_to_proto(self._router.loads(model, self._clock()))
        bookings = [b for b in self._router.book if model in ("", b.model)]
        return router_pb2.DumpResponse(
            router_id=self._router_id, bookings=map(booking_to_proto, bookings), workers=workers
        )

    async def Sync(  # type: ignore[override]
        self, request_iterator: AsyncIterator[router_pb2.SyncRequest], context: Context
    ) -> None:
        raise Unimplemented("routers do not replicate their bookings yet")

    # A session.

    async def _serve(
        self, frames: AsyncIterator[router_pb2.SessionRequest], outbox: _Outbox
    ) -> None:
        """Read until the stream ends or breaks the protocol; then its bookings are orphans."""
        book = self._router.book
        session: int | None = None
        try:
            async for frame in frames:
                if session is None:
                    frontend_id = _hello_of(frame)
                    session = book.open_session(frontend_id)
                    self._metrics.sessions.inc()
                    outbox.put_hello_ack()
                elif frame.HasField("hello"):
                    raise InvalidRequest("hello is for the first frame only", "hello")
                elif not frame.ListFields():
                    outbox.put_sign_of_life()
                await self._apply(frame, frontend_id, session, outbox)
        except MeshError as error:
            outbox.breach = error
        finally:
            if session is not None:
                orphaned = book.end_session(session, self._clock())
                self._metrics.sessions.dec()
                LOG.info("session ended", frontend_id=frontend_id, orphaned=orphaned)
            outbox.close()

    async def _apply(
        self, frame: router_pb2.SessionRequest, frontend_id: int, session: int, outbox: _Outbox
    ) -> None:
        """In the order that the contract gives the parts of a frame."""
        book = self._router.book
        for announced in frame.announced:
            booking = booking_from_proto(announced, frontend_id, "announced")
            try:
                book.announce(booking, session, self._clock())
            except Overloaded as error:
                self._metrics.unclaimed("announce_refused")
                LOG.warning("announced booking refused", key=booking.key, error=error.message)
        for results in self._answers(frame, frontend_id, session):
            await outbox.put(results)
        for message in frame.prefills_done:
            if not book.mark_prefill_done(key_from_proto(message, frontend_id, "prefills_done")):
                self._metrics.unclaimed("prefill_done")
        for output in frame.outputs:
            decay = output.decay_fraction if output.HasField("decay_fraction") else None
            key = key_from_proto(output.key, frontend_id, "outputs.key")
            if not book.add_output_blocks(key, output.blocks, decay):
                self._metrics.unclaimed("output")
        for message in frame.frees:
            if not book.free(key_from_proto(message, frontend_id, "frees")):
                self._metrics.unclaimed("free")

    def _answers(
        self, frame: router_pb2.SessionRequest, frontend_id: int, session: int
    ) -> Iterator[list[router_pb2.NewResult]]:
        """The answers to the News of a frame, a slice at a time."""
        news = iter(frame.news)
        while part := list(islice(news, SLICE)):
            yield [self._answer(new, frontend_id, session) for new in part]

    def _answer(self, new: router_pb2.New, frontend_id: int, session: int) -> router_pb2.NewResult:
        key = key_from_proto(new.key, frontend_id, "news.key")
        _require_query(new.HasField("query"), "news.query")
        try:
            decision = self._decide(new.query, key, session, new.traceparent)
        except MeshError as error:
            return router_pb2.NewResult(id=new.id, error=error_to_proto(error))
        return router_pb2.NewResult(id=new.id, decision=decision_to_proto(decision))

    def _decide(
        self,
        message: router_pb2.Query,
        key: BookingKey | None,
        session: int | None,
        traceparent: str,
    ) -> Decision:
        watch = Stopwatch()
        outcome = "bug"
        try:
            query = query_from_proto(message)
            if message.token_ids:
                query = self._hashed(query, message)
            watch.lap()
            matches = self._router.match(query)
            watch.lap()
            decision = self._router.decide(
                query, key, self._clock(), self._rng, session, matches=matches
            )
            watch.lap()
            outcome = "placed"
        except MeshError as error:
            outcome = error.kind.lower()
            self._spans.failed(traceparent, watch, error)
            raise
        except Exception as error:
            # A selector may be somebody else's code: one request fails, the session does not.
            LOG.exception("decision failed", model=message.model)
            raise Bug("the router failed to decide") from error
        finally:
            self._metrics.decided(outcome, watch.total_s())
        self._metrics.placed(query, decision, (*watch.laps_s(), watch.total_s()))
        self._spans.placed(traceparent, watch, query, key, decision)
        return decision

    def _hashed(self, query: Query, message: router_pb2.Query) -> Query:
        """The query with the hashes of its token ids, where it has those and no hashes."""
        if not message.token_ids or query.prefix_hashes or not query.model:
            return query
        block_size = block_size_of(query, self._router.fleet.block_size(query.model))
        lora_name = query.routing.lora_name if query.routing is not None else None
        hashes = self._hashers.prefix_hashes(
            message.token_ids, model=query.model, block_size=block_size, lora_name=lora_name or ""
        )
        return replace(query, prefix_hashes=hashes, hash_scheme=SCHEME_ID, block_size=block_size)


class _Outbox:
    """What a session still has to send, for its one writer.

    breach: why the session ends, if it ends with an error.
    """

    def __init__(self, router_id: int) -> None:
        self._router_id = router_id
        self._hello_ack: router_pb2.SessionHelloAck | None = None
        self._results: list[router_pb2.NewResult] = []
        self._sign_of_life = False
        self._closed = False
        self._filled = asyncio.Event()
        self._taken = asyncio.Event()
        self.breach: MeshError | None = None

    def put_hello_ack(self) -> None:
        self._hello_ack = router_pb2.SessionHelloAck(router_id=self._router_id)
        self._filled.set()

    def put_sign_of_life(self) -> None:
        """The peer asked for one; any frame is one."""
        self._sign_of_life = True
        self._filled.set()

    async def put(self, results: list[router_pb2.NewResult]) -> None:
        """Queue answers; waits while the peer is OUTBOX_MAX behind."""
        while len(self._results) >= OUTBOX_MAX:
            self._taken.clear()
            await self._taken.wait()
        self._results += results
        self._filled.set()
        await asyncio.sleep(0)  # The writer's turn, also amid a long frame.

    def close(self) -> None:
        """What is queued is still sent, then `next_frame` says that it is over."""
        self._closed = True
        self._filled.set()

    async def next_frame(self) -> router_pb2.SessionResponse | None:
        """All that has gathered, as one frame; None at the end."""
        await self._filled.wait()
        if not self._results and self._hello_ack is None and not self._sign_of_life:
            assert self._closed, "woken for nothing"
            return None
        frame = router_pb2.SessionResponse(hello_ack=self._hello_ack, results=self._results)
        self._hello_ack, self._results, self._sign_of_life = None, [], False
        if not self._closed:
            self._filled.clear()
        self._taken.set()
        return frame


def _hello_of(frame: router_pb2.SessionRequest) -> int:
    if not frame.HasField("hello"):
        raise Conflict("the first frame of a session must carry hello", reason="HELLO_REQUIRED")
    if frame.hello.frontend_id == 0:
        raise InvalidRequest("hello.frontend_id is required", "hello.frontend_id")
    return frame.hello.frontend_id


def _key_of(request: router_pb2.RouteRequest) -> BookingKey:
    if request.frontend_id == 0:
        raise InvalidRequest("book needs frontend_id: whose booking it is", "frontend_id")
    return key_from_proto(request.key, request.frontend_id, "key")


def _require_query(present: bool, field: str) -> None:
    if not present:
        raise InvalidRequest(f"{field} is required", field)
