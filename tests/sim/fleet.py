"""The processes of a simulated mesh: real services, joined by `net` instead of gRPC.

Each class here stands for one room's `app.py`, and wires the room's real parts as that does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from common.attach import LegSink, Order, ToFrontend, ToWorker
from common.attach_proto import (
    to_frontend_from_proto,
    to_frontend_to_proto,
    to_worker_from_proto,
    to_worker_to_proto,
)
from common.errors import MeshError
from common.instances import Instance, Snapshot, new_instance_id
from common.registry import Lease, MemoryRegistry, MemoryStore, Watch
from frontend_svc.core.request import Placed
from frontend_svc.engine_client import EngineClient, Submission, Transport
from frontend_svc.gateway import Gateway, place_alone
from frontend_svc.router_client import Answer, Key, Query, RouterClient, Session
from kvmesh.engine.v1 import engine_pb2
from kvmesh.router.v1 import router_pb2
from router_svc.core.route import Router
from router_svc.core.select import SELECTORS
from router_svc.fleet_watch import FleetWatch
from router_svc.metrics import Metrics
from router_svc.service import RouterService
from tests.sim.net import End, Net, Process
from worker_svc.attach_server import AttachServer
from worker_svc.runner import Runner
from worker_svc.sim_engine import SimConfig, SimEngine, SimModel

NAMESPACE = "sim"
MODEL = "kvmesh-sim"
# As `ServiceConfig` has them, shortened: a simulated drain need not wait for people.
NOTICE_S = 1.0
DRAIN_S = 5.0
_ROUTER_TICK_S = 0.5


class Discovery(MemoryRegistry):
    """The registry as one process sees it: late, and not at all while it is out of reach.

    seen: workers it was shown, and since when.
    """

    def __init__(self, store: MemoryStore, lag_s: Callable[[], float]) -> None:
        super().__init__(store)
        self.seen: dict[int, float] = {}
        self.found_at = 0.0
        self._lag_s = lag_s
        self._outages = 0
        self._in_reach = asyncio.Event()
        self._in_reach.set()

    @property
    def is_in_reach(self) -> bool:
        """Whether it can be reached, since `found_at`."""
        return not self._outages

    def lose(self) -> None:
        """The registry is out of reach, until `find` was called as often."""
        self._outages += 1
        self._in_reach.clear()

    def find(self) -> None:
        """One outage has ended."""
        self._outages -= 1
        if not self._outages:
            self.found_at = asyncio.get_running_loop().time()
            self._in_reach.set()

    async def reached(self) -> None:
        """Returns once it can be reached."""
        await self._in_reach.wait()

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        """See Registry."""
        async with super().watch(namespace) as watch:
            late = _LateWatch(self, watch)
            if self.is_in_reach:
                late.take(watch.current)
            yield late

    def note(self, snapshot: Snapshot) -> None:
        """Somebody was given this snapshot."""
        now = asyncio.get_running_loop().time()
        workers = [i.id for i in snapshot.of("worker")]
        self.seen = {id: self.seen.get(id, now) for id in workers}


class _LateWatch:
    def __init__(self, discovery: Discovery, watch: Watch) -> None:
        self._discovery = discovery
        self._watch = watch
        self._is_new = not discovery.is_in_reach
        self.current = Snapshot()

    def take(self, snapshot: Snapshot) -> None:
        self.current = snapshot
        self._discovery.note(snapshot)

    async def next(self) -> Snapshot:
        # What a process that was cut off from the start has missed is its first news.
        if not self._is_new:
            await self._watch.next()
        self._is_new = False
        await asyncio.sleep(self._discovery._lag_s())
        await self._discovery.reached()
        self.take(await self._discovery.snapshot(NAMESPACE))
        return self.current


Submitted = Callable[["SimFrontend", int, Order], None]
PlacedAfter = Callable[[Key, float], None]


class WatchedEngines(EngineClient):
    """An EngineClient that tells the checkers of every order."""

    frontend: SimFrontend
    submitted: Submitted

    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        """See EngineClient."""
        self.submitted(self.frontend, worker_id, order)
        return super().submit(worker_id, address, order, sink)


class WatchedRouterClient(RouterClient):
    """A RouterClient that tells the checkers how long each placement took, in seconds."""

    placed_after: PlacedAfter

    def place(self, key: Key, query: Query, answer: Answer) -> None:
        """See RouterClient."""
        asked_at = self._loop.time()

        def answered(placed: Placed | MeshError) -> None:
            self.placed_after(key, self._loop.time() - asked_at)
            answer(placed)

        super().place(key, query, answered)


class WatchedRunner(Runner):
    """A Runner that tells the checkers of every order it takes in."""

    admitted: Callable[[], None]

    def admit(self, order: Order) -> int:
        """See Runner."""
        key = super().admit(order)
        self.admitted()
        return key


@dataclass(frozen=True, slots=True)
class Parts:
    """What a mesh is made of. Tests of the checkers put a faulty one in."""

    gateway: type[Gateway] = Gateway
    placer: type[WatchedRouterClient] = WatchedRouterClient
    engines: type[WatchedEngines] = WatchedEngines
    runner: type[WatchedRunner] = WatchedRunner
    engine: type[SimEngine] = SimEngine
    router: type[Router] = Router


class SimWorker:
    """A worker process; see `worker_svc/app.py`."""

    def __init__(
        self,
        net: Net,
        discovery: Discovery,
        stable_name: str,
        address: str,
        config: SimConfig,
        model: SimModel,
        rng: Random,
        admitted: Callable[[SimWorker], None] = lambda _: None,
        parts: Parts | None = None,
        requests_max: int = 4096,
    ) -> None:
        parts = parts or Parts()
        self.process = Process(stable_name)
        self.id = new_instance_id(rng)
        self.stable_name = stable_name
        self.address = address
        self.engine = parts.engine(config, model=model)
        self.runner = parts.runner(self.engine, max_requests=requests_max)
        self.runner.admitted = lambda: admitted(self)
        self.attach = AttachServer(self.id, self.runner)
        self.discovery = discovery
        self.lease: Lease | None = None
        self.registered_at: float | None = None
        self.left_at: float | None = None
        self._net = net

    @property
    def is_serving(self) -> bool:
        """Whether it is alive, registered, and means to stay so."""
        return self.process.is_alive and self.registered_at is not None and self.left_at is None

    async def start(self) -> None:
        """Starts the engine, serves, and becomes known."""
        config = await self.engine.start(self.id)
        self._net.listen(self.address, self.process, self._serve)
        await self.discovery.reached()
        self.lease = await self.discovery.register(
            Instance(
                id=self.id,
                namespace=NAMESPACE,
                service="worker",
                stable_name=self.stable_name,
                address=self.address,
                model=MODEL,
                block_size=config.kv_cache_block_size,
                total_kv_blocks=config.total_kv_blocks,
                context_length=config.context_length,
            )
        )
        self.registered_at = asyncio.get_running_loop().time()

    async def _serve(self, end: End) -> None:
        async def read() -> ToWorker | None:
            message = await end.read()
            if message is None:
                return None
            return to_worker_from_proto(engine_pb2.AttachRequest.FromString(message))

        async def write(frame: ToFrontend) -> None:
            await end.write(to_frontend_to_proto(frame).SerializeToString())

        await self.attach.serve(read, write)

    async def drain(self) -> None:
        """Leaves as a worker does that was told to: see `common/lifecycle.py`."""
        self.left_at = asyncio.get_running_loop().time()
        await self.discovery.reached()
        if self.lease is not None:
            await self.lease.close()
        await asyncio.sleep(NOTICE_S)
        self.runner.is_draining = True
        try:
            await asyncio.wait_for(self.runner.idle(), DRAIN_S)
        except TimeoutError:
            await asyncio.sleep(0)  # the rest is cut by the end of the process
        self._net.close(self.address, self.process)


class SimTransport:
    """Attach over a simulated stream."""

    def __init__(self, end: End) -> None:
        self._end = end

    async def read(self) -> ToFrontend | None:
        """See Transport."""
        message = await self._end.read()
        if message is None:
            return None
        return to_frontend_from_proto(engine_pb2.AttachResponse.FromString(message))

    async def write(self, frame: ToWorker) -> None:
        """See Transport."""
        await self._end.write(to_worker_to_proto(frame).SerializeToString())

    async def close(self) -> None:
        """See Transport."""
        self._end.finish(None)


class _Dialer:
    def __init__(self, net: Net, process: Process) -> None:
        self._net = net
        self._process = process

    async def dial(self, address: str) -> Transport:
        return SimTransport(self._net.dial(self._process, address))


class _SimSession:
    def __init__(self, end: End) -> None:
        self._end = end

    async def read(self) -> router_pb2.SessionResponse | None:
        message = await self._end.read()
        return None if message is None else router_pb2.SessionResponse.FromString(message)

    async def write(self, frame: router_pb2.SessionRequest) -> None:
        await self._end.write(frame.SerializeToString())


class SimFrontend:
    """A frontend process without its HTTP server; see `frontend_svc/app.py`."""

    def __init__(
        self,
        net: Net,
        discovery: Discovery,
        stable_name: str,
        address: str,
        rng: Random,
        submitted: Submitted,
        placed_after: PlacedAfter,
        parts: Parts | None = None,
    ) -> None:
        parts = parts or Parts()
        self.process = Process(stable_name)
        self.id = new_instance_id(rng)
        self.stable_name = stable_name
        self.discovery = discovery
        self.snapshot = Snapshot()
        self.registered_at: float | None = None
        self.lease: Lease | None = None
        self.engines = parts.engines(self.id, _Dialer(net, self.process), rng)
        self.engines.frontend, self.engines.submitted = self, submitted
        self._rng = rng
        self._net = net
        self._address = address
        self._ended = asyncio.Event()
        self.router = parts.placer(
            self.id,
            lambda: self.snapshot.of("router"),
            self._place_alone,
            open_session=self._open_session,
            rng=rng,
        )
        self.router.placed_after = placed_after
        self.gateway = parts.gateway(self.router, self.engines, lambda: self.snapshot, rng)

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests."""
        return self.process.is_alive and self.registered_at is not None

    async def start(self) -> None:
        """Follows the mesh and becomes known."""
        self.process.spawn(self._follow())
        self.process.spawn(self.router.run())
        self.process.spawn(self._keep_engines())
        await self.discovery.reached()
        self.lease = await self.discovery.register(
            Instance(
                id=self.id,
                namespace=NAMESPACE,
                service="frontend",
                stable_name=self.stable_name,
                address=self._address,
            )
        )
        self.registered_at = asyncio.get_running_loop().time()

    def die(self) -> None:
        """SIGKILL. Its requests are nobody's any more: not even their timers may go on."""
        for ticket in tuple(self.gateway._open):
            ticket.machine.is_finished = True
            if ticket._timer is not None:
                ticket._timer.cancel()
        self.process.kill()

    def end(self) -> None:
        """Closes the streams to workers, as at the end of a process."""
        self._ended.set()

    async def _keep_engines(self) -> None:
        async with self.engines:
            await self._ended.wait()

    async def _follow(self) -> None:
        async with self.discovery.watch(NAMESPACE) as watch:
            self.snapshot = watch.current
            while True:
                self.snapshot = await watch.next()
                self.engines.keep(self.snapshot.instances)

    @asynccontextmanager
    async def _open_session(self, router: Instance) -> AsyncIterator[Session]:
        end = self._net.dial(self.process, router.address)
        try:
            yield _SimSession(end)
        finally:
            end.finish(None)

    def _place_alone(self, query: Query) -> Placed | MeshError:
        return place_alone(self.snapshot, self.engines.open_slots, query, self._rng)


class _Context:
    """As much of a servicer's context as a Session needs."""

    def __init__(self, end: End) -> None:
        self._end = end

    async def write(self, frame: router_pb2.SessionResponse) -> None:
        await self._end.write(frame.SerializeToString())


class SimRouter:
    """A router process; see `router_svc/app.py`."""

    def __init__(
        self,
        net: Net,
        discovery: Discovery,
        address: str,
        selector: str,
        rng: Random,
        parts: Parts | None = None,
    ) -> None:
        parts = parts or Parts()
        self.process = Process(f"router@{address}")
        self.id = new_instance_id(rng)
        self.discovery = discovery
        self.address = address
        self.lease: Lease | None = None
        self.router = parts.router(SELECTORS[selector]())
        self._net = net
        self._clock = asyncio.get_running_loop().time
        self._service = RouterService(
            self.router, self.id, Metrics(self.router), rng=rng, clock=self._clock
        )

    async def start(self) -> None:
        """Follows the fleet, serves once it was seen, and becomes known."""
        watch = FleetWatch(self.discovery, NAMESPACE, self.router, self._clock)
        self.process.spawn(watch.run())
        self.process.spawn(self._tick())
        await watch.first_seen.wait()
        self._net.listen(self.address, self.process, self._serve)
        await self.discovery.reached()
        self.lease = await self.discovery.register(
            Instance(
                id=self.id,
                namespace=NAMESPACE,
                service="router",
                stable_name=self.process.name,
                address=self.address,
            )
        )

    async def _serve(self, end: End) -> None:
        async def frames() -> AsyncIterator[router_pb2.SessionRequest]:
            while (message := await end.read()) is not None:
                yield router_pb2.SessionRequest.FromString(message)

        # Any: a context of grpc.aio has no public constructor.
        await self._service.Session(frames(), cast(Any, _Context(end)))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_ROUTER_TICK_S)
            self.router.book.expire(self._clock())


Peer = SimWorker | SimFrontend | SimRouter
