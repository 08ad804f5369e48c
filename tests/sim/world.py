"""A simulated mesh: built from a scenario, struck by its faults, watched by the checkers.

`run_seed(seed)` is the whole thing. The same seed gives the same run, event for event.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, TypeVar

from structlog.testing import capture_logs

from common.attach import Order
from common.blocks import PrefixHasher
from common.errors import MeshError, Unavailable, WorkerLost
from common.instances import Role
from common.preprocessed import StopConditions
from common.registry import MemoryStore
from frontend_svc.core.request import Outcome, Placed
from frontend_svc.engine_client import IDLE_S
from frontend_svc.router_client import Key
from tests.sim.checks import ABORT_S, AFTERMATH_S, LAG_MAX_S, Breach, Checks
from tests.sim.clients import (
    Client,
    Wish,
    draw_conversations,
    draw_wishes,
    expected_answer,
)
from tests.sim.faults import (
    KEEPALIVE_S,
    PROFILES,
    STORMS,
    VERTICAL_PROFILES,
    VERTICAL_STORMS,
    Fault,
    draw_faults,
)
from tests.sim.fleet import (
    MODEL,
    NAMESPACE,
    Discovery,
    KvPlane,
    Parts,
    Peer,
    SimFrontend,
    SimIndexer,
    SimRouter,
    SimWorker,
)
from tests.sim.loop import run_virtually
from tests.sim.net import WINDOW_BYTES, End, Net, Path, Process
from tests.sim.wire import KV_HOST, Garble, kv_address
from worker_svc.core.timing import Timing
from worker_svc.core.truth import Truth
from worker_svc.sim_engine import SimConfig, SimModel
from worker_svc.sim_handoff import SimHandoffConfig

T = TypeVar("T")

WORDS = tuple(range(10, 500))
EOS = 2
EOS_ONE_IN = 60
# All requests have ended this long after the last fault was over and the last client had come.
BOUND_S = 45.0
# By then keepalive has told everybody, orphaned bookings have expired, and stops were heeded.
REST_S = KEEPALIVE_S + 6.0
_UNTIL_S = 1_000.0
_CREDIT_LOOK_S = 0.1
SELECTOR_NAMES = ("least_loaded", "power_of_two", "round_robin", "random")
# As `SimHandoffConfig` has them, shortened: a run is over in half a minute.
HANDOFF = SimHandoffConfig(host=KV_HOST, timeout_s=5.0, abort_s=1.0, lease_s=5.0)
# What strikes amid a handoff waits so long for one.
AMID_S = 2.0
LOOK_S = 0.005
# Requests that have the mesh for themselves, once it is well.
QUIESCENT = 5
# KV events and bookings have settled by then.
SETTLE_S = 0.5
# As REST_S, where everybody notices within SOON_S what broke: stale sources count for 10 s.
SHORT_REST_S = 13.0
SOON_S = 3.0
# Whom no fault strikes where the first worker (of each role) is spared.
SPARED = frozenset({"w0", "p0", "d0"})

Mode = Literal["bootstrap", "completed"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything a run depends on. Times in virtual seconds, sizes as in `SimConfig`.

    delay_s: how far apart processes are, at most; quantum_s: see `Path`. spares_first: no fault
    strikes the first worker. requests_max: at each worker. window_bytes: see `net`. rest_s: how
    long the mesh is left alone after the last request; past IDLE_S, streams must be closed.

    With indexers there is a KV plane. workers are aggregated ones. prefills: how each prefill
    worker hands over. gb_per_s, chunk_pages, local_prefill: see `SimHandoffConfig`.
    prefill_token_s: see `Timing`; with batched_tokens, a step must not take as long as a hang.
    """

    seed: int
    is_storm: bool = False
    is_vertical: bool = False
    workers: int = 3
    prefills: tuple[Mode, ...] = ()
    decodes: int = 0
    indexers: int = 0
    gb_per_s: float = 25.0
    chunk_pages: int = 64
    local_prefill: bool = True
    prefill_token_s: float = 2e-5
    batched_tokens: int = 8192
    routers: int = 1
    frontends: int = 1
    selector: str = "least_loaded"
    step_s: float = 0.04
    blocks: int = 4096
    seqs: int = 64
    delay_s: float = 0.02
    jitter_s: float = 0.005
    quantum_s: float = 0.0
    spares_first: bool = True
    requests_max: int = 4096
    window_bytes: int = WINDOW_BYTES
    rest_s: float = REST_S
    wishes: tuple[Wish, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def is_tight(self) -> bool:
        """Whether workers refuse requests, or let handoffs wait too long, for want of room."""
        return self.requests_max < 100 or (self.decodes > 0 and self.blocks < 1000)

    @property
    def command(self) -> str:
        """How to run it again."""
        storm = " --storm" if self.is_storm else ""
        vertical = " --vertical" if self.is_vertical else ""
        return f"python -m tests.sim 1 --first {self.seed}{vertical}{storm} --trace"


def draw_scenario(seed: int, *, storm: bool = False) -> Scenario:
    """The scenario of a seed. storm: many more faults than any mesh should see."""
    rng = Random(f"scenario {seed}")
    truth = Truth(WORDS, EOS, eos_one_in=EOS_ONE_IN)
    blocks = rng.choice((160, 4096, 4096))
    until = rng.uniform(6.0, 14.0)
    kinds = PROFILES[rng.randrange(len(PROFILES))]
    if storm:
        kinds = STORMS[rng.randrange(len(STORMS))]
    return Scenario(
        seed=seed,
        is_storm=storm,
        workers=rng.randrange(2, 6),
        routers=rng.randrange(1, 3),
        frontends=rng.randrange(1, 3),
        selector=SELECTOR_NAMES[rng.randrange(len(SELECTOR_NAMES))],
        step_s=rng.uniform(0.02, 0.08),
        blocks=blocks,
        seqs=rng.choice((4, 64)),
        delay_s=rng.choice((0.0, 0.002, 0.05)),
        jitter_s=rng.choice((0.0, 0.002, 0.02)),
        quantum_s=rng.choice((0.0, 0.01, 0.05)),
        spares_first=rng.random() < 0.7,
        requests_max=rng.choice((4096, 4096, 4096, 6)),
        wishes=draw_wishes(rng, rng.randrange(25, 90), until, truth, long_prompts=blocks > 2000),
        faults=draw_faults(rng, kinds, 30 if storm else rng.randrange(2, 10), until),
    )


def draw_vertical(seed: int, *, storm: bool = False) -> Scenario:
    """The scenario of a seed with a KV plane: pairs of prefill and decode, and an index."""
    rng = Random(f"vertical {seed}")
    truth = Truth(WORDS, EOS, eos_one_in=EOS_ONE_IN)
    until = rng.uniform(6.0, 12.0)
    profiles = VERTICAL_STORMS if storm else VERTICAL_PROFILES
    kinds = profiles[rng.randrange(len(profiles))]
    faults = draw_faults(rng, kinds, 20 if storm else rng.randrange(2, 9), until)
    is_quick = rng.random() < 0.7
    if is_quick:
        faults = tuple(
            replace(one, near_s=min(SOON_S, one.near_s), far_s=min(SOON_S, one.far_s))
            for one in faults
        )
    modes: tuple[Mode, ...] = ("bootstrap", "bootstrap", "completed")
    return Scenario(
        seed=seed,
        is_storm=storm,
        is_vertical=True,
        workers=rng.choice((0, 0, 0, 1, 2)),
        prefills=tuple(rng.choices(modes, k=rng.randrange(1, 4))),
        decodes=rng.randrange(2, 5),
        indexers=rng.randrange(1, 3),
        routers=rng.randrange(1, 3),
        frontends=rng.randrange(1, 3),
        selector=rng.choice(("kv", "kv", "kv", "round_robin")),
        step_s=rng.uniform(0.02, 0.06),
        prefill_token_s=rng.choice((2e-5, 1e-3)),
        batched_tokens=600,
        gb_per_s=rng.choice((25.0, 0.5, 0.1)),
        chunk_pages=rng.choice((1, 4, 64)),
        local_prefill=rng.random() < 0.5,
        blocks=rng.choice((200, 2048, 2048)),
        delay_s=rng.choice((0.0, 0.002, 0.05)),
        jitter_s=rng.choice((0.0, 0.002, 0.02)),
        quantum_s=rng.choice((0.0, 0.01, 0.05)),
        spares_first=rng.random() < 0.7,
        rest_s=SHORT_REST_S if is_quick else REST_S,
        wishes=draw_conversations(rng, rng.randrange(20, 70), until, truth),
        faults=faults,
    )


@dataclass(frozen=True, slots=True)
class Report:
    """How a run went. digest: of all its events, in order.

    migrated, failed: requests. pairs_failed: legs. cached_tokens: as clients were told. garbled:
    batches of events. predicted: cached tokens of the requests that had the mesh for themselves.
    counters: the sums of all engines'.
    """

    scenario: Scenario
    breaches: tuple[Breach, ...]
    digest: str
    trace: tuple[str, ...]
    virtual_s: float
    migrated: int
    failed: int
    unacked_max: int
    pairs_failed: int
    cached_tokens: int
    garbled: int
    predicted: int
    counters: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"seed {self.scenario.seed}: {len(self.breaches)} breaches"]
        lines += [f"  {breach}" for breach in self.breaches[:10]]
        return "\n".join([*lines, f"  replay: {self.scenario.command}"])


def run_seed(seed: int, *, storm: bool = False, vertical: bool = False) -> Report:
    """Runs the scenario of a seed; see `draw_scenario`, `draw_vertical`."""
    draw = draw_vertical if vertical else draw_scenario
    return run_scenario(draw(seed, storm=storm))


def run_scenario(scenario: Scenario, parts: Parts | None = None) -> Report:
    """Runs a scenario, with other parts in place of the real ones where given.

    Raises Deadlock, Overrun, and what a callback of the mesh raised.
    """
    with capture_logs() as logs:
        return run_virtually(_run(scenario, parts or Parts(), logs), until=_UNTIL_S)


async def _run(scenario: Scenario, parts: Parts, logs: Sequence[Mapping[str, Any]]) -> Report:
    world = World(scenario, parts)
    await world.run()
    world.checks.logged(logs)
    outcomes = [outcome for client in world.clients for outcome in client.outcomes]
    return Report(
        scenario=scenario,
        breaches=tuple(world.checks.breaches),
        digest=world.trace.digest,
        trace=tuple(world.trace.lines),
        virtual_s=asyncio.get_running_loop().time(),
        migrated=sum(outcome.attempts > 1 for outcome in outcomes),
        failed=sum(outcome.error is not None for outcome in outcomes),
        unacked_max=world.unacked_max,
        pairs_failed=world.checks.pairs_failed,
        cached_tokens=sum(_cached_tokens(outcome) for outcome in outcomes),
        garbled=world.garbled,
        predicted=world.predicted,
        counters=sum((Counter(w.engine.counters) for w in world.workers), Counter()),
    )


def _cached_tokens(outcome: Outcome) -> int:
    details = outcome.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


class Trace:
    """What happened, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._loop = asyncio.get_running_loop()

    def note(self, *facts: object) -> None:
        """Something happened now."""
        self.lines.append(f"{self._loop.time():.6f} {' '.join(map(str, facts))}")

    @property
    def digest(self) -> str:
        """Of all of it."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()


class World:
    """One mesh in one run."""

    def __init__(self, scenario: Scenario, parts: Parts) -> None:
        self.scenario = scenario
        self.checks = Checks(attempts_explained=not scenario.is_tight)
        self.trace = Trace()
        self.clients: list[Client] = []
        self.workers: list[SimWorker] = []
        self.routers: list[SimRouter] = []
        self.frontends: list[SimFrontend] = []
        self.indexers: list[SimIndexer] = []
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._rng = Random(f"world {scenario.seed}")
        self._store = MemoryStore()
        self._net = Net(self._path, scenario.window_bytes)
        self._by_id: dict[int, SimWorker] = {}
        self.unacked_max = 0
        self.predicted = 0
        self._outages = 0
        self._paths = 0
        self._last_port = 1000
        self._handoffs: dict[str, SimHandoffConfig] = {}
        self._kv: KvPlane | None = None
        if scenario.indexers:
            self._kv = KvPlane(set(), Garble(Random(f"garble {scenario.seed}")))
        self._tasks: asyncio.TaskGroup | None = None
        self._truth = Truth(WORDS, EOS, eos_one_in=EOS_ONE_IN)
        self._hasher = PrefixHasher(mesh_key=b"", model=MODEL, block_size=16)

    async def run(self) -> None:
        """From the start of the first process to the end of the last."""
        await self._start()
        watch = self._loop.create_task(self._watch_credit())
        async with asyncio.TaskGroup() as self._tasks:
            for fault in self.scenario.faults:
                self._tasks.create_task(self._strike(fault))
            await self._let_clients_come()
        self.trace.note("healed")
        await self._until_ended()
        await asyncio.sleep(self.scenario.rest_s)
        if self._kv is not None:
            await self._try_out()
        self.checks.pages(self.workers)
        self.checks.at_rest(self._alive(), idle=self.scenario.rest_s > IDLE_S + AFTERMATH_S)
        await self._end()
        watch.cancel()
        await asyncio.wait([watch])
        self.checks.over()

    async def _start(self) -> None:
        scenario = self.scenario
        for _ in range(scenario.routers):
            await self._start_router(self._address())
        for number in range(scenario.frontends):
            await self._start_frontend(f"f{number}", self._address())
        for _ in range(scenario.indexers):
            await self._start_indexer(self._address())
        for name, handoff in self._roles():
            self._handoffs[name] = handoff
            await self._start_worker(name, self._address())
        await asyncio.sleep(2 * LAG_MAX_S)

    def _roles(self) -> list[tuple[str, SimHandoffConfig]]:
        """All workers by name, and what each does."""
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
        ]

    @property
    def garbled(self) -> int:
        """Batches of KV events that went wrong on the wire."""
        return 0 if self._kv is None else self._kv.garble.count

    async def _try_out(self) -> None:
        """The mesh is well: its index is the truth, and predicts what single requests find."""
        workers = [worker for worker in self.workers if worker.is_serving]
        routers = [router for router in self.routers if router.process.is_alive]
        self.checks.index([i for i in self.indexers if i.process.is_alive], routers, workers)
        frontend = next(frontend for frontend in self.frontends if frontend.is_serving)
        stop = StopConditions(max_tokens=24, ignore_eos=True)
        for number in range(QUIESCENT):
            earlier = self._rng.choice(self.scenario.wishes)
            # Some of it was said before, some is new.
            said = earlier.prompt[: self._rng.randrange(16, 400)]
            prompt = said + tuple(self._rng.choices(WORDS, k=40))
            wish = Wish(1_000_000 + number, 0.0, prompt, stop, deadline_s=20.0)
            client = self._let_in(wish, frontend)
            for _ in range(300):
                if client.outcomes:
                    break
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE_S)
            self.predicted += self.checks.quiescent(client, workers)

    async def _watch_credit(self) -> None:
        while True:
            await asyncio.sleep(_CREDIT_LOOK_S)
            self.checks.pages(self.workers)
            for worker in self.workers:
                for stream in worker.attach._streams.values():
                    self.unacked_max = max(self.unacked_max, stream.link.unacked_bytes)
                    self.checks.credit(worker.stable_name, stream.link.unacked_bytes)

    async def _let_clients_come(self) -> None:
        began = self._loop.time()
        for wish in self.scenario.wishes:
            await asyncio.sleep(max(0.0, began + wish.at - self._loop.time()))
            serving = [f for f in self.frontends if f.is_serving]
            if not serving:
                continue
            client = self._let_in(wish, _picked(serving, wish.pick))
            if wish.leaves_s is not None and not self.scenario.faults:
                at = self._loop.time() + wish.leaves_s + ABORT_S
                self._loop.call_at(at, self.checks.aborted, client, self.workers)

    def _let_in(self, wish: Wish, frontend: SimFrontend) -> Client:
        expected, finish = expected_answer(wish, self._truth)
        client = Client(wish, expected, finish, self._tokens, self._finished)
        self.clients.append(client)
        self.trace.note("asks", wish.request_id, frontend.stable_name)
        frontend.process.spawn(client.run(frontend, self._hasher))
        return client

    async def _until_ended(self) -> None:
        for _ in range(round(BOUND_S / 0.5)):
            if not self._open_clients():
                return
            await asyncio.sleep(0.5)
        self.checks.unfinished(self._open_clients())

    def _open_clients(self) -> list[Client]:
        """Those who were not told the end, and whose frontend lives to tell it."""
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
        for peer in self._alive():
            if isinstance(peer, SimWorker):
                await peer.engine.cleanup()
            peer.process.kill()
        for process in [peer.process for peer in self._everybody()]:
            await process.gone()

    # -- processes ------------------------------------------------------------------------------

    async def _start_worker(self, stable_name: str, address: str) -> None:
        scenario = self.scenario
        config = SimConfig(
            total_kv_blocks=scenario.blocks,
            max_num_seqs=scenario.seqs,
            max_num_batched_tokens=scenario.batched_tokens,
            eos_one_in=EOS_ONE_IN,
            timing=Timing(base_s=scenario.step_s, prefill_token_s=scenario.prefill_token_s),
            # A successor on the same address takes the same port for handoffs.
            handoff=replace(self._handoffs[stable_name], port=int(address.split(":")[1])),
        )
        worker = SimWorker(
            self._net,
            self._discovery(),
            stable_name,
            address,
            config,
            SimModel(WORDS, (EOS,), 32768),
            self._rng,
            self.checks.admitted,
            self._parts,
            scenario.requests_max,
            self._kv,
        )
        self.workers.append(worker)
        self._by_id[worker.id] = worker
        self.trace.note("starts", stable_name, worker.id)
        await worker.start()

    async def _start_router(self, address: str) -> None:
        selector = self.scenario.selector
        router = SimRouter(
            self._net, self._discovery(), address, selector, self._rng, self._parts, self._kv
        )
        self.routers.append(router)
        self.trace.note("starts", router.process.name, router.id)
        await router.start()

    async def _start_frontend(self, stable_name: str, address: str) -> None:
        frontend = SimFrontend(
            self._net,
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

    async def _start_indexer(self, address: str) -> None:
        indexer = SimIndexer(self._net, self._discovery(), address, self._rng, self._parts)
        self.indexers.append(indexer)
        self.trace.note("starts", indexer.process.name, indexer.id)
        await indexer.start()

    def _everybody(self) -> list[Peer]:
        return [*self.frontends, *self.routers, *self.indexers, *self.workers]

    def _alive(self) -> list[Peer]:
        return [peer for peer in self._everybody() if peer.process.is_alive]

    def _address(self) -> str:
        self._last_port += 1
        return f"sim:{self._last_port}"

    def _path(self, caller: str, address: str) -> Path:
        self._paths += 1
        rng = Random(f"path {self.scenario.seed} {self._paths}")
        base_s = rng.uniform(0.0001, max(0.0001, self.scenario.delay_s))
        return Path(rng, base_s, self.scenario.jitter_s, self.scenario.quantum_s)

    def _discovery(self) -> Discovery:
        rng = Random(self._rng.random())
        discovery = Discovery(self._store, lambda: rng.uniform(0.0, LAG_MAX_S))
        for _ in range(self._outages):
            discovery.lose()
        return discovery

    # -- what the checkers hear -----------------------------------------------------------------

    def submitted(self, frontend: SimFrontend, worker_id: int, order: Order) -> None:
        """See Witness."""
        worker = self._by_id.get(worker_id)
        name = worker.stable_name if worker is not None else "?"
        self.trace.note("submits", order.request_id, order.attempt, order.phase, name)
        self.checks.submitted(frontend, worker, order)

    def placed(self, key: Key, took_s: float, placed: Placed | MeshError) -> None:
        """See Witness."""
        self.checks.placed(key, took_s, placed)

    def delivered(self, order: Order) -> None:
        """See Witness."""
        self.checks.delivered(order)

    def leg_failed(self, frontend: SimFrontend, order: Order) -> None:
        """See Witness."""
        self.trace.note("loses", order.request_id, order.attempt, order.phase)
        self.checks.leg_failed(frontend, order, self.workers)

    def _tokens(self, client: Client, token_ids: list[int]) -> None:
        self.trace.note("tokens", client.wish.request_id, len(token_ids))
        self.checks.tokens(client, token_ids)

    def _finished(self, client: Client, outcome: Outcome) -> None:
        error = "" if outcome.error is None else outcome.error.reason
        self.trace.note("ends", client.wish.request_id, outcome.finish_reason, error)
        observers = [p for p in self._alive() if isinstance(p, SimFrontend | SimRouter)]
        serving = self.checks.serving(self.workers, observers)
        self.checks.finished(client, outcome, serving)

    # -- faults ---------------------------------------------------------------------------------

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        strike: Callable[[Fault], Coroutine[None, None, None]] = getattr(self, fault.kind.value)
        await strike(fault)

    def _some_worker(self, fault: Fault) -> SimWorker | None:
        there = self._strikable()
        return _picked(there, fault.pick) if there else None

    def _strikable(self, role: Role | None = None) -> list[SimWorker]:
        spared = SPARED if self.scenario.spares_first else ()
        return [
            worker
            for worker in self.workers
            if worker.is_serving and worker.stable_name not in spared
            if role in (None, worker.role)
        ]

    async def _amid_handoff(self, fault: Fault, role: Role) -> SimWorker | None:
        """Some worker of a role, one with an open room if there is one within AMID_S."""
        for _ in range(round(AMID_S / LOOK_S)):
            there = [w for w in self._strikable(role) if w.engine.loads()[0].rooms_open]
            if there:
                return _picked(there, fault.pick)
            await asyncio.sleep(LOOK_S)
        there = self._strikable(role)
        return _picked(there, fault.pick) if there else None

    def _some_frontend(self, fault: Fault) -> SimFrontend | None:
        there = [f for f in self.frontends if f.is_serving]
        return _picked(there, fault.pick_too) if there else None

    def _some_router(self, fault: Fault) -> SimRouter | None:
        there = [r for r in self.routers if r.process.is_alive and r.lease is not None]
        return _picked(there, fault.pick) if there else None

    def _note(self, fault: Fault, *facts: object) -> None:
        self.trace.note("fault", fault.kind.value, *facts)

    def _cut(self, near: End, fault: Fault) -> None:
        """Breaks a stream; each side learns of it in its own time."""
        far = near.peer
        assert far is not None, "a stream has two ends"
        near.sever()
        error = Unavailable("the connection broke")
        self._loop.call_later(fault.near_s, near.cut, error)
        self._loop.call_later(fault.far_s, far.cut, error)

    async def _hold(self, ends: Sequence[End], fault: Fault) -> None:
        held = [end for end in ends if end.peer is not None]
        for end in held:
            end.hold()
        await asyncio.sleep(fault.lasts_s)
        for end in held:
            end.let_go()

    async def _crash(self, peer: Peer, fault: Fault) -> None:
        """Ends a process without a word."""
        for end in tuple(peer.process.ends):
            other = end.peer
            end.sever()
            if other is not None:
                self._loop.call_later(fault.near_s, other.cut, Unavailable("connection reset"))
        if isinstance(peer, SimFrontend):
            peer.die()
        else:
            peer.process.kill()
        if isinstance(peer, SimRouter):
            self.checks.trouble(None, fault.lasts_s + fault.notice_s)
        members = self._store.members(NAMESPACE)
        self._loop.call_later(fault.notice_s, members.remove, peer.id)
        if isinstance(peer, SimWorker):
            self._net.close(peer.address, peer.process)
            peer.left_at = peer.left_at or self._loop.time() + fault.notice_s
            await peer.engine.cleanup()

    async def attach_cut(self, fault: Fault) -> None:
        """A token stream breaks."""
        ends = self._attach_ends(fault)
        if ends:
            self._cut(ends[0], fault)

    async def attach_hold(self, fault: Fault) -> None:
        """A token stream stands still, one way or both ways, then goes on."""
        ends = self._attach_ends(fault)
        far = [end.peer for end in ends if end.peer is not None]
        await self._hold([*ends, *far] if fault.near_s < 1 else ends or far, fault)

    def _attach_ends(self, fault: Fault) -> list[End]:
        """The frontend's end of one stream, if there is one between these two."""
        worker, frontend = self._some_worker(fault), self._some_frontend(fault)
        if worker is None or frontend is None:
            return []
        self._note(fault, frontend.stable_name, worker.stable_name)
        self.checks.trouble(worker, fault.lasts_s + KEEPALIVE_S)
        return _ends_between(frontend.process, worker.process)[:1]

    async def session_cut(self, fault: Fault) -> None:
        """The link between a frontend and its router breaks."""
        for end in self._session_ends(fault):
            self._cut(end, fault)

    async def session_hold(self, fault: Fault) -> None:
        """The link between a frontend and its router stands still."""
        await self._hold(self._session_ends(fault), fault)

    def _session_ends(self, fault: Fault) -> list[End]:
        frontend = self._some_frontend(fault)
        if frontend is None:
            return []
        self._note(fault, frontend.stable_name)
        self.checks.trouble(None, fault.lasts_s + KEEPALIVE_S)
        routers = [router.process for router in self.routers]
        return [end for router in routers for end in _ends_between(frontend.process, router)]

    async def worker_kill(self, fault: Fault) -> None:
        """A worker dies, and another takes its place."""
        await self._replace(self._some_worker(fault), fault)

    async def _replace(self, worker: SimWorker | None, fault: Fault) -> None:
        if worker is None:
            return
        self._note(fault, worker.stable_name)
        self.checks.trouble(worker, KEEPALIVE_S + fault.notice_s)
        await self._crash(worker, fault)
        await asyncio.sleep(fault.lasts_s)
        await self._start_worker(worker.stable_name, self._next_address(worker, fault))

    def _next_address(self, worker: SimWorker, fault: Fault) -> str:
        return worker.address if fault.pick_too < 0.5 else self._address()

    async def worker_stop(self, fault: Fault) -> None:
        """A worker's whole process stands still. Its health check sees that after two seconds."""
        worker = self._some_worker(fault)
        if worker is not None:
            await self._stop_worker(worker, fault)

    async def _stop_worker(self, worker: SimWorker, fault: Fault) -> None:
        self._note(fault, worker.stable_name, f"{fault.lasts_s:.3f}")
        self.checks.trouble(worker, fault.lasts_s + KEEPALIVE_S)
        worker.process.stop()
        worker.engine.freeze()
        await asyncio.sleep(min(2.0, fault.lasts_s))
        members = self._store.members(NAMESPACE)
        if fault.lasts_s > 2.0 and worker.is_serving:
            members.remove(worker.id)
            await asyncio.sleep(fault.lasts_s - 2.0)
            if worker.is_serving and worker.lease is not None:
                members.put(worker.lease.instance)
        worker.process.go_on()
        worker.engine.thaw()

    async def worker_freeze(self, fault: Fault) -> None:
        """A worker's accelerator hangs; its process is well."""
        worker = self._some_worker(fault)
        if worker is not None:
            await self._freeze_worker(worker, fault)

    async def _freeze_worker(self, worker: SimWorker, fault: Fault) -> None:
        self._note(fault, worker.stable_name, f"{fault.lasts_s:.3f}")
        self.checks.trouble(worker, fault.lasts_s)
        worker.engine.freeze()
        await asyncio.sleep(fault.lasts_s)
        worker.engine.thaw()

    async def worker_break(self, fault: Fault) -> None:
        """A worker's engine fails all it has and is given, until it is replaced."""
        worker = self._some_worker(fault)
        if worker is None:
            return
        self._note(fault, worker.stable_name)
        self.checks.trouble(worker, fault.lasts_s + KEEPALIVE_S + fault.notice_s)
        worker.engine.break_down(WorkerLost("the accelerator is gone", retryable=True))
        await asyncio.sleep(fault.lasts_s)
        if worker.is_serving:
            await self._crash(worker, fault)
            await self._start_worker(worker.stable_name, self._next_address(worker, fault))

    async def worker_drain(self, fault: Fault) -> None:
        """A worker is replaced as in a rollout, its successor before or after it."""
        worker = self._some_worker(fault)
        if worker is None:
            return
        self._note(fault, worker.stable_name)
        self.checks.trouble(worker, 30.0)
        if fault.pick_too < 0.5:
            await self._start_worker(worker.stable_name, self._address())
        if worker.is_serving:  # still, after the wait
            await worker.drain()
            await self._crash(worker, replace(fault, near_s=0.0, notice_s=0.0))
        if fault.pick_too >= 0.5:
            await self._start_worker(worker.stable_name, worker.address)

    async def router_kill(self, fault: Fault) -> None:
        """A router dies, and another takes its place."""
        router = self._some_router(fault)
        if router is None:
            return
        self._note(fault, router.process.name)
        await self._crash(router, fault)
        await asyncio.sleep(fault.lasts_s)
        await self._start_router(router.address)

    async def router_stop(self, fault: Fault) -> None:
        """A router stands still."""
        router = self._some_router(fault)
        if router is None:
            return
        self._note(fault, router.process.name, f"{fault.lasts_s:.3f}")
        self.checks.trouble(None, fault.lasts_s)
        router.process.stop()
        await asyncio.sleep(fault.lasts_s)
        router.process.go_on()

    async def frontend_stall(self, fault: Fault) -> None:
        """A frontend does not get round to reading."""
        frontend = self._some_frontend(fault)
        if frontend is None:
            return
        self._note(fault, frontend.stable_name, f"{fault.lasts_s:.3f}")
        self.checks.trouble(frontend, fault.lasts_s)
        self.checks.trouble(None, fault.lasts_s)
        await self._hold(tuple(frontend.process.ends), fault)

    async def frontend_kill(self, fault: Fault) -> None:
        """A frontend dies with all its requests, and another takes its place."""
        frontend = self._some_frontend(fault)
        if frontend is None:
            return
        self._note(fault, frontend.stable_name)
        await self._crash(frontend, fault)
        await asyncio.sleep(fault.lasts_s)
        await self._start_frontend(frontend.stable_name, self._address())

    async def registry_lost(self, fault: Fault) -> None:
        """Nobody can reach the registry."""
        self._note(fault, f"{fault.lasts_s:.3f}")
        self.checks.trouble(None, fault.lasts_s)
        self._outages += 1
        for peer in self._everybody():
            peer.discovery.lose()
        await asyncio.sleep(fault.lasts_s)
        self._outages -= 1
        for peer in self._everybody():
            peer.discovery.find()

    async def registry_stale(self, fault: Fault) -> None:
        """One frontend or router hears nothing from the registry."""
        there: list[Peer] = [*self.frontends, *self.routers, *self.indexers]
        if self._kv is not None:
            there += self.workers  # their publishers follow the indexers
        peer = _picked(there, fault.pick)
        self._note(fault, peer.process.name, f"{fault.lasts_s:.3f}")
        self.checks.trouble(None, fault.lasts_s)
        peer.discovery.lose()
        await asyncio.sleep(fault.lasts_s)
        peer.discovery.find()

    async def registry_flap(self, fault: Fault) -> None:
        """Some processes vanish from the registry for a while, though they live."""
        members = self._store.members(NAMESPACE)
        rng = Random(fault.pick)
        gone = [peer for peer in self._alive() if peer.lease is not None and rng.random() < 0.5]
        self._note(fault, *(peer.process.name for peer in gone), f"{fault.lasts_s:.3f}")
        self.checks.trouble(None, fault.lasts_s)
        for peer in gone:
            members.remove(peer.id)
        await asyncio.sleep(fault.lasts_s)
        for peer in gone:
            has_left = isinstance(peer, SimWorker) and peer.left_at is not None
            if peer.process.is_alive and peer.lease is not None and not has_left:
                members.put(peer.lease.instance)

    # -- faults of the KV plane -----------------------------------------------------------------

    async def prefill_kill(self, fault: Fault) -> None:
        """A prefill worker dies amid a handoff."""
        await self._replace(await self._amid_handoff(fault, "prefill"), fault)

    async def decode_kill(self, fault: Fault) -> None:
        """A decode worker dies while it waits for KV."""
        await self._replace(await self._amid_handoff(fault, "decode"), fault)

    async def pair_kill(self, fault: Fault) -> None:
        """A prefill and a decode worker die at once."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._replace(await self._amid_handoff(fault, "decode"), fault))
            there = self._strikable("prefill")
            if there:
                prefill = _picked(there, fault.pick_too)
                tasks.create_task(self._replace(prefill, fault))

    async def prefill_hang(self, fault: Fault) -> None:
        """A prefill worker hangs amid a handoff: its accelerator, or all of it."""
        await self._hang(await self._amid_handoff(fault, "prefill"), fault)

    async def decode_hang(self, fault: Fault) -> None:
        """A decode worker hangs while it waits for KV."""
        await self._hang(await self._amid_handoff(fault, "decode"), fault)

    async def _hang(self, worker: SimWorker | None, fault: Fault) -> None:
        if worker is not None:
            strike = self._freeze_worker if fault.pick_too < 0.5 else self._stop_worker
            await strike(worker, fault)

    def _handoff_end(self, fault: Fault) -> End | None:
        """The decode side of some handoff that is under way."""
        engines = [worker.process for worker in self._strikable("prefill")]
        ends = [
            end
            for worker in self._strikable("decode")
            for engine in engines
            for end in _ends_between(worker.process, engine)
        ]
        return _picked(ends, fault.pick) if ends else None

    async def _soon(self, fault: Fault) -> End | None:
        for _ in range(round(AMID_S / LOOK_S)):
            if (end := self._handoff_end(fault)) is not None:
                break
            await asyncio.sleep(LOOK_S)
        if end is not None and end.peer is not None:
            self._note(fault, end.owner.name, end.peer.owner.name)
            for worker in self.workers:
                if worker.process in (end.owner, end.peer.owner):
                    self.checks.trouble(worker, fault.lasts_s + KEEPALIVE_S)
        return end

    async def handoff_cut(self, fault: Fault) -> None:
        """The link of one handoff breaks."""
        end = await self._soon(fault)
        if end is not None and end.peer is not None:
            self._cut(end, fault)

    async def handoff_hold(self, fault: Fault) -> None:
        """The link of one handoff stands still, one way or both ways, then goes on."""
        end = await self._soon(fault)
        if end is not None and end.peer is not None:
            await self._hold([end, end.peer] if fault.near_s < 1 else [end], fault)

    async def handoff_refused(self, fault: Fault) -> None:
        """A prefill worker's handoffs are out of reach."""
        there = self._strikable("prefill")
        if not there or self._kv is None:
            return
        worker = _picked(there, fault.pick)
        handoff = worker.engine.config.handoff
        address = kv_address(handoff.host, handoff.port)
        self._note(fault, worker.stable_name, f"{fault.lasts_s:.3f}")
        # Whoever was with it, or would have been, fails with it.
        for one in self.workers:
            self.checks.trouble(one, fault.lasts_s)
        self._kv.refused.add(address)
        await asyncio.sleep(fault.lasts_s)
        self._kv.refused.discard(address)

    async def indexer_kill(self, fault: Fault) -> None:
        """An indexer dies, and an empty one takes its place."""
        indexer = self._some_indexer(fault)
        if indexer is None:
            return
        self._note(fault, indexer.process.name)
        await self._crash(indexer, fault)
        await asyncio.sleep(fault.lasts_s)
        same = fault.pick_too < 0.5
        await self._start_indexer(indexer.address if same else self._address())

    async def indexer_stop(self, fault: Fault) -> None:
        """An indexer stands still."""
        indexer = self._some_indexer(fault)
        if indexer is None:
            return
        self._note(fault, indexer.process.name, f"{fault.lasts_s:.3f}")
        indexer.process.stop()
        await asyncio.sleep(fault.lasts_s)
        indexer.process.go_on()

    def _some_indexer(self, fault: Fault) -> SimIndexer | None:
        there = [i for i in self.indexers if i.process.is_alive and i.lease is not None]
        return _picked(there, fault.pick) if there else None

    def _feed_end(self, fault: Fault) -> End | None:
        """Some stream from a worker to an indexer, or from there to a router."""
        indexer = self._some_indexer(fault)
        ends = [end for end in indexer.process.ends if end.peer is not None] if indexer else []
        if not ends:
            return None
        end = _picked(ends, fault.pick_too)
        assert end.peer is not None, "those without were left out"
        self._note(fault, end.owner.name, end.peer.owner.name)
        return end

    async def feed_cut(self, fault: Fault) -> None:
        """A stream of KV events breaks."""
        end = self._feed_end(fault)
        if end is not None:
            self._cut(end, fault)

    async def feed_hold(self, fault: Fault) -> None:
        """A stream of KV events stands still."""
        end = self._feed_end(fault)
        if end is not None:
            await self._hold([end], fault)

    async def events_garbled(self, fault: Fault) -> None:
        """Batches of KV events are lost, doubled and overtaken."""
        if self._kv is None:
            return
        self._note(fault, f"{fault.lasts_s:.3f}")
        self._kv.garble.rate += 0.3
        await asyncio.sleep(fault.lasts_s)
        self._kv.garble.rate = max(0.0, self._kv.garble.rate - 0.3)

    async def events_lost(self, fault: Fault) -> None:
        """An engine's events are lost before they are numbered."""
        worker = self._some_worker(fault)
        if worker is not None and worker.publisher is not None:
            self._note(fault, worker.stable_name)
            worker.has_forgotten = True
            worker.publisher.lose(0, "a fault")

    async def cache_reset(self, fault: Fault) -> None:
        """An engine evicts all it can and begins a new epoch."""
        worker = self._some_worker(fault)
        if worker is not None and worker.publisher is not None:
            self._note(fault, worker.stable_name)
            worker.has_forgotten = True
            worker.engine.flush_cache()
            worker.publisher.reset(0)


def _picked(there: Sequence[T], pick: float) -> T:
    return there[int(pick * len(there))]


def _ends_between(near: Process, far: Process) -> list[End]:
    return [end for end in near.ends if end.peer is not None and end.peer.owner is far]
