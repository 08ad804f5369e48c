"""Concurrent and queued requests over real gRPC: nothing is lost or booked twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from common.errors import (
    Conflict,
    Overloaded,
    RequestCancelled,
    Unavailable,
)
from common.request.placement import Placement
from common.request.preprocessed import RoutingHints, SessionControl
from common.rpc import channel as rpc
from common.wire.preprocessed import dataclass_to_proto
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.types.v1 import request_pb2
from router_svc.core.candidate import LoadTotals
from tests.kit.local_router import LocalRouter, Session, error_of, key, local_router, new, query_of
from tests.kit.waiting import WAIT_S, until

BATCH = 1000
TOKENS = 2 * BATCH  # One such prompt makes a worker busy.


def busy(**settings: Any) -> AbstractAsyncContextManager[LocalRouter]:
    """A router with workers that are busy with one prompt of the usual length."""
    query, worker = {"total_tokens": TOKENS}, {"max_num_batched_tokens": BATCH}
    return local_router(query=query, worker=worker, **settings)


@pytest.fixture
async def bed() -> AsyncIterator[LocalRouter]:
    """One worker, and a queue."""
    async with busy(queue_threshold=1.0) as bed:
        await bed.add_workers(1)
        yield bed


# A thousand concurrent requests.


@pytest.mark.slow
@pytest.mark.row("S1-105")
async def test_a_thousand_concurrent_decisions_are_neither_lost_nor_doubled() -> None:
    async with busy() as bed, bed.session() as one, bed.session() as other:
        await bed.add_workers(1, 2, 3, 4, 5)
        tokens = 100

        async def by_session(session: Session, numbers: range) -> list[int]:
            for number in numbers:
                await session.send_queries(number, total_tokens=tokens)
            results_by_id = await session.results_by_id(len(numbers))
            assert set(results_by_id) == set(numbers)
            return [result.decision.worker.worker_id for result in results_by_id.values()]

        async def by_route(number: int) -> list[int]:
            return [(await bed.route(number, total_tokens=tokens)).worker.worker_id]

        placed = await asyncio.gather(
            by_session(one, range(400)),
            by_session(other, range(400, 800)),
            *(by_route(number) for number in range(800, 1000)),
        )
        at = Counter(worker_id for workers in placed for worker_id in workers)
        assert sum(at.values()) == 1000
        assert len(bed.router.load_tracker) == 1000
        for worker_id, requests in at.items():
            load = bed.router.load_tracker.load(Placement(worker_id, 0), bed.clock.now)
            assert load == LoadTotals(requests * tokens, requests * 7, requests)
        assert max(at.values()) - min(at.values()) <= 1, (
            "each decision includes all bookings before it"
        )
        # All again, by the other call: the same results, and each load counts once.
        again = await asyncio.gather(*(by_route(number) for number in range(0, 1000, 5)))
        assert len(again) == 200
        assert len(bed.router.load_tracker) == 1000
        await one.send(frees=[key(number) for number in range(500)])
        await other.send(frees=[key(number) for number in range(500, 1000)])
        await until(lambda: len(bed.router.load_tracker) == 0, "all are freed")
        for worker_id in at:
            assert (
                bed.router.load_tracker.load(Placement(worker_id, 0), bed.clock.now) == LoadTotals()
            )


@pytest.mark.slow
@pytest.mark.row("S1-105", "S1-106")
async def test_a_thousand_queued_requests_are_placed_once_each_and_never_on_a_busy_worker(
    bed: LocalRouter,
) -> None:
    await bed.add_workers(2, 3, 4)
    async with bed.session() as session:
        for first in range(0, 1000, 100):
            await session.send_queries(*range(first, first + 100))
        open_ones, seen = set[int](), set[int]()
        # Ends: each answer has a limit.
        while len(seen) < 1000:
            for number, result in (await session.next_results_by_id()).items():
                assert number not in seen
                assert result.HasField("decision"), result
                open_ones.add(number)
                seen.add(number)
            loads = [
                bed.router.load_tracker.load(Placement(at, 0), bed.clock.now) for at in (1, 2, 3, 4)
            ]
            assert all(load.requests <= 1 for load in loads), "one prompt makes a worker busy"
            await session.send(frees=[key(number) for number in open_ones])
            open_ones.clear()
        await until(lambda: len(bed.router.load_tracker) == 0, "all are freed")
    assert len(bed.router.queue) == 0


@pytest.mark.row("S1-106")
async def test_a_booking_counts_before_its_caller_has_the_response() -> None:
    async with busy() as bed, bed.session() as session:
        await bed.add_workers(1, 2, 3, 4)
        await session.send_queries(*range(8))
        await until(
            lambda: len(bed.router.load_tracker) == 8, "all are booked before any response is read"
        )
        at = Counter(booking.worker.worker_id for booking in bed.router.load_tracker)
        assert at == {1: 2, 2: 2, 3: 2, 4: 2}, "no herd on one worker"
        assert len(await session.results_by_id(8)) == 8


# The admission queue over gRPC.


@pytest.mark.row("S1-21")
async def test_a_queued_query_gets_its_result_once_a_worker_has_capacity(bed: LocalRouter) -> None:
    async with bed.session() as session:
        await session.send_queries(1, 2, 3)
        assert set(await session.results_by_id(1)) == {1}
        await bed.waiting(2)
        bed.clock.now += 0.25
        await session.send(prefills_done=[key(1)])
        (result,) = (await session.results_by_id(1)).values()
        assert (result.id, result.decision.queued_ms) == (2, 250)
        await session.send(frees=[key(1), key(2)])
        assert set(await session.results_by_id(1)) == {3}
    assert bed.metric("queue_wait_seconds_count") == 2
    assert bed.metric("decisions_total", selector="kv", outcome="placed") == 3


async def test_a_route_call_is_queued_like_a_session_query_and_both_by_priority(
    bed: LocalRouter,
) -> None:
    async with bed.session() as session:
        await bed.route(0)
        low = asyncio.ensure_future(bed.route(1))
        await bed.waiting(1)
        await session.send_queries(2, strict_priority=1)
        await bed.waiting(2)
        await session.send(frees=[key(0)])
        assert set(await session.results_by_id(1)) == {2}
        await session.send(frees=[key(2)])
        assert (await low).worker.worker_id == 1
        await session.send(frees=[key(1)])
        await until(lambda: len(bed.router.load_tracker) == 0, "all are freed")


async def test_potential_loads_and_metrics_report_the_queue(bed: LocalRouter) -> None:
    async with bed.session() as session:
        await session.send_queries(1, 2, 3)
        await bed.waiting(2)
        request = pb.PotentialLoadsRequest(query=query_of(total_tokens=10))
        response = await rpc.unary(bed.stub.PotentialLoads, request, timeout_s=WAIT_S)
        assert (response.pending_count, response.pending_tokens) == (2, 2 * TOKENS)
        assert bed.metric("queue_requests") == 2
        assert bed.metric("queue_tokens") == 2 * TOKENS


async def test_a_query_without_a_booking_is_never_queued(bed: LocalRouter) -> None:
    await bed.route(0)
    request = pb.RouteRequest(query=query_of())
    response = await rpc.unary(bed.stub.Route, request, timeout_s=WAIT_S)
    assert response.decision.worker.worker_id == 1
    assert len(bed.router.queue) == 0


async def test_a_request_freed_while_queued_is_withdrawn_without_a_booking(
    bed: LocalRouter,
) -> None:
    async with bed.session() as session:
        await session.send_queries(1, 2, 3)
        await session.results_by_id(1)
        await bed.waiting(2)
        await session.send(frees=[key(2)])
        result = (await session.results_by_id(1))[2]
        assert isinstance(error_of(result), RequestCancelled)
        await session.send(frees=[key(1)])
        assert set(await session.results_by_id(1)) == {3}
        assert [booking.key.request_id for booking in bed.router.load_tracker] == ["r3"]
    assert bed.metric("unclaimed_total", kind="free") == 0


async def test_a_request_sent_and_freed_in_one_frame_leaves_no_booking(bed: LocalRouter) -> None:
    async with bed.session() as session:
        await bed.route(0)
        await session.send(news=[new(1)], frees=[key(1)])
        assert isinstance(error_of((await session.results_by_id(1))[1]), RequestCancelled)
        assert (len(bed.router.queue), len(bed.router.load_tracker)) == (0, 1)


async def test_a_session_that_ends_withdraws_its_queued_requests(bed: LocalRouter) -> None:
    await bed.route(0)
    async with bed.session() as session:
        await session.send_queries(1, 2)
        await bed.waiting(2)
    await bed.waiting(0)
    assert len(bed.router.load_tracker) == 1


async def test_a_cancelled_route_call_leaves_the_queue(bed: LocalRouter) -> None:
    await bed.route(0)
    call = asyncio.ensure_future(bed.route(1))
    await bed.waiting(1)
    call.cancel()
    await asyncio.wait([call])
    await bed.waiting(0)
    assert len(bed.router.load_tracker) == 1


async def test_a_repeated_key_replaces_the_queued_request(bed: LocalRouter) -> None:
    async with bed.session() as old, bed.session() as young:
        await old.send_queries(1, 2)
        await old.results_by_id(1)
        await bed.waiting(1)
        await young.send_queries(2, waited_ms=500)
        result = (await old.results_by_id(1))[2]
        error = error_of(result)
        assert isinstance(error, Conflict)
        assert error.reason == "ASKED_AGAIN"
        await bed.waiting(1)
        await old.send(frees=[key(1)])
        assert set(await young.results_by_id(1)) == {2}
        assert len(bed.router.load_tracker) == 1


async def test_a_full_queue_rejects_with_the_limit_and_a_retry_hint() -> None:
    async with busy(queue_threshold=1.0, queue_requests_max=2) as bed, bed.session() as session:
        await bed.add_workers(1)
        await session.send_queries(1, 2, 3, 4)
        results_by_id = await session.results_by_id(2)
        assert set(results_by_id) == {1, 4}
        error = error_of(results_by_id[4])
        assert isinstance(error, Overloaded)
        assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 1.0)
        assert error.metadata["limit_kind"] == "requests"
        with pytest.raises(Overloaded) as caught:
            await bed.route(5)
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.metadata["limit"] == "2"
        assert bed.metric("queue_full_total", limit="requests") == 2


async def test_a_wait_above_the_limit_ends_with_a_typed_error(bed: LocalRouter) -> None:
    async with bed.session() as session:
        await session.send_queries(1, 2)
        await session.results_by_id(1)
        await bed.waiting(1)
        bed.clock.now += 60.0
        error = error_of((await session.results_by_id(1))[2])
        assert isinstance(error, Overloaded)
        assert error.reason == "QUEUE_TIMEOUT"


async def test_when_all_workers_leave_all_queued_requests_fail_at_once(bed: LocalRouter) -> None:
    async with bed.session() as session:
        await session.send_queries(1, 2, 3)
        await session.results_by_id(1)
        await bed.waiting(2)
        await bed.leases[1].close()
        for result in (await session.results_by_id(2)).values():
            error = error_of(result)
            assert isinstance(error, Unavailable)
            assert error.reason == "NO_WORKER"


async def test_a_closing_router_ends_queued_requests_with_a_retryable_error(
    bed: LocalRouter,
) -> None:
    async with bed.session() as session:
        await session.send_queries(1, 2)
        await session.results_by_id(1)
        unary = asyncio.ensure_future(bed.route(3))
        await bed.waiting(2)
        drain = asyncio.ensure_future(bed.app.drain(WAIT_S))
        with pytest.raises(Unavailable) as by_stream:
            await session.read()
        with pytest.raises(Unavailable) as by_call:
            await unary
        await drain
        reasons = {by_stream.value.reason, by_call.value.reason}
        assert reasons == {"ROUTER_DRAINING"}
        assert len(bed.router.queue) == 0


async def test_a_closing_router_rejects_requests_that_would_be_queued(
    bed: LocalRouter,
) -> None:
    async with bed.session() as session:
        await session.send_queries(1)
        await session.results_by_id(1)
        bed.decisions.close()
        await session.send_queries(2, 3)
        with pytest.raises(Unavailable) as closing:
            await session.read()
        assert closing.value.reason == "ROUTER_DRAINING"
        assert len(bed.router.queue) == 0


@pytest.mark.parametrize("tracks", [True, False])
async def test_the_hello_reports_whether_frontends_send_output_blocks(tracks: bool) -> None:
    async with busy(track_output_blocks=tracks) as bed, bed.session() as session:
        assert session.hello_ack.track_output_blocks is tracks


async def test_busy_workers_get_no_request_and_if_all_are_busy_requests_are_rejected() -> None:
    async with busy(active_prefill_tokens_threshold=TOKENS - 1) as bed, bed.session() as session:
        await bed.add_workers(1, 2)
        await session.send_queries(1, 2, 3)
        results_by_id = await session.results_by_id(3)
        assert {results_by_id[n].decision.worker.worker_id for n in (1, 2)} == {1, 2}
        error = error_of(results_by_id[3])
        assert isinstance(error, Overloaded)
        assert error.reason == "ALL_WORKERS_BUSY"


async def test_a_soft_session_does_not_wait_for_its_worker_while_another_has_capacity() -> None:
    hints = RoutingHints(session_control=SessionControl("alice"))
    routing = request_pb2.RoutingHints()
    dataclass_to_proto(hints, routing)
    async with busy(queue_threshold=1.0, session_affinity_mode="soft") as bed:
        await bed.add_workers(1, 2)
        async with bed.session() as session:
            await session.send_queries(1, 2, 3, routing=routing)
            results_by_id = await session.results_by_id(2)
            workers = [results_by_id[number].decision.worker.worker_id for number in (1, 2)]
            assert sorted(workers) == [1, 2]
            await bed.waiting(1)
            await session.send(frees=[key(1)])
            (third,) = (await session.results_by_id(1)).values()
            assert third.decision.worker.worker_id == workers[0], "the first worker with capacity"
