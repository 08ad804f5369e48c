"""`make bench-scale`: what a member costs in fleets of 10 to 10,000 workers; the last line is JSON.

Routers, replication and index are the production cores, in virtual time and with the messages that
a network would carry (`bench/scale/fleet.py`); load reports are measured on an indexer and a router
process, the registry on answers of Consul, the index by its memory. From these unit costs follow
the shares of a core and the bytes of each member at REQUESTS_PER_S requests a second and worker:

    report_s = 0.1 s up to 500 workers, then in proportion to their number, at most 2 s
    decisions   requests / routers * decide_us
    replication requests / routers * peers * (sync_send_us + sync_receive_us)
    loads       workers / report_s * load_us
    events      requests * batches_per_request * batch_us
    indexer     (workers / report_s + requests * batches_per_request) * (in_us + routers / INDEXERS
                * out_us)

The JSON has all unit costs (`fleets`, `reports`, `registry`, `indexes`) and the table (`members`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any, TypeVar

import structlog

from bench.measure import print_report
from bench.scale import fleet, index, registry, streams
from bench.scale.table import FrameCosts, member_row, print_table

WORKERS = (10, 100, 1000, 10_000)
ROUTERS = (1, 10, 100)
# Of virtual time, and requests a second of each worker in it.
REQUESTS, RATE = 400, 0.2
SECONDS_MIN, SECONDS_MAX = 0.2, 5.0
PUBLISHERS, SUBSCRIBERS = 100, 8
# Blocks of each worker, by the number of workers.
INDEXES = ((100, 3000), (1000, 1000), (10_000, 300))
T = TypeVar("T")


def alone(call: Callable[..., T], *arguments: Any) -> T:
    """Runs a measurement in a process of its own, so that its memory is known."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def measure_fleet(workers: int, routers: int) -> fleet.FleetCosts:
    seconds = min(SECONDS_MAX, max(SECONDS_MIN, REQUESTS / (RATE * workers)))
    return fleet.measure(workers, routers, RATE, seconds, os.getpid())


def measure_index(workers: int, blocks: int) -> index.IndexCosts:
    return index.measure(workers, blocks, os.getpid())


def measure_reports(seconds: float) -> FrameCosts:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    few = asyncio.run(streams.measure(PUBLISHERS, 0, seconds))
    many = asyncio.run(streams.measure(PUBLISHERS, SUBSCRIBERS, seconds))
    # The router process subscribes in both.
    out_us = max(0.0, (many.indexer_us - few.indexer_us) / SUBSCRIBERS)
    return FrameCosts(max(0.0, few.indexer_us - out_us), out_us, few.router_us, many.bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--routers", type=int, nargs="+", default=ROUTERS)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the load reports")
    args = parser.parse_args()
    reports = alone(measure_reports, args.seconds)
    sys.stdout.write(f"load report: {reports}\n")
    registries = {count: alone(registry.measure, count) for count in args.workers}
    indexes = {n: alone(measure_index, n, b) for n, b in INDEXES if n <= max(args.workers)}
    for members, found in registries.items():
        sys.stdout.write(f"registry of {members}: {found}\n")
    for workers, costs in indexes.items():
        sys.stdout.write(f"index of {workers}: {costs}\n")
    fleets: list[fleet.FleetCosts] = []
    for workers in args.workers:
        for routers in args.routers:
            fleets.append(alone(measure_fleet, workers, routers))
            sys.stdout.write(f"{fleets[-1]}\n")
            sys.stdout.flush()
    rows = [member_row(costs, reports, registries[costs.workers]) for costs in fleets]
    print_table(rows, sys.stdout)
    figures = {
        "reports": asdict(reports),
        "registry": {count: asdict(found) for count, found in registries.items()},
        "indexes": {count: asdict(found) for count, found in indexes.items()},
        "fleets": [asdict(costs) for costs in fleets],
        "members": rows,
    }
    print_report("scale", vars(args), figures)


if __name__ == "__main__":
    main()
