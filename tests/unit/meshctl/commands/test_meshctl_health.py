"""Output of `meshctl health` for a port."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshctl.commands.health import health, main


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


@pytest.mark.parametrize("address", ["localhost", ":7001", "localhost:", "localhost:x"])
def test_an_address_without_host_or_port_is_named(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([address])
    assert exit_.value.code == 2
    message = f"argument HOST:PORT: {address!r}: must be HOST:PORT (see meshctl health --help)"
    assert capsys.readouterr().err == f"meshctl health: {message}\n"


def test_an_ipv6_address_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["[::1]:1"]) == 1
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
    assert done.stdout.split() == [
        "meshctl",
        "meshctl.__main__",
        "meshctl.commands",
        "meshctl.commands.health",
    ]
