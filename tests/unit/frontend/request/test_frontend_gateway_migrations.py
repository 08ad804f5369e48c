"""Retried requests in the gateway: permits, and the fields that a retry keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from common.errors import MeshError, Overloaded, Unavailable, WorkerLost
from common.registry.instances import Instance, Role, Snapshot
from common.request.placement import Decision
from common.request.preprocessed import PreprocessedRequest, RoutingHints, TokenIds, TokenLogprob
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.errors import http_error
from frontend_svc.members import Members
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.placement_request import PlacementKey, PlacementRequest
from frontend_svc.request.retry_policy import PERMITS_PER_WORKER, MigrationLimiter
from frontend_svc.request.types import RequestOutcome, RequestPlan
from frontend_svc.request.worker_pool import WorkerPool
from frontend_svc.workers.breaker import Cause, CircuitBreaker
from tests.kit.placements import decided, placement_request
from tests.sim.loop import run_virtually

MODEL = "model"
DEAD, ALIVE = 1, 2
LOST = WorkerLost("gone", retryable=True)


@dataclass
class Router:
    """Places on the lost worker first, then on the other one; records the queries."""

    queries: list[tuple[PlacementKey, PlacementRequest]] = field(default_factory=list)

    def place(
        self,
        key: PlacementKey,
        query: PlacementRequest,
        reply: Callable[[Decision | MeshError], None],
    ) -> None:
        self.queries.append((key, query))
        placed = decided(ALIVE if DEAD in query.query.excluded_worker_ids else DEAD)
        asyncio.get_running_loop().call_soon(reply, placed)

    def prefill_done(self, key: PlacementKey) -> None: ...

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None: ...

    def free(self, key: PlacementKey) -> None: ...

    def retried(self) -> list[int]:
        """Numbers of the retried requests, in order."""
        return [int(request_id) for (request_id, attempt), _ in self.queries if attempt]


class Submitted:
    def abort(self, reason: str) -> None: ...


@dataclass
class Engines:
    """Two workers; `sinks` has the legs of the live one, `lost_sinks` those of the other."""

    lost_sinks: list[LegSink] = field(default_factory=list)
    sinks: dict[int, LegSink] = field(default_factory=dict)
    open_slots: dict[int, int] = field(default_factory=dict)

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submitted:
        if worker_id == DEAD:
            self.lost_sinks.append(sink)
        else:
            self.sinks[int(leg_request.request_id)] = sink
        return Submitted()

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return frozenset({DEAD}) & frozenset(pool)


@dataclass
class Client:
    outcomes: list[RequestOutcome] = field(default_factory=list)

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...

    def finished(self, outcome: RequestOutcome) -> None:
        self.outcomes.append(outcome)


def worker(number: int) -> Instance:
    return Instance(
        id=number,
        namespace="default",
        service="worker",
        stable_name="",
        address=f"127.0.0.1:{number}",
        model=MODEL,
        role="aggregated",
    )


class _AllAvailable(Engines):
    """No circuit is open: only failed requests exclude a worker."""

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return frozenset()


async def run_loop() -> None:
    for _ in range(5):
        await asyncio.sleep(0.01)


async def many_lost(
    gateway: Gateway,
    engines: Engines,
    count: int,
    routing: RoutingHints | None = None,
    error: MeshError = LOST,
) -> list[Client]:
    """Opens `count` requests and loses their worker; number n arrived n seconds before 0."""
    clients = [Client() for _ in range(count)]
    now = asyncio.get_running_loop().time()
    for number, client in enumerate(clients):
        request = PreprocessedRequest(model=MODEL, token_ids=TokenIds.of([1, 2, 3]))
        plan = RequestPlan(str(number), request, deadline=now + 100.0)
        query = placement_request(MODEL, 3, arrived_at=float(-number), routing=routing)
        gateway.open(plan, query, client)
    await run_loop()
    assert len(engines.lost_sinks) == count
    for sink in engines.lost_sinks:
        sink.lost(error)
    await run_loop()
    return clients


def mesh(
    engines: Engines, migrations: MigrationLimiter[RequestHandle] | None = None
) -> tuple[Gateway, Router]:
    router = Router()
    snapshot = Snapshot(instances={n: worker(n) for n in (DEAD, ALIVE)})
    return Gateway(router, engines, Members(snapshot), migrations=migrations), router


def test_requests_of_a_lost_worker_are_retried_within_the_limit_oldest_first() -> None:
    async def main() -> None:
        engines = _AllAvailable()
        limiter = MigrationLimiter[RequestHandle](per_worker=4)  # two workers: eight at once
        gateway, router = mesh(engines, limiter)
        await many_lost(gateway, engines, 12)
        assert router.retried() == list(range(8))
        for number in (3, 5):
            engines.sinks[number].accepted()
            engines.sinks[number].tokens([7], ())
        await run_loop()
        assert router.retried()[8:] == [11, 10], "the queued requests that arrived first"
        assert gateway.migrations.waiting == 2

    run_virtually(main())


def test_a_retried_request_keeps_its_arrival_time() -> None:
    async def main() -> None:
        engines = _AllAvailable()
        gateway, router = mesh(engines)
        await many_lost(gateway, engines, 3)
        for (request_id, _attempt), query in router.queries:
            assert query.arrived_at == -float(request_id)
        assert len(router.retried()) == 3

    run_virtually(main())


def test_a_request_that_ends_while_it_waits_for_a_permit_is_removed() -> None:
    async def main() -> None:
        engines = _AllAvailable()
        gateway, router = mesh(engines, MigrationLimiter(per_worker=1))
        clients = await many_lost(gateway, engines, 4)
        assert (gateway.migrations.computing, gateway.migrations.waiting) == (2, 2)
        gateway.abort_all(Unavailable("shutting down"))
        await run_loop()
        assert [len(client.outcomes) for client in clients] == [1] * 4
        assert (gateway.migrations.computing, gateway.migrations.waiting) == (0, 0)
        assert len(router.retried()) <= 4

    run_virtually(main())


def test_all_requests_of_a_lost_worker_are_tried_again() -> None:
    async def main() -> None:
        engines = _AllAvailable()
        gateway, router = mesh(engines)
        count = 3000
        clients = await many_lost(gateway, engines, count)
        placed = 0
        while placed < count:
            new = router.retried()[placed:]
            assert len(new) <= 2 * PERMITS_PER_WORKER, "paced by what the workers compute"
            placed += len(new)
            for number in new:
                engines.sinks[number].accepted()
                engines.sinks[number].tokens([7], ())
            await run_loop()
        assert not any(client.outcomes for client in clients)
        assert (gateway.retries.granted, gateway.retries.refused) == (count, 0)

    run_virtually(main())


def test_retries_after_overload_beyond_the_budget_are_a_503_with_retry_after() -> None:
    async def main() -> None:
        engines = _AllAvailable()
        gateway, _ = mesh(engines)
        full = Unavailable("too many concurrent requests", 1.0, reason="FULL")
        clients = await many_lost(gateway, engines, gateway.retries.RETRIES_MIN + 1, error=full)
        (outcome,) = clients[-1].outcomes
        assert outcome.error is not None
        assert outcome.error.reason == "RETRY_BUDGET"
        assert dict(http_error(outcome.error).headers)["retry-after"] == "1"
        assert not clients[0].outcomes

    run_virtually(main())


def test_an_excluded_worker_does_not_count_as_available() -> None:
    async def main() -> None:
        snapshot = Snapshot(instances={n: worker(n) for n in (DEAD, ALIVE)})
        assert WorkerPool(Members(snapshot), Engines()).count_available(MODEL) == 1
        assert WorkerPool(Members(snapshot), _AllAvailable()).count_available(MODEL) == 2

    run_virtually(main())


def test_the_limit_for_an_adapter_counts_the_workers_that_have_it() -> None:
    async def main() -> None:
        engines, router = _AllAvailable(), Router()
        workers = {n: worker(n) for n in range(1, 9)}
        for number in (DEAD, ALIVE):
            workers[number] = replace(worker(number), loras=frozenset({"french"}))
        snapshot = Snapshot(instances=workers)
        migrations = MigrationLimiter[RequestHandle](per_worker=1)
        gateway = Gateway(router, engines, Members(snapshot), migrations=migrations)
        pool = WorkerPool(Members(snapshot), engines)
        assert (pool.count_available(MODEL), pool.count_available(MODEL, "french")) == (8, 2)
        await many_lost(gateway, engines, 5, RoutingHints(lora_name="french"))
        assert router.retried() == [0, 1], "the limit of the two workers that have it"
        for number in (0, 1):
            engines.sinks[number].accepted()
            engines.sinks[number].tokens([7], ())
        await run_loop()
        assert router.retried()[2:] == [4, 3], "the queued requests that arrived first"

    run_virtually(main())


class _Breaker(Engines):
    """Circuits of a real breaker. failing, lost: workers whose circuits are open."""

    def __init__(self, *, failing: Iterable[int] = (), lost: Iterable[int] = ()) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(Random(1))
        for cause, workers in ((Cause.FAILING, failing), (Cause.LOST, lost)):
            for number in workers:
                self.breaker.open_circuit(number, "", 0.0, cause)
                self.breaker.record_probe(number, False, 1.0)

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return self.breaker.excluded(pool)


def test_a_failing_worker_without_a_peer_is_replaced_by_the_other_serving_mode() -> None:
    aggregated, prefill, decode = 1, 2, 3
    roles: dict[int, Role] = {aggregated: "aggregated", prefill: "prefill", decode: "decode"}

    def pool_of(engines: Engines, *numbers: int) -> WorkerPool:
        instances = {n: replace(worker(n), role=roles[n]) for n in numbers or roles}
        return WorkerPool(Members(Snapshot(instances=instances)), engines)

    def excluded(*numbers: int, failing: Iterable[int], lost: Iterable[int] = ()) -> frozenset[int]:
        pool = pool_of(_Breaker(failing=failing, lost=lost), *numbers)
        excluded = pool.members(MODEL)[1]
        computing = {n for n in numbers or roles if n != decode}
        assert pool.count_available(MODEL) == len(computing - excluded)
        return excluded

    assert excluded(failing=[aggregated]) == {aggregated}
    assert excluded(failing=[prefill]) == {prefill}
    assert excluded(failing=[decode]) == {decode}
    assert excluded(failing=[aggregated], lost=[decode]) == {decode}, "no pair is left"
    assert excluded(failing=[prefill], lost=[aggregated]) == {aggregated}
    assert not {aggregated, prefill} <= excluded(failing=[aggregated, prefill])
    assert excluded(aggregated, prefill, failing=[aggregated]) == frozenset()
    assert excluded(aggregated, failing=[aggregated]) == frozenset()

    pool = pool_of(_AllAvailable())
    assert pool.peers(aggregated, MODEL) == {aggregated, prefill, decode}
    assert pool.peers(decode, MODEL) == {decode, aggregated}
    assert pool_of(_AllAvailable(), prefill, decode).peers(prefill, MODEL) == {prefill}
    assert pool.peers(9, MODEL) == frozenset()


class _NoneAvailable(Engines):
    """Both workers are excluded, except those in `available`."""

    available: frozenset[int] = frozenset()

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return frozenset(pool) - self.available


def test_without_another_worker_a_failed_one_is_used_again_once_its_circuit_closes() -> None:
    async def main() -> None:
        loop, engines = asyncio.get_running_loop(), _NoneAvailable()
        engines.available = frozenset({DEAD})
        gateway, router = mesh(engines)
        router_queries = router.queries
        request = PreprocessedRequest(model=MODEL, token_ids=TokenIds.of([1, 2, 3]))
        gateway.open(
            RequestPlan("0", request, deadline=100.0), placement_request(MODEL, 3, 0.0), Client()
        )
        await run_loop()
        (sink,) = engines.lost_sinks
        engines.available = frozenset()  # its stream is lost, and the other worker hangs
        sink.lost(WorkerLost("gone", retryable=True))
        await asyncio.sleep(1.0)
        assert len(router_queries) == 1, "no worker is available"
        engines.available = frozenset({DEAD})
        closed_at = loop.time()
        while len(router_queries) == 1:
            await asyncio.sleep(0.01)
            assert loop.time() < closed_at + 0.2
        assert DEAD not in router_queries[-1][1].query.excluded_worker_ids
        assert ALIVE in router_queries[-1][1].query.excluded_worker_ids

    run_virtually(main(), until=50.0)


def test_a_busy_worker_is_tried_again_if_the_others_have_an_open_circuit() -> None:
    async def main() -> None:
        engines = _NoneAvailable()
        engines.available = frozenset({DEAD})
        gateway, router = mesh(engines)
        gateway.open_circuits = lambda: {ALIVE: "it hangs"}
        request = PreprocessedRequest(model=MODEL, token_ids=TokenIds.of([1, 2, 3]))
        gateway.open(
            RequestPlan("0", request, deadline=100.0), placement_request(MODEL, 3, 0.0), Client()
        )
        await run_loop()
        (sink,) = engines.lost_sinks
        sink.rejected(Overloaded(1.0))
        await run_loop()
        query = router.queries[-1][1].query
        assert query.excluded_worker_ids == {ALIVE}
        assert query.exclusion_reasons == ("its circuit is open: it hangs",)

    run_virtually(main(), until=50.0)
