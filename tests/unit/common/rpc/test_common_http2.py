"""The client's end of HTTP/2: messages, windows and frames that violate the protocol."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from common.rpc.http2.call import CallStatus
from common.rpc.http2.ends import ClientCall
from common.rpc.http2.frames import FRAME_BYTES_MAX, WINDOW_BYTES
from tests.kit.http2_frames import frame, headers, prefixed, taken

MESSAGE_BYTES_MAX, HEADER_BYTES_MAX = 100_000, 4096
REQUEST = ((":method", "POST"), (":path", "/a/B"))
HEADERS = ((":status", "200"), ("content-type", "application/grpc"))
PREFACE_BYTES = 24
DATA, HEAD, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8


def trailers(*pairs: tuple[str, str]) -> bytes:
    return headers(*pairs, flags=END_HEADERS | END_STREAM)


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, payload=struct.pack(">HL", name, value), stream=0)


def window(increment: int, stream: int) -> bytes:
    return frame(WINDOW, payload=struct.pack(">L", increment), stream=stream)


def call() -> ClientCall:
    """A call whose first frames were sent."""
    made = ClientCall(
        REQUEST, message_bytes_max=MESSAGE_BYTES_MAX, header_bytes_max=HEADER_BYTES_MAX
    )
    made.take_output()
    return made


def begun() -> ClientCall:
    made = call()
    made.receive(headers(*HEADERS))
    return made


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of each frame."""
    found = []
    while data:
        size = int.from_bytes(data[:3], "big")
        (stream,) = struct.unpack(">L", data[5:9])
        found.append((data[3], data[4], stream, data[9 : 9 + size]))
        data = data[9 + size :]
    return found


OK = CallStatus(StatusCode.OK, "")


def test_a_call_begins_with_the_preface_settings_and_its_headers() -> None:
    output = ClientCall(REQUEST, message_bytes_max=1, header_bytes_max=1).take_output()
    assert output[:PREFACE_BYTES] == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    assert [one[0] for one in frames(output[PREFACE_BYTES:])] == [SETTINGS, HEAD, WINDOW, WINDOW]


@given(
    st.lists(st.binary(max_size=300), max_size=8),
    st.lists(st.integers(0, 3000), max_size=12),
    st.lists(st.integers(0, 3000), max_size=12),
)
def test_messages_are_the_same_at_every_split_into_frames_and_reads(
    messages: list[bytes], frame_cuts: list[int], read_cuts: list[int]
) -> None:
    data = b"".join(map(prefixed, messages))
    wire = frame(SETTINGS, stream=0) + headers(*HEADERS)
    wire += b"".join(frame(DATA, payload=part) for part in split(data, frame_cuts))
    wire += trailers(("grpc-status", "0"))
    made = call()
    for part in split(wire, read_cuts):
        made.receive(part)
    assert taken(made) == messages
    assert made.status == OK


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(st.binary(max_size=400))
def test_no_bytes_raise(data: bytes) -> None:
    begun().receive(data)
    call().receive(data)


@given(st.integers(0, 9), st.integers(0, 255), st.integers(0, 2), st.binary(max_size=40))
def test_no_frame_raises(kind: int, flags: int, stream: int, payload: bytes) -> None:
    for made in (call(), begun()):
        made.receive(frame(kind, flags, payload, stream))


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (frame(DATA, payload=b"\x01\0\0\0\0"), "compressed"),
        (frame(DATA, payload=struct.pack(">BL", 0, MESSAGE_BYTES_MAX + 1)), "larger than max"),
        (frame(DATA, payload=b"x", stream=3), "data without headers"),
        (frame(DATA, END_STREAM), "ended without a status"),
        (trailers(("grpc-message", "x")), "ended without a status"),
        (headers(("a", "b")), "headers between messages"),
        (frame(HEAD, END_HEADERS, b"\xff" * 40), "unreadable headers"),
        (frame(HEAD, 0, bytes(HEADER_BYTES_MAX + 1)), "headers above"),
        (frame(HEAD, 0, b"") + frame(DATA, payload=b"x"), "without their continuation"),
        (frame(CONTINUATION, END_HEADERS, b""), "a continuation without"),
        (frame(RESET, payload=struct.pack(">L", 2)), "the peer reset the stream"),
        (frame(PUSH, END_HEADERS, b"x"), "a push"),
        (frame(PING, payload=b"x", stream=0), "an invalid ping"),
        (setting(4, 2**31), "too large"),
        (setting(5, 1), "size of frames"),
        (frame(SETTINGS, payload=b"x", stream=0), "invalid settings"),
        (window(0, 1), "invalid window update"),
        (window(2**31 - 1, 0), "invalid window update"),
        (frame(DATA, PADDED, b"\x05abc"), "invalid padding"),
        ((FRAME_BYTES_MAX + 1).to_bytes(3, "big") + bytes(6), "a frame of"),
        (frame(PING, ACK, bytes(8), stream=0) * 2000, "too many control frames"),
        (frame(GOAWAY, payload=struct.pack(">LL", 0, 0), stream=0), "closes the connection"),
    ],
)
def test_a_violation_ends_the_call_with_its_name(wire: bytes, text: str) -> None:
    made = begun()
    has_frames = made.receive(wire)
    while has_frames:
        has_frames = made.receive(b"")
    assert made.status is not None
    assert text in made.status.message
    assert made.status.code is not StatusCode.OK


def test_bytes_after_the_end_are_not_held() -> None:
    made = begun()
    made.receive(trailers(("grpc-status", "0")))
    made.receive(bytes(100_000))
    assert not made._frame


def test_data_above_the_window_ends_the_call() -> None:
    made = begun()
    part = frame(DATA, payload=b"".join(prefixed(bytes(1000)) for _ in range(200)))
    for _ in range(WINDOW_BYTES // 200_000 + 1):
        made.receive(part)
    assert made.status is not None
    assert "more data than the window" in made.status.message


def test_the_window_opens_as_messages_are_taken() -> None:
    made = begun()
    part = frame(DATA, payload=b"".join(prefixed(bytes(1000)) for _ in range(200)))
    for _ in range(15):
        made.receive(part)
    assert made.take_output() == b""
    taken(made)
    updates = frames(made.take_output())
    assert [(kind, stream) for kind, _, stream, _ in updates] == [(WINDOW, 0), (WINDOW, 1)]
    assert {payload for *_, payload in updates} == {struct.pack(">L", 15 * 200 * 1005)}


@given(
    st.lists(st.binary(max_size=60_000), min_size=1, max_size=6),
    st.integers(0, 100_000),
    st.lists(st.integers(1, 50_000), min_size=30, max_size=30),
)
def test_the_data_that_is_sent_fits_the_windows_and_is_complete(
    messages: list[bytes], initial: int, increments: list[int]
) -> None:
    made = begun()
    made.receive(setting(4, initial))
    made.take_output()
    allowed, sent = {0: 65_535, 1: initial}, b""
    for message in messages:
        made.send(message)
    made.half_close()
    ended = False
    for increment in [*increments, 2**20]:
        for kind, flags, _, payload in frames(made.take_output()):
            assert kind == DATA
            sent += payload
            ended = bool(flags & END_STREAM)
        assert len(sent) <= min(allowed.values())
        assert ended == (not made.is_blocked)
        for stream in (0, 1):
            made.receive(window(increment, stream))
            allowed[stream] += increment
    for _, flags, _, payload in frames(made.take_output()):
        sent += payload
        ended = bool(flags & END_STREAM)
    assert sent == b"".join(map(prefixed, messages))
    assert ended


def test_pings_and_settings_are_acknowledged_and_cancel_resets_the_stream() -> None:
    made = begun()
    made.receive(setting(5, 20_000) + frame(PING, payload=b"12345678", stream=0))
    made.cancel()
    assert frames(made.take_output()) == [
        (SETTINGS, ACK, 0, b""),
        (PING, ACK, 0, b"12345678"),
        (RESET, 0, 1, struct.pack(">L", 8)),
    ]


def test_a_status_has_its_text_and_details() -> None:
    made = call()
    made.receive(
        trailers(
            *HEADERS,
            ("grpc-status", "8"),
            ("grpc-message", "full: 100%25 %E2%9C%93"),
            ("grpc-status-details-bin", "AAEC"),
        )
    )
    assert made.status == CallStatus(
        StatusCode.RESOURCE_EXHAUSTED, "full: 100% ✓", bytes((0, 1, 2))
    )


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("401", StatusCode.UNAUTHENTICATED),
        ("404", StatusCode.UNIMPLEMENTED),
        ("503", StatusCode.UNAVAILABLE),
        ("200", StatusCode.UNKNOWN),
    ],
)
def test_a_response_that_is_not_of_grpc_is_an_error(status: str, code: StatusCode) -> None:
    made = call()
    made.receive(headers((":status", status), ("content-type", "text/html")))
    assert made.status is not None
    assert made.status.code is code


def test_a_peer_that_takes_no_new_calls_finishes_this_one() -> None:
    made = begun()
    made.receive(frame(GOAWAY, payload=struct.pack(">LL", 2**31 - 1, 0), stream=0))
    assert made.status is None
    made.receive(frame(DATA, payload=prefixed(b"x")) + trailers(("grpc-status", "0")))
    assert taken(made) == [b"x"]
    assert made.status == OK
