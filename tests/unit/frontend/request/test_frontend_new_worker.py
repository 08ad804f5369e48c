"""Workers that the router names and discovery does not show here: new ones, and those that left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from random import Random

from common.errors import MeshError
from common.registry.instances import Snapshot
from common.request.preprocessed import PreprocessedRequest, TokenIds, TokenLogprob
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.core.peers.placement_query import PlacementKey, Query
from frontend_svc.core.peers.recently_left import RecentlyLeft
from frontend_svc.core.request.types import Placement, RequestOutcome, RequestPlan, RoutingDecision
from frontend_svc.request.gateway import Gateway
from tests.sim.loop import run_virtually

PAIR = RoutingDecision(1, prefill=Placement(2, address="w:2"), address="w:1")


class Router:
    """Places everything as it was told."""

    def __init__(self, placed: RoutingDecision) -> None:
        self.placed = placed
        self.asked = 0

    def place(
        self, key: PlacementKey, query: Query, answer: Callable[[RoutingDecision | MeshError], None]
    ) -> None:
        self.asked += 1
        asyncio.get_running_loop().call_soon(answer, self.placed)

    def prefill_done(self, key: PlacementKey) -> None:
        pass

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None:
        pass

    def free(self, key: PlacementKey) -> None:
        pass


class Workers:
    """Takes orders down and does nothing about them."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, str]] = []
        self.open_slots: dict[int, int] = {}

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Workers:
        self.orders.append((worker_id, address))
        return self

    def abort(self, reason: str) -> None:
        pass

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return frozenset()


class Silent:
    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        pass

    def finished(self, outcome: RequestOutcome) -> None:
        pass


def orders_of(
    placed: RoutingDecision, recently_left: RecentlyLeft | None
) -> tuple[list[tuple[int, str]], int]:
    """Who is asked where, when discovery shows nobody; and how often the router was asked."""

    async def main() -> tuple[list[tuple[int, str]], int]:
        router, workers = Router(placed), Workers()
        gateway = Gateway(router, workers, Snapshot, Random(1), recently_left=recently_left)
        now = asyncio.get_running_loop().time()
        request = PreprocessedRequest(token_ids=TokenIds.of([1, 2, 3]))
        handle = gateway.open(RequestPlan("r", request, now + 5.0), Query("m", 3, now), Silent())
        await asyncio.sleep(0.5)
        handle.client_gone()
        return workers.orders, router.asked

    return run_virtually(main())


def test_a_worker_that_discovery_does_not_show_yet_is_asked_where_the_router_says() -> None:
    assert orders_of(RoutingDecision(1, address="w:1"), RecentlyLeft()) == ([(1, "w:1")], 1)


def test_so_is_the_prefill_worker_of_a_pair() -> None:
    assert orders_of(PAIR, RecentlyLeft()) == ([(2, "w:2")], 1)


def test_a_worker_that_was_seen_to_leave_is_asked_nothing() -> None:
    recently_left = RecentlyLeft()
    recently_left.follow([1])
    recently_left.follow([])
    orders, asked = orders_of(RoutingDecision(1, address="w:1"), recently_left)
    assert orders == []
    assert asked > 1, "it is placed elsewhere"


def test_a_router_that_knows_no_address_leads_nowhere() -> None:
    assert orders_of(RoutingDecision(1), RecentlyLeft())[0] == []


def test_a_gateway_that_does_not_watch_who_leaves_asks_only_whom_discovery_shows() -> None:
    assert orders_of(RoutingDecision(1, address="w:1"), None)[0] == []
