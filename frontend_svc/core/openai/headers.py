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
    NvextSessionControl,
    invalid_value,
)

HEADER_PREFIX = b"x-kvmesh-"
# Header -> the field of `nvext` that it stands for, as a path.
HEADER_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
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
_TEXT_HEADERS = frozenset({"x-kvmesh-session-id"})
_NESTED_OBJECTS: Mapping[str, type[AgentHints] | type[NvextSessionControl]] = MappingProxyType(
    {"agent_hints": AgentHints, "session_control": NvextSessionControl}
)
_INTEGER = re.compile(r"-?[0-9]{1,24}")
# What may stand in a header without being read differently by anybody on its way.
_PRINTABLE = re.compile(r"[ -~]*")
_DISPLAY_CHARS_MAX = 80

R = TypeVar("R", bound=GenerationRequest)


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> Nvext | None:
    """What the headers ask for; None where none of ours is there. Names are in lower case.

    Raises InvalidRequest, which names the header, for one that is unknown, there twice, or has a
    value that its field does not take.
    """
    kvmesh_headers = [(name, raw) for name, raw in headers if name.startswith(HEADER_PREFIX)]
    if not kvmesh_headers:
        return None
    # Any: fields and their parts, as a body has them.
    requested: dict[str, Any] = {}
    seen: set[str] = set()
    for raw_name, raw in kvmesh_headers:
        name = raw_name.decode("latin-1")
        if name not in HEADER_FIELDS:
            raise InvalidRequest(
                f"Unknown header: '{name[:_DISPLAY_CHARS_MAX]}'; known are "
                f"{', '.join(HEADER_FIELDS)}.",
                name[:_DISPLAY_CHARS_MAX],
                reason="UNKNOWN_PARAMETER",
            )
        if name in seen:
            raise _invalid_header(name, "it is there more than once")
        seen.add(name)
        value = _parse_value(name, raw)
        _check_value(name, value)
        *part, field_name = HEADER_FIELDS[name]
        target = requested.setdefault(part[0], {}) if part else requested
        target[field_name] = value
    return Nvext.model_validate(requested)


def _parse_value(name: str, raw: bytes) -> str | int:
    text = raw.decode("latin-1").strip(" \t")
    if name in _TEXT_HEADERS:
        if not _PRINTABLE.fullmatch(text):
            raise _invalid_header(name, "only printable ASCII can stand in a header")
        return text
    if not _INTEGER.fullmatch(text):
        raise _invalid_header(name, f"expected an integer, but got {text[:_DISPLAY_CHARS_MAX]!r}")
    return int(text)


def _check_value(name: str, value: str | int) -> None:
    """Raises InvalidRequest, naming the header, where its field does not take the value."""
    *part, field_name = HEADER_FIELDS[name]
    shape = _NESTED_OBJECTS[part[0]] if part else Nvext
    try:
        shape.model_validate({field_name: value})
    except ValidationError as error:
        raise invalid_value(error, name) from None


def _invalid_header(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid header '{name}': {message}.", name, reason="INVALID_VALUE")


def with_headers(request: R, requested: Nvext | None) -> R:
    """The request with what its headers asked for in place of what its `nvext` says of the same."""
    if requested is None:
        return request
    nvext = request.nvext
    return request.model_copy(
        update={"nvext": requested if nvext is None else _merge(nvext, requested)}
    )


def _merge(nvext: Nvext, requested: Nvext) -> Nvext:
    # Any: the type of each field.
    changes: dict[str, Any] = {
        name: getattr(requested, name) for name in requested.model_fields_set
    }
    for name in _NESTED_OBJECTS:
        before, requested_part = getattr(nvext, name), changes.get(name)
        if before is not None and requested_part is not None:
            updates = {
                field: getattr(requested_part, field) for field in requested_part.model_fields_set
            }
            changes[name] = before.model_copy(update=updates)
    return nvext.model_copy(update=changes)
