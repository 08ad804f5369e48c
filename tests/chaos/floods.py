"""Floods every port of a mesh: `python -m tests.chaos.floods [--seconds 1.5] [PART ...]`.

PART is a part of a case's name; all cases by default. A hostile process sends one flood to one port
of a worker, router, indexer or frontend. Meanwhile another connection of the same process sends
pings, and further ones connect anew. Prints one JSON line a case:

    worst_ping_ms      of the connection that was open before the flood
    worst_connect_ms   of new connections, with their first response
    worst_wall_ms      of the pings with the time in which the process waited for a processor,
                       which the others leave out
    rss_growth_mb      of the process
    calm               limit that the hostile connection exceeded, as its GOAWAY names it

The last line counts the cases. A case fails if a ping takes more than PING_MAX_MS, if memory grows
by more than RSS_GROWTH_MAX_MB, or if a peaceful connection ends. The exit status is 1 then. On the
ports of unary calls, the C core of gRPC decides about memory and new connections: there such a case
counts as skipped, and `core_limits` states what was missed (docs/security.md).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.floods import Peaceful, PingFigures, flooding, http2_floods, http_floods, rss_mb
from tests.kit.processes import Mesh, Service

PING_MAX_MS = 50.0
CONNECT_MAX_MS = 2000.0
RSS_GROWTH_MAX_MB = 64.0
# Of the calls of floods.
METHODS = {
    "worker": "/kvmesh.engine.v1.EngineService/Attach",
    "router": "/kvmesh.router.v1.RouterService/Session",
    "indexer": "/kvmesh.indexer.v1.IndexerService/MatchStream",
    "frontend": "/grpc.health.v1.Health/Watch",
}
# Of peaceful calls: they wait for a message, in silence.
PEACEFUL_METHODS = {
    "worker": "/kvmesh.engine.v1.EngineService/ListKvBlocks",
    "router": "/kvmesh.router.v1.RouterService/Session",
    "indexer": "/kvmesh.indexer.v1.IndexerService/Dump",
}
CONNECTIONS = {"connections": 5000, "connections_with_preface": 5000, "reconnects": 16}
CONNECTIONS_DEFAULT = 8
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Case:
    """One flood of one port."""

    service: Service
    port: str
    """`streams`, `grpc` or `http`."""
    flood: str
    connections: int

    @property
    def name(self) -> str:
        count = f"x{self.connections}" if self.connections > 1 else ""
        return f"{self.service.kind}/{self.port}/{self.flood}{count}"

    @property
    def address(self) -> str:
        return self.service.addresses[self.port].removeprefix("http://")

    @property
    def method(self) -> str:
        """Of the calls of hostile connections; empty: they do not speak gRPC."""
        return "" if self.port == "http" else METHODS[self.service.kind]

    def peaceful(self, *, is_new: bool) -> Peaceful:
        """Returns a peaceful connection to the process. On a port of unary calls, a thread of grpc
        responds to pings; so only new connections use that port."""
        service = self.service
        if service.kind == "frontend":
            address = service.addresses["http"].removeprefix("http://")
            return Peaceful(address, service.pid, "", is_new)
        address = self.address if is_new else service.addresses["streams"]
        return Peaceful(address, service.pid, PEACEFUL_METHODS[service.kind], is_new)


def cases(mesh: Mesh) -> Iterator[Case]:
    """Returns all cases, each port first without a flood."""
    for service in mesh.services:
        for port in ("streams", "grpc", "http"):
            if port not in service.addresses:
                continue
            method = "" if port == "http" else METHODS[service.kind]
            floods = http2_floods(method) if method else http_floods()
            yield Case(service, port, IDLE, 1)
            for flood in floods:
                yield Case(service, port, flood, CONNECTIONS.get(flood, CONNECTIONS_DEFAULT))


def run(case: Case, seconds: float) -> dict[str, Any]:
    """Runs a case; returns its JSON line."""
    before = rss_mb(case.service.pid)
    figures: dict[str, Any] = {}
    with (
        case.peaceful(is_new=False).measured() as pings,
        case.peaceful(is_new=True).measured() as connects,
    ):
        if case.flood == IDLE:
            # Sleep: the flood of no bytes.
            time.sleep(seconds)
        else:
            arguments = (case.address, case.flood, case.method, seconds, case.connections)
            with flooding(*arguments) as result:
                figures = result()
    after = rss_mb(case.service.pid)
    line = {
        "case": case.name,
        "worst_ping_ms": pings.worst_ms,
        "worst_connect_ms": connects.worst_ms,
        "worst_wall_ms": pings.worst_wall_ms,
        "rss_growth_mb": round(after - before, 1),
        **figures,
    }
    missed = _missed(line, pings, connects)
    if case.port == "grpc" and line["worst_ping_ms"] <= PING_MAX_MS and not pings.error:
        return {**line, "missed": [], "core_limits": missed}
    return {**line, "missed": missed}


def _missed(line: dict[str, Any], *measured: PingFigures) -> list[str]:
    missed = [figures.error for figures in measured if figures.error]
    if line["worst_ping_ms"] > PING_MAX_MS:
        missed.append(f"a ping above {PING_MAX_MS:g} ms")
    if line["worst_connect_ms"] > CONNECT_MAX_MS:
        missed.append(f"a connection above {CONNECT_MAX_MS:g} ms")
    if line["rss_growth_mb"] > RSS_GROWTH_MAX_MB:
        missed.append(f"memory above {RSS_GROWTH_MAX_MB:g} MB")
    return missed


def main(argv: list[str]) -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.floods", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts of names of cases")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each flood")
    options = parser.parse_args(argv)
    with (
        tempfile.TemporaryDirectory(prefix="kvmesh-floods-") as folder,
        Mesh(Path(folder), workers=1, indexers=1) as mesh,
    ):
        lines, skipped = [], 0
        for case in cases(mesh):
            if options.parts and not any(part in case.name for part in options.parts):
                skipped += 1
                continue
            line = run(case, options.seconds)
            print(json.dumps(line), flush=True)
            lines.append(line)
        ended = [service.name for service in mesh.services if service.process.poll() is not None]
    failed = [line["case"] for line in lines if line["missed"]]
    of_core = sum(bool(line.get("core_limits")) for line in lines)
    summary = {
        "passed": len(lines) - len(failed) - of_core,
        "failed": len(failed),
        "skipped": skipped + of_core,
        "worst_ping_ms": max((line["worst_ping_ms"] for line in lines), default=0),
        "worst_connect_ms": max((line["worst_connect_ms"] for line in lines), default=0),
        "rss_growth_mb": max((line["rss_growth_mb"] for line in lines), default=0),
        "failed_cases": failed,
        "ended_services": ended,
    }
    print(json.dumps(summary), flush=True)
    return 1 if failed or ended or not lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
