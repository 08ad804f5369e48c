"""`meshctl batches`: batches and their progress."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import datetime
from typing import Any

import click
from google.protobuf.json_format import MessageToDict

from common.inspection.batches import read_progress
from common.rpc import channel as rpc
from kvmesh.batch.v1 import batch_pb2
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.view.members import names_by_id, read_members
from meshctl.view.screen import align

_HEADER = (
    *("BATCH", "TENANT", "STATUS", "LINES", "DONE", "FAILED", "IN FLIGHT"),
    *("ENDPOINT", "CREATED", "EXPIRES"),
)
_RESPONSES_HEADER = ("TENANT", "RESPONSES IN THE BACKGROUND", "COUNT")


@click.command("batches", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="At most so many."
)
@json_flag
def command(config: MeshConfig, limit: int, as_json: bool) -> int:
    """Shows the batches of all tenants, newest first, and which service runs them; then how many
    responses in the background there are, by tenant and status.

    DONE and FAILED are lines with a result; IN FLIGHT are lines that a frontend has and that may
    wait there for idle capacity.
    """
    found, runner = asyncio.run(_read(config, limit))
    if as_json:
        value = {
            "batches": [_fields(progress) for progress in found.batches],
            "responses": [
                {"tenant": one.tenant, "status": one.status, "count": one.count}
                for one in found.responses
            ],
            "runner": runner or None,
        }
        sys.stdout.write(json.dumps(value) + "\n")
        return 0
    rows = align([_HEADER, *map(_row, found.batches)])
    sys.stdout.writelines(f"{row}\n" for row in rows)
    sys.stdout.write(f"runner: {runner or 'none has the lease'}\n")
    if found.responses:
        counts = [(one.tenant or "-", one.status, str(one.count)) for one in found.responses]
        sys.stdout.writelines(f"{row}\n" for row in ["", *align([_RESPONSES_HEADER, *counts])])
    return 0


async def _read(config: MeshConfig, limit: int) -> tuple[batch_pb2.ListProgressResponse, str]:
    """Returns the batches, and the name of the service that runs them; "": none does."""
    snapshot = await read_members(config)
    found = await read_progress(snapshot, rpc.security_from_config(config), limit)
    runner = str(found.runner_id or "")
    return found, names_by_id(snapshot).get(runner, runner)


# Any: JSON.
def _fields(progress: batch_pb2.Progress) -> dict[str, Any]:
    fields: dict[str, Any] = MessageToDict(
        progress.batch, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    numbers = {name: int(value) for name, value in fields.items() if name.endswith("_at")}
    return {
        **fields,
        **numbers,
        "tenant": progress.tenant,
        "in_flight": progress.in_flight,
    }


def _row(progress: batch_pb2.Progress) -> tuple[str, ...]:
    batch = progress.batch
    return (
        batch.id,
        progress.tenant or "-",
        batch.status,
        *(str(count) for count in (batch.total, batch.completed, batch.failed)),
        str(progress.in_flight),
        batch.endpoint,
        *(_time(at_s) for at_s in (batch.created_at, batch.expires_at)),
    )


def _time(at_s: int) -> str:
    return datetime.fromtimestamp(at_s).astimezone().isoformat(" ", "seconds")[:19]
