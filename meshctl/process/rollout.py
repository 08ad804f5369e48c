"""Which members a rolling restart replaces, and how (pure).

Members of one role can replace each other. A member is replaced new-first (the new process is
routable before the old one ends) or old-first. Old-first needs another live member of its role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from common.errors import InvalidRequest
from common.runtime.config import PREFIX
from common.runtime.suggestion import suggest
from meshctl.mesh_file.settings import PORTS, service_prefix
from meshctl.services import ServiceSpec

# Services that others need come first, so that a new frontend connects to new routers and workers.
_ORDER = ("indexer", "worker", "router", "frontend", "epp", "batch", "console")
# Its value begins with the host in a registry of several hosts.
_STABLE_NAME = "--stable-name"
NO_SUCCESSORS: Final[Mapping[str, ServiceSpec]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Member:
    """A member as a plan sees it. is_live: whether it is ready."""

    spec: ServiceSpec
    is_live: bool
    instance_id: str = ""
    """"": it has not registered."""


@dataclass(frozen=True, slots=True)
class Step:
    """The replacement of one member. new_first: as above. fixed: the port for which it is not
    replaced new-first although it would be; "": none."""

    name: str
    new_first: bool
    fixed: str = ""


def select(members: Sequence[Member], names: Iterable[str]) -> list[Member]:
    """Returns the members with these names, groups (`worker`, `frontend`) or roles (`prefill`); all
    without names. The stable name and the id in the registry are names too. Raises InvalidRequest
    for a name that fits none."""
    found: dict[str, Member] = {}
    for name in names:
        fitting = [m for m in members if name in _names(m)]
        if not fitting:
            known = {known for m in members for known in _names(m)}
            raise InvalidRequest(f"{name!r}: no such member or service{suggest(name, known)}")
        found |= {m.spec.name: m for m in fitting}
    selected = list(found.values()) if found else list(members)
    return sorted(selected, key=lambda m: _ORDER.index(_service(m.spec)))


def plan(
    members: Sequence[Member],
    selected: Sequence[Member],
    environ: Mapping[str, str],
    *,
    new_first: bool | None = None,
    successors: Mapping[str, ServiceSpec] = NO_SUCCESSORS,
) -> list[Step]:
    """Returns the replacements in order. Raises InvalidRequest if one would end the last live
    member of a role.

    - environ: of meshctl, which services inherit.
    - new_first: None: frontends, and the only members of a role, are replaced new-first; observers,
      whose ports are fixed and which may be absent for a while, never.
    - successors: what members become, by name, if that is known.
    """
    steps = []
    for member in selected:
        spec = member.spec
        if spec.is_observer:
            steps.append(Step(spec.name, False))
            continue
        peers = [m for m in members if m.spec.role == spec.role and m.spec.name != spec.name]
        is_last = not any(m.is_live for m in peers)
        is_surge = is_last or spec.http_port is not None if new_first is None else new_first
        port = ""
        if is_surge and member.is_live:
            port = fixed_port(spec, environ)
            port = port or fixed_port(successors.get(spec.name, spec), environ)
        if port:
            if is_last or new_first:
                hint = f"use {port} 0, or add a second {spec.role}"
                if port == "http_port":
                    hint = f"the process of its version binds it; add a second {spec.role}"
                raise InvalidRequest(
                    f"{spec.name} cannot be replaced new-first: two processes cannot have its fixed"
                    f" {port}; {hint}"
                )
            is_surge = False
        if not is_surge and is_last and member.is_live:
            raise InvalidRequest(
                f"{spec.name} is the last live {spec.role}: replace it new-first (without"
                " --no-surge)"
            )
        steps.append(Step(spec.name, is_surge and member.is_live, port))
    return steps


def check_drain(members: Sequence[Member], name: str) -> Member:
    """Returns the member to drain. Raises InvalidRequest if there is none, or if it is the last
    live one of its role."""
    (member, *others) = select(members, [name])
    if others:
        raise InvalidRequest(f"{name!r} names {len(others) + 1} members; drain one at a time")
    peers = [m for m in members if m.spec.role == member.spec.role and m is not member]
    if not member.spec.is_observer and member.is_live and not any(m.is_live for m in peers):
        raise InvalidRequest(f"{member.spec.name} is the last live {member.spec.role}")
    return member


def fixed_port(spec: ServiceSpec, environ: Mapping[str, str]) -> str:
    """Returns the name of a port that only one process on a host can have; "": none."""
    own = service_prefix(_service(spec))
    if spec.http_port and spec.binds_port:
        return "http_port"
    for name in PORTS:
        for variable in (f"{own}{name.upper()}", f"{PREFIX}{name.upper()}"):
            if spec.with_environ(environ).get(variable, "0") not in ("", "0"):
                return name
    return ""


def _service(spec: ServiceSpec) -> str:
    return spec.module.removesuffix("_svc")


def _names(member: Member) -> set[str]:
    spec = member.spec
    names = {spec.name, spec.name.rpartition("-")[0], _service(spec), spec.role.partition(" ")[0]}
    if _STABLE_NAME in spec.args:
        names.add(spec.args[spec.args.index(_STABLE_NAME) + 1])
    return (names | {member.instance_id}) - {""}
