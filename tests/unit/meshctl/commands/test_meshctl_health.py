"""Output of `meshctl health` for a port."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshctl.commands.health import health


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshctl.commands.health.TIMEOUT_S", 20.0)


@pytest.fixture
def served() -> Iterator[tuple[grpc_health.HealthServicer, str]]:
    """A health servicer and its address."""
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = grpc_health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_serving_port_is_reported_as_serving(
    served: tuple[grpc_health.HealthServicer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = served
    assert health(address) == 0
    assert capsys.readouterr() == (f"{address}: SERVING\n", "")


def test_a_port_that_does_not_serve_is_reported(
    served: tuple[grpc_health.HealthServicer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, address = served
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert health(address) == 1
    assert capsys.readouterr() == ("", f"{address}: NOT_SERVING\n")


def test_a_service_that_the_port_does_not_have_is_named(
    served: tuple[grpc_health.HealthServicer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = served
    assert health(address, "x.Y") == 1
    assert capsys.readouterr() == ("", f"{address}: NOT_FOUND: no service 'x.Y' here\n")


def test_a_closed_port_is_one_line_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    # No process listens on port 1.
    assert health("127.0.0.1:1") == 1
    errors = capsys.readouterr().err
    assert errors.startswith("127.0.0.1:1: UNAVAILABLE: failed to connect")
    assert errors.count("\n") == 1
