"""Several routers over the same workers: with Sync they spread the load almost like one."""

from __future__ import annotations

import heapq
from random import Random

import pytest

from common.registry.instances import Instance, Snapshot
from common.request.placement import Query
from router_svc.core.booking import BookingKey
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.replication import OutboundSync, Replica
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS

WORKERS = range(1, 9)
FRONTEND = 7
# A frame is collected for 10 ms; the rest is the network.
SYNC_S = 0.012
REQUESTS = 1500
# Short and long prompts, at 70% of the capacity of the workers.
TOKENS = (64, 4096)
ARRIVE_S = 0.045
TOKENS_PER_S = 8_000
SEEDS = range(3)


class World:
    """Prompts are sent to the routers in turn; each is computed by one of eight equal workers in
    turn.

    No worker reports load: the only load of the routers is their bookings.
    """

    def __init__(self, routers: int, seed: int, *, synced: bool) -> None:
        self.rng = Random(seed)
        load_trackers = [LoadTracker() for _ in range(routers)]
        replicas = [Replica(load_tracker) for load_tracker in load_trackers]
        self.routers = [
            Router(SELECTORS["kv"](), load_tracker=load_tracker) for load_tracker in load_trackers
        ]
        self.sessions = [load_tracker.open_session(FRONTEND) for load_tracker in load_trackers]
        self.links: list[tuple[OutboundSync, Replica, int, int]] = []
        fields = {"model": "m", "block_size": 16}
        instances = {
            n: Instance(n, "n", "worker", "", "127.0.0.1:1", **fields)  # type: ignore[arg-type]
            for n in WORKERS
        }
        for router in self.routers:
            router.update(Snapshot(1, instances), 0.0)
        if synced:
            self.links = [
                (one.open_outbound(), other, number, other.stream_opened(number))
                for number, one in enumerate(replicas, 1)
                for other in replicas
                if other is not one
            ]
        # Time at which each worker has computed all its prompts.
        self.busy_until = dict.fromkeys(WORKERS, 0.0)
        self.ends: list[tuple[float, int, BookingKey]] = []

    def mean_wait_s(self) -> float:
        """Mean time until a worker starts a request."""
        now, synced_at, waited_s = 0.0, 0.0, 0.0
        for number in range(REQUESTS):
            now += self.rng.expovariate(1 / ARRIVE_S)
            while self.ends and self.ends[0][0] <= now:
                _, router, key = heapq.heappop(self.ends)
                self.routers[router].load_tracker.free(key)
            if now - synced_at >= SYNC_S:
                synced_at = now
                for outbound, receiver, sender, stream in self.links:
                    receiver.apply_frame(sender, stream, outbound.frame(now), now)
            waited_s += self.place(number, now)
        return waited_s / REQUESTS

    def place(self, number: int, now: float) -> float:
        at = number % len(self.routers)
        query = Query("m", self.rng.choice(TOKENS))
        key = BookingKey(FRONTEND, f"{number}", 0)
        record = self.routers[at].decide(query, key, now, self.rng, self.sessions[at])
        worker = record.decision.worker.worker_id
        begins = max(now, self.busy_until[worker])
        self.busy_until[worker] = begins + query.total_tokens / TOKENS_PER_S
        heapq.heappush(self.ends, (self.busy_until[worker], at, key))
        return begins - now


def mean_wait_s(routers: int, *, synced: bool) -> float:
    waits = [World(routers, seed, synced=synced).mean_wait_s() for seed in SEEDS]
    return sum(waits) / len(waits)


@pytest.mark.slow
@pytest.mark.parametrize(("routers", "of_unsynced", "of_one"), [(2, 0.8, 1.6), (4, 0.6, 1.9)])
def test_routers_with_sync_do_not_herd(routers: int, of_unsynced: float, of_one: float) -> None:
    one = mean_wait_s(1, synced=False)
    apart = mean_wait_s(routers, synced=False)
    together = mean_wait_s(routers, synced=True)
    summary = (
        f"mean wait: one router {one:.3f} s, {routers} {together:.3f} s, without sync {apart:.3f} s"
    )
    print(summary)
    assert together < of_unsynced * apart, summary
    assert together < of_one * one, summary
