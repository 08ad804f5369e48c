"""The control socket of `meshctl up`: a Unix socket in the folder of its logs, mode 0600.

A client sends one JSON line, and receives JSON lines: `{"name", "state", "detail"}` for progress,
then one with `"done"` or `"error"`. Programs of the same user, and root, can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import MeshError
from meshctl.mesh_file.document import MeshFileError

SOCKET_NAME = "control.sock"
REQUEST_BYTES_MAX = 1 << 16
REQUEST_TIMEOUT_S = 5.0
CLIENTS_MAX = 16


class ControlRequest(BaseModel):
    """What a client requests. Fields of a newer client are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    command: Literal["status", "restart", "drain", "start", "scale", "stop"]
    names: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    new_first: bool | None = None
    wait: bool = True
    force: bool = False


class NoMesh(Exception):
    """No `meshctl up` answers; the message states what to do."""


# Sends a line to the client; no effect after it has gone.
Send = Callable[[dict[str, Any]], None]
# Any: JSON. `is_gone` returns whether the client has disconnected.
Handle = Callable[[ControlRequest, Send, Callable[[], bool]], Awaitable[Any]]


@contextmanager
def short_address(folder: Path) -> Iterator[str]:
    """Yields an address of the socket; paths of Unix sockets are limited to 107 bytes."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET_NAME}"
    finally:
        os.close(fd)


@asynccontextmanager
async def control_server(folder: Path, handle: Handle) -> AsyncIterator[None]:
    """Serves requests until the block is left. The caller owns the folder (see its lock)."""
    path = folder / SOCKET_NAME
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        with short_address(folder) as address:
            listener.bind(address)
    finally:
        os.umask(mask)
    clients: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        clients.add(task)
        try:
            if len(clients) <= CLIENTS_MAX:
                await _serve(reader, writer, handle)
        finally:
            clients.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=listener, limit=REQUEST_BYTES_MAX)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handle: Handle
) -> None:
    def send(line: dict[str, Any]) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(line).encode() + b"\n")

    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            line = await reader.readline()
        request = ControlRequest.model_validate_json(line)
        done = await handle(request, send, lambda: reader.at_eof() or writer.is_closing())
        send({"done": done})
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        send({"error": f"this version of `meshctl up` does not know the request: {details}"})
    except MeshError as error:
        send({"error": error.message})
    except MeshFileError as error:
        send({"error": str(error)})
    except (TimeoutError, ValueError):
        send({"error": "no request"})
    except asyncio.CancelledError:
        send({"error": "the mesh is stopping"})
        raise
    with contextlib.suppress(OSError):
        await writer.drain()


def request(
    folder: Path, line: dict[str, Any], *, timeout_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the lines of the answer. Raises NoMesh.

    timeout_s: of each line; None: unlimited.
    """
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        client.settimeout(timeout_s)
        try:
            with short_address(folder) as address:
                client.connect(address)
            client.sendall(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise NoMesh(
                f"no `meshctl up` answers that has its logs in {folder}"
                f" ({error.strerror or error}); name its folder with --log-dir"
            ) from None
        lines = stack.enter_context(client.makefile("rb"))
        is_complete = False
        try:
            for raw in lines:
                answer: dict[str, Any] = json.loads(raw)
                is_complete = "done" in answer or "error" in answer
                yield answer
        except OSError as error:
            problem = error.strerror or error
            raise NoMesh(f"the connection to `meshctl up` failed: {problem}") from None
        if not is_complete:
            raise NoMesh("`meshctl up` ended before it answered")
