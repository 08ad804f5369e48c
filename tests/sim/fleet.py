"""The processes of a simulated mesh: real services, joined by `net` instead of gRPC.

Each class stands for the `app.py` of one service and wires the real parts of the service in the
same way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, cast

from common.errors import InternalError, MeshError
from common.kv.events import Partition, Source
from common.kv.hashing import HASH_SCHEME_ID, PrefixHasher
from common.kv.index_feed import IndexFeed
from common.kv.load import Load
from common.registry.instances import Instance, KvIndex, Snapshot, SnapshotDiff, new_instance_id
from common.registry.registry import Lease, MemoryRegistry, MemoryStore, Watch, follow
from common.request.placement import Decision, Placement, Query
from common.request.preprocessed import TokenLogprob
from common.request.token_stream import LegRequest, LegSink, RequestFrame, ResponseFrame, Terminal
from common.rpc import channel as rpc
from common.streams.stall_clock import StallClock
from common.wire.token_stream import (
    request_frame_from_proto,
    request_frame_to_proto,
    response_frame_from_proto,
    response_frame_to_proto,
)
from frontend_svc.members import Members
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.local_placement import has_workers, place_locally
from frontend_svc.request.placement_request import PlacementCallback, PlacementKey, PlacementRequest
from frontend_svc.routers.client import RouterClient
from frontend_svc.routers.session import Session
from frontend_svc.workers.client import EngineClient, Submission
from frontend_svc.workers.transport import Transport
from indexer_svc.core.budget import Budget
from indexer_svc.ingest import TICK_S as INDEXER_TICK_S
from indexer_svc.ingest import Ingest
from indexer_svc.metrics import Metrics as IndexerMetrics
from indexer_svc.service import IndexerService
from indexer_svc.worker_presence import WorkerPresence
from kvmesh.engine.v1 import engine_pb2
from kvmesh.indexer.v1 import indexer_pb2
from kvmesh.router.v1 import router_pb2
from router_svc.app import EXPIRE_BLOCKS_PER_STEP, STARTUP_TIMEOUT_S
from router_svc.app import TICK_S as ROUTER_TICK_S
from router_svc.core.admission import QueuedRequest
from router_svc.core.booking import BookingKey
from router_svc.core.candidate import Matches
from router_svc.core.decision import DecisionRecord
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.overlap import EVENT_INDEX_SETTINGS, IndexSettings
from router_svc.core.placement import PlacementAttempt, ServingPlan
from router_svc.core.policy import DEFAULT_POLICY, Policy
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from router_svc.fleet_watch import FleetWatch
from router_svc.index_replica import IndexReplica, Subscription
from router_svc.metrics import Metrics
from router_svc.replication_sync import PeerSync
from router_svc.service import RouterService
from tests.sim.ledger import DecisionChecker
from tests.sim.net import Process, SimNetwork, StreamEnd
from tests.sim.pulled_transport import PulledTransport
from tests.sim.wire import (
    PUBLISH,
    SUBSCRIBE,
    SYNC,
    Garble,
    HandoffNetwork,
    ReadDelay,
    StreamContext,
    make_publish_opener,
    make_subscribe_opener,
    make_sync_opener,
)
from worker_svc.engines.contract import EngineConfig, LLMEngineOutput
from worker_svc.engines.sim.config import SimConfig, SimModel
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.kv_events.event_log import PublishedSource
from worker_svc.kv_events.normalizer import Normalizer
from worker_svc.kv_events.publisher import Publisher
from worker_svc.serving.attach_server import AttachServer
from worker_svc.serving.runner import Runner, _ActiveRequest
from worker_svc.serving.stalled_requests import StalledRequests
from worker_svc.serving.step_limit import StepLimits, StepLimitSettings

NAMESPACE = "sim"
MODEL = "kvmesh-sim"
# Another model, with one worker that leaves for good.
TEMPORARY_MODEL = "kvmesh-visitor"
# Like the defaults of `ServiceConfig`, but shorter: no person waits for a simulated drain.
NOTICE_S = 1.0
DRAIN_S = 5.0
# Between the end of a service's streams and that of its process: they close in order.
CLOSING_S = 0.2
_POLL_S = 0.1
# Longer than in a real mesh, since half of all events would be reports; short enough to take
# effect.
_LOAD_SAMPLE_S = 0.4


class DelayedRegistry(MemoryRegistry):
    """The registry from the view of one process: late, and unavailable during an outage.

    seen: instances of the last snapshot, and since when they are present. returns_stale: it queries
    a follower that lags behind, so that an older snapshot follows a newer one. is_watched: whether
    this process watches it.
    """

    def __init__(self, store: MemoryStore, lag_s: Callable[[], float]) -> None:
        super().__init__(store)
        self.seen: dict[int, float] = {}
        self.reachable_since = 0.0
        self.returns_stale = False
        self.is_watched = False
        self.stale_lists_shown = 0
        self._last_snapshot = Snapshot()
        self._previous_snapshot = Snapshot()
        self._lag_s = lag_s
        self._outages = 0
        self._reachable = asyncio.Event()
        self._reachable.set()

    @property
    def is_reachable(self) -> bool:
        """Whether it is reachable, since `reachable_since`."""
        return not self._outages

    def lose(self) -> None:
        """An outage begins. It lasts until `find` was called as often as `lose`."""
        self._outages += 1
        self._reachable.clear()

    def find(self) -> None:
        """One outage has ended."""
        self._outages -= 1
        if not self._outages:
            self.reachable_since = asyncio.get_running_loop().time()
            self._reachable.set()

    async def wait_reachable(self) -> None:
        """Returns when it is reachable."""
        await self._reachable.wait()

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        """See Registry."""
        self.is_watched = True
        async with super().watch(namespace) as watch:
            delayed_watch = _DelayedWatch(self, watch)
            if self.is_reachable:
                delayed_watch.take(watch.current)
            yield delayed_watch

    def note(self, snapshot: Snapshot) -> None:
        """Record a snapshot that this process received."""
        now = asyncio.get_running_loop().time()
        self.seen = {id: self.seen.get(id, now) for id in snapshot.instances}
        if snapshot is not self._last_snapshot:
            self._previous_snapshot, self._last_snapshot = self._last_snapshot, snapshot

    @property
    def is_current(self) -> bool:
        """Whether the process has the newest snapshot, if it watches at all."""
        return not self.is_watched or self._last_snapshot is self._store.members(NAMESPACE).snapshot

    def stale_snapshot(self) -> Snapshot | None:
        """The snapshot of a follower that lags behind."""
        if not (self.returns_stale and self._previous_snapshot.revision):
            return None
        self.stale_lists_shown += 1
        return self._previous_snapshot


class _DelayedWatch(Watch):
    def __init__(self, discovery: DelayedRegistry, watch: Watch) -> None:
        self._discovery = discovery
        self._watch = watch
        self._has_pending_update = not discovery.is_reachable
        self.current = Snapshot()

    def take(self, snapshot: Snapshot) -> None:
        self.current = snapshot
        self._discovery.note(snapshot)

    async def next(self) -> Snapshot:
        # If the process was cut off from the start, its first update is what it missed.
        has_pending_update, self._has_pending_update = self._has_pending_update, False
        if not has_pending_update:
            await self._watch.next()
        await asyncio.sleep(self._discovery._lag_s())
        await self._discovery.wait_reachable()
        if not has_pending_update and (old := self._discovery.stale_snapshot()) is not None:
            self._has_pending_update = True
            self.take(old)
        else:
            self.take(await self._discovery.snapshot(NAMESPACE))
        return self.current


class FrontendObserver(Protocol):
    """Receives the actions of frontends."""

    def submitted(self, frontend: SimFrontend, worker_id: int, leg_request: LegRequest) -> None:
        """A frontend sends a request to a worker."""

    def placed(self, key: PlacementKey, took_s: float, placed: Decision | MeshError) -> None:
        """A frontend received a placement, or an error."""

    def delivered(self, leg_request: LegRequest) -> None:
        """A leg of a pair delivered its first tokens."""

    def leg_failed(self, frontend: SimFrontend, leg_request: LegRequest) -> None:
        """A leg of a pair was refused, failed or lost."""


class _ObservedLegSink:
    """The sink of a leg of a pair."""

    def __init__(self, sink: LegSink, frontend: SimFrontend, leg_request: LegRequest) -> None:
        self._sink = sink
        self._frontend = frontend
        self._leg_request = leg_request

    def accepted(self) -> None:
        self._sink.accepted()

    def rejected(self, error: MeshError) -> None:
        self._failed()
        self._sink.rejected(error)

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self._frontend.observer.delivered(self._leg_request)
        self._sink.tokens(token_ids, logprobs)

    def chunk(self, json: bytes) -> None:
        self._sink.chunk(json)

    def terminal(self, terminal: Terminal) -> None:
        if terminal.error is not None:
            self._failed()
        self._sink.terminal(terminal)

    def lost(self, error: MeshError) -> None:
        self._failed()
        self._sink.lost(error)

    def _failed(self) -> None:
        self._frontend.observer.leg_failed(self._frontend, self._leg_request)


class ObservedEngineClient(EngineClient):
    """An EngineClient that reports every submitted request to the checkers."""

    frontend: SimFrontend

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        """See EngineClient."""
        self.frontend.observer.submitted(self.frontend, worker_id, leg_request)
        if leg_request.phase:
            sink = _ObservedLegSink(sink, self.frontend, leg_request)
        return super().submit(worker_id, address, leg_request, sink)


class ObservedRouterClient(RouterClient):
    """A RouterClient that reports the duration of each placement to the checkers, in seconds.

    Time in which its own process was stalled is excluded.
    """

    observer: FrontendObserver

    def place(
        self, key: PlacementKey, request: PlacementRequest, callback: PlacementCallback
    ) -> None:
        """See RouterClient."""
        requested_at = self._loop.time() - self._stalled_s()

        def on_placed(placed: Decision | MeshError) -> None:
            self.observer.placed(key, self._loop.time() - self._stalled_s() - requested_at, placed)
            callback(placed)

        super().place(key, request, on_placed)


class ObservedRunner(Runner):
    """A Runner that reports every admitted request to the checkers.

    fails_after: tokens after which the engine fails a request; None: it does not fail.
    fails_probes: whether it then fails probes too.
    """

    admitted: Callable[[], None]
    fails_after: int | None = None
    fails_probes = False

    def admit(self, leg_request: LegRequest) -> int:
        """See Runner."""
        key = super().admit(leg_request)
        self.admitted()
        return key

    def _stream(self, active_request: _ActiveRequest) -> AsyncGenerator[LLMEngineOutput, None]:
        stream, request = super()._stream(active_request), active_request.leg_request.request
        is_spared = request is not None and request.is_probe and not self.fails_probes
        if self.fails_after is None or is_spared:
            return stream
        return _failing(stream, self.fails_after)


async def _failing(
    stream: AsyncGenerator[LLMEngineOutput, None], tokens: int
) -> AsyncGenerator[LLMEngineOutput, None]:
    """Yields at least so many tokens, then fails. A stream that ends before does not fail."""
    async with aclosing(stream):
        if tokens:
            async for output in stream:
                yield output
                tokens -= len(output.token_ids)
                if output.finish_reason is not None:
                    return
                if tokens <= 0:
                    break
        raise InternalError("the engine failed")


# The time of day at which every simulation begins, seconds since 1970.
EPOCH_S = 1.7e9


class ObservedRouter(Router):
    """A Router that reports every decision to its decision checker. None: no checks."""

    decision_checker: DecisionChecker | None = None

    def update(
        self, snapshot: Snapshot, now: float, changes: SnapshotDiff | None = None
    ) -> SnapshotDiff:
        """See Router."""
        changes = super().update(snapshot, now, changes)
        if self.decision_checker is not None:
            self.decision_checker.updated(self, changes, now)
        return changes

    def admit(
        self,
        query: Query,
        key: BookingKey,
        now: float,
        rng: Random,
        session: int | None = None,
        matches: Matches | None = None,
    ) -> DecisionRecord | QueuedRequest:
        """See Router."""
        try:
            outcome = super().admit(query, key, now, rng, session, matches)
        except MeshError as error:
            if self.decision_checker is not None:
                self.decision_checker.refused(self, query, error, now)
            raise
        if self.decision_checker is not None and isinstance(outcome, QueuedRequest):
            self.decision_checker.queued(query, key, now)
        return outcome

    def _place(
        self,
        attempt: PlacementAttempt,
        plan: ServingPlan,
        key: BookingKey | None,
        session: int | None,
        queued_s: float | None = None,
    ) -> DecisionRecord:
        record = super()._place(attempt, plan, key, session, queued_s)
        if self.decision_checker is not None and key is not None:
            self.decision_checker.placed(self, attempt.query, key, record, attempt.now)
        return record


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes of a mesh. Tests of the checkers replace one by a faulty one."""

    gateway: type[Gateway] = Gateway
    router_port: type[ObservedRouterClient] = ObservedRouterClient
    engines: type[ObservedEngineClient] = ObservedEngineClient
    runner: type[ObservedRunner] = ObservedRunner
    engine: type[SimEngine] = SimEngine
    router: type[ObservedRouter] = ObservedRouter
    publisher: type[Publisher] = Publisher
    feed: type[IndexFeed] = IndexFeed
    peers: type[PeerSync] = PeerSync


@dataclass(frozen=True, slots=True)
class KvPlane:
    """What the KV plane of a mesh shares, if it has one. refused: unavailable handoff addresses;
    garble: batches of events that are lost, duplicated or reordered.
    """

    refused: set[str]
    garble: Garble


class SimWorker:
    """A worker process; see `worker_svc/app.py`.

    kv: None publishes nothing. kv_index_mode: how routers track its cache; "events" is "none"
    without kv.
    """

    def __init__(
        self,
        net: SimNetwork,
        discovery: DelayedRegistry,
        stable_name: str,
        address: str,
        config: SimConfig,
        model: SimModel,
        rng: Random,
        admitted: Callable[[SimWorker], None] = lambda _: None,
        parts: Parts | None = None,
        requests_max: int = 4096,
        kv: KvPlane | None = None,
        *,
        kv_index_mode: KvIndex = "events",
    ) -> None:
        parts = parts or Parts()
        self.process = Process(stable_name)
        self.kv_index_mode: KvIndex = (
            "none" if kv_index_mode == "events" and kv is None else kv_index_mode
        )
        self.id = new_instance_id(rng)
        self.stable_name = stable_name
        self.address = address
        self.role = config.handoff.role
        self.local_prefill = True
        self.publisher: Publisher | None = None
        # Whether entries of held blocks were ever dropped.
        self.has_dropped_entries = False
        self._kv = kv
        self._parts = parts
        network = None
        if kv is not None:
            network = HandoffNetwork(net, self.process, kv.refused, Random(rng.random()))
        self.engine = parts.engine(config, model=model, network=network)
        self.runner = parts.runner(self.engine, max_requests=requests_max, role=self.role)
        self.runner.admitted = lambda: admitted(self)
        self.attach = AttachServer(self.id, self.runner)
        self.discovery = discovery
        self.lease: Lease | None = None
        self.registered_at: float | None = None
        self.left_at: float | None = None
        # Since when the registry does not show it, for any process that can reach the registry.
        self.gone_at: float | None = None
        self._net = net

    @property
    def is_serving(self) -> bool:
        """Whether it is alive, registered, and not leaving."""
        return self.process.is_alive and self.registered_at is not None and self.left_at is None

    @property
    def model(self) -> str:
        """The model it serves."""
        return self.engine.config.model

    @property
    def loras(self) -> frozenset[str]:
        """Its adapters."""
        return self.engine.config.loras

    async def start(self) -> None:
        """Starts the engine, serves, and registers."""
        config = await self.engine.start(self.id)
        self.local_prefill = config.local_prefill
        tokens_max = config.max_num_batched_tokens or math.inf
        self.runner.step_limits = StepLimits(StepLimitSettings(tokens_max=tokens_max))
        self.runner.engine_started(config)
        if self._kv is not None:
            self.publisher = self._build_publisher(config, self._kv)
            self.process.spawn(self.publisher.run())
        self.process.spawn(StalledRequests(self.runner, None).run())
        self._net.listen(self.address, self.process, self._serve)
        await self.discovery.wait_reachable()
        endpoint = config.disaggregated_endpoint or (None, None)
        self.lease = await self.discovery.register(
            Instance(
                id=self.id,
                namespace=NAMESPACE,
                service="worker",
                stable_name=self.stable_name,
                address=self.address,
                model=config.model,
                role=self.role,
                block_size=config.kv_cache_block_size,
                transfer_group=config.transfer_group,
                bootstrap_host=endpoint[0],
                bootstrap_port=endpoint[1],
                local_prefill=config.local_prefill,
                total_kv_blocks=config.total_kv_blocks,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                context_length=config.context_length,
                loras=config.loras,
                kv_index=self.kv_index_mode,
            )
        )
        self.registered_at = asyncio.get_running_loop().time()

    def _build_publisher(self, engine: EngineConfig, kv: KvPlane) -> Publisher:
        """Like `WorkerApp`."""
        block_size = self.engine.config.block_size
        publishes = self.kv_index_mode == "events"

        def hasher_factory(lora: str, salt: str, block_size: int) -> PrefixHasher:
            return PrefixHasher(
                mesh_key=b"", model=engine.model, block_size=block_size, lora_name=lora
            )

        publisher = self._parts.publisher(
            self.id,
            Partition(engine.model, block_size, HASH_SCHEME_ID if publishes else 0),
            {
                0: PublishedSource(
                    Source(self.id, 0), Normalizer(self.engine.kv_event_format, hasher_factory)
                )
            },
            self.engine.loads,
            self.discovery,
            NAMESPACE,
            rng=Random(self.id),
            open_call=make_publish_opener(self._net, self.process, kv.garble),
            load_sample_s=_LOAD_SAMPLE_S,
        )
        if publishes:
            self.engine.publish_to(publisher)
        return publisher

    async def _serve(self, end: StreamEnd) -> None:
        async def read() -> RequestFrame | None:
            message = await end.read()
            if message is None:
                return None
            return request_frame_from_proto(engine_pb2.AttachRequest.FromString(message))

        async def write(frame: ResponseFrame) -> None:
            await end.write(response_frame_to_proto(frame).SerializeToString())

        await self.attach.serve(read, write)

    async def drain(self) -> None:
        """Leaves like a worker that received SIGTERM: see `common/service/lifecycle.py`."""
        self.left_at = asyncio.get_running_loop().time()
        await self.discovery.wait_reachable()
        if self.lease is not None:
            await self.lease.close()
        self.gone_at = asyncio.get_running_loop().time()
        await asyncio.sleep(NOTICE_S)
        self.runner.is_draining = True
        with suppress(TimeoutError):  # the end of the process cuts the rest
            async with asyncio.timeout(DRAIN_S):
                await self.runner.wait_idle()
        await self.engine.drain()
        self._net.close(self.address, self.process)


class SimTransport(PulledTransport):
    """Attach over a simulated stream."""

    def __init__(self, end: StreamEnd) -> None:
        self._end = end

    async def read(self) -> ResponseFrame | None:
        """See Transport."""
        message = await self._end.read()
        if message is None:
            return None
        return response_frame_from_proto(engine_pb2.AttachResponse.FromString(message))

    async def write(self, frame: RequestFrame) -> None:
        """See Transport."""
        await self._end.write(request_frame_to_proto(frame).SerializeToString())

    async def close(self) -> None:
        """See Transport."""
        self._end.finish(None)


class _Dialer:
    def __init__(self, net: SimNetwork, process: Process) -> None:
        self._net = net
        self._process = process

    async def dial(self, address: str, worker_id: int) -> Transport:
        return SimTransport(self._net.dial(self._process, address))


class _SimSession:
    def __init__(self, end: StreamEnd) -> None:
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
        net: SimNetwork,
        discovery: DelayedRegistry,
        stable_name: str,
        address: str,
        rng: Random,
        observer: FrontendObserver,
        parts: Parts | None = None,
    ) -> None:
        parts = parts or Parts()
        self.process = Process(stable_name)
        self.id = new_instance_id(rng)
        self.stable_name = stable_name
        self.discovery = discovery
        self.members = Members()
        self.registered_at: float | None = None
        self.lease: Lease | None = None
        # The routers of its sessions, in order.
        self.routers_used: list[int] = []
        # Time in which it was stalled; see `stall`.
        self._stalled_s = 0.0
        self._stalls = 0
        self._stall_clock = StallClock(0.0)
        self.engines = parts.engines(
            self.id, _Dialer(net, self.process), rng, stalled_s=self.stalled_s
        )
        self.engines.frontend, self.observer = self, observer
        self._rng = rng
        self._net = net
        self.address = address
        self._ended = asyncio.Event()
        self.router = parts.router_port(
            self.id,
            self._place_locally,
            has_workers=lambda query: has_workers(self.members.snapshot, query),
            open_session=self._open_session,
            rng=rng,
            stalled_s=self.stalled_s,
        )
        self.router.observer = observer
        self.gateway = parts.gateway(
            self.router,
            self.engines,
            self.members,
            rng,
            stalled_s=self.stalled_s,
            silent_s=self.engines.silent_s,
            request_failed=self.engines.request_failed,
        )

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests."""
        return self.process.is_alive and self.registered_at is not None

    def has_seen_leave(self, worker_id: int) -> bool:
        """Whether it has seen a worker join and leave."""
        return self.members.has_left(worker_id)

    def stalled_s(self) -> float:
        """Like its stall clock, which need not tick here: only `stall` delays the process."""
        if not self._stalls:
            return self._stalled_s
        return self._stalled_s + self._stall_clock.stalled_s(asyncio.get_running_loop().time())

    def stall(self) -> None:
        """Its event loop is stalled until `resume` was called as often as `stall`."""
        if not self._stalls:
            self._stall_clock = StallClock(asyncio.get_running_loop().time())
        self._stalls += 1

    def resume(self) -> None:
        """One stall has ended."""
        stalled_s = self.stalled_s()
        self._stalls -= 1
        if not self._stalls:
            self._stalled_s = stalled_s

    async def start(self) -> None:
        """Watches the mesh and registers."""
        self.process.spawn(follow(self.discovery, NAMESPACE, self._on_snapshot, self._rng))
        self.process.spawn(self.router.run())
        self.process.spawn(self._run_engine_client())
        await self.discovery.wait_reachable()
        self.lease = await self.discovery.register(
            Instance(
                id=self.id,
                namespace=NAMESPACE,
                service="frontend",
                stable_name=self.stable_name,
                address=self.address,
            )
        )
        self.registered_at = asyncio.get_running_loop().time()

    def crash(self) -> None:
        """SIGKILL. Its requests end with it: their timers must not fire."""
        for handle in tuple(self.gateway._open):
            handle.machine.is_finished = True
            if handle._timer is not None:
                handle._timer.cancel()
        self.process.kill()

    async def drain(self) -> None:
        """Leaves like a frontend that received SIGTERM; requests left after DRAIN_S are cut."""
        self.registered_at = None
        await _deregister_and_wait(self)
        for _ in range(round(DRAIN_S / _POLL_S)):
            if not self.gateway.open_requests:
                break
            await asyncio.sleep(_POLL_S)
        self.end()

    def end(self) -> None:
        """Closes the streams to workers, like the end of a process."""
        self._ended.set()

    async def _run_engine_client(self) -> None:
        async with self.engines:
            await self._ended.wait()

    def _on_snapshot(self, snapshot: Snapshot, changes: SnapshotDiff) -> None:
        """Like `FrontendApp`."""
        self.members.on_snapshot(snapshot, changes)
        self.engines.on_snapshot(snapshot, changes)
        self.router.on_snapshot(snapshot, changes)

    @asynccontextmanager
    async def _open_session(self, router: Instance) -> AsyncIterator[Session]:
        end = self._net.dial(self.process, router.address)
        self.routers_used.append(router.id)
        try:
            yield _SimSession(end)
        finally:
            end.finish(None)

    def _place_locally(self, query: Query) -> Decision | MeshError:
        return place_locally(self.members.snapshot, self.engines.open_slots, query, self._rng)


class SimRouter:
    """A router process; see `router_svc/app.py`.

    kv: None follows no index. garble: of its messages to other routers. choice: how it tracks
    caches. decision_checker: checks its decisions.
    """

    def __init__(
        self,
        net: SimNetwork,
        discovery: DelayedRegistry,
        address: str,
        selector: str,
        rng: Random,
        parts: Parts | None = None,
        kv: KvPlane | None = None,
        garble: Garble | None = None,
        *,
        policy: Policy = DEFAULT_POLICY,
        choice: IndexSettings = EVENT_INDEX_SETTINGS,
        decision_checker: DecisionChecker | None = None,
    ) -> None:
        parts = parts or Parts()
        self.process = Process(f"router@{address}")
        self.id = new_instance_id(rng)
        self.discovery = discovery
        self.address = address
        self.lease: Lease | None = None
        self._net = net
        self._clock = asyncio.get_running_loop().time
        book = LoadTracker()
        self.choice = choice
        self.read_delay = ReadDelay()
        self.index: IndexReplica | None = None
        # The indexers it followed, in order.
        self.indexers_subscribed: list[int] = []
        if kv is not None:
            self._subscribe = make_subscribe_opener(net, self.process, kv.garble, self.read_delay)
            self.index = IndexReplica(
                self._report,
                subscribe=self._follow,
                feed=parts.feed(),
                loads_only=not choice.follows_events,
                rng=Random(self.id),
                clock=self._clock,
                stopwatch=_stopwatch(Random(self.id)),
            )
        self.router = parts.router(
            SELECTORS[selector](),
            index=self.index,
            index_settings=choice,
            load_tracker=book,
            policy=policy,
            epoch_s=EPOCH_S,
        )
        self.router.decision_checker = decision_checker
        self.peers = parts.peers(
            self.id,
            book,
            self.router.affinity,
            open_sync=make_sync_opener(net, self.process, garble or Garble(rng)),
            rng=Random(self.id),
            clock=self._clock,
        )
        self._service = RouterService(
            self.router,
            self.id,
            Metrics(self.router),
            peers=self.peers,
            track_output_blocks=True,
            rng=rng,
            clock=self._clock,
        )

    async def start(self) -> None:
        """Watches the fleet, serves after the first snapshot and the sync of its peers, and
        registers.
        """
        followers = [self.peers.on_snapshot]
        if self.index is not None:
            followers.append(self.index.on_snapshot)
        watch = FleetWatch(self.discovery, NAMESPACE, self.router, self._clock, followers)
        self.process.spawn(watch.run())
        self.process.spawn(self._tick())
        if self.index is not None:
            self.process.spawn(self.index.run())
        until = asyncio.get_running_loop().time() + STARTUP_TIMEOUT_S
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await watch.first_snapshot.wait()
        self.process.spawn(self.peers.run())
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self.peers.caught_up.wait()
        self._net.listen(self.address, self.process, self._serve)
        self._net.listen(SYNC.format(self.address), self.process, self._sync)
        await self.discovery.wait_reachable()
        self.lease = await self.discovery.register(
            Instance(
                id=self.id,
                namespace=NAMESPACE,
                service="router",
                stable_name=self.process.name,
                address=self.address,
            )
        )

    async def drain(self) -> None:
        """Leaves like a router that received SIGTERM."""
        await _deregister_and_wait(self)
        self._service.end_sessions()
        await asyncio.sleep(CLOSING_S)

    def _report(self, worker_id: int, dp_rank: int, load: Load | None, now: float) -> None:
        """Like `RouterApp`."""
        if load is None or self.router.fleet.has(Placement(worker_id, dp_rank)):
            self.router.load_tracker.report(worker_id, dp_rank, load, now)

    @asynccontextmanager
    async def _follow(
        self, indexer: Instance, request: indexer_pb2.SubscribeRequest
    ) -> AsyncIterator[Subscription]:
        self.indexers_subscribed.append(indexer.id)
        async with self._subscribe(indexer, request) as subscription:
            yield subscription

    async def _serve(self, end: StreamEnd) -> None:
        async def frames() -> AsyncIterator[router_pb2.SessionRequest]:
            while (message := await end.read()) is not None:
                yield router_pb2.SessionRequest.FromString(message)

        # Any: a context of grpc.aio has no public constructor.
        await self._service.Session(frames(), cast(Any, StreamContext(end)))

    async def _sync(self, end: StreamEnd) -> None:
        async def frames() -> AsyncIterator[router_pb2.SyncRequest]:
            while (message := await end.read()) is not None:
                yield router_pb2.SyncRequest.FromString(message)

        # Any: a context of grpc.aio has no public constructor.
        await self._service.Sync(frames(), cast(Any, StreamContext(end)))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(ROUTER_TICK_S)
            self.router.expire(self._clock())
            self._service.decisions.serve_queue()
            has_more = True
            while has_more:
                has_more = self.router.overlaps.expire(self._clock(), EXPIRE_BLOCKS_PER_STEP)
                await asyncio.sleep(0)


class SimIndexer:
    """An indexer process; see `indexer_svc/app.py`."""

    def __init__(
        self,
        net: SimNetwork,
        discovery: DelayedRegistry,
        address: str,
        rng: Random,
        parts: Parts | None = None,
        *,
        budget_bytes: int = 0,
        subscriber_bytes: int = 1 << 20,
    ) -> None:
        parts = parts or Parts()
        self.process = Process(f"indexer@{address}")
        self.id = new_instance_id(rng)
        self.discovery = discovery
        self.address = address
        self.lease: Lease | None = None
        self._net = net
        clock = asyncio.get_running_loop().time
        self.ingest = Ingest(
            parts.feed(), Budget(budget_bytes), clock, stopwatch=_stopwatch(Random(rng.random()))
        )
        self._presence = WorkerPresence(discovery, NAMESPACE, clock)
        self.metrics = IndexerMetrics(self.ingest)
        self.subscriber_bytes = subscriber_bytes
        self._service = IndexerService(
            self.ingest,
            self._presence,
            self.metrics,
            security=rpc.PLAINTEXT,
            subscriber_bytes=subscriber_bytes,
            clock=clock,
        )

    async def start(self) -> None:
        """Watches the fleet, serves and registers."""
        self.process.spawn(self._presence.run())
        self.process.spawn(self._tick())
        self._net.listen(PUBLISH.format(self.address), self.process, self._publish)
        self._net.listen(SUBSCRIBE.format(self.address), self.process, self._subscribe)
        await self.discovery.wait_reachable()
        self.lease = await self.discovery.register(
            Instance(
                id=self.id,
                namespace=NAMESPACE,
                service="indexer",
                stable_name=self.process.name,
                address=self.address,
            )
        )

    async def drain(self) -> None:
        """Leaves like an indexer that received SIGTERM."""
        await _deregister_and_wait(self)
        self._service.end_streams()
        await asyncio.sleep(CLOSING_S)

    async def _publish(self, end: StreamEnd) -> None:
        async def frames() -> AsyncIterator[indexer_pb2.PublishRequest]:
            while (message := await end.read()) is not None:
                yield indexer_pb2.PublishRequest.FromString(message)

        # Any: a context of grpc.aio has no public constructor.
        await self._service.Publish(frames(), cast(Any, StreamContext(end)))

    async def _subscribe(self, end: StreamEnd) -> None:
        message = await end.read()
        request = indexer_pb2.SubscribeRequest.FromString(message or b"")
        await self._service.Subscribe(request, cast(Any, StreamContext(end)))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(INDEXER_TICK_S)
            await self.ingest.tick(self._presence)


async def _deregister_and_wait(peer: SimFrontend | SimRouter | SimIndexer) -> None:
    """Deregisters, and serves until other processes have noticed."""
    lease, peer.lease = peer.lease, None
    await peer.discovery.wait_reachable()
    if lease is not None:
        await lease.close()
    await asyncio.sleep(NOTICE_S)


def _stopwatch(rng: Random) -> Callable[[], float]:
    """A stopwatch by which each slice takes a moment, and some slices too long."""
    shown = 0.0

    def read() -> float:
        nonlocal shown
        shown += 0.01 if rng.random() < 0.2 else 0.0
        return shown

    return read


Peer = SimWorker | SimFrontend | SimRouter | SimIndexer
