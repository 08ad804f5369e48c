"""The registered members, and the name of the registry in use."""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import NotFound, Unavailable
from common.registry.instances import Instance, Snapshot
from common.registry.open import describe_registry, open_registry
from common.registry.registry import Registry
from common.runtime.config import ServiceConfig
from common.runtime.suggestion import suggest


async def members(registry: Registry, config: ServiceConfig) -> Snapshot:
    """Returns the current members of the configured namespace. Raises Unavailable."""
    snapshot = await registry.snapshot(config.namespace)
    if not snapshot.revision:
        raise Unavailable(f"cannot reach {describe_registry(config)}")
    return snapshot


async def read_members(config: ServiceConfig) -> Snapshot:
    """Returns the current members, from a registry that is opened for that. Raises Unavailable and
    InvalidRequest."""
    registry = open_registry(config)
    try:
        return await members(registry, config)
    finally:
        await registry.close()


def names_by_id(snapshot: Snapshot) -> dict[str, str]:
    """Returns the stable names of the members by their id in decimal digits."""
    return {str(i.id): i.stable_name for i in snapshot.instances.values() if i.stable_name}


def find_member(instances: Iterable[Instance], text: str, config: ServiceConfig) -> Instance:
    """Returns the member with this stable name, id or key. Raises NotFound."""
    instances = tuple(instances)
    for instance in instances:
        if text in (instance.stable_name, str(instance.id), instance.key):
            return instance
    names = [instance.stable_name for instance in instances if instance.stable_name]
    place = f"namespace {config.namespace!r} of {describe_registry(config)}"
    message = f"no instance with the key {text!r} in {place}{suggest(text, names)}"
    raise NotFound(message, field="member")
