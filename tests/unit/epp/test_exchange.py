"""The exchange of one request: parts of a gateway in, answers and changes of the booking out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Overloaded, Unavailable, UnknownModel
from epp_svc.core.exchange import PIECE_BYTES_MAX, Exchange
from epp_svc.core.messages import (
    BodyMode,
    ContinueHeaders,
    EndRequestTrailers,
    FreeBooking,
    MoveBooking,
    Part,
    Pick,
    PrefillDone,
    Refuse,
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

FIRST, SECOND = "10.0.0.1:30000", "10.0.0.2:30000"
PICK = Pick((FIRST, SECOND))
NO_STEPS: Sequence[Step] = ()


def head(
    *,
    is_last: bool = False,
    request_mode: BodyMode = BodyMode.UNKNOWN,
    response_mode: BodyMode = BodyMode.UNKNOWN,
) -> RequestHeaders:
    headers = {":path": "/v1/chat/completions"}
    return RequestHeaders(headers, is_last, None, request_mode, response_mode)


def is_pick_due(exchange: Exchange) -> bool:
    """Returns the property; type checkers do not see that `receive` changes it."""
    return exchange.is_pick_due


def placed(pick: Pick = PICK, *, response_mode: BodyMode = BodyMode.UNKNOWN) -> Exchange:
    """Returns an exchange whose request has gone to its endpoint."""
    exchange = Exchange(1 << 20)
    exchange.receive(head(response_mode=response_mode))
    exchange.receive(RequestBody(b"{}", is_last=True))
    exchange.picked(pick)
    return exchange


def test_headers_wait_for_the_whole_body_and_go_out_before_it() -> None:
    exchange = Exchange(1 << 20)
    assert list(exchange.receive(head())) == []
    assert list(exchange.receive(RequestBody(b"ab", is_last=False))) == []
    assert not is_pick_due(exchange)
    assert list(exchange.receive(RequestBody(b"cd", is_last=True))) == []
    assert is_pick_due(exchange)
    assert exchange.body == b"abcd"
    assert list(exchange.picked(PICK)) == [
        SendHeaders((FIRST, SECOND), has_new_body=False),
        SendBody(b"abcd", is_last=True),
    ]
    assert not is_pick_due(exchange)


def test_a_large_body_goes_out_in_pieces_that_the_gateway_accepts() -> None:
    exchange = Exchange(1 << 20)
    exchange.receive(head())
    body = bytes(2 * PIECE_BYTES_MAX + 1)
    exchange.receive(RequestBody(body, is_last=True))
    _, *pieces = exchange.picked(PICK)
    assert [len(one.data) for one in pieces if isinstance(one, SendBody)] == [
        PIECE_BYTES_MAX,
        PIECE_BYTES_MAX,
        1,
    ]
    assert [one.is_last for one in pieces if isinstance(one, SendBody)] == [False, False, True]


def test_a_new_body_replaces_that_of_the_client() -> None:
    exchange = Exchange(1 << 20)
    exchange.receive(head())
    exchange.receive(RequestBody(b"old", is_last=True))
    assert list(exchange.picked(Pick((FIRST,), b"new"))) == [
        SendHeaders((FIRST,), has_new_body=True),
        SendBody(b"new", is_last=True),
    ]


def test_a_request_without_a_body_is_placed_by_its_headers() -> None:
    exchange = Exchange(1 << 20)
    exchange.receive(head(is_last=True))
    assert exchange.is_pick_due
    assert list(exchange.picked(PICK)) == [SendHeaders((FIRST, SECOND), has_new_body=False)]


def test_trailers_end_a_body_and_follow_it() -> None:
    exchange = Exchange(1 << 20)
    exchange.receive(head())
    exchange.receive(RequestBody(b"a", is_last=False))
    exchange.receive(RequestTrailers())
    assert exchange.is_pick_due
    assert list(exchange.picked(PICK)) == [
        SendHeaders((FIRST, SECOND), has_new_body=False),
        SendBody(b"a", is_last=False),
        EndRequestTrailers(),
    ]


def test_a_gateway_that_sends_the_body_whole_gets_an_answer_to_the_headers_first() -> None:
    exchange = Exchange(1 << 20)
    steps = exchange.receive(head(request_mode=BodyMode.BUFFERED, response_mode=BodyMode.NONE))
    assert list(steps) == [ContinueHeaders()]
    exchange.receive(RequestBody(b"{}", is_last=False))
    assert exchange.is_pick_due, "trailers may follow"
    assert list(exchange.picked(PICK)) == [SendWholeBody((FIRST, SECOND), None)]
    assert list(exchange.receive(RequestTrailers())) == [EndRequestTrailers()]


def test_a_mode_that_cannot_work_is_refused_by_name() -> None:
    exchange = Exchange(1 << 20)
    (refused,) = exchange.receive(head(request_mode=BodyMode.STREAMED))
    assert isinstance(refused, Refuse)
    assert b"FULL_DUPLEX_STREAMED" in refused.body
    assert list(exchange.receive(RequestBody(b"", is_last=True))) == []


def test_a_body_above_the_limit_is_refused() -> None:
    exchange = Exchange(4)
    exchange.receive(head())
    exchange.receive(RequestBody(b"1234", is_last=False))
    (refused,) = exchange.receive(RequestBody(b"5", is_last=True))
    assert isinstance(refused, Refuse)
    assert refused.status == 413
    assert not exchange.is_pick_due


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded(2.0), 429),
        (Unavailable("no server"), 503),
        (UnknownModel("x"), 404),
    ],
)
def test_a_refusal_has_the_status_of_the_protocol(error: Exception, status: int) -> None:
    exchange = Exchange(1 << 20)
    exchange.receive(head(is_last=True))
    assert isinstance(error, Overloaded | Unavailable | UnknownModel)
    (refused,) = exchange.refused(error)
    assert isinstance(refused, Refuse)
    assert refused.status == status
    assert ("retry-after", "2") in refused.headers or status != 429
    assert list(exchange.end()) == [], "nothing is booked"


def test_the_first_bytes_of_the_response_end_the_prefill_and_the_last_ones_the_booking() -> None:
    exchange = placed()
    assert list(exchange.receive(ResponseHeaders(is_last=False))) == [TakeResponseHeaders()]
    assert list(exchange.receive(ResponseBody(b"a", is_last=False))) == [
        PrefillDone(),
        TakeResponseBody(b"a", is_last=False, is_echo=True),
    ]
    assert list(exchange.receive(ResponseBody(b"", is_last=True))) == [
        TakeResponseBody(b"", is_last=True, is_echo=True),
        FreeBooking(),
    ]
    assert list(exchange.end()) == []


def test_without_bodies_of_responses_their_headers_end_the_prefill() -> None:
    exchange = placed(response_mode=BodyMode.NONE)
    assert list(exchange.receive(ResponseHeaders(is_last=False))) == [
        PrefillDone(),
        TakeResponseHeaders(),
    ]
    assert list(exchange.end()) == [FreeBooking()]


def test_trailers_of_the_response_end_the_booking() -> None:
    exchange = placed()
    exchange.receive(ResponseHeaders(is_last=False))
    assert list(exchange.receive(ResponseTrailers())) == [TakeResponseTrailers(), FreeBooking()]


def test_a_booking_follows_the_endpoint_that_has_served() -> None:
    exchange = placed()
    steps = exchange.receive(ResponseHeaders(is_last=False, served=SECOND))
    assert list(steps) == [MoveBooking(SECOND), TakeResponseHeaders()]
    for served in (FIRST, "", "10.9.9.9:1"):  # The last one is unknown: it may be the first one.
        steps = placed().receive(ResponseHeaders(is_last=False, served=served))
        assert list(steps) == [TakeResponseHeaders()]


def test_a_stream_that_ends_early_frees_the_booking() -> None:
    assert list(placed().end()) == [FreeBooking()]
    exchange = Exchange(1 << 20)
    exchange.receive(head())
    assert list(exchange.end()) == [], "nothing is booked before the pick"


PARTS = st.one_of(
    st.builds(RequestBody, st.binary(max_size=3), st.booleans()),
    st.just(RequestTrailers()),
    st.builds(ResponseHeaders, st.booleans(), st.sampled_from(["", FIRST, SECOND, "x:1"])),
    st.builds(ResponseBody, st.binary(max_size=3), st.booleans()),
    st.just(ResponseTrailers()),
)


@given(st.sampled_from(BodyMode), st.sampled_from(BodyMode), st.booleans(), st.lists(PARTS))
def test_any_order_of_parts_frees_a_booking_exactly_once(
    request_mode: BodyMode, response_mode: BodyMode, is_last: bool, parts: list[Part]
) -> None:
    exchange = Exchange(8)
    first = RequestHeaders({}, is_last, None, request_mode, response_mode)
    steps: list[Step] = []
    picks = 0
    for part in [first, *parts]:
        was_refused = exchange.is_refused
        found = list(exchange.receive(part))
        assert not (was_refused and found), "nothing follows a refusal"
        steps += found
        if exchange.is_pick_due:
            picks += 1
            steps += exchange.picked(PICK)
    steps += exchange.end()
    assert steps.count(FreeBooking()) == (1 if picks else 0)
    assert picks <= 1
    assert steps.count(PrefillDone()) <= 1
    if FreeBooking() in steps:
        late = steps[steps.index(FreeBooking()) :]
        assert not any(isinstance(step, PrefillDone | MoveBooking) for step in late)
