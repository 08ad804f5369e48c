"""The ports of frontends: open while a process runs or starts, closed after a drain or failure."""

from __future__ import annotations

import socket

import pytest

from meshctl.process.listeners import CannotListen, Listeners, listeners
from meshctl.process.supervise import RestartsExhausted
from tests.kit.supervised import FakeProcess, World, becomes_ready, dead, running, spec

HOST = "127.0.0.1"


def port_of(opened: Listeners, name: str) -> int:
    listener = opened.open(name)
    assert listener is not None
    port: int = listener.getsockname()[1]
    return port


def connect(port: int) -> None:
    socket.create_connection((HOST, port), timeout=10.0).close()


def test_a_closed_port_refuses_connections_and_is_the_same_after_it_is_opened() -> None:
    with listeners(HOST, {"frontend-0": 0}) as opened:
        port = port_of(opened, "frontend-0")
        assert opened.open("frontend-0") is opened.open("frontend-0")
        connect(port)
        opened.close("frontend-0")
        with pytest.raises(ConnectionRefusedError):
            connect(port)
        assert port_of(opened, "frontend-0") == port
        connect(port)
    with pytest.raises(ConnectionRefusedError):
        connect(port)


def test_a_port_that_another_process_has_taken_is_named() -> None:
    with listeners(HOST, {"frontend-0": 0}) as opened:
        port = port_of(opened, "frontend-0")
        opened.close("frontend-0")
        with (
            listeners(HOST, {"frontend-9": port}),
            pytest.raises(CannotListen, match=f"port {port} of {HOST} is in use"),
        ):
            opened.open("frontend-0")


async def test_a_member_is_given_up_when_none_of_its_processes_runs_or_starts_again() -> None:
    def born(process: FakeProcess) -> None:
        (becomes_ready if process.pid == 100 else dead)(process)

    world = World(born=born)
    async with running(world, spec("a")) as supervisor:
        await supervisor.wait_all_ready()
        (old,) = supervisor.children
        supervisor.add(spec("a"), after=old)
        await world.next_event(RestartsExhausted)
        assert not supervisor.is_given_up("a")
        await supervisor.end(old)
        assert supervisor.is_given_up("a")
