"""Parts of an HTTP request that a gateway sends, and the steps that follow (pure).

The wire form is `protos/kvmesh/extproc/v1/extproc.proto`; `epp_svc/wire.py` translates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias


class BodyMode(Enum):
    """How a gateway sends a body; see `BodySendMode` of the proto."""

    NONE = auto()
    STREAMED = auto()
    BUFFERED = auto()
    DUPLEX = auto()
    UNKNOWN = auto()
    """The gateway does not state it: it counts as DUPLEX, which the protocol requires."""


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The first part of a request."""

    headers: Mapping[str, str]
    """By name in lower case; of several values, the last one."""

    is_last: bool
    """Whether no body follows."""

    subset: tuple[str, ...] | None = None
    """Endpoints to choose from, `host:port`; None: any."""

    request_mode: BodyMode = BodyMode.UNKNOWN
    response_mode: BodyMode = BodyMode.UNKNOWN


@dataclass(frozen=True, slots=True)
class RequestBody:
    data: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The last part of a request that has trailers."""


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    is_last: bool
    served: str = ""
    """The endpoint that the response is from, if the gateway states it."""


@dataclass(frozen=True, slots=True)
class ResponseBody:
    data: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class ResponseTrailers:
    """The last part of a response that has trailers."""


Part: TypeAlias = (
    RequestHeaders
    | RequestBody
    | RequestTrailers
    | ResponseHeaders
    | ResponseBody
    | ResponseTrailers
)


@dataclass(frozen=True, slots=True)
class ContinueHeaders:
    """Takes the headers of the request as they are; the pick follows with the body."""


@dataclass(frozen=True, slots=True)
class SendHeaders:
    """Names the endpoints in the headers of the request."""

    endpoints: tuple[str, ...]
    """In the order in which the gateway tries them."""

    has_new_body: bool
    """Whether the length in the headers is wrong from now on."""


@dataclass(frozen=True, slots=True)
class SendBody:
    """A piece of the request's body for the server, in full duplex."""

    data: bytes
    is_last: bool


@dataclass(frozen=True, slots=True)
class SendWholeBody:
    """Names the endpoints with the response to a whole body."""

    endpoints: tuple[str, ...]
    new_body: bytes | None
    """None: the body of the client."""


@dataclass(frozen=True, slots=True)
class EndRequestTrailers:
    """Takes the trailers of the request as they are."""


@dataclass(frozen=True, slots=True)
class TakeResponseHeaders:
    """Takes the headers of the response as they are."""


@dataclass(frozen=True, slots=True)
class TakeResponseBody:
    """Sends a piece of the response on. is_echo: whether the gateway expects the bytes back."""

    data: bytes
    is_last: bool
    is_echo: bool


@dataclass(frozen=True, slots=True)
class TakeResponseTrailers:
    """Takes the trailers of the response as they are."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Ends the request with an HTTP response of the picker."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The server has computed the prompt."""


@dataclass(frozen=True, slots=True)
class MoveBooking:
    """Another endpoint than the first one has served the request."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class FreeBooking:
    """The request has ended."""


Answer: TypeAlias = (
    ContinueHeaders
    | SendHeaders
    | SendBody
    | SendWholeBody
    | EndRequestTrailers
    | TakeResponseHeaders
    | TakeResponseBody
    | TakeResponseTrailers
    | Refuse
)
Booking: TypeAlias = PrefillDone | MoveBooking | FreeBooking
Step: TypeAlias = Answer | Booking


@dataclass(frozen=True, slots=True)
class Pick:
    """A placed request. A booking exists, and `FreeBooking` ends it."""

    endpoints: tuple[str, ...]
    new_body: bytes | None = None
    """None: the body of the client."""
