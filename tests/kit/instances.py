"""Registered workers, and snapshots of a registry."""

from __future__ import annotations

from typing import Any

from common.registry.instances import Instance, Snapshot


def worker(worker_id: int, role: str = "aggregated", **fields: Any) -> Instance:
    """Returns a worker of the model `m` with blocks of 16 tokens.

    No server listens at its address. fields: other values of fields of `Instance`.
    """
    given: dict[str, Any] = {
        "role": role,
        "namespace": "mesh",
        "stable_name": "",
        "address": "127.0.0.1:1",
        "model": "m",
        "block_size": 16,
        **fields,
    }
    return Instance(worker_id, service="worker", **given)


def snapshot_of(*instances: Instance) -> Snapshot:
    """Returns the first snapshot of a registry with these instances."""
    return Snapshot(1, {instance.id: instance for instance in instances})
