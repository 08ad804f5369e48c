"""Floods of the ports of real services: other connections are served meanwhile."""

from __future__ import annotations

import socket

import pytest

from tests.chaos.floods import METHODS, PEACEFUL_METHODS
from tests.kit.floods import Peaceful, flooding
from tests.kit.http2_frames import FLOODS, calm_text, request
from tests.kit.processes import Mesh, Service, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

FLOOD_S = 0.5
# If each connection's flood is handled in one turn, a ping takes 1.2 to 3 s.
CONNECTIONS = {"connections": 600, "empty_messages": 8}
PING_MAX_MS = 500.0
SERVICES = ("worker", "router", "indexer")
METRICS = ["--metrics-port=0"]

mesh = mesh_fixture(
    workers=1,
    indexers=1,
    worker_flags=METRICS,
    router_flags=METRICS,
    indexer_flags=METRICS,
)


def service_of(mesh: Mesh, kind: str) -> Service:
    return mesh.of_kind(kind)[0]


@pytest.mark.parametrize("flood", ["empty_messages", "rapid_reset", "connections"])
@pytest.mark.parametrize("kind", SERVICES)
def test_a_call_is_served_beside_a_flood_of_the_stream_port(
    mesh: Mesh, kind: str, flood: str
) -> None:
    service = service_of(mesh, kind)
    address = service.addresses["streams"]
    connections = CONNECTIONS.get(flood, 2)
    peaceful = Peaceful(address, service.pid, PEACEFUL_METHODS[kind])
    with (
        peaceful.measured() as pings,
        flooding(address, flood, METHODS[kind], FLOOD_S, connections) as result,
    ):
        assert result()["opened"]
    assert (pings.error, pings.pings > 1) == ("", True)
    assert pings.worst_ms < PING_MAX_MS
    new = Peaceful(address, service.pid, PEACEFUL_METHODS[kind], is_new=True)
    with new.measured() as connects:
        pass
    assert (connects.error, connects.pings) == ("", 1)


@pytest.mark.parametrize("kind", SERVICES)
def test_a_service_names_the_limit_that_a_peer_has_exceeded(mesh: Mesh, kind: str) -> None:
    service = service_of(mesh, kind)
    host, _, port = service.addresses["streams"].rpartition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as peer:
        peer.sendall(request(METHODS[kind]) + FLOODS["settings"] * 3000)
        # Ends: the service ends the connection; each read has a limit.
        while data := peer.recv(1 << 16):
            received += data
    assert "too many control frames: 1000" in (calm_text(received) or "")
    wait_for(
        lambda: any(e["limit"] == "control_frames" for e in service.events("streams_refused")),
        "the limit is in the log",
    )
    assert service.metric('kvmesh_stream_connections_ended_total{limit="control_frames"}') >= 1
    assert service.metric('kvmesh_stream_connections{state="pending"}') >= 0


@pytest.mark.parametrize(
    "flood",
    [
        *("pipelined", "small_chunks", "headers", "reconnects"),
        *("websocket_pings", "websocket_errors"),
    ],
)
def test_a_client_is_served_beside_a_flood_of_the_http_port(mesh: Mesh, flood: str) -> None:
    address = mesh.url.removeprefix("http://")
    with (
        Peaceful(address, mesh.frontend.pid, "").measured() as pings,
        flooding(address, flood, "", FLOOD_S, 2) as result,
    ):
        assert result()["sent"]
    assert (pings.error, pings.pings > 1) == ("", True)
    assert pings.worst_ms < PING_MAX_MS


@pytest.mark.parametrize("kind", [*SERVICES, "frontend"])
def test_a_flood_of_pings_of_a_unary_port_is_ended(mesh: Mesh, kind: str) -> None:
    host, _, port = service_of(mesh, kind).addresses["grpc"].rpartition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as peer:
        peer.sendall(request("/grpc.health.v1.Health/Watch") + FLOODS["ping"] * 3000)
        # Ends: the service ends the connection; each read has a limit.
        while data := peer.recv(1 << 16):
            received += data
            if calm_text(received) is not None:
                break
    assert calm_text(received) == "too_many_pings"
