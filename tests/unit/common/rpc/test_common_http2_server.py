"""The server's end of HTTP/2: beside the client's, and with clients that violate the protocol."""

from __future__ import annotations

import struct

import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from common.rpc.http2.call import (
    MESSAGE_COST_BYTES,
    TURN_BYTES,
    TURN_FRAMES_BYTES,
    CallStatus,
    Http2Call,
)
from common.rpc.http2.ends import ClientCall, ServerCall
from common.rpc.http2.frames import PREFACE, WINDOW_BYTES, WINDOW_DEFAULT
from tests.kit.http2_frames import FLOODS, calm_text, frame, headers, prefixed, taken

LIMITS = {"message_bytes_max": 100_000, "header_bytes_max": 4096}
REQUEST = ((":method", "POST"), (":path", "/a/B"), ("content-type", "application/grpc"))
TURN_MESSAGES = TURN_BYTES // MESSAGE_COST_BYTES
DATA, HEAD, RESET, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS = 1, 4


def server() -> ServerCall:
    return ServerCall(**LIMITS)


def begun() -> ServerCall:
    """A server's end that has received the headers of a call."""
    made = server()
    made.receive(PREFACE + headers(*REQUEST))
    made.open_window()
    made.take_output()
    return made


def receive(call: Http2Call, data: bytes) -> None:
    """Lets a call handle data, in as many turns as it takes."""
    while call.receive(data):
        data = b""


def exchange(client: ClientCall, called: ServerCall, sizes: list[int]) -> None:
    """Moves the output of both, in parts of the given sizes, until there is none."""
    parts = iter(sizes)
    ends: list[tuple[Http2Call, Http2Call]] = [(client, called), (called, client)]
    while moved := [(to, data) for end, to in ends if (data := end.take_output())]:
        for to, data in moved:
            while data:
                size = next(parts, len(data)) or len(data)
                receive(to, data[:size])
                data = data[size:]


@given(
    st.lists(st.binary(max_size=90_000), max_size=6),
    st.lists(st.binary(max_size=90_000), max_size=6),
    st.lists(st.integers(1, 60_000), max_size=40),
    st.text(max_size=20),
    st.none() | st.binary(max_size=40),
)
def test_both_ends_exchange_messages_and_a_status(
    requests: list[bytes],
    responses: list[bytes],
    sizes: list[int],
    text: str,
    details: bytes | None,
) -> None:
    client, called = ClientCall(REQUEST, **LIMITS), server()
    exchange(client, called, sizes)
    assert called.headers is not None
    assert called.headers[":path"] == "/a/B"
    called.open_window()
    for message in requests:
        client.send(message)
    client.half_close()
    called.respond([("x-proof", "1")])
    for message in responses:
        called.send(message)
    exchange(client, called, sizes)
    assert called.has_all_messages
    assert taken(called) == requests
    assert client.headers is not None
    assert client.headers["x-proof"] == "1"
    status = CallStatus(StatusCode.NOT_FOUND, text.encode(errors="replace").decode(), details)
    called.finish(status)
    exchange(client, called, sizes)
    assert (taken(client), client.status, called.status) == (responses, status, status)


def test_a_status_follows_the_messages_that_wait_for_the_window() -> None:
    client, called = ClientCall(REQUEST, **LIMITS), server()
    exchange(client, called, [])
    called.respond()
    message = bytes(99_000)
    count = WINDOW_BYTES // len(message) + 20
    for _ in range(count):
        called.send(message)
    called.finish(CallStatus(StatusCode.OK, ""))
    exchange(client, called, [])
    assert called.is_blocked
    assert called.status is None
    received = 0
    while client.messages:
        received += len(taken(client))
        exchange(client, called, [])
    assert received == count
    assert client.status == called.status == CallStatus(StatusCode.OK, "")


@given(st.binary(max_size=400), st.booleans())
def test_no_bytes_raise(data: bytes, has_preface: bool) -> None:
    server().receive((PREFACE if has_preface else b"") + data)
    begun().receive(data)


@given(st.integers(0, 9), st.integers(0, 255), st.integers(0, 3), st.binary(max_size=40))
def test_no_frame_raises(kind: int, flags: int, stream: int, payload: bytes) -> None:
    begun().receive(frame(kind, flags, payload, stream))


@pytest.mark.parametrize("cut", range(len(PREFACE)))
def test_the_preface_may_come_in_parts(cut: int) -> None:
    made = server()
    made.receive(PREFACE[:cut])
    made.receive(PREFACE[cut:] + headers(*REQUEST))
    assert made.headers is not None


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not HTTP/2"),
        (PREFACE + headers((":method", "GET"), *REQUEST[1:]), "not of gRPC"),
        (PREFACE + headers(*REQUEST[:2], ("content-type", "text/html")), "not of gRPC"),
        (PREFACE + headers(*REQUEST, stream=3), "headers of another stream"),
        (PREFACE + headers(*REQUEST) + headers(*REQUEST, stream=3), "headers of another stream"),
        (PREFACE + headers(*REQUEST) + headers(("a", "b")), "headers between messages"),
        (PREFACE + frame(DATA, payload=b"x"), "data without headers"),
        (PREFACE + headers(*REQUEST) + frame(DATA, END_STREAM, b"\0\0"), "an incomplete message"),
        (PREFACE + headers(*REQUEST) + frame(RESET, payload=bytes(4)), "the peer reset the stream"),
    ],
)
def test_a_violation_ends_the_call_with_its_name(wire: bytes, text: str) -> None:
    made = server()
    made.receive(wire)
    assert made.status is not None
    assert text in made.status.message
    assert made.status.code is not StatusCode.OK


def test_before_its_messages_are_read_a_client_may_send_little() -> None:
    data = frame(DATA, payload=prefixed(bytes(40_000)))
    assert 2 * len(data) > WINDOW_DEFAULT
    closed, opened = server(), begun()
    receive(closed, PREFACE + headers(*REQUEST) + data + data)
    assert closed.status is not None
    assert "more data than the window" in closed.status.message
    receive(opened, data + data)
    assert opened.status is None


def test_a_refusal_without_a_response_is_the_only_headers() -> None:
    client, called = ClientCall(REQUEST, **LIMITS), server()
    exchange(client, called, [])
    called.finish(CallStatus(StatusCode.UNAUTHENTICATED, "no"))
    exchange(client, called, [])
    assert client.headers is None
    assert client.status == CallStatus(StatusCode.UNAUTHENTICATED, "no")


@pytest.mark.parametrize(
    ("kind", "length"), [(SETTINGS, 20_000), (PING, 20_000), (HEAD, 20_000), (DATA, 70_000)]
)
def test_a_frame_above_its_limit_is_refused_before_its_bytes_come(kind: int, length: int) -> None:
    made = server()
    made.receive(PREFACE + headers(*REQUEST) + frame(kind, payload=bytes(length))[:9])
    assert made.status is not None
    assert made.status.message == f"a frame of {length} bytes"


def test_a_frame_of_too_many_settings_is_invalid() -> None:
    made = server()
    made.receive(PREFACE + frame(SETTINGS, payload=struct.pack(">HL", 1, 0) * 65, stream=0))
    assert made.status is not None
    assert made.status.message == "invalid settings"


def test_changes_of_the_header_table_are_sent_once() -> None:
    made = begun()
    change = frame(SETTINGS, payload=struct.pack(">HLHL", 1, 0, 1, 4096) * 32, stream=0)
    for _ in range(15):
        made.receive(change)
    made.take_output()
    made.respond()
    assert len(made.take_output()) < 100


def test_the_call_of_a_client_that_sends_goaway_continues() -> None:
    made = begun()
    made.receive(frame(GOAWAY, payload=bytes(8), stream=0))
    assert made.status is None


def test_a_turn_parses_a_bounded_number_of_messages_and_the_rest_follows_in_order() -> None:
    made = begun()
    sent = [struct.pack(">L", number) for number in range(5000)]
    made.receive(frame(DATA, END_STREAM, b"".join(map(prefixed, sent))))
    received = []
    while made.messages or made.is_behind:
        assert len(made.messages) <= TURN_MESSAGES
        received += [made.take_message() for _ in range(len(made.messages))]
        made.receive(b"")
    assert received == sent
    assert made.has_all_messages


def test_a_turn_parses_a_bounded_number_of_bytes() -> None:
    made = begun()
    size = TURN_BYTES // 8 - MESSAGE_COST_BYTES
    for _ in range(40):
        made.receive(frame(DATA, payload=prefixed(bytes(size))))
    assert len(made.messages) == 8
    assert taken(made) == [bytes(size)] * 40


def test_the_window_stays_closed_for_messages_that_are_not_parsed() -> None:
    made = begun()
    wire = frame(DATA, payload=b"".join(prefixed(b"") for _ in range(40_000)))
    for _ in range(WINDOW_BYTES // 200_000):
        made.receive(wire)
    for _ in range(TURN_MESSAGES):
        made.take_message()
    assert made.take_output() == b""
    made.receive(b"")
    taken(made)
    assert made.take_output() != b""


def test_a_turn_handles_a_bounded_number_of_frames() -> None:
    made = begun()
    part = frame(DATA, payload=prefixed(b"x"))
    assert made.receive(part * 10_000)
    turns = 1
    while made.receive(b""):
        turns += 1
    assert turns >= 10_000 * len(part) // TURN_FRAMES_BYTES - 1
    assert taken(made) == [b"x"] * 10_000


def test_a_violation_behind_messages_ends_the_call_after_them() -> None:
    made = begun()
    wire = b"".join(prefixed(b"x") for _ in range(200)) + b"\x01\0\0\0\0"
    made.receive(frame(DATA, END_STREAM, wire))
    assert taken(made) == [b"x"] * 200
    assert made.status is not None
    assert made.status.message == "a compressed message"


def test_messages_before_the_trailers_of_a_server_are_received() -> None:
    client, called = ClientCall(REQUEST, **LIMITS), server()
    exchange(client, called, [])
    called.respond()
    for _ in range(500):
        called.send(b"x")
    called.finish(CallStatus(StatusCode.OK, ""))
    exchange(client, called, [])
    assert client.status == CallStatus(StatusCode.OK, "")
    assert taken(client) == [b"x"] * 500


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.parametrize("has_call", [True, False])
def test_a_flood_ends_the_connection_with_the_name_of_the_limit(name: str, has_call: bool) -> None:
    made = begun() if has_call else server()
    if not has_call:
        made.receive(PREFACE)
    output = b""
    for _ in range(100):
        made.receive(FLOODS[name] * 1000)
        output += made.take_output()
    assert made.status is not None
    if has_call or name != "empty_data":
        assert made.exceeded == "control_frames"
        assert "too many control frames: 1000" in (calm_text(output) or "")
    assert len(output) < 50_000
    assert not made.receive(b"")
    assert not made._frame


@pytest.mark.parametrize("part", [b"", b"x" * 100])
def test_a_flood_of_continuations_ends_the_connection(part: bytes) -> None:
    made = server()
    made.receive(PREFACE + frame(HEAD, 0, b""))
    for _ in range(100):
        made.receive(frame(CONTINUATION, 0, part) * 100)
    assert made.exceeded == ("header_bytes" if part else "control_frames")
    assert calm_text(made.take_output())
    assert not made._frame


def test_headers_that_expand_end_the_connection() -> None:
    # A literal that is added to the table, and references to it.
    bomb = b"\x40\x01a\x7f\x81\x16" + bytes(400) + b"\xbe" * 3000
    made = server()
    made.receive(PREFACE + frame(HEAD, END_HEADERS, bomb))
    assert made.exceeded == "header_bytes"


@pytest.mark.parametrize("change", [b"\x20", b"\x3f\xe1\x1f"])
def test_headers_that_change_the_table_again_and_again_end_the_connection(change: bytes) -> None:
    encoded = headers(*REQUEST)[9:]  # begins with a change
    for count, text in ((1, None), (2, "unreadable headers: too many changes of the table")):
        made = server()
        made.receive(PREFACE + frame(HEAD, END_HEADERS, change * count + encoded))
        assert (made.status and made.status.message) == text


def test_the_error_of_unreadable_headers_is_short() -> None:
    made = server()
    made.receive(PREFACE + frame(HEAD, END_HEADERS, b"\x7f" + b"\xff" * 30_000))
    assert made.status is not None
    assert len(made.status.message) <= 200


def test_floods_of_several_periods_are_counted_in_each() -> None:
    made = begun()
    for _ in range(20):
        made.begin_period()
        made.receive(FLOODS["ping"] * 200)
    assert made.status is None


def test_a_client_that_responds_to_each_frame_of_data_is_no_flood() -> None:
    made = begun()
    made.respond()
    for _ in range(3000):
        made.send(b"the frame of a token")
        made.receive(FLOODS["window_update"] * 2 + FLOODS["ping"])
        made.take_output()
    assert made.status is None


def test_a_client_that_receives_no_responses_to_pings_cannot_fill_the_memory() -> None:
    """`begin_period` is not called while the transport waits for the client."""
    made = begun()
    for _ in range(1000):
        made.receive(FLOODS["ping"] * 50)
    assert made.exceeded == "control_frames"
    assert len(made.take_output()) < 20_000
