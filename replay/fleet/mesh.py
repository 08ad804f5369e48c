"""A fleet in virtual time: cells, each a mesh of its own, and the choice of a cell (pure).

Routers, their replication and the index are the production cores; workers are `FleetWorker`s. All
routers of a cell follow one copy of its index. Delays are those of a real mesh: routers receive
blocks and loads after `index_lag_s`, and each other's bookings in frames of `sync_batch_s`. A cell
is chosen by the requests that each cell had in progress at the last of its reports.

`decide`, `make_frame` and the methods that begin with `apply_` are where a subclass may count.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np

from common.kv.hashing import hashes_to_bytes
from common.kv.load import LOAD_HEARTBEAT_S, Load
from common.registry.instances import Snapshot
from common.request.placement import Query
from replay.engine import WorkerSettings
from replay.fleet.cells import choose_cell
from replay.fleet.worker import CacheChange, FleetWorker, Prompt
from replay.mesh import REPORT_S, ReplayIndex
from replay.policies import POLICIES, ReplayPolicy
from replay.routers import MODEL, ReplayPeer, connect, open_peer, worker_snapshot
from replay.trace import TraceRequest
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.policy import Policy
from router_svc.core.replication import DIGEST_S, Frame, OutboundSync
from router_svc.core.router import Router
from router_svc.core.shortlist import CANDIDATES_MAX


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """workers: of all cells, which have equally many. routers: of each cell."""

    workers: int
    cells: int = 1
    routers: int = 1
    worker: WorkerSettings = field(default=WorkerSettings())
    key_blocks: int = 9
    """The block of a prompt that chooses its cell: 1: the first one, so that a system prompt has
    one cell; more: the first one of the conversation's own."""

    bound: float = 1.25
    """Of the load of a cell, as a multiple of the mean."""

    cell_report_s: float = 0.5
    candidates_max: int = CANDIDATES_MAX
    """Most workers whose cost a decision computes."""

    report_s: float = REPORT_S
    """Between two load reports of a busy worker."""

    index_lag_s: float = 0.02
    sync_batch_s: float = 0.01
    seed: int = 1


@dataclass(slots=True)
class FleetOutcome:
    """The course of one request."""

    at_s: float
    input_tokens: int
    cell: int
    cached_tokens: int = 0
    ttft_s: float | None = None


@dataclass(slots=True, eq=False)
class Cell:
    """Routers and workers of one mesh."""

    number: int
    first_worker: int
    """Number of the first of its workers."""

    workers: list[FleetWorker]
    index: ReplayIndex
    peers: list[ReplayPeer]
    requests: int = 0
    """In progress."""

    reported: int = 0
    """Requests in progress at its last report."""

    ticks: int = 0


@dataclass(slots=True, eq=False)
class _Active:
    outcome: FleetOutcome
    key: BookingKey
    peer: ReplayPeer
    cell: Cell
    worker: int
    """Number in its cell."""

    prompt: Prompt


class FleetMesh:
    """One run. Call `run` once."""

    def __init__(self, settings: FleetSettings, policy: ReplayPolicy = POLICIES["kv"]) -> None:
        if settings.workers % settings.cells:
            raise ValueError(
                f"{settings.workers} workers cannot be divided into {settings.cells} equal cells"
            )
        self.settings = settings
        self.now = 0.0
        self._policy = policy
        self._rng = Random(settings.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        size = settings.workers // settings.cells
        self.cells = [self._make_cell(number, size) for number in range(settings.cells)]
        self._active: dict[Prompt, _Active] = {}
        # Numbers of the routers of which one is scheduled.
        self._flushes: set[int] = set()

    def fill(self, worker: int, names: Sequence[int]) -> None:
        """Puts the blocks of a prompt into the cache of a worker and the index, before `run`."""
        cell, number = self._cell_of(worker)
        change = cell.workers[number].fill(names)
        cell.index.update(number, change.stored, change.evicted)

    def run(self, requests: Iterable[TraceRequest]) -> list[FleetOutcome]:
        """Returns the courses of the requests, which arrive in order, after all have a first
        token."""
        outcomes: list[FleetOutcome] = []
        self._schedule(0.0, self._report_cells)
        for cell in self.cells:
            self._schedule(0.0, partial(self._report_loads, cell))
            for peer in cell.peers:
                if peer.outbound:
                    self._schedule(self._rng.random() * DIGEST_S, partial(self._tick, cell, peer))
        for request in requests:
            self._advance(request.at_s)
            self.now = request.at_s
            outcomes.append(self._arrive(request))
        while any(outcome.ttft_s is None for outcome in reversed(outcomes)):
            self._advance(self.now + 1.0)
        return outcomes

    # What routers do, and what a network carries.

    def decide(self, peer: ReplayPeer, query: Query, key: BookingKey) -> DecisionRecord:
        record = peer.router.admit(query, key, self.now, peer.rng, peer.session)
        assert isinstance(record, DecisionRecord), "there is no queue"
        return record

    def make_frame(self, outbound: OutboundSync) -> Frame:
        return outbound.frame(self.now)

    def apply_frame(self, sender: ReplayPeer, receiver: ReplayPeer, frame: Frame) -> None:
        stream = receiver.streams[sender.number]
        if receiver.replica.apply_frame(sender.number, stream, frame, self.now):
            sender.outbound[receiver.number].request_full_sync()

    def apply_change(self, cell: Cell, worker: int, change: CacheChange) -> None:
        cell.index.update(worker, change.stored, change.evicted)

    def apply_loads(self, cell: Cell, loads: Sequence[tuple[int, Load]]) -> None:
        """loads: with the number of the worker."""
        for peer in cell.peers:
            report = peer.router.load_tracker.report
            for worker, load in loads:
                report(worker + 1, 0, load, self.now)

    # Requests.

    def _arrive(self, request: TraceRequest) -> FleetOutcome:
        settings = self.settings
        cell = self.cells[0]
        if len(self.cells) > 1:
            key = request.hash_ids[: settings.key_blocks][-1] if request.hash_ids else 0
            loads = [float(cell.reported) for cell in self.cells]
            cell = self.cells[choose_cell(key, loads, settings.bound)]
        peer = cell.peers[self._rng.randrange(len(cell.peers))]
        names = [name + 1 for name in request.hash_ids]
        size = settings.worker.block_size
        hashes = np.array(names[: request.input_tokens // size], dtype=np.uint64)
        query = Query(
            MODEL, request.input_tokens, hashes_to_bytes(hashes), int(len(hashes) > 0), size
        )
        self._event_count += 1
        booking = BookingKey(peer.number + 1, str(self._event_count), 0)
        record = self.decide(peer, query, booking)
        outcome = FleetOutcome(self.now, request.input_tokens, cell.number)
        worker = record.decision.worker.worker_id - 1
        prompt = Prompt(hashes.tolist(), request.input_tokens, request.output_tokens)
        self._active[prompt] = _Active(outcome, booking, peer, cell, worker, prompt)
        cell.requests += 1
        cell.reported += 1
        cell.workers[worker].submit(prompt)
        self._start(cell, worker)
        self._flush_soon(peer)
        return outcome

    def _start(self, cell: Cell, worker: int) -> None:
        started = cell.workers[worker].start()
        if started is not None:
            prompt, seconds = started
            self._schedule(self.now + seconds, partial(self._finish_prompt, self._active[prompt]))

    def _finish_prompt(self, active: _Active) -> None:
        cell, prompt = active.cell, active.prompt
        change, response_s = cell.workers[active.worker].finish_prompt()
        active.outcome.ttft_s = self.now - active.outcome.at_s
        active.outcome.cached_tokens = prompt.cached_blocks * self.settings.worker.block_size
        active.peer.router.load_tracker.mark_prefill_done(active.key)
        self._flush_soon(active.peer)
        if change.stored or change.evicted:
            at_s = self.now + self.settings.index_lag_s
            self._schedule(at_s, partial(self.apply_change, cell, active.worker, change))
        self._schedule(self.now + response_s, partial(self._end, active))
        self._start(cell, active.worker)

    def _end(self, active: _Active) -> None:
        del self._active[active.prompt]
        active.cell.requests -= 1
        active.cell.workers[active.worker].end(active.prompt)
        active.peer.router.load_tracker.free(active.key)
        self._flush_soon(active.peer)

    # What routers learn.

    def _report_cells(self) -> None:
        for cell in self.cells:
            cell.reported = cell.requests
        self._schedule(self.now + self.settings.cell_report_s, self._report_cells)

    def _report_loads(self, cell: Cell) -> None:
        cell.ticks += 1
        # An idle worker repeats its load.
        beats = max(1, round(LOAD_HEARTBEAT_S / self.settings.report_s))
        loads = [
            (number, worker.load())
            for number, worker in enumerate(cell.workers)
            if not worker.is_idle or number % beats == cell.ticks % beats
        ]
        at_s = self.now + self.settings.index_lag_s
        self._schedule(at_s, partial(self.apply_loads, cell, loads))
        self._schedule(self.now + self.settings.report_s, partial(self._report_loads, cell))

    def _flush_soon(self, peer: ReplayPeer) -> None:
        if peer.outbound and peer.number not in self._flushes:
            self._flushes.add(peer.number)
            self._schedule(self.now + self.settings.sync_batch_s, partial(self._flush, peer))

    def _tick(self, cell: Cell, peer: ReplayPeer) -> None:
        self._flush(peer)
        self._schedule(self.now + DIGEST_S, partial(self._tick, cell, peer))

    def _flush(self, peer: ReplayPeer) -> None:
        """Sends the unsent changes of a router, and digests that are due."""
        self._flushes.discard(peer.number)
        peers = self.cells[peer.number // self.settings.routers].peers
        first = peers[0].number
        for receiver, outbound in peer.outbound.items():
            if outbound.seconds_until_due(self.now) == 0:
                self.apply_frame(peer, peers[receiver - first], self.make_frame(outbound))

    def _schedule(self, at_s: float, call: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (at_s, self._event_count, call))

    def _advance(self, until_s: float) -> None:
        events = self._events
        while events[0][0] <= until_s:
            self.now, _, call = heapq.heappop(events)
            call()
        self.now = until_s

    # Parts.

    def _cell_of(self, worker: int) -> tuple[Cell, int]:
        size = len(self.cells[0].workers)
        return self.cells[worker // size], worker % size

    def _make_cell(self, number: int, size: int) -> Cell:
        settings = self.settings
        cell = Cell(
            number,
            number * size,
            [FleetWorker(settings.worker) for _ in range(size)],
            ReplayIndex(size, settings.candidates_max),
            [],
        )
        snapshot = worker_snapshot(settings.worker, ["aggregated"] * size)
        for router in range(settings.routers):
            cell.peers.append(self._make_peer(cell, snapshot, number * settings.routers + router))
        connect(cell.peers)
        return cell

    def _make_peer(self, cell: Cell, snapshot: Snapshot, number: int) -> ReplayPeer:
        policy = self._policy
        router = Router(
            policy.make_selector({}),
            index=cell.index,
            index_settings=policy.index_settings,
            cost_settings=policy.cost_settings,
            policy=Policy(candidates_max=self.settings.candidates_max),
        )
        router.update(snapshot, 0.0)
        return open_peer(router, number, self.settings.seed)
