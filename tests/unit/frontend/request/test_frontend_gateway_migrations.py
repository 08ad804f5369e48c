"""Requests that are tried again, as the gateway runs them: their turns, and what they keep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from common.errors import MeshError, Overloaded, Unavailable, WorkerLost
from common.registry.instances import Instance, Snapshot
from common.request.preprocessed import PreprocessedRequest, RoutingHints, TokenIds, TokenLogprob
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.core.openai.errors import http_error
from frontend_svc.core.peers.placement_query import PlacementKey, Query
from frontend_svc.core.request.retry_policy import MigrationLimiter
from frontend_svc.core.request.types import RequestOutcome, RequestPlan, RoutingDecision
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.worker_pool import WorkerPool
from tests.sim.loop import run_virtually

MODEL = "model"
DEAD, ALIVE = 1, 2


@dataclass
class Router:
    """Places on the dead worker first, then on the other one; keeps what it was asked."""

    asked: list[tuple[PlacementKey, Query]] = field(default_factory=list)

    def place(
        self, key: PlacementKey, query: Query, answer: Callable[[RoutingDecision | MeshError], None]
    ) -> None:
        self.asked.append((key, query))
        placed = RoutingDecision(ALIVE if DEAD in query.excluded else DEAD)
        asyncio.get_running_loop().call_soon(answer, placed)

    def prefill_done(self, key: PlacementKey) -> None: ...

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None: ...

    def free(self, key: PlacementKey) -> None: ...

    def again(self) -> list[int]:
        """Requests asked for again, by number, in that order."""
        return [int(request_id) for (request_id, attempt), _ in self.asked if attempt]


class Submitted:
    def abort(self, reason: str) -> None: ...


@dataclass
class Engines:
    """Two workers; `sinks` has those of the living one, `doomed` those of the other."""

    doomed: list[LegSink] = field(default_factory=list)
    sinks: dict[int, LegSink] = field(default_factory=dict)
    open_slots: dict[int, int] = field(default_factory=dict)

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submitted:
        if worker_id == DEAD:
            self.doomed.append(sink)
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


class _Whole(Engines):
    """Nobody is left alone: the router is told of failures by exclusion alone."""

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return frozenset()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0.01)


async def many_lost(
    gateway: Gateway, engines: Engines, count: int, routing: RoutingHints | None = None
) -> list[Client]:
    """So many requests whose worker dies before their first token; number n came at second n."""
    clients = [Client() for _ in range(count)]
    now = asyncio.get_running_loop().time()
    for number, client in enumerate(clients):
        request = PreprocessedRequest(model=MODEL, token_ids=TokenIds.of([1, 2, 3]))
        plan = RequestPlan(str(number), request, deadline=now + 100.0)
        query = Query(MODEL, 3, arrived_at=float(-number), routing=routing)
        gateway.open(plan, query, client)
    await turns()
    assert len(engines.doomed) == count
    for sink in engines.doomed:
        sink.lost(WorkerLost("gone", retryable=True))
    await turns()
    return clients


def mesh(
    engines: Engines, migrations: MigrationLimiter[RequestHandle] | None = None
) -> tuple[Gateway, Router]:
    router = Router()
    snapshot = Snapshot(instances={n: worker(n) for n in (DEAD, ALIVE)})
    return Gateway(router, engines, lambda: snapshot, migrations=migrations), router


def test_of_a_dead_workers_requests_so_many_go_on_at_once_and_the_oldest_first() -> None:
    async def main() -> None:
        engines = _Whole()
        limiter = MigrationLimiter[RequestHandle](per_worker=4)  # two workers: eight at once
        gateway, router = mesh(engines, limiter)
        await many_lost(gateway, engines, 12)
        assert router.again() == list(range(8))
        for number in (3, 5):
            engines.sinks[number].accepted()
            engines.sinks[number].tokens([7], ())
        await turns()
        assert router.again()[8:] == [11, 10], "those that came first, of those that wait"
        assert gateway.migrations.waiting == 2

    run_virtually(main())


def test_a_request_that_is_tried_again_keeps_the_time_at_which_it_came() -> None:
    async def main() -> None:
        engines = _Whole()
        gateway, router = mesh(engines)
        await many_lost(gateway, engines, 3)
        for (request_id, _attempt), query in router.asked:
            assert query.arrived_at == -float(request_id)
        assert len(router.again()) == 3

    run_virtually(main())


def test_a_client_that_goes_while_it_waits_for_its_turn_leaves_nothing_behind() -> None:
    async def main() -> None:
        engines = _Whole()
        gateway, router = mesh(engines, MigrationLimiter(per_worker=1))
        clients = await many_lost(gateway, engines, 4)
        assert (gateway.migrations.computing, gateway.migrations.waiting) == (2, 2)
        gateway.abort_all(Unavailable("shutting down"))
        await turns()
        assert [len(client.outcomes) for client in clients] == [1] * 4
        assert (gateway.migrations.computing, gateway.migrations.waiting) == (0, 0)
        assert len(router.again()) <= 4

    run_virtually(main())


def test_beyond_the_queue_of_re_routes_clients_get_503_with_retry_after() -> None:
    async def main() -> None:
        engines = _Whole()
        gateway, _ = mesh(engines, MigrationLimiter(per_worker=1, waiting_max=1))
        clients = await many_lost(gateway, engines, 4)
        (outcome,) = clients[3].outcomes
        assert outcome.error is not None
        assert outcome.error.reason == "REROUTES_FULL"
        answer = http_error(outcome.error)
        assert answer.status == 503
        assert dict(answer.headers)["retry-after"] == "1"

    run_virtually(main())


def test_beyond_the_retry_budget_clients_get_503_with_retry_after() -> None:
    async def main() -> None:
        engines = _Whole()
        gateway, _ = mesh(engines)
        clients = await many_lost(gateway, engines, gateway.retries.RETRIES_MIN + 1)
        (outcome,) = clients[-1].outcomes
        assert outcome.error is not None
        assert outcome.error.reason == "RETRY_BUDGET"
        assert dict(http_error(outcome.error).headers)["retry-after"] == "1"
        assert not clients[0].outcomes

    run_virtually(main())


def test_a_worker_left_alone_does_not_count_as_a_survivor() -> None:
    async def main() -> None:
        snapshot = Snapshot(instances={n: worker(n) for n in (DEAD, ALIVE)})
        assert WorkerPool(lambda: snapshot, Engines()).count_available(MODEL) == 1
        assert WorkerPool(lambda: snapshot, _Whole()).count_available(MODEL) == 2

    run_virtually(main())


def test_an_adapters_requests_go_on_at_once_by_the_workers_that_have_it() -> None:
    async def main() -> None:
        engines, router = _Whole(), Router()
        there = {n: worker(n) for n in range(1, 9)}
        for number in (DEAD, ALIVE):
            there[number] = replace(worker(number), loras=frozenset({"french"}))
        snapshot = Snapshot(instances=there)
        migrations = MigrationLimiter[RequestHandle](per_worker=1)
        gateway = Gateway(router, engines, lambda: snapshot, migrations=migrations)
        pool = WorkerPool(lambda: snapshot, engines)
        assert (pool.count_available(MODEL), pool.count_available(MODEL, "french")) == (8, 2)
        await many_lost(gateway, engines, 5, RoutingHints(lora_name="french"))
        assert router.again() == [0, 1], "the share of the two workers that have it"
        for number in (0, 1):
            engines.sinks[number].accepted()
            engines.sinks[number].tokens([7], ())
        await turns()
        assert router.again()[2:] == [4, 3], "those that came first, of those that wait"

    run_virtually(main())


class _Both(Engines):
    """Both workers are left alone, until `whole` says that one is not."""

    whole: frozenset[int] = frozenset()

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return frozenset(pool) - self.whole


def test_with_nobody_else_left_a_worker_that_failed_it_is_asked_as_soon_as_it_is_whole() -> None:
    async def main() -> None:
        loop, engines = asyncio.get_running_loop(), _Both()
        engines.whole = frozenset({DEAD})
        gateway, router = mesh(engines)
        router_asks = router.asked
        request = PreprocessedRequest(model=MODEL, token_ids=TokenIds.of([1, 2, 3]))
        gateway.open(RequestPlan("0", request, deadline=100.0), Query(MODEL, 3, 0.0), Client())
        await turns()
        (sink,) = engines.doomed
        engines.whole = frozenset()  # its stream broke, and the other one hangs
        sink.lost(WorkerLost("gone", retryable=True))
        await asyncio.sleep(1.0)
        assert len(router_asks) == 1, "there is nobody to ask for"
        engines.whole = frozenset({DEAD})
        healed_at = loop.time()
        while len(router_asks) == 1:
            await asyncio.sleep(0.01)
            assert loop.time() < healed_at + 0.2
        assert DEAD not in router_asks[-1][1].excluded
        assert ALIVE in router_asks[-1][1].excluded

    run_virtually(main(), until=50.0)


def test_a_worker_that_refused_it_and_is_not_left_alone_is_not_asked_again_for_that() -> None:
    async def main() -> None:
        engines = _Both()
        engines.whole = frozenset({DEAD})
        gateway, router = mesh(engines)
        request = PreprocessedRequest(model=MODEL, token_ids=TokenIds.of([1, 2, 3]))
        gateway.open(RequestPlan("0", request, deadline=100.0), Query(MODEL, 3, 0.0), Client())
        await turns()
        (sink,) = engines.doomed
        sink.rejected(Overloaded(1.0))
        await asyncio.sleep(2.0)
        assert len(router.asked) == 1, "busy is not dead: it waits for the other one"

    run_virtually(main(), until=50.0)
