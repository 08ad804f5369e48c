"""Facts about the registry: whether it can be read, its entries, the cards that members name."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from common.errors import MeshError, PermissionDenied
from common.registry.consul.client import ConsulClient
from common.registry.consul.entries import HealthState
from common.registry.file_lock import is_locked, open_regular
from common.registry.file_view import FolderView, entry_name
from common.registry.folder_changes import FolderChanges
from common.registry.instances import Instance, newest_incarnations
from common.registry.open import open_registry
from common.registry.signature import UNSIGNED, EntrySigner
from common.runtime.config import ServiceConfig
from common.runtime.member_key import MemberKeys
from meshctl.doctor.collect.consul_rights import find_refusal
from meshctl.doctor.facts import RegistryFacts


async def read_registry(
    config: ServiceConfig, limit_s: float
) -> tuple[RegistryFacts, tuple[Instance, ...]]:
    """Returns the facts, and the members: the newest incarnation of each process."""
    is_consul = config.registry == "consul"
    place = config.consul_url if is_consul else str(config.registry_path.resolve())
    facts = RegistryFacts(place=place, kind=config.registry)
    if is_consul:
        facts, instances = await _read_consul(config, facts, limit_s)
    else:
        facts, instances = _read_folder(config, facts)
    members = newest_incarnations(instances)
    checksums = {i.card_checksum for i in members if i.card_checksum}
    errors = await _find_card_errors(config, checksums, limit_s)
    current = {instance.id for instance in members}
    superseded = tuple(instance for instance in instances if instance.id not in current)
    return replace(facts, card_errors=errors, superseded=superseded), members


def _read_folder(
    config: ServiceConfig, facts: RegistryFacts
) -> tuple[RegistryFacts, tuple[Instance, ...]]:
    """Returns the facts with what the folder shows, and all live instances, oldest first."""
    folder = config.registry_path / config.namespace / "instances"
    try:
        # Before the views, which remove the entries of ended processes.
        live, orphans, others = _scan(folder)
    except OSError as error:
        text = f"cannot read {folder}: {error.strerror}"
        return replace(facts, error=text), ()
    signed = _view_instances(folder, config.namespace, _signer(config))
    unsigned = _view_instances(folder, config.namespace, UNSIGNED)
    named = {entry_name(instance_id) for instance_id in unsigned}
    facts = replace(
        facts,
        foreign=tuple(i for i in unsigned.values() if i.id not in signed),
        orphans=tuple(str(folder / name) for name in orphans),
        unreadable=tuple(str(folder / name) for name in (*others, *sorted(live - named))),
    )
    return facts, tuple(signed.values())


def _scan(folder: Path) -> tuple[set[str], list[str], list[str]]:
    """Returns the names of entries with an owner, of those without, and of other files."""
    live, orphans, others = set(), [], []
    with contextlib.suppress(FileNotFoundError):  # It is created with the first entry.
        for name in sorted(os.listdir(folder)):
            if name.startswith("."):
                continue
            try:
                fd = open_regular(folder / name, os.O_RDONLY)
            except FileNotFoundError:
                continue
            except OSError:
                others.append(name)
                continue
            try:
                if not _is_entry_name(name):
                    others.append(name)
                elif is_locked(fd):
                    live.add(name)
                elif os.fstat(fd).st_size:
                    orphans.append(name)
            finally:
                os.close(fd)
    return live, orphans, others


def _is_entry_name(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return name == entry_name(int(name.removesuffix(".json"), 16))
    return False


def _view_instances(folder: Path, namespace: str, signer: EntrySigner) -> dict[int, Instance]:
    """Returns the instances that a signer accepts, oldest first, superseded ones included."""
    changes = FolderChanges()
    view = FolderView(folder, namespace, changes, signer)
    try:
        view.poll()
        return {instance.id: instance for instance in view.instances()}
    finally:
        view.close()
        changes.close()


def _signer(config: ServiceConfig) -> EntrySigner:
    members = MemberKeys(is_required=config.has_mesh_secret)
    return EntrySigner(config.mesh_token, members=members)


async def _read_consul(
    config: ServiceConfig, facts: RegistryFacts, limit_s: float
) -> tuple[RegistryFacts, tuple[Instance, ...]]:
    """Returns the facts with what Consul lists, and all listed instances, oldest first."""
    try:
        async with asyncio.timeout(limit_s):
            signed, unsigned = await asyncio.gather(
                _list_consul(config, _signer(config)), _list_consul(config, UNSIGNED)
            )
    except PermissionDenied as error:
        return replace(facts, refused=error.message), ()
    except MeshError as error:
        return replace(facts, error=error.message), ()
    except TimeoutError:
        text = f"Consul at {config.consul_url} did not answer within {limit_s:g} s"
        return replace(facts, error=text), ()
    (members, _), (all_instances, unreadable) = signed, unsigned
    accepted = {instance.id for instance in members}
    facts = replace(
        facts,
        foreign=tuple(i for i in all_instances if i.id not in accepted),
        unreadable=unreadable,
        refused=await find_refusal(config, limit_s),
    )
    return facts, members


async def _list_consul(
    config: ServiceConfig, signer: EntrySigner
) -> tuple[tuple[Instance, ...], tuple[str, ...]]:
    """Returns the instances that a signer accepts, oldest first, and the ids of other entries.

    An entry stays for a minute after the end of its process; if a newer instance has its name, it
    is left out.
    """
    client = ConsulClient(config.consul_url, config.consul_token, signer, config.consul_ca_path)
    try:
        listing = await client.list_entries(config.namespace)
    finally:
        await client.close()
    entries = sorted(listing.entries, key=lambda entry: entry.order)
    newest = {i.id for i in newest_incarnations(entry.instance for entry in entries)}
    instances = tuple(
        entry.instance
        for entry in entries
        if entry.instance.id in newest or entry.health is HealthState.PASSING
    )
    return instances, tuple(sorted(listing.unreadable))


async def _find_card_errors(
    config: ServiceConfig, checksums: Iterable[str], limit_s: float
) -> Mapping[str, str]:
    """Returns why cards cannot be read, by checksum."""
    registry = open_registry(config)
    errors: dict[str, str] = {}

    async def read(checksum: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await registry.get_card(checksum)
        except MeshError as error:
            errors[checksum] = error.message
        except TimeoutError:
            errors[checksum] = f"no answer within {limit_s:g} s"

    try:
        await asyncio.gather(*map(read, sorted(checksums)))
    finally:
        await registry.close()
    return errors
