"""A fleet in virtual time with the CPU and the bytes of each of its parts."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from bench.measure import rss_mb
from common.kv.events import EventBatch, EventKind, KvEvent, Source
from common.kv.load import Load
from common.request.placement import Query
from common.wire.kv import batch_from_proto, batch_to_proto, source_to_proto
from common.wire.load import load_from_proto, load_to_proto
from kvmesh.indexer.v1 import indexer_pb2
from kvmesh.router.v1 import router_pb2
from replay.engine import WorkerSettings
from replay.fleet.mesh import Cell, FleetMesh, FleetSettings
from replay.fleet.traffic import Traffic, TrafficSettings
from replay.fleet.worker import CacheChange
from replay.routers import ReplayPeer
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.replication import Frame, OutboundSync
from router_svc.proto import frame_from_proto, frame_to_proto
from worker_svc.engines.sim.timing import Timing

TENANTS = 200
WORKER = WorkerSettings(total_blocks=600, timing=Timing(speedup=0.2))


@dataclass(slots=True)
class Costs:
    """Sums over a run, of all routers: seconds of CPU, and what was sent."""

    decide_s: list[float] = field(default_factory=list)
    sync_send_s: float = 0.0
    sync_receive_s: float = 0.0
    sync_frames: int = 0
    sync_bytes: int = 0
    load_updates: int = 0
    load_apply_s: float = 0.0
    load_bytes: int = 0
    batches: int = 0
    batch_apply_s: float = 0.0
    batch_bytes: int = 0


class MeteredFleet(FleetMesh):
    """A fleet whose messages are encoded as on the wire, and read again."""

    def __init__(self, settings: FleetSettings) -> None:
        super().__init__(settings)
        self.costs = Costs()
        self._sequences: dict[int, int] = {}

    def decide(self, peer: ReplayPeer, query: Query, key: BookingKey) -> DecisionRecord:
        began = time.thread_time()
        record = super().decide(peer, query, key)
        self.costs.decide_s.append(time.thread_time() - began)
        return record

    def make_frame(self, outbound: OutboundSync) -> Frame:
        began = time.thread_time()
        frame = super().make_frame(outbound)
        self.costs.sync_send_s += time.thread_time() - began
        return frame

    def apply_frame(self, sender: ReplayPeer, receiver: ReplayPeer, frame: Frame) -> None:
        costs, began = self.costs, time.thread_time()
        data = frame_to_proto(frame, sender.number + 1).SerializeToString()
        sent = time.thread_time()
        super().apply_frame(
            sender, receiver, frame_from_proto(router_pb2.SyncRequest.FromString(data))
        )
        costs.sync_receive_s += time.thread_time() - sent
        costs.sync_send_s += sent - began
        costs.sync_frames += 1
        costs.sync_bytes += len(data)

    def apply_change(self, cell: Cell, worker: int, change: CacheChange) -> None:
        costs = self.costs
        sequence = self._sequences[worker] = self._sequences.get(worker, 0) + 1
        events = [
            KvEvent(kind, np.array(blocks, dtype=np.uint64))
            for kind, blocks in (
                (EventKind.REMOVED, change.evicted),
                (EventKind.STORED, change.stored),
            )
            if blocks
        ]
        source = Source(worker + 1)
        message = indexer_pb2.SubscribeResponse(
            source=source_to_proto(source),
            batch=batch_to_proto(EventBatch(source, 1, sequence, events)),
        )
        data = message.SerializeToString()
        began = time.thread_time()
        batch_from_proto(indexer_pb2.SubscribeResponse.FromString(data).batch, worker + 1)
        super().apply_change(cell, worker, change)
        costs.batch_apply_s += time.thread_time() - began
        costs.batches += 1
        costs.batch_bytes += len(data)

    def apply_loads(self, cell: Cell, loads: Sequence[tuple[int, Load]]) -> None:
        costs = self.costs
        frame = indexer_pb2.SubscribeResponse()
        for worker, load in loads:
            message = frame.more.add()
            message.source.worker_id = worker + 1
            message.load.CopyFrom(load_to_proto(load))
        data = frame.SerializeToString()
        began = time.thread_time()
        parts = indexer_pb2.SubscribeResponse.FromString(data).more
        read = [(part.source.worker_id - 1, load_from_proto(part.load)) for part in parts]
        parsed = time.thread_time()
        super().apply_loads(cell, read)
        applied = time.thread_time()
        # Each router reads its own copy.
        costs.load_apply_s += (parsed - began) * len(cell.peers) + applied - parsed
        costs.load_updates += len(loads)
        costs.load_bytes += len(data)


@dataclass(frozen=True, slots=True)
class FleetCosts:
    """Microseconds of CPU, at each router, and bytes."""

    workers: int
    routers: int
    requests: int
    decide_us: float
    """Median: match, decision and booking."""

    sync_send_us: float
    """For each request of its own and each peer."""

    sync_receive_us: float
    """For each request of a peer."""

    sync_bytes: float
    """For each request and each peer."""

    load_us: float
    load_bytes: float
    batch_us: float
    batch_bytes: float
    batches_per_request: float
    router_mb: float
    """Of bookings, loads, candidates and predictions; without the index."""

    wall_s: float


def measure(workers: int, routers: int, rate: float, seconds: float, pid: int) -> FleetCosts:
    """rate: requests a second of each worker. seconds: of virtual time."""
    began = time.perf_counter()
    gc.collect()
    settings = FleetSettings(workers, routers=routers, worker=WORKER)
    mesh = MeteredFleet(settings)
    traffic = Traffic(TrafficSettings(rate * workers, tenants=TENANTS), 1)
    _fill(mesh, traffic)
    before_mb = rss_mb(pid)
    requests = list(traffic.requests(seconds))
    mesh.run(requests)
    costs, count = mesh.costs, max(1, len(requests))
    pairs = max(1, count * (routers - 1))
    return FleetCosts(
        workers,
        routers,
        len(requests),
        median(costs.decide_s) * 1e6,
        costs.sync_send_s / pairs * 1e6,
        costs.sync_receive_s / pairs * 1e6,
        costs.sync_bytes / pairs,
        costs.load_apply_s / max(1, costs.load_updates * routers) * 1e6,
        costs.load_bytes / max(1, costs.load_updates),
        costs.batch_apply_s / max(1, costs.batches) * 1e6,
        costs.batch_bytes / max(1, costs.batches),
        costs.batches / count,
        (rss_mb(pid) - before_mb) / routers,
        time.perf_counter() - began,
    )


def _fill(mesh: MeteredFleet, traffic: Traffic) -> None:
    """Puts the system prompt of a tenant into each cache, of frequent ones into more."""
    prefixes = traffic.prefixes
    for worker in range(mesh.settings.workers):
        mesh.fill(worker, [name + 1 for name in prefixes[worker % len(prefixes)]])
