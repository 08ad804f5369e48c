"""A listening socket that a launcher passes to a frontend."""

from __future__ import annotations

import os
import socket

import pytest

from common.errors import InvalidRequest
from frontend_svc.config import FrontendConfig
from frontend_svc.edge.sockets import inherit
from frontend_svc.processes.parent import process_config


def test_a_listening_socket_is_inherited() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with inherit(os.dup(listener.fileno())) as inherited:
            assert inherited.getsockname() == listener.getsockname()
            assert not inherited.get_inheritable()
            assert not inherited.getblocking()
        # A connection that the process has not accepted before it ends waits for the next one.
        with (
            socket.create_connection(listener.getsockname()),
            inherit(os.dup(listener.fileno())) as successor,
        ):
            successor.settimeout(20.0)
            successor.accept()[0].close()


def test_another_descriptor_is_refused_by_name() -> None:
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(InvalidRequest, match="is not a socket") as refused:
            inherit(read_end)
        assert refused.value.field == "http_fd"
    finally:
        os.close(read_end)
        os.close(write_end)
    with (
        socket.socket() as unbound,
        pytest.raises(InvalidRequest, match="not a socket that is bound"),
    ):
        inherit(os.dup(unbound.fileno()))


def test_each_of_several_processes_has_sockets_of_its_own() -> None:
    config = FrontendConfig(http_fd=(3, 4, 5), processes=2)
    assert config.problems() == []
    assert [process_config(config, slot).http_fd for slot in range(2)] == [(3, 5), (4,)]
    (problem,) = FrontendConfig(http_fd=(3,), processes=2).problems()
    assert problem == "http_fd: 1 sockets for 2 processes; each needs one of its own"
