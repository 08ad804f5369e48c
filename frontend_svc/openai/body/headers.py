"""Headers with routing hints: placement and priority of a request (pure). They win over `nvext`.

Each header with the prefix `x-kvmesh-` stands for one field of `nvext`, with the same values and
meaning. An unknown header with this prefix is refused by name, like an unknown field. All other
headers are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import ValidationError

from common.errors import InvalidRequest
from frontend_svc.errors import HEADER_FIELDS
from frontend_svc.openai.body.nvext import AgentHints, Nvext, NvextRouter, NvextSessionControl
from frontend_svc.openai.body.schema import GenerationRequest
from frontend_svc.openai.body.validation_errors import invalid_value

HEADER_PREFIX = b"x-kvmesh-"
_TEXT_HEADERS = frozenset({"x-kvmesh-session-id"})
_NESTED_OBJECTS: Mapping[str, type[AgentHints] | type[NvextRouter] | type[NvextSessionControl]] = (
    MappingProxyType(
        {"agent_hints": AgentHints, "router": NvextRouter, "session_control": NvextSessionControl}
    )
)
_INTEGER = re.compile(r"-?[0-9]{1,24}")
# Characters that no proxy on the way interprets differently.
_PRINTABLE = re.compile(r"[ -~]*")
_DISPLAY_CHARS_MAX = 80

R = TypeVar("R", bound=GenerationRequest)


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> Nvext | None:
    """Returns the hints in the headers; None without `x-kvmesh-` headers. Names are in lower
    case. Raises InvalidRequest, which names the header, if it is unknown, repeated, or has a
    value that is invalid for its field."""
    kvmesh_headers = [(name, raw) for name, raw in headers if name.startswith(HEADER_PREFIX)]
    if not kvmesh_headers:
        return None
    # Any: JSON values, as in a body.
    requested: dict[str, Any] = {}
    seen: set[str] = set()
    for raw_name, raw in kvmesh_headers:
        name = raw_name.decode("latin-1")
        if name not in HEADER_FIELDS:
            shown, known = name[:_DISPLAY_CHARS_MAX], ", ".join(HEADER_FIELDS)
            text = f"Unknown header: '{shown}'; known headers are {known}."
            raise InvalidRequest(text, shown, reason="UNKNOWN_PARAMETER")
        if name in seen:
            raise _invalid_header(name, "it is present more than once")
        seen.add(name)
        value = _parse_value(name, raw)
        *part, field_name = HEADER_FIELDS[name]
        try:
            (_NESTED_OBJECTS[part[0]] if part else Nvext).model_validate({field_name: value})
        except ValidationError as error:
            raise invalid_value(error, name) from None
        target = requested.setdefault(part[0], {}) if part else requested
        target[field_name] = value
    return Nvext.model_validate(requested)


def _parse_value(name: str, raw: bytes) -> str | int:
    text = raw.decode("latin-1").strip(" \t")
    if name in _TEXT_HEADERS:
        if not _PRINTABLE.fullmatch(text):
            raise _invalid_header(name, "only printable ASCII is allowed in a header")
        return text
    if not _INTEGER.fullmatch(text):
        raise _invalid_header(name, f"expected an integer, but got {text[:_DISPLAY_CHARS_MAX]!r}")
    return int(text)


def _invalid_header(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid header '{name}': {message}.", name, reason="INVALID_VALUE")


def with_headers(request: R, requested: Nvext | None) -> R:
    if requested is None:
        return request
    nvext = requested if request.nvext is None else _merge(request.nvext, requested)
    return request.model_copy(update={"nvext": nvext})


def _merge(nvext: Nvext, requested: Nvext) -> Nvext:
    # Any: the types of the fields.
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
