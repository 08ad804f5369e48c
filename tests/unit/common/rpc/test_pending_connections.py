"""Places and turns of connections without an accepted call."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from common.rpc import pending_connections
from common.rpc.pending_connections import PendingConnection, PendingConnections, source_of


class Recorder(asyncio.Protocol):
    """Records what a connection receives."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.received.append(data)


class Places:
    """A table of few places, and the connections that it has ended."""

    def __init__(self) -> None:
        self.table = PendingConnections(Counter())
        self.ended: list[str] = []

    def add(self, name: str, source: str = "a") -> PendingConnection:
        connection = PendingConnection(self.table, source, Recorder())
        self.table.add(connection)
        connection.end = lambda: self.ended.append(name)
        return connection


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setattr(pending_connections, "PENDING_MAX", 4)
    return Places()


def test_the_oldest_connection_of_the_busiest_source_gives_its_place(places: Places) -> None:
    places.add("member", "b")
    for number in range(10):
        places.add(f"flood {number}")
    assert places.ended == [f"flood {number}" for number in range(7)]
    assert len(places.table) == 4
    assert places.table.ended == {"evicted": 7}


async def test_a_connection_that_waits_for_its_turn_or_is_checked_keeps_its_place(
    places: Places,
) -> None:
    places.add("waits").data_received(b"x")
    places.add("is checked").is_checked = True
    for number in range(5):
        places.add(f"idle {number}")
    assert places.ended == ["idle 0", "idle 1", "idle 2"]


def test_all_are_ended_at_the_end_of_the_server(places: Places) -> None:
    for name in "abc":
        places.add(name)
    places.table.end_all()
    assert places.ended == ["a", "b", "c"]


async def test_each_turn_of_the_loop_handles_one_connection_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = Places()
    order: list[str] = []

    def receive(name: str, turn: list[int]) -> Recorder:
        class Turn(Recorder):
            def data_received(self, data: bytes) -> None:
                order.append(f"{name}{data.decode()}@{turn[0]}")

        return Turn()

    turn = [0]
    connections = []
    for name in "abc":
        connection = PendingConnection(places.table, "a", receive(name, turn))
        places.table.add(connection)
        connections.append(connection)
    for connection in connections:
        connection.data_received(b"1")
    connections[0].data_received(b"2")
    for _ in range(5):
        await asyncio.sleep(0)
        turn[0] += 1
    assert [entry.partition("@")[0] for entry in order] == ["a12", "b1", "c1"]
    assert len({entry.partition("@")[2] for entry in order}) == 3


async def test_a_connection_that_sends_too_much_before_its_turn_is_ended() -> None:
    places = Places()
    flood = places.add("flood")
    for _ in range(3):
        flood.data_received(bytes(60_000))
    assert places.ended == ["flood"]
    assert places.table.ended == {"pending_bytes": 1}


def test_a_place_is_freed_once(places: Places) -> None:
    connection = places.add("a")
    places.table.remove(connection)
    places.table.remove(connection)
    assert len(places.table) == 0
    assert not places.table.end_oldest()


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "20010db800010002"),
        ("fe80::1%eth0", "fe80000000000000"),
        ("", ""),
    ],
)
def test_an_ipv6_network_of_64_bits_is_one_source(host: str, source: str) -> None:
    assert source_of(host) == source
