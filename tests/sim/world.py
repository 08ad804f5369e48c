"""A simulated mesh: built from a scenario, with its faults injected, and checked.

`run_seed(seed)` runs one seed. The same seed gives the same run, event for event.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from random import Random
from typing import Any, TypeVar

from structlog.testing import capture_logs

from common.errors import DeadlineExceeded, MeshError
from common.kv.hashing import PrefixHasher
from common.registry.registry import MemoryStore
from common.request.placement import Decision
from common.request.preprocessed import StopConditions
from common.request.token_stream import LegRequest
from common.runtime.tasks import TaskGroup
from frontend_svc.request.placement_request import PlacementKey
from frontend_svc.request.retry_policy import WORKER_WAIT_S
from frontend_svc.request.types import RequestOutcome
from frontend_svc.workers.connection import IDLE_TIMEOUT_S
from router_svc.app import TICK_S
from tests.sim.checks import ABORT_S, AFTERMATH_S, REGISTRY_LAG_MAX_S, Checks, Violation
from tests.sim.clients import Client, ClientSpec, expected_response
from tests.sim.draws import draw_scenario
from tests.sim.faults import FAULT_MAX_S, select_by_draw
from tests.sim.fleet import (
    MODEL,
    TEMPORARY_MODEL,
    DelayedRegistry,
    KvPlane,
    Parts,
    Peer,
    SimFrontend,
    SimIndexer,
    SimRouter,
    SimWorker,
)
from tests.sim.ledger import DecisionChecker, SessionHistory
from tests.sim.loop import run_virtually
from tests.sim.net import LinkDelay, SimNetwork
from tests.sim.scenario import EOS, EOS_ONE_IN, TOKEN_IDS, Scenario
from tests.sim.strikes import FaultInjector
from tests.sim.wire import KV_HOST, Garble
from worker_svc.engines.sim.config import SimConfig, SimHandoffConfig, SimModel
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle

T = TypeVar("T")

_UNTIL_S = 1_000.0
_POLL_S = 0.2
# How often the recovery of the mesh is checked.
_RECOVERY_POLL_S = 0.5
# Counting corrupt pages takes a while, and counts never decrease.
_PAGES_EVERY = 5
# Like the defaults of `SimHandoffConfig`, but shorter: a run takes half a minute.
HANDOFF = SimHandoffConfig(host=KV_HOST, timeout_s=5.0, abort_s=1.0, lease_s=5.0)
# All requests have ended this long after the last fault and the last client.
END_TIMEOUT_S = 45.0
# Response lengths of the requests that have the mesh for themselves, after recovery.
QUIESCENT_TOKENS = (8, 8, 8, 60)
# Number of events that are shown with a violation.
LAST_EVENTS = 25
# KV events and bookings have settled by then.
SETTLE_TIME_S = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run. digest: of all its events, in order.

    recovered_s: from the last fault and request to recovery. counts: how often each event happened;
    see `_counts`. counters: the sums of all engines.
    """

    scenario: Scenario
    violations: tuple[Violation, ...]
    digest: str
    trace: tuple[str, ...]
    virtual_s: float
    recovered_s: float
    unacked_max: int
    counts: Counter[str]
    counters: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"seed {self.scenario.seed}: {len(self.violations)} violations"]
        lines += [f"  {violation}" for violation in self.violations[:10]]
        if self.violations:
            lines += [
                "  before the first:",
                *(f"  {line}" for line in self.lines_before_violation()),
            ]
        return "\n".join([*lines, f"  replay: {self.scenario.command}"])

    def lines_before_violation(self) -> list[str]:
        """The last events before the first violation, and all events of the requests it names."""
        first = self.violations[0]
        request_ids = set(re.findall(r"\br\d+\b", first.what))
        earlier_events = [line for line in self.trace if float(line.split()[0]) <= first.at + 1e-6]
        related_events = [
            line for line in earlier_events[:-LAST_EVENTS] if _is_relevant(line, request_ids)
        ]
        return [*related_events[-LAST_EVENTS:], *earlier_events[-LAST_EVENTS:]]


def _is_relevant(line: str, request_ids: set[str]) -> bool:
    """Whether an event is a fault, or about one of these requests."""
    words = line.split()
    return words[1] == "fault" or (
        words[1] != "tokens" and words[2:3] != [] and words[2] in request_ids
    )


def run_seed(seed: int, *, storm: bool = False) -> Report:
    """Runs the scenario of a seed; see `draw_scenario`."""
    return run_scenario(draw_scenario(seed, storm=storm))


def run_scenario(scenario: Scenario, parts: Parts | None = None) -> Report:
    """Runs a scenario, with other parts in place of the real ones where given.

    Raises Deadlock, Overrun, and what a callback of the mesh raised.
    """
    with capture_logs() as logs:
        return run_virtually(
            _run(scenario, parts or Parts(), logs),
            until=_UNTIL_S,
            shuffle_rng=Random(f"ties {scenario.seed}"),
        )


async def _run(scenario: Scenario, parts: Parts, logs: Sequence[Mapping[str, Any]]) -> Report:
    world = World(scenario, parts)
    await world.run()
    world.checks.check_logs(logs)
    return Report(
        scenario=scenario,
        violations=tuple(world.checks.violations),
        digest=world.trace.digest,
        trace=tuple(world.trace.lines),
        virtual_s=asyncio.get_running_loop().time(),
        recovered_s=world.recovered_s,
        unacked_max=world.unacked_max,
        counts=_counts(world),
        counters=sum((Counter(w.engine.counters) for w in world.workers), Counter()),
    )


def _counts(world: World) -> Counter[str]:
    """Faults by kind, and other events that the minimum counts require, in words."""
    outcomes = [outcome for client in world.clients for outcome in client.outcomes]
    feeds = [indexer.ingest.feed for indexer in world.indexers]
    feeds += [router.index.feed for router in world.routers if router.index is not None]
    sessions = [frontend.routers_used for frontend in world.frontends]
    followed = [router.indexers_subscribed for router in world.routers]
    return Counter(
        {
            **world.injected,
            **world.counts,
            "requests": len(world.clients),
            "requests failed": sum(one.error is not None for one in outcomes),
            "requests retried": sum(one.attempts > 1 for one in outcomes),
            "responses migrated": len(world.migrated),
            "clients left": sum(client.has_disconnected for client in world.clients),
            "clients stopped": sum(client.has_stopped for client in world.clients),
            "clients read slowly": sum(client.spec.pause_s > 0 for client in world.clients),
            "deadlines passed": sum(isinstance(one.error, DeadlineExceeded) for one in outcomes),
            "pairs failed": world.checks.pairs_failed,
            "cached tokens": sum(_cached_tokens(outcome) for outcome in outcomes),
            "cached tokens predicted": world.predicted,
            "batches garbled": world.garbled,
            "batches doubled": sum(feed.counters.duplicates for feed in feeds),
            "gaps": sum(feed.counters.gaps for feed in feeds),
            "snapshots": sum(feed.counters.snapshots for feed in feeds),
            "router failovers": sum(map(_changes, sessions)),
            "indexer failovers": sum(map(_changes, followed)),
            "subscribers cut": sum(map(_cuts, world.indexers)),
            "queue timeouts": sum(_is_queue_timeout(one) for one in outcomes),
            "adapters requested": sum(bool(client.spec.lora) for client in world.clients),
            "clients cut": sum(_is_cut(one) for one in outcomes),
            "peers requested a resend": sum(r.peers.replica.resends for r in world.routers),
            "unrouted": sum(frontend.router.unrouted for frontend in world.frontends),
            "stale lists shown": sum(
                peer.discovery.stale_lists_shown for peer in world.all_processes()
            ),
        }
    )


def _changes(ids: Sequence[int]) -> int:
    """How often an id differs from the previous one."""
    return sum(one != other for one, other in pairwise(ids))


def _is_cut(outcome: RequestOutcome) -> bool:
    return outcome.error is not None and outcome.error.reason == "SLOW_READER"


def _is_queue_timeout(outcome: RequestOutcome) -> bool:
    return outcome.error is not None and outcome.error.reason == "QUEUE_TIMEOUT"


def _cuts(indexer: SimIndexer) -> int:
    """Number of subscribers that were cut because they read too slowly."""
    (family,) = indexer.metrics.subscribers_cut.collect()
    return round(family.samples[0].value)


def _cached_tokens(outcome: RequestOutcome) -> int:
    details = outcome.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


class Trace:
    """The events of a run, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._loop = asyncio.get_running_loop()

    def note(self, *facts: object) -> None:
        """Record an event at the current time."""
        self.lines.append(f"{self._loop.time():.6f} {' '.join(map(str, facts))}")

    @property
    def digest(self) -> str:
        """The hash of all events."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()


class World:
    """One mesh in one run."""

    def __init__(self, scenario: Scenario, parts: Parts) -> None:
        self.scenario = scenario
        queue, busy = scenario.policy.queue, scenario.policy.busy
        self.checks = Checks(
            attempts_explained=not scenario.has_tight_capacity,
            queued_s=queue.wait_max_s if queue.threshold is not None else 0.0,
            may_be_busy=not busy.is_disabled,
        )
        self.counts: Counter[str] = Counter()
        self.sessions = SessionHistory()
        self.trace = Trace()
        self.clients: list[Client] = []
        self._clients_by_request: dict[str, Client] = {}
        self.workers: list[SimWorker] = []
        self.routers: list[SimRouter] = []
        self.frontends: list[SimFrontend] = []
        self.indexers: list[SimIndexer] = []
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._rng = Random(f"world {scenario.seed}")
        self.store = MemoryStore()
        self.net = SimNetwork(self._path, scenario.window_bytes)
        self._by_id: dict[int, SimWorker] = {}
        self.unacked_max = 0
        self.recovered_s = 0.0
        self.migrated: set[str] = set()
        self.injected: Counter[str] = Counter()
        self.predicted = 0
        self.outages = 0
        self._paths = 0
        self._last_port = 1000
        self._handoffs: dict[str, SimHandoffConfig] = {}
        self.kv: KvPlane | None = None
        if scenario.indexers:
            self.kv = KvPlane(set(), Garble(Random(f"garble {scenario.seed}")))
        self.sync_garble = Garble(Random(f"sync {scenario.seed}"))
        self._token_oracle = TokenOracle(TOKEN_IDS, EOS, eos_one_in=EOS_ONE_IN)
        self._hashers: dict[tuple[str, str], PrefixHasher] = {}

    async def run(self) -> None:
        """Runs from the start of the first process to the end of the last."""
        watch = self._loop.create_task(self._watch())
        await self._start()
        injector = FaultInjector(self)
        async with TaskGroup() as tasks:
            if self.scenario.temporary_model_s is not None:
                tasks.create_task(
                    self._drain_temporary_worker(injector, self.scenario.temporary_model_s)
                )
            for fault in self.scenario.faults:
                tasks.create_task(injector.inject(fault))
            await self._start_clients()
        self.trace.note("faults_ended")
        await self._wait_until_ended()
        await self._wait_until_recovered()
        await asyncio.sleep(self.scenario.linger_s)
        self.checks.check_recovered(
            self.alive(), idle=self.scenario.linger_s > IDLE_TIMEOUT_S + AFTERMATH_S
        )
        await self._run_quiescent_requests()
        self.checks.pages(self.workers)
        self.checks.stalled(self.workers)
        self.checks.check_recovered(self.alive())
        await self._end()
        watch.cancel()
        await asyncio.wait([watch])
        self.checks.check_no_tasks()

    async def _start(self) -> None:
        scenario = self.scenario
        for _ in range(scenario.routers):
            await self.start_router(self.new_address())
        for number in range(scenario.frontends):
            await self.start_frontend(f"f{number}", self.new_address())
        for _ in range(scenario.indexers):
            await self.start_indexer(self.new_address())
        for name, handoff in self._roles():
            self._handoffs[name] = handoff
            await self.start_worker(name, self.new_address())
        await asyncio.sleep(2 * REGISTRY_LAG_MAX_S)
        self.checks.begin()

    def _roles(self) -> list[tuple[str, SimHandoffConfig]]:
        """All workers by name, with their roles."""
        scenario = self.scenario
        handoff = replace(
            HANDOFF,
            gb_per_s=scenario.gb_per_s,
            chunk_pages=scenario.chunk_pages,
            local_prefill=scenario.local_prefill,
        )
        prefills = [replace(handoff, role="prefill", mode=mode) for mode in scenario.prefills]
        decode = replace(handoff, role="decode")
        return [
            *((f"w{number}", HANDOFF) for number in range(scenario.workers)),
            *((f"p{number}", one) for number, one in enumerate(prefills)),
            *((f"d{number}", decode) for number in range(scenario.decodes)),
            *((("v0", HANDOFF),) if scenario.temporary_model_s is not None else ()),
        ]

    @property
    def garbled(self) -> int:
        """Batches of KV events that were garbled on the wire."""
        return 0 if self.kv is None else self.kv.garble.count

    async def _run_quiescent_requests(self) -> None:
        """In a healthy mesh, single requests are served, with the cached tokens that the index
        predicts.
        """
        workers = [worker for worker in self.workers if worker.is_serving]
        frontend = next(frontend for frontend in self.frontends if frontend.is_serving)
        for number, limit in enumerate(QUIESCENT_TOKENS):
            stop = StopConditions(max_tokens=limit, ignore_eos=True)
            earlier = self._rng.choice(self.scenario.client_specs)
            # A part of the prompt was sent before, a part is new.
            shared_prefix = earlier.prompt[: self._rng.randrange(16, 400)]
            prompt = shared_prefix + tuple(self._rng.choices(TOKEN_IDS, k=40))
            spec = ClientSpec(
                1_000_000 + number, 0.0, prompt, stop, deadline_s=20.0, lora=earlier.lora
            )
            client = self._start_client(spec, frontend)
            for _ in range(300):
                if client.outcomes:
                    break
                await asyncio.sleep(0.1)
                self.checks.check_bookings(client, self.alive())
            router = self._current_router(frontend)
            is_approximate = router is None or not router.choice.follows_events
            self.predicted += self.checks.check_quiescent_request(
                client, workers, is_approximate=is_approximate
            )
            await asyncio.sleep(SETTLE_TIME_S + self._prediction_ttl_s)
        if self.scenario.temporary_model_s is not None:
            await self._request_temporary_model(frontend)

    async def _request_temporary_model(self, frontend: SimFrontend) -> None:
        """Long after the only worker of the other model left. The request waits for a worker."""
        stop = StopConditions(max_tokens=1)
        deadline_s = 2 * WORKER_WAIT_S
        spec = ClientSpec(
            2_000_000, 0.0, TOKEN_IDS[:20], stop, deadline_s=deadline_s, model=TEMPORARY_MODEL
        )
        client = self._start_client(spec, frontend)
        await asyncio.sleep(WORKER_WAIT_S + SETTLE_TIME_S)
        self.checks.check_departed_model(client)

    @property
    def _prediction_ttl_s(self) -> float:
        """How long predicted entries exist beside the index."""
        limits = [choice.predicted for choice in self.scenario.choices]
        return max((one.ttl_s + TICK_S for one in limits if one is not None), default=0.0)

    def _current_router(self, frontend: SimFrontend) -> SimRouter | None:
        """The router of a frontend."""
        id = frontend.routers_used[-1] if frontend.routers_used else None
        return next((router for router in self.routers if router.id == id), None)

    async def _drain_temporary_worker(self, injector: FaultInjector, after_s: float) -> None:
        """The only worker of the other model leaves in order, without a successor."""
        await asyncio.sleep(after_s)
        temporary_worker = next(
            worker for worker in self.workers if worker.model == TEMPORARY_MODEL
        )
        self.trace.note("leaves", temporary_worker.stable_name)
        self.checks.record_fault(temporary_worker, 60.0)
        await injector.end(temporary_worker)

    async def _watch(self) -> None:
        for tick in count():
            await asyncio.sleep(_POLL_S)
            if tick % _PAGES_EVERY == 0:
                self.checks.pages(self.workers)
                self.checks.stalled(self.workers)
            for worker in self.workers:
                for stream in worker.attach._streams.values():
                    self.unacked_max = max(self.unacked_max, stream.link.unacked_bytes)
                    self.checks.credit(worker.stable_name, stream.link.unacked_bytes)
            for indexer in self.indexers:
                self.checks.backlog(indexer)
            for router in self.routers:
                if router.process.is_alive and router.router.decision_checker is not None:
                    router.router.decision_checker.check(router.router, self._loop.time())

    async def _start_clients(self) -> None:
        began = self._loop.time()
        for spec in self.scenario.client_specs:
            await asyncio.sleep(max(0.0, began + spec.at - self._loop.time()))
            serving = [f for f in self.frontends if f.is_serving]
            if not serving:
                continue
            client = self._start_client(spec, select_by_draw(serving, spec.target_draw))
            if spec.disconnect_after_s is not None and not self.scenario.faults:
                at = self._loop.time() + spec.disconnect_after_s + ABORT_S
                self._loop.call_at(at, self.checks.aborted, client, self.workers)

    def _start_client(self, spec: ClientSpec, frontend: SimFrontend) -> Client:
        expected, finish = expected_response(spec, self._token_oracle)
        client = Client(spec, expected, finish, self._tokens, self._finished)
        self.checks.began(client)
        self.clients.append(client)
        self._clients_by_request[spec.request_id] = client
        self.trace.note("requests", spec.request_id, frontend.stable_name)
        frontend.process.spawn(client.run(frontend, self._hasher(spec.model, spec.lora)))
        return client

    def _hasher(self, model: str, lora: str) -> PrefixHasher:
        """The block hasher of a model, or of an adapter."""
        hasher = self._hashers.get((model, lora))
        if hasher is None:
            hasher = PrefixHasher(mesh_key=b"", model=model, block_size=16, lora_name=lora)
            self._hashers[model, lora] = hasher
        return hasher

    async def _wait_until_ended(self) -> None:
        for _ in range(round(END_TIMEOUT_S / 0.5)):
            if not self._open_clients():
                return
            await asyncio.sleep(0.5)
        self.checks.report_unfinished(self._open_clients())

    async def _wait_until_recovered(self) -> None:
        """Returns after recovery, or at the deadline for it."""
        faults_ended_at = self._loop.time()
        while self._loop.time() < faults_ended_at + self.scenario.recovery_max_s:
            if next(self.checks.problems(self.alive()), None) is None:
                break
            await asyncio.sleep(_RECOVERY_POLL_S)
        self.recovered_s = self._loop.time() - faults_ended_at
        self.trace.note("recovered", f"{self.recovered_s:.1f}")

    def _open_clients(self) -> list[Client]:
        """Clients without an outcome at live frontends."""
        return [
            client
            for client in self.clients
            if not client.outcomes
            and client.frontend is not None
            and client.frontend.process.is_alive
        ]

    async def _end(self) -> None:
        for frontend in self.frontends:
            frontend.end()
        for peer in self.alive():
            if isinstance(peer, SimWorker):
                await peer.engine.cleanup()
            peer.process.kill()
        for process in [peer.process for peer in self.all_processes()]:
            await process.wait_until_gone()

    # -- processes ------------------------------------------------------------------------------

    async def start_worker(self, stable_name: str, address: str) -> None:
        scenario = self.scenario
        is_temporary = stable_name.startswith("v")
        index_kind = scenario.kv_index_mode(stable_name)
        config = SimConfig(
            model=TEMPORARY_MODEL if is_temporary else MODEL,
            loras=frozenset() if is_temporary else scenario.find_adapters(stable_name),
            prefix_caching=index_kind != "none",
            total_kv_blocks=scenario.blocks,
            max_num_seqs=scenario.seqs,
            max_num_batched_tokens=scenario.batched_tokens,
            eos_one_in=EOS_ONE_IN,
            timing=Timing(base_s=scenario.step_s, prefill_token_s=scenario.prefill_token_s),
            # A successor on the same address takes the same port for handoffs.
            handoff=replace(self._handoffs[stable_name], port=int(address.split(":")[1])),
        )
        worker = SimWorker(
            self.net,
            self._discovery(),
            stable_name,
            address,
            config,
            SimModel(TOKEN_IDS, (EOS,), 32768),
            self._rng,
            self.checks.admitted,
            self._parts,
            scenario.requests_max,
            self.kv,
            kv_index_mode=index_kind,
        )
        worker.has_dropped_entries = scenario.budget_bytes > 0
        self.workers.append(worker)
        self._by_id[worker.id] = worker
        self.trace.note("starts", stable_name, worker.id)
        if self.kv is not None and self.kv.refused:
            self.checks.record_fault(worker, FAULT_MAX_S)  # it may have an unreachable address
        await worker.start()

    async def start_router(self, address: str) -> None:
        scenario = self.scenario
        choice = scenario.choices[len(self.routers) % len(scenario.choices)]
        router = SimRouter(
            self.net,
            self._discovery(),
            address,
            scenario.selector,
            self._rng,
            self._parts,
            self.kv,
            self.sync_garble,
            policy=scenario.policy,
            choice=choice,
            decision_checker=DecisionChecker(
                self.checks.violation, self.counts, self.sessions, scenario.policy, choice
            ),
        )
        self.routers.append(router)
        self.trace.note("starts", router.process.name, router.id)
        await router.start()

    async def start_frontend(self, stable_name: str, address: str) -> None:
        frontend = SimFrontend(
            self.net,
            self._discovery(),
            stable_name,
            address,
            Random(self._rng.random()),
            self,
            self._parts,
        )
        self.frontends.append(frontend)
        self.trace.note("starts", stable_name, frontend.id)
        await frontend.start()

    async def start_indexer(self, address: str) -> None:
        scenario = self.scenario
        indexer = SimIndexer(
            self.net,
            self._discovery(),
            address,
            self._rng,
            self._parts,
            budget_bytes=scenario.budget_bytes,
            subscriber_bytes=scenario.subscriber_bytes,
        )
        self.indexers.append(indexer)
        self.trace.note("starts", indexer.process.name, indexer.id)
        await indexer.start()

    def all_processes(self) -> list[Peer]:
        return [*self.frontends, *self.routers, *self.indexers, *self.workers]

    def alive(self) -> list[Peer]:
        return [peer for peer in self.all_processes() if peer.process.is_alive]

    def new_address(self) -> str:
        self._last_port += 1
        return f"sim:{self._last_port}"

    def _path(self, caller: str, address: str) -> LinkDelay:
        self._paths += 1
        rng = Random(f"path {self.scenario.seed} {self._paths}")
        base_s = rng.uniform(0.0001, max(0.0001, self.scenario.delay_s))
        return LinkDelay(rng, base_s, self.scenario.jitter_s, self.scenario.quantum_s)

    def _discovery(self) -> DelayedRegistry:
        rng = Random(self._rng.random())
        discovery = DelayedRegistry(self.store, lambda: rng.uniform(0.0, REGISTRY_LAG_MAX_S))
        for _ in range(self.outages):
            discovery.lose()
        return discovery

    # -- observers -------------------------------------------------------------------------------

    def submitted(self, frontend: SimFrontend, worker_id: int, leg_request: LegRequest) -> None:
        """See FrontendObserver."""
        worker = self._by_id.get(worker_id)
        name = worker.stable_name if worker is not None else "?"
        self.trace.note(
            "submits", leg_request.request_id, leg_request.attempt, leg_request.phase, name
        )
        if leg_request.attempt and self._clients_by_request[leg_request.request_id].delivered:
            self.migrated.add(leg_request.request_id)
        self.checks.submitted(frontend, worker, leg_request)
        if worker is not None:
            self.checks.check_adapter(
                self._clients_by_request[leg_request.request_id], worker, leg_request
            )

    def placed(self, key: PlacementKey, took_s: float, placed: Decision | MeshError) -> None:
        """See FrontendObserver."""
        self._clients_by_request[key[0]].placed_at = self._loop.time()
        self.checks.placed(key, took_s, placed)

    def delivered(self, leg_request: LegRequest) -> None:
        """See FrontendObserver."""
        self.checks.delivered(leg_request)

    def leg_failed(self, frontend: SimFrontend, leg_request: LegRequest) -> None:
        """See FrontendObserver."""
        self.trace.note("loses", leg_request.request_id, leg_request.attempt, leg_request.phase)
        self.checks.leg_failed(frontend, leg_request, self.workers)

    def _tokens(self, client: Client, token_ids: list[int]) -> None:
        self.trace.note("tokens", client.spec.request_id, len(token_ids))
        self.checks.tokens(client, token_ids)

    def _finished(self, client: Client, outcome: RequestOutcome) -> None:
        error = "" if outcome.error is None else outcome.error.reason
        self.trace.note("ends", client.spec.request_id, outcome.finish_reason, error)
        observers = [p for p in self.alive() if isinstance(p, SimFrontend | SimRouter)]
        serving = self.checks.serving(self.workers, observers)
        self.checks.finished(client, outcome, serving)
