"""The routers of a replayed mesh, and the workers that they see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from common.registry.instances import Instance, Role, Snapshot
from replay.engine import WorkerSettings
from router_svc.core.replication import OutboundSync, Replica
from router_svc.core.router import Router

MODEL = "replay"


@dataclass(slots=True, eq=False)
class ReplayPeer:
    """A router with its replication."""

    number: int
    router: Router
    replica: Replica
    session: int
    rng: Random
    outbound: dict[int, OutboundSync] = field(default_factory=dict)
    """To the other routers, by number."""

    streams: dict[int, int] = field(default_factory=dict)
    """Streams from the other routers, by number."""


def open_peer(router: Router, number: int, seed: int) -> ReplayPeer:
    """Returns a router with its replication and one session; it has no peers yet."""
    session = router.load_tracker.open_session(number + 1, 1)
    replica = Replica(router.load_tracker, overlaps=router.overlaps)
    return ReplayPeer(number, router, replica, session, Random(f"{seed}:{number}"))


def connect(peers: Sequence[ReplayPeer]) -> None:
    """Opens the streams between all routers."""
    for receiver in peers:
        for sender in peers:
            if sender is not receiver:
                sender.outbound[receiver.number] = sender.replica.open_outbound()
                receiver.streams[sender.number] = receiver.replica.stream_opened(sender.number)


def worker_snapshot(sizes: WorkerSettings, roles: Iterable[Role]) -> Snapshot:
    """Returns a registry with a worker of each role, of ids from 1. Workers that prefill or decode
    are one transfer group."""
    workers = [
        Instance(
            *(number, "replay", "worker", f"worker-{number - 1}", "127.0.0.1:1"),
            model=MODEL,
            block_size=sizes.block_size,
            total_kv_blocks=sizes.total_blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            kv_index="events",
            role=role,
            transfer_group="" if role == "aggregated" else "replay",
        )
        for number, role in enumerate(roles, 1)
    ]
    return Snapshot(1, {worker.id: worker for worker in workers})
