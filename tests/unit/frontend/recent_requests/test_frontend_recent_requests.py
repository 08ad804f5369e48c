"""The last requests of a frontend: small records, in a bounded ring, found by what they have."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Any: parts of a connection that a record does not read.
from typing import Any

import pytest
from opentelemetry import trace

from common.access.caller import ANONYMOUS
from common.errors import InvalidRequest, WorkerLost
from common.registry.instances import Instance
from common.request.placement import Decision, Placement, Query
from common.request.preprocessed import (
    CompletionUsage,
    FinishReason,
    PromptTokensDetails,
    RequestTracker,
)
from frontend_svc.endpoints.request_context import EndedRequest, HttpRequest, Progress
from frontend_svc.endpoints.route import Operation, Route
from frontend_svc.members import Members
from frontend_svc.recent_requests.record import (
    TEXT_CHARS_MAX,
    RecentQuery,
    RecentRequest,
    RequestWorker,
    record_of,
)
from frontend_svc.recent_requests.ring import RecentRequests
from frontend_svc.recent_requests.service import LIMIT_MAX, RecentRequestServicer
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.types import RequestOutcome
from frontend_svc.tracing import RequestSpan
from kvmesh.frontend.v1 import frontend_pb2
from tests.kit.instances import snapshot_of, worker

ROUTE = Route(
    method="POST", path="/v1/completions", operation=Operation(summary="x"), label="completions"
)
UNUSED: Any = None


@dataclass(frozen=True)
class Body:
    model: str = "sim"
    is_stream: bool = True


@dataclass(frozen=True)
class Part:
    outcome: RequestOutcome
    first_token_at: float | None


SNAPSHOT = snapshot_of(
    worker(1, "prefill", stable_name="worker-1"),
    worker(2, "decode", stable_name="worker-2"),
    Instance(9, "mesh", "router", "router-0", "127.0.0.1:1"),
)
OUTCOME = RequestOutcome(
    FinishReason.LENGTH,
    None,
    CompletionUsage(64, 8, 72, PromptTokensDetails(cached_tokens=32)),
    attempts=2,
    worker_ids=(1, 2, 1, 3),
    placed=Decision(
        Placement(3),
        Placement(1),
        reasons=("lowest cost",),
        predicted_cached_tokens=48,
        queued_ms=4,
        router_id=9,
    ),
    migrations=1,
)


def ended(number: int = 0, outcome: RequestOutcome | None = OUTCOME, **progress: Any) -> Any:
    """A request that was received at 5 s, and on the other clocks at 10 and 20 s."""
    tracker = RequestTracker(received_ms=1e12 + number, received_s=5.0)
    tracker.mark("prefill_started", 5.010)
    tracker.mark("prefill_finished", 5.030)
    tracker.output_ended(5.090)
    responses = [] if outcome is None else [Part(outcome, 10.050)]
    placements = [PlacementRequest(Query("sim"), arrived_at=20.002)]
    values = {"body": Body(), "status": 200, **progress}
    context = HttpRequest(
        route=ROUTE,
        request_id=f"{number:032x}",
        client_id=b"mine",
        caller=ANONYMOUS,
        quota=None,
        header_pairs=(),
        headers={},
        started_at_s=10.0,
        arrived_at=20.0,
        tracker=tracker,
        span=RequestSpan(trace.INVALID_SPAN),
        send=UNUSED,
        connection=UNUSED,
        progress=Progress(placements=placements, responses=responses, **values),
    )
    return EndedRequest(context, outcome, values.get("error"), context.ttft_s, 100.0)


def test_a_record_has_times_tokens_workers_and_reasons() -> None:
    assert record_of(ended(), SNAPSHOT) == RecentRequest(
        "0" * 32,
        client_request_id="mine",
        endpoint="completions",
        model="sim",
        status=200,
        finish_reason="length",
        received_ms=1e12,
        tokenized_ms=2.0,
        routed_ms=10.0,
        prefilled_ms=30.0,
        first_token_ms=50.0,
        last_token_ms=90.0,
        total_ms=100.0,
        queue_ms=4,
        prompt_tokens=64,
        output_tokens=8,
        cached_tokens=32,
        predicted_cached_tokens=48,
        workers=(
            RequestWorker(1, "worker-1", "prefill"),
            RequestWorker(2, "worker-2", "decode"),
            RequestWorker(1, "worker-1", "prefill"),
            RequestWorker(3),
        ),
        is_pair=True,
        router_id=9,
        router_name="router-0",
        reasons=("lowest cost",),
        attempts=2,
        migrations=1,
        choices=1,
        is_stream=True,
    )


def test_a_record_of_a_refusal_has_its_reason_and_is_bounded() -> None:
    error = InvalidRequest("x" * 10_000, reason="TOO_LONG")
    record = record_of(
        ended(outcome=None, error=error, status=400, body=Body("m" * 10_000)), SNAPSHOT
    )
    assert (record.status, record.failure) == (400, "TOO_LONG")
    assert len(record.error) == len(record.model) == TEXT_CHARS_MAX
    assert (record.workers, record.first_token_ms, record.last_token_ms) == ((), None, None)


def test_a_placement_without_a_router_predicts_nothing() -> None:
    placed = Decision(Placement(1), is_unrouted=True, reasons=("no router",))
    record = record_of(ended(outcome=replace(OUTCOME, placed=placed)), SNAPSHOT)
    assert (record.router_id, record.predicted_cached_tokens) == (0, None)
    assert record.reasons == ("no router",)


def ring(limit: int, requests: int = 0) -> RecentRequests:
    found = RecentRequests(limit, Members(SNAPSHOT))
    for number in range(requests):
        found.add(ended(number))
    return found


def test_a_ring_keeps_the_last_requests() -> None:
    kept = ring(4, requests=10)
    assert kept.last_sequence == 10
    assert [record.sequence for record in kept.find(RecentQuery())] == [10, 9, 8, 7]
    assert [record.sequence for record in kept.find(RecentQuery(after=8))] == [10, 9]
    assert list(ring(0, requests=3).find(RecentQuery())) == []


@pytest.mark.parametrize(
    ("query", "count"),
    [
        (RecentQuery(id=f"{1:032x}"), 1),
        (RecentQuery(id=f"chatcmpl-{1:032x}"), 1),
        (RecentQuery(id="mine"), 3),
        (RecentQuery(id="other"), 0),
        (RecentQuery(id=f"{7:032x}"), 0),
        (RecentQuery(model="sim"), 3),
        (RecentQuery(model="si"), 0),
        (RecentQuery(tenant="acme"), 0),
        (RecentQuery(failed=True), 0),
    ],
)
def test_a_query_finds_the_records_with_all_of_its_values(query: RecentQuery, count: int) -> None:
    assert len(list(ring(8, requests=3).find(query))) == count


def test_a_query_finds_failed_requests() -> None:
    kept = ring(8, requests=3)
    kept.add(ended(3, error=WorkerLost("gone", retryable=True)))
    assert [record.sequence for record in kept.find(RecentQuery(failed=True))] == [4]


async def test_a_call_returns_the_newest_requests_as_messages() -> None:
    servicer = RecentRequestServicer(ring(128, requests=100))
    request = frontend_pb2.ListRecentRequestsRequest(limit=70)
    response = await servicer.ListRecentRequests(request, UNUSED)
    assert [record.sequence for record in response.requests] == list(range(100, 30, -1))
    assert response.last_sequence == 100
    (first, *_) = response.requests
    assert [worker.name for worker in first.workers] == ["worker-1", "worker-2", "worker-1", ""]
    assert (first.first_token_ms, first.predicted_cached_tokens) == (50.0, 48)
    assert first.cached_tokens == 32
    with pytest.raises(InvalidRequest, match=f"limit must be at most {LIMIT_MAX}, not 1025"):
        await servicer.ListRecentRequests(
            frontend_pb2.ListRecentRequestsRequest(limit=1025), UNUSED
        )


async def test_times_that_were_not_reached_are_absent() -> None:
    kept = ring(8)
    kept.add(ended(outcome=None))
    response = await RecentRequestServicer(kept).ListRecentRequests(
        frontend_pb2.ListRecentRequestsRequest(), UNUSED
    )
    assert not response.requests[0].HasField("first_token_ms")
    assert response.requests[0].HasField("routed_ms")
