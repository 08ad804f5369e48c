"""`meshctl adapters`: the LoRA adapters that the workers of a mesh shall hold."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

# Any: JSON.
from typing import Any, TypeVar

import click

from common.errors import NotFound, UnknownModel
from common.registry.adapters import DesiredAdapter, check_addition, describe_adapters
from common.registry.open import open_registry
from common.registry.registry import Registry, desired_adapters, remove_adapter
from meshctl.commands.mesh_options import report_problems
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.load import read_mesh_file
from meshctl.mesh_file.placed_adapters import AdapterChanges, apply_adapters
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, file_origin, json_flag
from meshctl.usage import Group
from meshctl.view.members import members
from meshctl.view.screen import align

T = TypeVar("T")

EXIT_NOTHING_DONE = 2
_HEADER = ("NAME", "MODEL", "COPIES", "HELD BY", "FAILS AT", "URI")

command = Group(
    "adapters",
    help="Adds, removes and lists the LoRA adapters that workers hold. Workers load and unload"
    " within seconds.",
)


def _with_registry(config: MeshConfig, use: Callable[[Registry], Awaitable[T]]) -> T:
    """Returns the result of an operation on the registry of a mesh."""

    async def run() -> T:
        registry = open_registry(config)
        try:
            return await use(registry)
        finally:
            await registry.close()

    return asyncio.run(run())


@command.command("add", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.argument("name")
@click.option("--model", required=True, help="The model whose workers load it.")
@click.option("--uri", default="", help="Location of its files: file:///FOLDER on their hosts.")
@click.option("--copies", type=int, help="Workers of each role that hold it. Unset: all.")
@click.option("--copies-max", type=int, help="Up to so many while it is in much use.")
def add(config: MeshConfig, name: str, model: str, **values: Any) -> int:
    """Has workers load an adapter, in place of one of the same name."""
    adapter = DesiredAdapter(name, model, **values)

    async def store(registry: Registry) -> None:
        snapshot = await members(registry, config)
        models = {worker.model for worker in snapshot.of("worker")}
        if model not in models:
            raise UnknownModel(model)
        check_addition(adapter, await desired_adapters(registry, config.namespace), models)
        await registry.put_adapter(config.namespace, adapter)

    _with_registry(config, store)
    return 0


@command.command("remove", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.argument("name")
def remove(config: MeshConfig, name: str) -> int:
    """Has workers unload an adapter that was added; running requests go on to their end."""

    async def delete(registry: Registry) -> bool:
        return await remove_adapter(registry, config.namespace, name)

    if not _with_registry(config, delete):
        raise NotFound(f"{name!r} is no desired adapter of namespace {config.namespace!r}")
    return 0


@command.command("list", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@json_flag
def list_(config: MeshConfig, as_json: bool) -> int:
    """Shows the adapters with the workers that hold them, and those that could not load them.

    The status is 1 if a worker could not load one, or none holds it.
    """

    async def read(registry: Registry) -> list[dict[str, Any]]:
        snapshot = await members(registry, config)
        found = await desired_adapters(registry, config.namespace)
        return describe_adapters(found, snapshot.of("worker"))

    found = _with_registry(config, read)
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
    elif found:
        lines = align([_HEADER, *map(_row, found)])
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        for adapter in found:
            for worker in adapter["failed"]:
                place = worker["name"] or worker["id"]
                sys.stdout.write(f"{place}: {adapter['name']}: {worker['reason']}\n")
    return 0 if all(adapter["workers"] and not adapter["failed"] for adapter in found) else 1


@command.command("apply", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def apply(environ: Mapping[str, str], config: MeshConfig, file: Path) -> int:
    """Makes the adapters with `copies` of a mesh file those of a running mesh.

    Adapters that an earlier state of the file had are removed; those of `meshctl adapters add` and
    of the HTTP API stay.
    """
    try:
        loaded = read_mesh_file(file, environ)
    except MeshFileError as error:
        report_problems(error)
        return EXIT_NOTHING_DONE

    async def change(registry: Registry) -> AdapterChanges:
        origin = file_origin(config)
        return await apply_adapters(registry, config.namespace, loaded.mesh.adapters, origin)

    changes = _with_registry(config, change)
    for text, names in (("stored", changes.stored), ("removed", changes.removed)):
        sys.stdout.write("".join(f"{name}: {text}\n" for name in names))
    return 0


def _row(adapter: Mapping[str, Any]) -> tuple[str, ...]:
    copies = str(adapter["copies"] or "all")
    if adapter["copies_max"]:
        copies += f"-{adapter['copies_max']}"
    held, failed = (
        ", ".join(worker["name"] or worker["id"] for worker in adapter[key]) or "-"
        for key in ("workers", "failed")
    )
    return adapter["name"], adapter["model"], copies, held, failed, adapter["uri"] or "-"
