"""Which parts of a request need a scope of its key (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from common.access.caller import Caller
from common.api_keys import Permission
from frontend_svc.openai.body.nvext import AgentHints, Nvext
from frontend_svc.openai.output.extension import METRICS, QUERY_ONLY

_ROUTING_FIELDS: Final = (
    *("backend_instance_id", "prefill_worker_id", "decode_worker_id"),
    *("dp_rank", "prefill_dp_rank", "allowed_worker_ids"),
    *("router_config_override", "routing_constraints"),
)
_EXPLAIN_FIELDS: Final = frozenset({"worker_id", "timing", "kv_hit"})
_EXPLAIN_ANNOTATIONS: Final = frozenset({QUERY_ONLY, METRICS})


def check_permissions(caller: Caller, nvext: Nvext | None, priority: int | None = None) -> None:
    """Raises PermissionDenied for the first part of a request that its key does not permit. nvext:
    with the hints of the headers. priority: the field of that name in the body."""
    if caller.scopes >= {Permission.ROUTING, Permission.EXPLAIN}:
        return
    if priority is not None:
        caller.require(Permission.ROUTING, "priority")
    for scope, field in () if nvext is None else _needs(nvext):
        caller.require(scope, f"nvext.{field}")


def _needs(nvext: Nvext) -> Iterator[tuple[Permission, str]]:
    for name in _ROUTING_FIELDS:
        if getattr(nvext, name) is not None:
            yield Permission.ROUTING, name
    hints = nvext.agent_hints or AgentHints()
    for name in AgentHints.model_fields:
        if getattr(hints, name) is not None:
            yield Permission.ROUTING, f"agent_hints.{name}"
    if not _EXPLAIN_FIELDS.isdisjoint(nvext.extra_fields or ()):
        yield Permission.EXPLAIN, "extra_fields"
    names = {annotation.partition(":")[0] for annotation in nvext.annotations or ()}
    if not _EXPLAIN_ANNOTATIONS.isdisjoint(names):
        yield Permission.EXPLAIN, "annotations"
