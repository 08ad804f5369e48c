"""Headers that say where, and how soon, a request is to run (pure). They win over `nvext`.

Ours begin with `x-kvmesh-`, and each stands for one field of `nvext`: it takes the same values and
means the same. One that begins so and is not known is refused by name, as an unknown field is; all
other headers are somebody else's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from common.errors import InvalidRequest
from frontend_svc.core.openai.bodies import (
    AgentHints,
    GenerationRequest,
    Nvext,
    Session,
    invalid_value,
)

PREFIX = b"x-kvmesh-"
# Header -> the field of `nvext` that it stands for, as a path.
FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "x-kvmesh-backend-instance-id": ("backend_instance_id",),
        "x-kvmesh-prefill-worker-id": ("prefill_worker_id",),
        "x-kvmesh-decode-worker-id": ("decode_worker_id",),
        "x-kvmesh-dp-rank": ("dp_rank",),
        "x-kvmesh-prefill-dp-rank": ("prefill_dp_rank",),
        "x-kvmesh-priority": ("agent_hints", "priority"),
        "x-kvmesh-strict-priority": ("agent_hints", "strict_priority"),
        "x-kvmesh-osl": ("agent_hints", "osl"),
        "x-kvmesh-session-id": ("session_control", "session_id"),
    }
)
_TEXTS = frozenset({"x-kvmesh-session-id"})
_PARTS: Mapping[str, type[AgentHints] | type[Session]] = MappingProxyType(
    {"agent_hints": AgentHints, "session_control": Session}
)
_INTEGER = re.compile(r"-?[0-9]{1,24}")
# What may stand in a header without being read differently by anybody on its way.
_PRINTABLE = re.compile(r"[ -~]*")
_SHOWN_CHARS = 80

R = TypeVar("R", bound=GenerationRequest)


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> Nvext | None:
    """What the headers ask for; None where none of ours is there. Names are in lower case.

    Raises InvalidRequest, which names the header, for one that is unknown, there twice, or has a
    value that its field does not take.
    """
    ours = [(name, raw) for name, raw in headers if name.startswith(PREFIX)]
    if not ours:
        return None
    # Any: fields and their parts, as a body has them.
    asked: dict[str, Any] = {}
    seen: set[str] = set()
    for raw_name, raw in ours:
        name = raw_name.decode("latin-1")
        if name not in FIELDS:
            raise InvalidRequest(
                f"Unknown header: '{name[:_SHOWN_CHARS]}'; known are {', '.join(FIELDS)}.",
                name[:_SHOWN_CHARS],
                reason="UNKNOWN_PARAMETER",
            )
        if name in seen:
            raise _refused(name, "it is there more than once")
        seen.add(name)
        value = _value(name, raw)
        _check(name, value)
        *part, last = FIELDS[name]
        into = asked.setdefault(part[0], {}) if part else asked
        into[last] = value
    return Nvext.model_validate(asked)


def _value(name: str, raw: bytes) -> str | int:
    text = raw.decode("latin-1").strip(" \t")
    if name in _TEXTS:
        if not _PRINTABLE.fullmatch(text):
            raise _refused(name, "only printable ASCII can stand in a header")
        return text
    if not _INTEGER.fullmatch(text):
        raise _refused(name, f"expected an integer, but got {text[:_SHOWN_CHARS]!r}")
    return int(text)


def _check(name: str, value: str | int) -> None:
    """Raises InvalidRequest, naming the header, where its field does not take the value."""
    *part, last = FIELDS[name]
    shape = _PARTS[part[0]] if part else Nvext
    try:
        shape.model_validate({last: value})
    except ValidationError as error:
        raise invalid_value(error, name) from None


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid header '{name}': {why}.", name, reason="INVALID_VALUE")


def with_headers(request: R, asked: Nvext | None) -> R:
    """The request with what its headers asked for in place of what its `nvext` says of the same."""
    if asked is None:
        return request
    given = request.nvext
    return request.model_copy(update={"nvext": asked if given is None else _merged(given, asked)})


def _merged(given: Nvext, asked: Nvext) -> Nvext:
    # Any: the type of each field.
    changes: dict[str, Any] = {name: getattr(asked, name) for name in asked.model_fields_set}
    for name in _PARTS:
        before, wanted = getattr(given, name), changes.get(name)
        if before is not None and wanted is not None:
            said = {one: getattr(wanted, one) for one in wanted.model_fields_set}
            changes[name] = before.model_copy(update=said)
    return given.model_copy(update=changes)
