"""One HTTP request between a gateway, its picker and a server (pure).

Parts of the request come in, steps go out: answers to the gateway and changes of the booking. When
the request is complete, `is_pick_due` is set; the caller places the request and reports the result
with `picked` or `refused`. The body is held until then, because the endpoint follows from it.

Order of the answers. In full duplex the headers wait for the pick; then they, the body in pieces
and the trailers go out. If the gateway sends the body whole, it waits for the answer to the headers
first, and the pick goes out with the answer to the body. Responses pass unchanged.

Invariants: `FreeBooking` is returned exactly once after `picked`, whatever ends the request; never
without it. Nothing is answered after `Refuse`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.errors import InvalidRequest, MeshError, Unsupported
from epp_svc.core.messages import (
    BodyMode,
    ContinueHeaders,
    EndRequestTrailers,
    FreeBooking,
    MoveBooking,
    Part,
    Pick,
    PrefillDone,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    SendBody,
    SendHeaders,
    SendWholeBody,
    Step,
    TakeResponseBody,
    TakeResponseHeaders,
    TakeResponseTrailers,
)
from epp_svc.core.refusals import refusal
from frontend_svc.errors import BODY_TOO_LARGE

# Envoy's limit of a piece is 64 KiB.
PIECE_BYTES_MAX = 62_000
_DUPLEX = (BodyMode.DUPLEX, BodyMode.UNKNOWN)


class Exchange:
    """The state of one request."""

    def __init__(self, body_bytes_max: int) -> None:
        self.head = RequestHeaders({}, is_last=False)
        """The headers; empty before they have come."""
        self.is_pick_due = False
        """Whether the request is complete and not placed."""
        self.is_refused = False
        self.has_response = False
        self._body_bytes_max = body_bytes_max
        self._pieces: list[bytes] = []
        self._size = 0
        self._has_body = False
        self._has_trailers = False
        self._endpoints: tuple[str, ...] = ()
        self._is_booked = False
        self._is_prefill_done = False

    @property
    def body(self) -> bytes:
        """The body of the client."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def receive(self, part: Part) -> Sequence[Step]:
        """Returns the steps after a part."""
        if self.is_refused:
            return ()
        match part:
            case RequestHeaders():
                return self._head_received(part)
            case RequestBody(data, is_last):
                return self._body_received(data, is_last)
            case RequestTrailers():
                return self._trailers_received()
            case ResponseHeaders():
                return list(self._response_began(part))
            case ResponseBody(data, is_last):
                return list(self._response_continued(data, is_last))
            case ResponseTrailers():
                return [TakeResponseTrailers(), *self._free()]

    def picked(self, pick: Pick) -> Sequence[Step]:
        """Returns the answers that send the request to its endpoint."""
        assert self.is_pick_due, "a request is placed once"
        self.is_pick_due = False
        self._is_booked, self._endpoints = True, pick.endpoints
        if self._is_whole:
            return [SendWholeBody(pick.endpoints, pick.new_body)]
        return list(self._duplex_answers(pick))

    def refused(self, error: MeshError) -> Sequence[Step]:
        """Returns the response that ends the request, without a booking."""
        self.is_pick_due = False
        self.is_refused = True
        return [refusal(error)]

    def end(self) -> Sequence[Step]:
        """Returns the last steps: the stream has ended, whatever the reason."""
        self.is_pick_due = False
        return list(self._free())

    @property
    def _is_whole(self) -> bool:
        """Whether the body came whole, with an answer to the headers before it."""
        return self._has_body and self.head.request_mode is BodyMode.BUFFERED

    def _head_received(self, head: RequestHeaders) -> Sequence[Step]:
        self.head = head
        if head.is_last or head.request_mode is BodyMode.NONE:
            self.is_pick_due = True
            return ()
        if head.request_mode is BodyMode.BUFFERED:
            return [ContinueHeaders()]
        if head.request_mode is BodyMode.STREAMED:
            text = "set FULL_DUPLEX_STREAMED (or BUFFERED) in the processing mode of the gateway"
            return self.refused(Unsupported("request_body_mode", text))
        return ()

    def _body_received(self, data: bytes, is_last: bool) -> Sequence[Step]:
        if self._endpoints:  # nothing follows the last piece
            return ()
        self._has_body = True
        self._size += len(data)
        if self._size > self._body_bytes_max:
            text = f"The body is larger than {self._body_bytes_max} bytes."
            return self.refused(InvalidRequest(text, reason=BODY_TOO_LARGE))
        self._pieces.append(data)
        # A body that comes whole is not the last part if trailers follow.
        self.is_pick_due = is_last or self.head.request_mode is BodyMode.BUFFERED
        return ()

    def _trailers_received(self) -> Sequence[Step]:
        if self._endpoints:  # of a request whose whole body was answered
            return [EndRequestTrailers()]
        self._has_trailers = self.is_pick_due = True
        return ()

    def _duplex_answers(self, pick: Pick) -> Iterator[Step]:
        yield SendHeaders(pick.endpoints, has_new_body=pick.new_body is not None)
        if self._has_body:
            body = self.body if pick.new_body is None else pick.new_body
            for at in range(0, max(len(body), 1), PIECE_BYTES_MAX):
                is_end = at + PIECE_BYTES_MAX >= len(body) and not self._has_trailers
                yield SendBody(body[at : at + PIECE_BYTES_MAX], is_end)
        if self._has_trailers:
            yield EndRequestTrailers()
        self._pieces = []

    def _response_began(self, part: ResponseHeaders) -> Iterator[Step]:
        self.has_response = True
        # Another address may be the server of the pick as its gateway reaches it.
        if self._is_booked and part.served in self._endpoints[1:]:
            yield MoveBooking(part.served)
        if self.head.response_mode is BodyMode.NONE:
            yield from self._prefill_done()
        yield TakeResponseHeaders()
        if part.is_last:
            yield from self._free()

    def _response_continued(self, data: bytes, is_last: bool) -> Iterator[Step]:
        if data:
            yield from self._prefill_done()
        yield TakeResponseBody(data, is_last, is_echo=self.head.response_mode in _DUPLEX)
        if is_last:
            yield from self._free()

    def _prefill_done(self) -> Iterator[Step]:
        if self._is_booked and not self._is_prefill_done:
            self._is_prefill_done = True
            yield PrefillDone()

    def _free(self) -> Iterator[Step]:
        if self._is_booked:
            self._is_booked = False
            yield FreeBooking()
