"""The registered members, and the name of the registry in use."""

from __future__ import annotations

from common.errors import Unavailable
from common.registry.instances import Snapshot
from common.registry.registry import Registry
from common.runtime.config import ServiceConfig


async def members(registry: Registry, config: ServiceConfig) -> Snapshot:
    """Returns the current members of the configured namespace. Raises Unavailable."""
    snapshot = await registry.snapshot(config.namespace)
    if not snapshot.revision:
        raise Unavailable(f"cannot reach {describe_registry(config)}")
    return snapshot


def describe_registry(config: ServiceConfig) -> str:
    if config.registry == "consul":
        return f"Consul at {config.consul_url}"
    path = config.registry_path.resolve()
    return f"the registry {path}" + ("" if path.is_dir() else " (folder does not exist)")
