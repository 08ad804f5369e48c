"""The adapters of a mesh file that workers place themselves: those with `copies`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common.errors import InvalidRequest
from common.registry.adapters import DesiredAdapter, check_addition
from common.registry.registry import Registry, desired_adapters, remove_adapter
from meshctl.mesh_file.document import KeyPath
from meshctl.mesh_file.schema import Adapter


def desired(adapter: Adapter, origin: str = "file") -> DesiredAdapter:
    """Returns an adapter as the registry has it. Raises InvalidRequest with the key."""
    return DesiredAdapter(
        *(adapter.name, adapter.model, adapter.uri, adapter.copies, adapter.copies_max), origin
    )


def find_placement_problems(adapters: Sequence[Adapter]) -> Iterable[tuple[KeyPath, str]]:
    """Yields the values that the registry would refuse."""
    names: set[str] = set()
    for i, adapter in enumerate(adapters):
        if adapter.copies is None:
            if adapter.copies_max is not None:
                yield ("adapters", i, "copies_max"), "needs copies"
            continue
        if adapter.name in names:
            text = f"another adapter has the name {adapter.name!r}"
            yield ("adapters", i, "name"), text
        names.add(adapter.name)
        try:
            desired(adapter)
        except InvalidRequest as error:
            yield ("adapters", i, error.field or "name"), error.message


@dataclass(frozen=True, slots=True)
class AdapterChanges:
    """What was changed, by name."""

    stored: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


async def apply_adapters(
    registry: Registry, namespace: str, adapters: Iterable[Adapter], origin: str
) -> AdapterChanges:
    """Makes those of the registry with this origin the ones of a mesh file. Raises Conflict and
    Unavailable; then some may be changed."""
    wanted = {one.name: desired(one, origin) for one in adapters if one.copies is not None}
    present = {one.name: one for one in await desired_adapters(registry, namespace)}
    stored = []
    for name, adapter in wanted.items():
        before = present.get(name)
        if before is not None and replace(before, origin=origin) == adapter:
            continue
        check_addition(adapter, present.values())
        await registry.put_adapter(namespace, adapter)
        present[name] = adapter
        stored.append(name)
    gone = [one.name for one in present.values() if one.origin == origin and one.name not in wanted]
    for name in gone:
        await remove_adapter(registry, namespace, name)
    return AdapterChanges(tuple(stored), tuple(gone))
