"""`meshctl status [MEMBER]`: the members of a mesh with health, load and KV use.

The data comes from the registry and from the processes themselves, never from a cache.

A worker of which the engine fails its probes is `failing`; the reason follows the table. A member
is routable if its peers send it work; the peers that it waits for follow the table, too. Then come
the workers that the routers recommend for each model and role.

MEMBER selects one member by its stable name, its id or its key in log events.

Exit status: 0 if all members serve; 1 if one does not, or there is none; 2 if the registry is
unreachable.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import click

from common.errors import MeshError, NotFound
from common.inspection.members import SERVING, read_member
from common.registry.instances import Instance
from common.registry.open import describe_registry
from common.rpc import channel as rpc
from common.runtime.config import ServiceConfig
from common.service.routable.peers import Routable, WaitingPeer
from kvmesh.types.v1 import load_pb2
from meshctl.completion import complete_members
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.view.members import find_member, read_members
from meshctl.view.pools import Pool, describe_pools, read_pools
from meshctl.view.screen import align

TIMEOUT_S = 1.0
EXIT_UNREACHABLE = 2
UNAUTHENTICATED = "unauthenticated"

# The order in which `meshctl up` starts and shows them.
_SERVICES = ("frontend", "router", "indexer", "batch", "worker")
_ROLES = ("aggregated", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Row:
    """One instance."""

    instance: Instance
    health: str
    loads: tuple[load_pb2.Load, ...] = ()
    """Empty except for workers that responded."""

    failure: str = ""
    """Why the engine of a worker fails, by its probe; "" if it does not."""

    routable: Routable | None = None
    """None if the member does not report it."""

    pools: tuple[Pool, ...] = ()
    """Of a router."""

    @property
    def kv(self) -> float | None:
        """Share of KV blocks in use by running requests."""
        total = sum(load.kv_total_blocks for load in self.loads)
        used = sum(load.kv_used_blocks for load in self.loads)
        return used / total if total else None

    def fields(self) -> dict[str, Any]:
        """Returns the row for programs: that of the table, `failure` if there is one, the peers
        that the member waits for, or waits for no more, and the pools, if there are any."""
        fields: dict[str, Any] = self.columns() | (
            {"failure": self.failure} if self.failure else {}
        )
        if self.routable is not None:
            peers = {"missing": self.routable.missing, "given_up": self.routable.given_up}
            fields |= {
                name: list(map(_peer_fields, found)) for name, found in peers.items() if found
            }
        if self.pools:
            fields["pools"] = [pool.fields() for pool in self.pools]
        return fields

    def columns(self) -> dict[str, str | int | float | None]:
        """Returns the row of the table: None for absent values; the id as text, since it exceeds
        2^53."""
        instance = self.instance
        return {
            "service": instance.service,
            "name": instance.stable_name or None,
            "id": str(instance.id),
            "address": instance.address,
            "model": instance.model or None,
            "role": instance.role if instance.service == "worker" else None,
            "health": self.health,
            "routable": None if self.routable is None else self.routable.is_routable,
            "running": sum(load.running for load in self.loads) if self.loads else None,
            "waiting": sum(load.waiting for load in self.loads) if self.loads else None,
            "kv": self.kv,
        }

    def json_object(self) -> dict[str, Any]:
        """Returns `fields` with the key of the instance and the parts that it is made of."""
        instance = self.instance
        return self.fields() | {"key": instance.key, "endpoint": asdict(instance.endpoint)}

    def cells(self) -> tuple[str, ...]:
        kv = None if self.kv is None else f"{100 * self.kv:.0f} %"
        columns = self.columns() | {"kv": kv}
        if self.routable is not None:
            columns["routable"] = _describe_routable(self.routable)
        return tuple("-" if value is None else str(value) for value in columns.values())


def _peer_fields(peer: WaitingPeer) -> dict[str, str | None]:
    return {
        "service": peer.service,
        "name": peer.stable_name or None,
        "id": str(peer.instance_id) if peer.instance_id else None,
        "reason": peer.reason,
    }


def _describe_routable(routable: Routable) -> str:
    """Returns the cell of the table; the number is that of the peers without an acknowledgement."""
    if routable.is_leaving:
        return "leaving"
    missing = len(routable.missing) + len(routable.given_up)
    answer = "yes" if routable.is_routable else "no"
    return f"{answer} ({missing} missing)" if missing else answer


async def gather(config: ServiceConfig, member: str = "") -> list[Row]:
    """Reads the registry, then queries all instances at once, or the one with this name, id or key.
    Raises Unavailable, InvalidRequest, and NotFound without such an instance."""
    security = rpc.security_from_config(config)
    snapshot = await read_members(config)
    instances = sorted(snapshot.instances.values(), key=_sort_key)
    if member:
        instances = [find_member(instances, member, config)]
    return list(await asyncio.gather(*(_query_instance(i, security) for i in instances)))


def _sort_key(instance: Instance) -> tuple[int, int, list[str | int]]:
    """Returns the sort key in the table; instances without a name keep the order of
    registration."""
    parts = re.split(r"([0-9]+)", instance.stable_name)
    natural = [int(part) if n % 2 else part for n, part in enumerate(parts)]
    return _SERVICES.index(instance.service), _ROLES.index(instance.role), natural


async def _query_instance(instance: Instance, security: rpc.Security) -> Row:
    async with rpc.channel(instance.address, role=instance.service, security=security) as channel:
        state = await read_member(channel, instance.service, timeout_s=TIMEOUT_S)
        pools: tuple[Pool, ...] = ()
        if instance.service == "router" and state.has_responded:
            pools = await read_pools(channel, timeout_s=TIMEOUT_S)
        return Row(instance, state.health, state.loads, state.failure, state.routable, pools)


def describe_token_problem(rows: Iterable[Row], config: ServiceConfig) -> str:
    """Returns what to do about members that reject our token; "" if all accept it."""
    if all(row.health != UNAUTHENTICATED for row in rows):
        return ""
    problem = "differs from the mesh's" if config.mesh_token else "is not set"
    return f"meshctl: {UNAUTHENTICATED}: KVMESH_MESH_TOKEN {problem}; set the mesh's token\n"


def describe_failures(rows: Iterable[Row]) -> str:
    """Returns one line for each worker of which the engine fails, and for each peer that a member
    misses."""
    lines = []
    for row in rows:
        name = row.instance.stable_name or row.instance.id
        if row.failure:
            lines.append(f"{name}: its engine fails: {row.failure}\n")
        if row.routable is not None:
            verb = "still gets work of" if row.routable.is_leaving else "waits for"
            lines += [f"{name}: {verb} {peer}\n" for peer in row.routable.missing]
            lines += [f"{name}: does not wait for {peer}\n" for peer in row.routable.given_up]
    return "".join(lines)


@click.command("status", cls=MeshCommand, config=MeshConfig, flags=REGISTRY_FLAGS)
@click.argument("member", default="", shell_complete=complete_members)
@json_flag
def command(config: MeshConfig, member: str, as_json: bool) -> int:
    """Shows the members of a mesh with their health, load and KV use.

    MEMBER is the stable name of one member, its id, or its key in log events. With `--json` ids
    are text, and KV use is from 0 to 1.
    """
    return status(config, member, as_json=as_json)


def status(config: ServiceConfig, member: str = "", *, as_json: bool) -> int:
    """Prints the members; returns 1 if one does not serve, or there is none."""
    try:
        rows = asyncio.run(gather(config, member))
    except MeshError as error:
        sys.stderr.write(f"meshctl: {error.message}\n")
        return 1 if isinstance(error, NotFound) else EXIT_UNREACHABLE
    if as_json:
        sys.stdout.write(json.dumps([row.json_object() for row in rows]) + "\n")
    elif not rows:
        message = f"no instance in namespace {config.namespace!r} of {describe_registry(config)}"
        sys.stdout.write(f"{message}\n")
    else:
        header = [name.upper() for name in rows[0].columns()]
        lines = align([header, *(row.cells() for row in rows)])
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.write(describe_failures(rows))
        sys.stdout.write(describe_pools(pool for row in rows for pool in row.pools))
    sys.stderr.write(describe_token_problem(rows, config))
    return 0 if rows and all(row.health == SERVING for row in rows) else 1
