"""The check of API keys: once per request, before its body is read."""

from __future__ import annotations

import time

from common.access.caller import ANONYMOUS, Caller
from common.access.key_file import KeyFile
from common.api_keys import Permission
from frontend_svc.access.quotas import Quota, TenantQuotas
from frontend_svc.edge.asgi import AsgiApp, Receive, Scope, Send

# Key of the KeyFile in the state of a scope; absent: the API has no keys.
_KEYS = "kvmesh.api_keys"
# Key of the TenantQuotas, beside it.
_QUOTAS = "kvmesh.quotas"
# Key of the Caller of a request that no client sends; absent: the headers have the key.
CALLER = "kvmesh.caller"


def with_keys(api: AsgiApp, keys: KeyFile, quotas: TenantQuotas) -> AsgiApp:
    """Returns the same API, whose `admit` demands a key, and whose requests have the quotas of
    tenants."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][_KEYS] = keys
        scope["state"][_QUOTAS] = quotas
        await api(scope, receive, send)

    return serve


def admit(scope: Scope, needed: Permission | None) -> Caller:
    """Returns the client of a request. needed: what its key must permit; None: any key will do.
    Raises Unauthenticated and PermissionDenied."""
    state = scope["state"]
    keys: KeyFile | None = state.get(_KEYS)
    caller: Caller | None = state.get(CALLER)
    if caller is None:
        if keys is None:
            return ANONYMOUS
        caller = keys.identify(scope["headers"])
    if needed is not None:
        caller.require(needed)
    return caller


def quota_of(scope: Scope, caller: Caller) -> Quota | None:
    """Returns the quota of a client's new request; None without limits."""
    quotas: TenantQuotas | None = scope["state"].get(_QUOTAS)
    return None if quotas is None else quotas.quota(caller, time.monotonic())
