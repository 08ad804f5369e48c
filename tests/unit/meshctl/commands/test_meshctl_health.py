"""Output of `meshctl health` for a port."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshctl.cli import run_command
from meshctl.health_probe import health


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshctl.health_probe.TIMEOUT_S", 20.0)


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


@pytest.mark.parametrize("address", ["localhost", ":7001", "localhost:", "localhost:x"])
def test_an_address_without_host_or_port_is_named(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["health", address], {}) == 2
    message = f"argument HOST:PORT: {address!r}: must be HOST:PORT (see meshctl health --help)"
    assert capsys.readouterr().err == f"meshctl health: {message}\n"


def test_an_ipv6_address_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["health", "[::1]:1"], {}) == 1
    assert capsys.readouterr().err.startswith("[::1]:1: UNAVAILABLE")


def test_the_command_imports_no_other_part_of_the_project() -> None:
    """Container engines run it every few seconds: the other imports took 0.45 s of CPU time."""
    script = (
        "import sys; sys.argv = ['meshctl', 'health', '127.0.0.1:1']\n"
        "from meshctl.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 1\n"
        "print(*(name for name in sys.modules if name.startswith(('common', 'meshctl'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["meshctl", "meshctl.__main__", "meshctl.health_probe"]


def test_a_health_for_programs_is_json(
    served: tuple[grpc_health.HealthServicer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, address = served
    assert run_command(["health", address, "--json"], {}) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"address": address, "status": "SERVING", "error": None}
    assert run_command(["health", address, "--service=x.Y", "--json"], {}) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["error"] == "NOT_FOUND: no service 'x.Y' here"


def test_a_service_with_a_long_name_is_requested_by_it(
    served: tuple[grpc_health.HealthServicer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, address = served
    name = "a" * 300
    servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    assert health(address, name) == 0
    assert health(address, name + "b") == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE"),
        (b"", "UNAVAILABLE: the server closed the connection"),
        (b"\x00\x00\x08\x07" + bytes(13), "UNAVAILABLE: the server ended the call"),
    ],
)
def test_a_port_of_another_protocol_is_unavailable(
    answer: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        served = pool.submit(serve)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert health(address) == 1
        served.result()
    assert capsys.readouterr().err.startswith(f"{address}: {reason}")


def test_a_port_without_an_answer_is_reported_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshctl.health_probe.TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert health(address) == 1
    expected = f"{address}: DEADLINE_EXCEEDED: no response within 0.2 s\n"
    assert capsys.readouterr().err == expected
