"""Whether the peers of a member send it work."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import MeshError
from common.rpc import channel as rpc
from common.service.routable.service import read_routable
from meshctl.process.supervise import Child

TIMEOUT_S = 5.0
# In certificates an endpoint picker is a frontend.
_ROLES = {"epp": "frontend"}


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a member waits for, and the peers without which it is routable."""

    missing: str = ""
    """"": the member is routable."""
    given_up: str = ""


async def find_missing(security: rpc.Security, child: Child) -> Waiting:
    """Returns what a ready member waits for."""
    if child.line is None:
        return Waiting("it is not ready")
    if child.spec.is_observer:
        return Waiting()
    address = child.line.addresses["grpc"]
    try:
        role = _ROLES.get(child.line.name, child.line.name)
        async with rpc.channel(address, role=role, security=security) as channel:
            state = await read_routable(channel, timeout_s=TIMEOUT_S)
    except MeshError as error:
        return Waiting(f"it does not respond: {error.message}")
    # A service of an earlier version does not report it, and is routable when it is ready.
    if state is None:
        return Waiting()
    given_up = "; ".join(map(str, state.given_up))
    if state.is_routable:
        return Waiting(given_up=given_up)
    return Waiting("; ".join(map(str, state.missing)) or "it has not read its peers yet", given_up)
