"""A worker whose incoming connections can be cut.

    python -m tests.chaos.cut_worker FLAGS...

The flags are those of `python -m worker_svc`. The worker registers the address of a TCP proxy in
its own process. After CUT the proxy forwards nothing and closes nothing, as if all packets were
lost; after MEND it continues. The worker's own connections, to indexers, are not cut.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.service.base import main
from common.service.lifecycle import Lifecycle, ServiceInfo
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

CUT = signal.SIGUSR1
MEND = signal.SIGUSR2
READ_BYTES = 1 << 16


class Proxy:
    """Forwards TCP connections to a port of this host, until `cut`."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port of the proxy."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._is_open.wait()
                upstream = await asyncio.open_connection(host, port)
                both = self._forward(reader, upstream[1]), self._forward(upstream[0], writer)
                await asyncio.gather(*both)
            except OSError:
                writer.close()

        self._server = await asyncio.start_server(connected, host, 0)
        proxy_port: int = self._server.sockets[0].getsockname()[1]
        return proxy_port

    def cut(self) -> None:
        self._is_open.clear()

    def mend(self) -> None:
        self._is_open.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # Ends: one side closes.
            while data := await reader.read(READ_BYTES):
                await self._is_open.wait()
                writer.write(data)
                await writer.drain()
            await self._is_open.wait()
        finally:
            writer.close()


class ProxiedWorker(WorkerApp):
    """A worker that registers the address of its proxy."""

    proxy_port = 0

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """As WorkerApp."""
        info = await super().start(lifecycle)
        host, _, port = self.address.rpartition(":")
        proxy, loop = Proxy(), asyncio.get_running_loop()
        self.proxy_port = await proxy.start(host, int(port))
        loop.add_signal_handler(CUT, proxy.cut)
        loop.add_signal_handler(MEND, proxy.mend)
        return info

    def _instance(self) -> Instance:
        host = self.address.rpartition(":")[0]
        return replace(super()._instance(), address=rpc.join_address(host, self.proxy_port))


if __name__ == "__main__":
    main("worker", WorkerConfig, ProxiedWorker)
