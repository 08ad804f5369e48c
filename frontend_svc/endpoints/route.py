"""What the HTTP API states about one of its routes (pure).

`frontend_svc/routes/table.py` has an entry for each route; dispatch, permissions, metric labels,
spans, errors and the OpenAPI document derive from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from common.api_keys import Permission
from frontend_svc.errors import OPENAI_ERRORS, ErrorForm

# A parameter in a path: `{name}` is one segment, `{name:path}` the rest.
PATH_PARAMETER: Final = re.compile(r"\{(\w+)(:path)?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What the OpenAPI document states about a route."""

    summary: str

    bodies: tuple[type[BaseModel], ...] = ()
    """Models of the request, of which one applies."""

    # Any: JSON.
    example: Mapping[str, Any] | None = None
    """A body for a mesh that serves the model `sim`."""

    result: str = "the result"
    """What a 200 contains; "": there is no such response."""

    streams: bool = False
    """Whether the response is a stream of events if the body or the query has `stream`."""

    media_type: str = "application/json"
    """Of the response."""

    is_list: bool = False
    """Whether the JSON of the response is an array, not an object."""

    failure: int | None = None
    """A status whose body is that of a 200; None: there is none."""

    query: type[BaseModel] | None = None
    """Model of the query parameters."""

    body_type: str = "application/json"
    """Media type of the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path."""

    method: str
    """GET also serves HEAD; see `methods`."""

    path: str
    """With parameters as `{name}` for one segment, or `{name:path}` for the rest of the path."""

    operation: Operation

    permission: Permission | None = None
    """What the key of a request must permit; None: any key is valid. Routes of administrators have
    a listener of their own if it is configured."""

    label: str = ""
    """Value of the metric label and log field `endpoint`; "": requests are not counted."""

    span_operation: str = ""
    """OpenTelemetry's name of the operation (`gen_ai.operation.name`)."""

    errors: ErrorForm = OPENAI_ERRORS
    """The form of its errors."""

    anthropic_errors: ErrorForm | None = None
    """The form of its errors for Anthropic's clients, which get responses of their API's form too;
    None: all clients get the same form. The header `anthropic-version` decides."""

    is_open: bool = False
    """Whether requests need no key."""

    serves_head: bool = True
    """Whether HEAD is served if the method is GET."""

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.method == "GET" and self.serves_head else (self.method,)

    @property
    def is_admin(self) -> bool:
        """Whether the route is one of administrators."""
        return self.permission is Permission.ADMIN
