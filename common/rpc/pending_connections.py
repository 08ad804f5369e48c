"""Connections to a stream port whose call is not accepted yet.

Until the server has checked its credential, a connection is that of any process that reaches the
port. Such connections share a bounded number of places, and one turn of the event loop: each turn
handles what one of them has sent, in the order of arrival. Members have places of their own, so
that no number of other connections keeps them out.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from collections.abc import Callable
from typing import cast

PENDING_MAX = 256
# Receives for a connection that has ended or is handed over: without it, each connection would be
# part of a reference cycle, and a flood of them would stop the process for its collection.
_NOTHING = asyncio.Protocol()
# What a connection may send before its turn: headers, and the data that the first window allows.
PENDING_BYTES_MAX = 128 << 10


class PendingConnection(asyncio.Protocol):
    """One connection, from its accept until its call is accepted or it ends."""

    def __init__(self, table: PendingConnections, source: str, accepted: asyncio.Protocol) -> None:
        """Creates it; `PendingConnections.add` gives it its place.

        - source: network of the peer.
        - accepted: the protocol that handles what arrives, later without this one.
        """
        self.source = source
        self.is_waiting = False
        """For its turn."""
        self.is_checked = False
        """Whether its credential is being checked."""
        self.end: Callable[[], object] = lambda: None
        """Ends the connection. Set by the owner until the handshake is complete."""
        self.transport: asyncio.Transport | None = None
        self._table = table
        self._accepted = accepted
        self._received = b""

    def accept(self) -> None:
        """Hands the connection over. The call is accepted."""
        assert self.transport is not None
        self._table.remove(self)
        self.transport.set_protocol(self._accepted)
        if self._received:
            self.take_turn()
        self._accepted = _NOTHING

    def take_turn(self) -> None:
        """Handles what has arrived."""
        data, self._received = self._received, b""
        self._accepted.data_received(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        self.end = self.transport.abort
        self._accepted.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if len(self._received) + len(data) > PENDING_BYTES_MAX:
            self._table.ended["pending_bytes"] += 1
            self.end()
            return
        self._received += data
        self._table.await_turn(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._table.remove(self)
        self._accepted.connection_lost(error)
        self._accepted = _NOTHING

    def pause_writing(self) -> None:
        self._accepted.pause_writing()

    def resume_writing(self) -> None:
        self._accepted.resume_writing()


class PendingConnections:
    """The pending connections of one port.

    - ended: counts connections that were ended, by reason.
    - is_calm: set while few connections wait for their turn. The server accepts new ones only then,
      so that each has time to send its call before newer ones take its place.
    """

    def __init__(self, ended: Counter[str]) -> None:
        self.ended = ended
        self.is_calm = asyncio.Event()
        self.is_calm.set()
        # By the order of arrival.
        self._connections: dict[PendingConnection, None] = {}
        self._by_source: Counter[str] = Counter()
        self._waiting: deque[PendingConnection] = deque()
        self._next_turn: asyncio.Handle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: PendingConnection) -> None:
        """Gives a place to a new connection. If there is none, ends the oldest one that neither
        waits for its turn nor is checked, of the source that has the most."""
        if len(self._connections) >= PENDING_MAX:
            self.end_oldest()
        self._connections[connection] = None
        self._by_source[connection.source] += 1

    def end_oldest(self) -> bool:
        """Returns whether there was a connection to end; see `add`."""
        ((source, _),) = self._by_source.most_common(1) or [("", 0)]
        idle = [each for each in self._connections if not (each.is_waiting or each.is_checked)]
        oldest = next((each for each in idle if each.source == source), next(iter(idle), None))
        if oldest is None:
            return False
        self.ended["evicted"] += 1
        self.remove(oldest)
        oldest.end()
        return True

    def end_all(self) -> None:
        for connection in list(self._connections):
            connection.end()

    def remove(self, connection: PendingConnection) -> None:
        """Frees the place of a connection, if it has one."""
        if connection not in self._connections:
            return
        del self._connections[connection]
        self._by_source[connection.source] -= 1
        if not self._by_source[connection.source]:
            del self._by_source[connection.source]
        if connection.is_waiting:
            connection.is_waiting = False
            self._waiting.remove(connection)
            self._update_calm()

    def await_turn(self, connection: PendingConnection) -> None:
        """Calls `take_turn` of a connection once, after those that wait already."""
        if connection.is_waiting or connection not in self._connections:
            return
        connection.is_waiting = True
        self._waiting.append(connection)
        self._update_calm()
        self._schedule_turn()

    def _update_calm(self) -> None:
        if len(self._waiting) <= PENDING_MAX // 2:
            self.is_calm.set()
        else:
            self.is_calm.clear()

    def _schedule_turn(self) -> None:
        if self._waiting and self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._next_turn = None
        if self._waiting:
            connection = self._waiting.popleft()
            connection.is_waiting = False
            self._update_calm()
            self._schedule_turn()
            connection.take_turn()


def source_of(host: str) -> str:
    """Returns what counts as one source: an IPv4 address, or the first 64 bits of an IPv6 one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else address.packed[:8].hex()
