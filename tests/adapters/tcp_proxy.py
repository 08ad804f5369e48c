"""A TCP connection that a test interrupts."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Self

from tests.kit.waiting import WAIT_S


class TcpProxy:
    """Forwards a free port of this host to another one, in a thread of its own.

    While `is_cut`, it has no connections: open ones end, and new ones are closed.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.is_cut = False
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._ended = asyncio.Event()
        self._links: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="TCP proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(WAIT_S)

    def cut(self) -> None:
        """Ends all connections, and refuses others until `restore`."""
        self.is_cut = True
        asyncio.run_coroutine_threadsafe(self._close_links(), self._loop).result(WAIT_S)

    def restore(self) -> None:
        """Forwards again."""
        self.is_cut = False

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        await self._ended.wait()
        server.close()
        await self._close_links()

    async def _close_links(self) -> None:
        for task in self._links:
            task.cancel()
        if self._links:
            await asyncio.wait(self._links)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        task = self._loop.create_task(self._link(reader, writer))
        self._links.add(task)
        task.add_done_callback(self._links.discard)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copies both ways until one side ends."""
        out = None
        try:
            back, out = await asyncio.open_connection("127.0.0.1", self._target_port)
            copies = [
                asyncio.ensure_future(_copy(reader, out)),
                asyncio.ensure_future(_copy(back, writer)),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in copies:
                    one.cancel()
        finally:
            for end in (writer, out):
                if end is not None:
                    end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        # Ends: with the connection.
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
