"""Cells in virtual time: what they cost in hits, latency and balance, and the CPU of a router in
one, beside what its unit costs predict."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean

from bench.scale.fleet import TENANTS, WORKER, FleetCosts, MeteredFleet
from bench.scale.registry import RegistryCosts
from bench.scale.table import REQUESTS_PER_S, FrameCosts, member_row, report_s
from replay.engine import WorkerSettings
from replay.fleet.cells import choose_cell
from replay.fleet.mesh import FleetMesh, FleetSettings
from replay.fleet.traffic import Traffic, TrafficSettings
from replay.report import percentile

# Requests a second of each worker, which compute 2,400 prompt tokens in it.
RATE = 0.25
CHOICES = 1000
# The workers of a cell whose routers are measured serve one request a second each.
FAST_WORKER = WorkerSettings(total_blocks=600)
PARTS = ("decisions", "replication", "loads", "events")


@dataclass(frozen=True, slots=True)
class Layout:
    """A fleet and how it is divided. seconds: of virtual time; figures are of the second half."""

    workers: int
    cells: int
    seconds: float
    tenants: int = TENANTS
    key_blocks: int = FleetSettings(1).key_blocks

    @property
    def name(self) -> str:
        if self.cells == 1:
            return f"{self.workers} workers, one mesh"
        by = "system prompt" if self.key_blocks == 1 else "conversation"
        return f"{self.workers} workers, {self.cells} cells by {by}"


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """Of the requests of the second half. busiest: requests of the busiest cell, as a multiple of
    the mean. choose_us: of the choice of a cell."""

    requests: int
    hit_rate: float
    ttft_s: float
    ttft_p95_s: float
    busiest: float
    choose_us: float
    wall_s: float


def run_layout(layout: Layout, seed: int) -> LayoutFigures:
    """Returns the figures of a fleet whose workers are as busy in each layout."""
    began = time.perf_counter()
    settings = FleetSettings(
        layout.workers,
        cells=layout.cells,
        worker=WORKER,
        key_blocks=layout.key_blocks,
        report_s=report_s(layout.workers // layout.cells),
        seed=seed,
    )
    traffic = Traffic(TrafficSettings(RATE * layout.workers, tenants=layout.tenants), seed)
    outcomes = FleetMesh(settings).run(traffic.requests(layout.seconds))
    found = [one for one in outcomes if one.at_s >= layout.seconds / 2]
    ttfts = sorted(one.ttft_s or 0.0 for one in found)
    cells = Counter(one.cell for one in found)
    return LayoutFigures(
        len(found),
        sum(one.cached_tokens for one in found) / sum(one.input_tokens for one in found),
        fmean(ttfts),
        percentile(ttfts, 0.95),
        max(cells.values()) * layout.cells / len(found),
        choose_us(layout.cells) if layout.cells > 1 else 0.0,
        time.perf_counter() - began,
    )


def choose_us(cells: int) -> float:
    """Returns the microseconds of CPU of the choice of a cell."""
    loads = [1.0] * cells
    began = time.thread_time()
    for key in range(CHOICES):
        choose_cell(key, loads, FleetSettings(1).bound)
    return (time.thread_time() - began) / CHOICES * 1e6


def simulated_shares(workers: int, routers: int, seconds: float) -> dict[str, float]:
    """Returns the shares of a core that each router of a cell takes at REQUESTS_PER_S, without the
    network: all of it is done in virtual time."""
    settings = FleetSettings(
        workers, routers=routers, worker=FAST_WORKER, report_s=report_s(workers)
    )
    mesh = MeteredFleet(settings)
    traffic = Traffic(TrafficSettings(REQUESTS_PER_S * workers, tenants=TENANTS), 1)
    mesh.run(traffic.requests(seconds))
    costs = mesh.costs
    sums = {
        "decisions": sum(costs.decide_s) / routers,
        "replication": (costs.sync_send_s + costs.sync_receive_s) / routers,
        "loads": costs.load_apply_s / routers,
        # One index for all routers.
        "events": costs.batch_apply_s,
    }
    return {name: value / mesh.now for name, value in sums.items()}


def computed_shares(costs: FleetCosts, routers: int, registry: RegistryCosts) -> dict[str, float]:
    """Returns the same shares by the arithmetic of `member_row`, from unit costs of another run.
    costs: of a fleet of as many workers."""
    row = member_row(
        replace(costs, routers=routers), FrameCosts(0.0, 0.0, costs.load_us, 0.0), registry
    )
    return {name: float(row[name]) for name in PARTS}
