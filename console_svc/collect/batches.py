"""Reads the batches from the service that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from common.errors import MeshError
from common.inspection.batches import list_progress
from common.registry.instances import Instance
from console_svc.collect.channels import Channels
from console_svc.state.batches import Batches, BatchView, ResponseCountView
from kvmesh.batch.v1 import batch_pb2

BATCHES_MAX: Final = 200
TIMEOUT_S: Final = 2.0


async def read_batches(
    channels: Channels,
    services: Sequence[Instance],
    before: Batches,
    name_of: Callable[[int], str],
) -> Batches:
    """Returns the newest batches; those of before, with the problem, if no service responds."""
    if not services:
        return Batches()
    by_id = {instance.id: instance for instance in services}
    newest = next(reversed(by_id.values()))
    try:
        found = await _read(channels, newest)
        # Only the runner has the lines in flight.
        if found.runner_id != newest.id and found.runner_id in by_id:
            found = await _read(channels, by_id[found.runner_id])
    except MeshError as error:
        return Batches(True, before.runner, before.batches, error.message, before.responses)
    runner = name_of(found.runner_id) if found.runner_id in by_id else ""
    counts = (ResponseCountView(one.tenant, one.status, one.count) for one in found.responses)
    return Batches(True, runner, tuple(map(_view, found.batches)), responses=tuple(counts))


async def _read(channels: Channels, instance: Instance) -> batch_pb2.ListProgressResponse:
    async with channels.use(instance) as channel:
        return await list_progress(channel, BATCHES_MAX, timeout_s=TIMEOUT_S)


def _view(progress: batch_pb2.Progress) -> BatchView:
    batch = progress.batch
    return BatchView(
        id=batch.id,
        tenant=progress.tenant,
        status=batch.status,
        endpoint=batch.endpoint,
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
        in_flight=progress.in_flight,
        created_s=batch.created_at,
        expires_s=batch.expires_at,
        problem="; ".join(
            f"line {error.line}: {error.message}" if error.line else error.message
            for error in batch.errors[:3]
        ),
    )
