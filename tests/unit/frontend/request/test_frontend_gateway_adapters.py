"""Requests for an adapter: eligible workers, and errors for the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random

from common.errors import MeshError, NotFound, Unavailable, UnknownModel
from common.registry.instances import Instance, Snapshot
from common.request.placement import Decision, Query
from common.request.preprocessed import PreprocessedRequest, RoutingHints, TokenIds, TokenLogprob
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.members import Members
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.local_placement import has_workers, place_locally
from frontend_svc.request.placement_request import UNKNOWN_ADAPTER, PlacementKey, PlacementRequest
from frontend_svc.request.types import RequestOutcome, RequestPlan
from router_svc.core.eligibility import AdapterResidency
from tests.kit.placements import decided, placement_request
from tests.sim.loop import run_virtually

FRENCH = RoutingHints(lora_name="french")


def worker(number: int, *loras: str) -> Instance:
    return Instance(
        number, "mesh", "worker", "", f"127.0.0.1:{number}", model="m", loras=frozenset(loras)
    )


def mesh(*workers: Instance) -> Snapshot:
    return Snapshot(1, {one.id: one for one in workers})


class Router:
    """Sends the same reply to every query, and records the queries."""

    def __init__(self, reply: Decision | MeshError) -> None:
        self.reply = reply
        self.queries: list[PlacementRequest] = []

    def place(
        self,
        key: PlacementKey,
        query: PlacementRequest,
        reply: Callable[[Decision | MeshError], None],
    ) -> None:
        self.queries.append(query)
        asyncio.get_running_loop().call_soon(reply, self.reply)

    def prefill_done(self, key: PlacementKey) -> None: ...

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None: ...

    def free(self, key: PlacementKey) -> None: ...


class Workers:
    """Records submitted legs without running them. excluded: workers with an open circuit."""

    def __init__(self, excluded: Iterable[int] = ()) -> None:
        self.excluded = frozenset(excluded)
        self.submitted: list[tuple[int, LegRequest]] = []
        self.open_slots: dict[int, int] = {}

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Workers:
        self.submitted.append((worker_id, leg_request))
        return self

    def abort(self, reason: str) -> None: ...

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return self.excluded & frozenset(pool)


class ResponseSink:
    def __init__(self) -> None:
        self.outcome: RequestOutcome | None = None

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...

    def finished(self, outcome: RequestOutcome) -> None:
        self.outcome = outcome


async def opened(
    router: Router, workers: Workers, snapshot: Snapshot, routing: RoutingHints | None
) -> tuple[Gateway, ResponseSink]:
    gateway = Gateway(router, workers, Members(snapshot), Random(1))
    now, sink = asyncio.get_running_loop().time(), ResponseSink()
    request = PreprocessedRequest(token_ids=TokenIds.of([1, 2, 3]), routing=routing)
    gateway.open(
        RequestPlan("r", request, now + 60.0), placement_request("m", 3, now, routing=routing), sink
    )
    return gateway, sink


async def error_of(reply: MeshError, routing: RoutingHints | None) -> MeshError:
    _, sink = await opened(Router(reply), Workers(), mesh(worker(1, "french")), routing)
    await asyncio.sleep(40.0)
    assert sink.outcome is not None
    assert sink.outcome.error is not None
    return sink.outcome.error


def router_error() -> NotFound:
    """The error of a router for an unknown adapter."""
    try:
        AdapterResidency().check(Query("m", 3, routing=FRENCH), 0.0)
    except NotFound as error:
        return error
    raise AssertionError("no worker has it")


def test_an_adapter_that_is_unknown_to_the_router_only_is_a_503_that_names_it() -> None:
    unknown = router_error()
    assert unknown.reason == UNKNOWN_ADAPTER
    error = run_virtually(error_of(unknown, FRENCH))
    assert isinstance(error, Unavailable)
    assert error.retry_after_s is not None
    assert "'french'" in error.message
    base = run_virtually(error_of(UnknownModel("m"), None))
    assert isinstance(base, Unavailable)
    assert "'m'" in base.message
    other = run_virtually(error_of(NotFound("missing"), None))
    assert type(other) is NotFound


def test_a_request_waits_while_the_only_worker_with_its_adapter_is_excluded() -> None:
    async def main() -> tuple[int, int, list[int]]:
        router, workers = Router(decided(2)), Workers(excluded=[2])
        snapshot = mesh(worker(1), worker(2, "french"))
        await opened(router, workers, snapshot, FRENCH)
        await asyncio.sleep(1.0)
        before = len(router.queries)
        workers.excluded = frozenset()
        await asyncio.sleep(1.0)
        return before, len(router.queries), [leg_request for leg_request, _ in workers.submitted]

    assert run_virtually(main()) == (0, 1, [2])


def test_the_worker_receives_the_name_of_the_adapter() -> None:
    async def main() -> list[str | None]:
        workers = Workers()
        await opened(Router(decided(2)), workers, mesh(worker(2, "french")), FRENCH)
        await asyncio.sleep(0.1)
        (leg_request,) = (leg_request for _, leg_request in workers.submitted)
        assert leg_request.request is not None
        assert leg_request.request.routing is not None
        return [leg_request.request.routing.lora_name]

    assert run_virtually(main()) == ["french"]


def test_a_frontend_counts_the_workers_that_can_serve_a_query() -> None:
    workers = mesh(worker(1), worker(2, "french"))
    plain, other = Query("m", 3), Query("n", 3)
    german = RoutingHints(lora_name="german")
    assert has_workers(workers, plain)
    assert has_workers(workers, replace(plain, routing=FRENCH))
    assert not has_workers(workers, replace(plain, routing=german))
    assert not has_workers(workers, other)
    assert not has_workers(mesh(), plain)


def test_without_a_router_a_request_is_placed_on_workers_with_its_adapter() -> None:
    workers = mesh(worker(1), worker(2, "french"), worker(3, "german"), worker(4, "french"))
    queries = [
        place_locally(workers, {}, Query("m", 3, routing=FRENCH), Random(seed))
        for seed in range(20)
    ]
    assert {one.worker.worker_id for one in queries if isinstance(one, Decision)} == {2, 4}
    no_worker = place_locally(mesh(worker(1)), {}, Query("m", 3, routing=FRENCH), Random(1))
    assert isinstance(no_worker, Unavailable)
    assert no_worker.reason == "NO_WORKER"
    assert "'french'" in no_worker.message
