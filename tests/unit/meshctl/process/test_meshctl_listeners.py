"""The ports of frontends: open while a process runs or starts, closed after a drain or failure."""

from __future__ import annotations

import contextlib
import socket

import pytest

from meshctl.process.listeners import CannotListen, Listeners, listeners
from meshctl.process.supervise import RestartsExhausted
from tests.kit.supervised import FakeProcess, World, becomes_ready, dead, running, spec

HOST = "127.0.0.1"


def port_of(opened: Listeners, name: str) -> int:
    port: int = opened.open(name)[0].getsockname()[1]
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


def test_a_socket_that_is_added_gets_connections_once_a_process_listens_on_it() -> None:
    with listeners(HOST, {"frontend-0": 0}) as opened:
        port = port_of(opened, "frontend-0")
        first, added = opened.open("frontend-0", 2)
        assert added.getsockname() == first.getsockname()
        assert opened.open("frontend-0") == [first, added], "fewer processes share all sockets"

        def accepted() -> list[int]:
            clients = [socket.create_connection((HOST, port), timeout=10.0) for _ in range(32)]
            counts = []
            for listener in (first, added):
                listener.setblocking(False)
                counts.append(0)
                with contextlib.suppress(OSError):
                    # Ends: no more connections wait.
                    while True:
                        listener.accept()[0].close()
                        counts[-1] += 1
            for client in clients:
                client.close()
            return counts

        assert accepted() == [32, 0]
        added.listen()
        counts = accepted()
        assert min(counts) > 0
        assert sum(counts) == 32
        opened.keep("frontend-0", 1)
        assert opened.open("frontend-0") == [first]
        connect(port)


def test_a_service_without_a_port_has_no_socket() -> None:
    with listeners(HOST, {"frontend-0": 0}) as opened:
        assert opened.open("router-0") == []
        opened.keep("router-0", 1)
        opened.close("router-0")


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
