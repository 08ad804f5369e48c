"""The control socket: requests, progress, refusals, access."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from common.errors import InvalidRequest
from meshctl.commands.drain import command as drain
from meshctl.commands.operate import complete_names
from meshctl.process.control import (
    SOCKET_NAME,
    ControlRequest,
    NoMesh,
    Send,
    control_server,
    request,
)
from tests.kit.waiting import until


# Any, here and below: JSON.
async def echo(message: ControlRequest, send: Send, _is_gone: Callable[[], bool]) -> Any:
    if message.names == ("bad",):
        raise InvalidRequest("'bad': no such member")
    send({"name": "a", "state": "starting", "detail": ""})
    return {"command": message.command, "names": message.names}


async def answers(folder: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
    return await asyncio.to_thread(lambda: list(request(folder, line)))


async def test_a_request_receives_its_progress_and_its_result(tmp_path: Path) -> None:
    async with control_server(tmp_path, echo):
        # A field of a newer client does not matter.
        found = await answers(tmp_path, {"command": "restart", "names": ["a"], "newer": 1})
    assert found == [
        {"name": "a", "state": "starting", "detail": ""},
        {"done": {"command": "restart", "names": ["a"]}},
    ]


async def test_a_refusal_and_an_unknown_request_are_errors(tmp_path: Path) -> None:
    async with control_server(tmp_path, echo):
        (refused,) = await answers(tmp_path, {"command": "drain", "names": ["bad"]})
        (unknown,) = await answers(tmp_path, {"command": "fly"})
    assert refused == {"error": "'bad': no such member"}
    assert "does not know the request: command" in unknown["error"]


async def test_only_the_same_user_reaches_the_socket(tmp_path: Path) -> None:
    async with control_server(tmp_path, echo):
        assert (tmp_path / SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / SOCKET_NAME).exists()


def test_a_completion_of_names_does_not_wait_for_a_mesh_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshctl.commands.operate.COMPLETION_TIMEOUT_S", 0.05)
    context = click.Context(drain, obj={})
    context.params["log_dir"] = tmp_path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()
        # In a thread, which does not block the end of the tests.
        found: queue.Queue[list[str]] = queue.Queue()
        complete = threading.Thread(
            target=lambda: found.put(complete_names(context, drain.params[0], "w")), daemon=True
        )
        complete.start()
        assert found.get(timeout=10.0) == []


async def test_the_path_may_be_longer_than_that_of_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20) / ("path" * 20)
    folder.mkdir(parents=True)
    async with control_server(folder, echo):
        found = await answers(folder, {"command": "status"})
    assert found[-1]["done"]["command"] == "status"


async def test_without_a_mesh_the_message_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(NoMesh, match=f"no `meshctl up` answers that has its logs in {tmp_path}"):
        await answers(tmp_path, {"command": "status"})


async def test_clients_that_wait_receive_an_error_when_the_mesh_stops(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def hang(_message: ControlRequest, _send: Send, _is_gone: Callable[[], bool]) -> Any:
        entered.set()
        await asyncio.get_running_loop().create_future()

    async with control_server(tmp_path, hang):
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET_NAME)
        writer.write(b'{"command": "restart"}\n')
        await entered.wait()
    assert json.loads(await reader.read()) == {"error": "the mesh is stopping"}
    writer.close()


async def test_a_client_that_has_gone_is_noticed(tmp_path: Path) -> None:
    noticed = asyncio.Event()

    async def wait(_message: ControlRequest, _send: Send, is_gone: Callable[[], bool]) -> Any:
        await until(is_gone, "the client has gone")
        noticed.set()

    async with control_server(tmp_path, wait):
        _, writer = await asyncio.open_unix_connection(tmp_path / SOCKET_NAME)
        writer.write(b'{"command": "restart"}\n')
        writer.close()
        async with asyncio.timeout(20.0):
            await noticed.wait()
