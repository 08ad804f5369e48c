"""The id that the caller of the current RPC has proved, and the check of an id that it claims."""

from __future__ import annotations

from contextvars import ContextVar

import structlog

from common.errors import PermissionDenied
from common.instance_ids import MEMBER_IDS

LOG = structlog.get_logger(__name__)

# 0: no proof came. None: this process requires none.
_caller_id: ContextVar[int | None] = ContextVar("kvmesh_caller_id", default=None)
# Of a caller with the token of operators: it may have no id of an instance.
_OPERATOR = -1


def bind_caller_id(caller_id: int | None, *, is_operator: bool = False) -> None:
    """Sets the proved id for the task of the RPC. 0: no proof came. None: none is required.

    is_operator: whether the caller has proved only that it is an operator.
    """
    _caller_id.set(_OPERATOR if is_operator else caller_id)


def check_claimed_id(claimed_id: int, field: str) -> None:
    """Raises PermissionDenied if the caller has not proved the id in a field of its message.

    A caller without a proof may have any id that has no key: the processes of earlier versions have
    such ids. An operator may have none.
    """
    caller_id = _caller_id.get()
    if caller_id is None or caller_id == claimed_id:
        return
    if caller_id == _OPERATOR:
        text = f"{field}: the operator token has no id of an instance"
    elif caller_id:
        text = f"{field}: the caller is instance {caller_id}, not {claimed_id}"
    elif claimed_id in MEMBER_IDS:
        text = f"{field}: the caller has not proved that it is instance {claimed_id}"
    else:
        return
    LOG.warning("member_id_refused", field=field, claimed_id=claimed_id, caller_id=caller_id)
    raise PermissionDenied(text, field=field, reason="OTHER_MEMBER")
