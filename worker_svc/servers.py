"""One process for several servers that run already: each is a registered worker of its own.

Every server has its own id, card, ports, publisher and life cycle (`common.service.lifecycle.run`),
so that routers, indexers and frontends need no notion of it: a server that is lost, removed or
restarted is a worker that is. A worker that ends is started again with a pause that grows.

The process has health of its own, on `port` and on the health port: SERVING ("") while its workers
get work of their peers, or there is no server. One that does not respond does not count, unless
none responds.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import structlog

from common.errors import MeshError, Unavailable
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from common.runtime.config import ConfigError
from common.runtime.member_key import MemberKey
from common.service import lifecycle as life
from common.service.lifecycle import App, Lifecycle, ServiceInfo
from common.streams.backoff import Backoff
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig, url_problem
from worker_svc.engine_factory import build_node

# Between two looks at the file or the name.
DISCOVERY_INTERVAL_S: Final = 2.0
# A name server that restarts may deny a name: that it has no address counts after as many answers.
EMPTY_ANSWERS: Final = 5
READY_INTERVAL_S: Final = 0.2
# Of a name without addresses; others are failures of the name server.
_NO_ADDRESS: Final = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
RESTART_PAUSE_MIN_S: Final = 1.0
RESTART_PAUSE_MAX_S: Final = 30.0

log = structlog.get_logger()

# Returns the URL of each address of a URL's host; raises OSError.
FindAddresses: TypeAlias = Callable[[str], Awaitable[Sequence[str]]]


def build_worker(config: WorkerConfig, *, instance_id: int, member_key: MemberKey | None) -> App:
    """Returns the app of a worker process."""
    if config.has_several_servers:
        return ServersApp(config)
    if config.is_further_node:
        return build_node(config)
    return WorkerApp(config, instance_id=instance_id, member_key=member_key)


class _Member:
    """A `WorkerApp` that remembers its life cycle, so that it can be drained from outside."""

    def __init__(self, app: WorkerApp) -> None:
        self._app = app
        self.lifecycle: Lifecycle | None = None
        self.info: ServiceInfo | None = None
        self.register = app.register
        self.deregister = app.deregister
        self.left = app.left
        self.drain = app.drain
        self.close = app.close

    @property
    def is_routable(self) -> bool:
        return self._app.routable.is_routable

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        self.lifecycle = lifecycle
        self.info = await self._app.start(lifecycle)
        return self.info


@dataclass(eq=False)
class _Server:
    """One server. is_desired: whether it is still configured. info: of its worker, once ready."""

    url: str
    is_desired: bool = True
    member: _Member | None = None
    info: ServiceInfo | None = None
    task: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self, reason: str) -> None:
        """Drains its worker, which is not started again."""
        self.is_desired = False
        self.changed.set()
        if self.member is not None and self.member.lifecycle is not None:
            self.member.lifecycle.drain(reason)


async def find_addresses(url: str) -> Sequence[str]:
    """Returns the URL with each address of its host name in place of the name; none if the name has
    no address, as one of Kubernetes without pods. Raises OSError if that is unknown."""
    parts = urlsplit(url)
    port = parts.port or 80
    loop = asyncio.get_running_loop()
    try:
        rows = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS:
            return []
        raise
    hosts = sorted({str(row[4][0]) for row in rows})
    return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]


class ServersApp:
    """The workers of all configured servers. look_up: of `server_dns`."""

    def __init__(self, config: WorkerConfig, look_up: FindAddresses = find_addresses) -> None:
        self._config = config
        self._look_up = look_up
        self._empty_answers = 0
        self._are_known = False
        self._calls = RunningCalls()
        self._security = rpc.security_from_config(config)
        self._server = rpc.server(security=self._security, calls=self._calls)
        self._servers: dict[str, _Server] = {}
        self._ready: asyncio.Event = asyncio.Event()
        self._lifecycle: Lifecycle | None = None
        self._last_problem = ""

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Returns when the worker of one server is registered; at once without servers, and for a
        name, whose servers come and go.

        Raises ConfigError for a file that cannot be read, Unavailable if no server responds.
        """
        self._lifecycle = lifecycle
        lifecycle.health.await_routable()
        lifecycle.spawn(self._follow_routable(lifecycle), name="health of the process")
        addresses = await self._serve_health(lifecycle)
        try:
            self._apply(await self._find_urls())
        except (OSError, ValueError) as error:
            if not self._config.server_dns:
                raise ConfigError([f"{self._source}: {error}"]) from error
            self._report(error)
        lifecycle.spawn(self._discover(), name="server discovery")
        if not self._servers:
            log.warning("no_servers", source=self._source)
        if not self._servers or self._config.server_dns:
            return ServiceInfo("0", addresses)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.server_start_s + DISCOVERY_INTERVAL_S):
                await self._ready.wait()
        infos = [one.info for one in self._servers.values() if one.info is not None]
        if not infos:
            urls = ", ".join(self._servers)
            limit_s = self._config.server_start_s
            raise Unavailable(f"none of these servers serves within {limit_s:g} s: {urls}")
        return ServiceInfo(infos[0].instance_id, {**infos[0].addresses, **addresses})

    async def register(self) -> None:
        """Does nothing: each worker registers itself."""

    async def deregister(self) -> None:
        """Requests the drain of all workers, which deregisters them."""
        for server in self._servers.values():
            server.stop("the process stops")

    async def left(self, timeout_s: float) -> None:
        """Returns at once: each worker waits for its peers itself."""

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Waits for the end of all workers. Returns the URLs of those that still run."""
        tasks = {one.task: url for url, one in self._servers.items() if one.task is not None}
        pending: set[asyncio.Task[None]] = set()
        if tasks:
            limit_s = grace_s + life.DRAIN_MARGIN_S - 1.0
            _, pending = await asyncio.wait(tasks, timeout=limit_s)
        await rpc.stop(self._server, 0.0, self._calls)
        return [tasks[task] for task in pending]

    async def close(self) -> None:
        await self._server.stop(None)

    @property
    def _source(self) -> str:
        if self._config.server_file is not None:
            return f"server_file {self._config.server_file}"
        return f"server_dns {self._config.server_dns}" if self._config.server_dns else "server_urls"

    async def _discover(self) -> None:
        while True:
            await asyncio.sleep(DISCOVERY_INTERVAL_S)
            try:
                self._apply(await self._find_urls())
                self._last_problem = ""
            except (OSError, ValueError) as error:
                self._report(error)

    def _report(self, error: Exception) -> None:
        """Logs a lookup that failed, once: the servers found before stay."""
        if str(error) != self._last_problem:
            self._last_problem = str(error)
            log.warning("server_discovery_failed", source=self._source, error=str(error))

    async def _find_urls(self) -> Sequence[str]:
        """Returns the URLs of all servers; those found before if a name has had no address for less
        than EMPTY_ANSWERS lookups. Raises OSError, and ValueError for an invalid line."""
        if self._config.server_file is not None:
            return await asyncio.to_thread(read_urls, self._config.server_file)
        if self._config.server_dns:
            urls = await self._look_up(self._config.server_dns)
            self._empty_answers = 0 if urls else self._empty_answers + 1
            return urls if urls or self._empty_answers >= EMPTY_ANSWERS else list(self._servers)
        return self._config.server_urls

    async def _serve_health(self, lifecycle: Lifecycle) -> dict[str, str]:
        """Serves health on the port of the process, if it has one; returns its address."""
        config = self._config
        if not config.port:
            return {}
        port = rpc.bind(self._server, config.host, config.port, security=self._security)
        rpc.add_health(self._server, lifecycle.health.servicer)
        await self._server.start()
        return {"grpc": rpc.join_address(config.advertise_host or config.host, port)}

    async def _follow_routable(self, lifecycle: Lifecycle) -> None:
        """Reports to those that ask for the health of the process whether it does its work."""
        was_routable = False
        while True:
            if (is_routable := self._is_routable) != was_routable:
                was_routable = is_routable
                await lifecycle.health.set_routable(is_routable)
            await asyncio.sleep(READY_INTERVAL_S)

    @property
    def _is_routable(self) -> bool:
        members = [one.member for one in self._servers.values() if one.info and one.member]
        has_work = bool(members or not self._servers)
        return self._are_known and has_work and all(one.is_routable for one in members)

    def _apply(self, urls: Sequence[str]) -> None:
        """Starts the workers of new servers, and drains those of others."""
        assert self._lifecycle is not None
        if self._lifecycle.is_draining:
            return
        self._are_known = True
        for url in self._servers.keys() - set(urls):
            log.info("server_removed", url=url)
            self._servers.pop(url).stop("the server was removed")
        for url in urls:
            if url not in self._servers:
                server = self._servers[url] = _Server(url)
                name = f"server {url}"
                server.task = self._lifecycle.spawn(self._serve(server), name=name, essential=False)

    async def _serve(self, server: _Server) -> None:
        """Runs the worker of one server, again and again until it is not desired."""
        backoff = Backoff(RESTART_PAUSE_MIN_S, RESTART_PAUSE_MAX_S, None)
        while server.is_desired:
            try:
                server.member = _Member(WorkerApp(self._config_of(server.url)))
            except (ConfigError, MeshError) as error:
                log.error("server_rejected", url=server.url, error=str(error))
                return
            member = server.member
            status = await life.run(
                member,
                notice_s=self._config.notice_s,
                drain_s=self._config.drain_s,
                name="worker",
                signals=False,
                on_ready=partial(self._on_ready, server, member, backoff),
            )
            server.info = None
            if server.is_desired:
                pause_s = backoff.next_s()
                log.warning("worker_restarts", url=server.url, status=status, pause_s=pause_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await server.changed.wait()

    def _on_ready(self, server: _Server, member: _Member, backoff: Backoff) -> None:
        server.info = member.info
        backoff.reset()
        self._ready.set()

    def _config_of(self, url: str) -> WorkerConfig:
        parts = urlsplit(url)
        name = self._config.stable_name
        return self._config.model_copy(
            update={
                "server_urls": (url,),
                "server_file": None,
                "server_dns": None,
                "port": 0,
                "stable_name": f"{name}-{parts.hostname}-{parts.port}" if name else "",
            }
        )


def read_urls(path: Path) -> Sequence[str]:
    """Returns the URLs of a file, one a line; blank lines and # comments are skipped.

    Raises OSError, and ValueError with the number of an invalid line.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        url = line.partition("#")[0].strip()
        if url and (problem := url_problem(url)):
            raise ValueError(f"line {number}: {problem}")
        if url:
            found.append(url.rstrip("/"))
    return list(dict.fromkeys(found))
