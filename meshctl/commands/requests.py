"""`meshctl requests`: the last requests of all frontends."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import datetime

import click

from kvmesh.frontend.v1 import frontend_pb2
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.view.members import read_members
from meshctl.view.recent_requests import RecentRequests, Record, list_recent
from meshctl.view.screen import align

EXIT_FAILED = 1
_HEADER: tuple[str, ...] = (
    *("RECEIVED", "REQUEST", "MODEL", "TENANT", "STATUS", "PROMPT", "CACHED", "OUTPUT"),
    *("ROUTED", "PREFILLED", "FIRST", "TOTAL", "WORKERS", "FRONTEND"),
)


@click.command("requests", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.option("--model", default="", help="Only those of this model.")
@click.option("--tenant", default="", help="Only those of this tenant.")
@click.option("--failed", is_flag=True, help="Only those that failed.")
@click.option(
    "--limit", type=click.IntRange(1, 1024), default=20, show_default=True, help="At most so many."
)
@json_flag
def command(
    config: MeshConfig, model: str, tenant: str, failed: bool, limit: int, as_json: bool
) -> int:
    """Shows the last requests of all frontends, newest first, sampled or not.

    Times are milliseconds since the request was received; CACHED is what the engine found in its
    cache and, after a slash, what the router predicted. `meshctl trace` shows one request as a
    tree, `meshctl explain` why its worker was chosen. A frontend keeps 1,024 requests
    (`--recent-requests`).
    """
    request = frontend_pb2.ListRecentRequestsRequest(
        limit=limit, model=model, tenant=tenant, failed=failed
    )
    found = asyncio.run(_list(config, request))
    for problem in found.problems:
        sys.stderr.write(f"meshctl requests: {problem}\n")
    if as_json:
        result = {"requests": found.records, "problems": found.problems}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        rows = align([_HEADER, *map(_row, found.records)])
        sys.stdout.writelines(f"{row}\n" for row in rows)
    return EXIT_FAILED if found.problems else 0


async def _list(
    config: MeshConfig, request: frontend_pb2.ListRecentRequestsRequest
) -> RecentRequests:
    return await list_recent(config, await read_members(config), request)


def _row(record: Record) -> tuple[str, ...]:
    received = datetime.fromtimestamp(record["received_ms"] / 1000).astimezone()
    times = ("routed_ms", "prefilled_ms", "first_token_ms", "total_ms")
    cached = [record.get(name) for name in ("cached_tokens", "predicted_cached_tokens")]
    workers = [worker["name"] or worker["worker_id"] for worker in record["workers"]]
    return (
        received.isoformat(" ", "milliseconds")[:23],
        record["request_id"],
        record["model"] or "-",
        record["tenant"] or "-",
        f"{record['status']} {record['failure']}".strip(),
        str(record["prompt_tokens"]),
        "/".join("-" if tokens is None else str(tokens) for tokens in cached),
        str(record["output_tokens"]),
        *("-" if (ms := record.get(name)) is None else f"{ms:.1f}" for name in times),
        " -> ".join(workers) or "-",
        record["frontend"]["name"] or record["frontend"]["id"],
    )
