"""Workers in a routing decision that discovery does not show: new ones, and ones that left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from random import Random

from common.errors import MeshError
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.placement import Decision, Placement
from common.request.preprocessed import PreprocessedRequest, TokenIds, TokenLogprob
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.members import Members
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.placement_request import PlacementKey, PlacementRequest
from frontend_svc.request.types import RequestOutcome, RequestPlan
from tests.kit.placements import decided, placement_request
from tests.sim.loop import run_virtually

PAIR = decided(1, prefill=Placement(2), worker_address="w:1", prefill_address="w:2")


class Router:
    """Sends the same decision for every query."""

    def __init__(self, placed: Decision) -> None:
        self.placed = placed
        self.placements = 0

    def place(
        self,
        key: PlacementKey,
        query: PlacementRequest,
        reply: Callable[[Decision | MeshError], None],
    ) -> None:
        self.placements += 1
        asyncio.get_running_loop().call_soon(reply, self.placed)

    def prefill_done(self, key: PlacementKey) -> None:
        pass

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None:
        pass

    def free(self, key: PlacementKey) -> None:
        pass


class Workers:
    """Records submitted legs without running them."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, str]] = []
        self.open_slots: dict[int, int] = {}

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Workers:
        self.submitted.append((worker_id, address))
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


def submitted_legs(placed: Decision, members: Members) -> tuple[list[tuple[int, str]], int]:
    """Submitted (worker, address) with an empty snapshot, and the number of placements."""

    async def main() -> tuple[list[tuple[int, str]], int]:
        router, workers = Router(placed), Workers()
        gateway = Gateway(router, workers, members, Random(1))
        now = asyncio.get_running_loop().time()
        request = PreprocessedRequest(token_ids=TokenIds.of([1, 2, 3]))
        handle = gateway.open(
            RequestPlan("r", request, now + 5.0), placement_request("m", 3, now), Silent()
        )
        await asyncio.sleep(0.5)
        handle.abort()
        return workers.submitted, router.placements

    return run_virtually(main())


def test_a_worker_unknown_to_discovery_is_contacted_at_the_routers_address() -> None:
    assert submitted_legs(decided(1, worker_address="w:1"), Members()) == ([(1, "w:1")], 1)


def test_a_prefill_worker_unknown_to_discovery_is_contacted_at_the_routers_address() -> None:
    assert submitted_legs(PAIR, Members()) == ([(2, "w:2")], 1)


def test_a_worker_that_left_is_not_contacted() -> None:
    members = Members()
    worker = Instance(1, "n", "worker", "", "w:1", model="m")
    members.on_snapshot(Snapshot(1, {1: worker}), SnapshotDiff(joined=(worker,)))
    members.on_snapshot(Snapshot(2), SnapshotDiff(left=(worker,)))
    submitted, placements = submitted_legs(decided(1, worker_address="w:1"), members)
    assert submitted == []
    assert placements > 1, "it is placed again"


def test_a_worker_without_an_address_is_not_contacted() -> None:
    assert submitted_legs(decided(1), Members())[0] == []
