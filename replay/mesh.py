"""A mesh in virtual time: routers, their index, and workers, driven by the requests of a trace.

Routers, their replication, the index and the workers are the production cores. The clock jumps from
event to event; decisions take no time. Routers learn of cached blocks and of loads `index_lag_s`
after the change, and of each other's bookings and prompts `sync_lag_s` after it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import numpy as np

from common.errors import Overloaded
from common.kv.events import Hashes, Source
from common.kv.hashing import hashes_from_bytes, hashes_to_bytes
from common.kv.load import LOAD_HEARTBEAT_S, Load
from common.kv.prefix_index import AdvertisedBlocks, PrefixIndex, SourceMatch
from common.registry.instances import Role
from common.request.placement import Decision, Placement, Query
from replay.engine import KvChange, ReplayWorker, WorkerSettings, prompt_hashes
from replay.policies import ReplayPolicy
from replay.routers import MODEL, ReplayPeer, connect, open_peer, worker_snapshot
from replay.trace import TraceRequest
from router_svc.core.admission import QueuedRequest
from router_svc.core.booking import BookingKey
from router_svc.core.candidate import Leg
from router_svc.core.decision import DecisionRecord
from router_svc.core.overlap import IndexStatus
from router_svc.core.policy import DEFAULT_POLICY, Policy
from router_svc.core.replication import Frame
from router_svc.core.router import Router
from worker_svc.engines.sim.scheduler import SimSequence
from worker_svc.kv_events.external_events import PagesStored

REPORT_S = 0.1
# Work of the index that is put off until it is idle.
_SWEEP_BLOCKS = 1 << 16


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """The size and the settings of a replayed mesh."""

    workers: int = 8
    """Number of workers."""

    prefill_workers: int = 0
    """The first so many workers prefill and the others decode; 0: all do both."""

    routers: int = 1
    """Number of routers."""

    index_lag_s: float = 0.02
    sync_lag_s: float = 0.005
    worker: WorkerSettings = field(default=WorkerSettings())
    speeds: tuple[float, ...] = ()
    """Of the first workers, as multiples of the others; 0: the worker accepts requests and computes
    nothing."""

    rules: Policy = DEFAULT_POLICY
    """Queue and bypass of the routers."""

    with_hints: bool = False
    """Requests name their conversation."""

    is_tokenized: bool = True
    """False: bodies pass through, so that routers see neither their length nor their blocks."""

    has_indexer: bool = True
    """False: routers receive no KV events."""

    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """The course of one request. Times are seconds."""

    at_s: float
    input_tokens: int
    output_tokens: int
    """Less than in the trace if the cache is too small."""

    worker: int = 0
    """Number of the worker, from 0."""

    prefill: int | None = None
    """Number of the worker of its prefill leg; None: not split."""

    cached_tokens: int = 0
    ttft_s: float | None = None
    """Time to the first token; None if no token came."""

    refusal: str = ""
    """Reason of the router's error."""

    end_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Requests at each worker at one moment."""

    at_s: float
    requests: tuple[int, ...]


@dataclass(slots=True)
class ReplayResult:
    """The result of one replay."""

    outcomes: list[Outcome]
    samples: list[LoadSample] = field(default_factory=list)
    truncated: int = 0
    """Requests cut to the size of the cache."""

    preemptions: int = 0


class ReplayIndex:
    """The index that all routers follow."""

    def __init__(
        self, workers: int, rows_max: int | None = None, *, has_indexer: bool = True
    ) -> None:
        """has_indexer: False: it stays empty."""
        self._index = PrefixIndex(rows_max)
        self._has_indexer = has_indexer
        self._sources = [self._add(number) for number in range(workers)]

    def match(self, query: Query) -> Sequence[SourceMatch]:
        return self._index.match(hashes_from_bytes(query.prefix_hashes))

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact" if self._has_indexer else "none")

    def apply(self, worker: int, changes: Sequence[KvChange], now: float) -> None:
        if not self._has_indexer:
            return
        source = self._sources[worker]
        for change in changes:
            hashes: Hashes = np.array(change.hashes, dtype=np.uint64)
            if isinstance(change, PagesStored):
                self._index.store(source, hashes)
            else:
                self._index.remove(source, hashes)
        self._index.sweep(_SWEEP_BLOCKS)

    def update(self, worker: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        """Removes blocks of a worker, then stores others."""
        source = self._sources[worker]
        self._index.remove(source, np.array(removed, dtype=np.uint64))
        self._index.store(source, np.array(stored, dtype=np.uint64))
        self._index.sweep(_SWEEP_BLOCKS)

    def _add(self, worker: int) -> AdvertisedBlocks:
        source = self._index.add_source(Source(worker + 1))
        self._index.set_visible(source, True)
        return source


@dataclass(slots=True, eq=False)
class _Active:
    """A request at a router or at workers. peer: the number of its router. sequence, prefill: at
    the engines, once it is placed; prefill: None: not split.
    """

    number: int
    request: TraceRequest
    hashes: Hashes
    outcome: Outcome
    key: BookingKey
    peer: int
    sequence: SimSequence | None = None
    prefill: SimSequence | None = None


class ReplayMesh:
    """One run of one policy. Call `run` once."""

    def __init__(self, settings: MeshSettings, policy: ReplayPolicy) -> None:
        self._settings = settings
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._event_count = 0
        self._rng = Random(settings.seed)
        self._index = ReplayIndex(settings.workers, has_indexer=settings.has_indexer)
        self._reports: dict[Placement, Load] = {}
        self._last_sent: dict[int, tuple[float, Load]] = {}
        self._workers = [self._make_worker(number) for number in range(settings.workers)]
        self._active: dict[SimSequence, _Active] = {}
        self._queued: dict[BookingKey, _Active] = {}
        self._arrivals_left = 0
        self._peers = [self._make_peer(policy, number) for number in range(settings.routers)]
        connect(self._peers)

    def run(
        self, requests: Sequence[TraceRequest], on_progress: Callable[[int], None] = lambda _: None
    ) -> ReplayResult:
        """Replays the requests until all are answered. on_progress: called with their number."""
        settings = self._settings
        result = ReplayResult([])
        self._arrivals_left = len(requests)
        sample_s = max(REPORT_S, requests[-1].at_s / 300)
        next_sample_s = 0.0
        arrivals = iter(enumerate(requests))
        arrival = next(arrivals, None)
        next_report_s = 0.0
        while arrival is not None or self._has_work():
            event_s = self._events[0][0] if self._events else float("inf")
            arrival_s = float("inf") if arrival is None else arrival[1].at_s
            if next_report_s <= min(event_s, arrival_s):
                self._now = next_report_s
                next_report_s += REPORT_S
                self._report_loads()
                if self._now >= next_sample_s:
                    next_sample_s += sample_s
                    loads = [w.scheduler.running + w.scheduler.waiting for w in self._workers]
                    result.samples.append(LoadSample(self._now, tuple(loads)))
            elif arrival is not None and arrival_s <= event_s:
                self._now = arrival_s
                number, request = arrival
                fitted = _fit(request, settings.worker)
                result.truncated += fitted is not request
                result.outcomes.append(self._arrive(number, fitted))
                on_progress(number + 1)
                arrival = next(arrivals, None)
            else:
                self._now, _, call = heapq.heappop(self._events)
                call(self._now)
        result.preemptions = sum(worker.scheduler.preemptions for worker in self._workers)
        return result

    def _has_work(self) -> bool:
        stuck = {n for n, speed in enumerate(self._settings.speeds) if speed == 0}
        if not stuck or self._queued:
            return bool(self._active or self._queued)
        outcomes = (active.outcome for active in self._active.values())
        return any(stuck.isdisjoint((outcome.worker, outcome.prefill)) for outcome in outcomes)

    def _schedule(self, at_s: float, call: Callable[[float], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (at_s, self._event_count, call))

    # Requests.

    def _arrive(self, number: int, request: TraceRequest) -> Outcome:
        now = self._now
        peer_number = self._rng.randrange(len(self._peers))
        peer = self._peers[peer_number]
        hashes = prompt_hashes(request, self._settings.worker.block_size)
        query = self._query(request, hashes)
        key = BookingKey(peer_number + 1, str(number), 0)
        outcome = Outcome(now, request.input_tokens, request.output_tokens)
        active = _Active(number, request, hashes, outcome, key, peer_number)
        try:
            placed = peer.router.admit(query, key, now, peer.rng, peer.session)
        except Overloaded as error:
            outcome.refusal = error.reason
            return outcome
        if isinstance(placed, QueuedRequest):
            self._queued[key] = active
            self._serve_queue(peer)
        else:
            self._start(active, placed.decision)
        return outcome

    def _query(self, request: TraceRequest, hashes: Hashes) -> Query:
        settings = self._settings
        target_s = request.ttft_target_s
        query = Query(
            MODEL,
            strict_priority=request.level,
            tenant=request.tenant,
            affinity_key=request.session if settings.with_hints else 0,
            ttft_target_ms=None if target_s is None else target_s * 1000,
        )
        if settings.is_tokenized:
            query.total_tokens, query.block_size = request.input_tokens, settings.worker.block_size
            query.prefix_hashes, query.hash_scheme = hashes_to_bytes(hashes), int(len(hashes) > 0)
        return query

    def _start(self, active: _Active, decision: Decision) -> None:
        """Sends a placed request to its workers."""
        self._sync(active.peer)
        now, outcome = self._now, active.outcome
        outcome.worker = decision.worker.worker_id - 1
        leg: Leg = "whole"
        if decision.prefill is not None:
            leg, outcome.prefill = "decode", decision.prefill.worker_id - 1
            active.prefill = self._submit(active, outcome.prefill, "prefill")
        active.sequence = self._submit(active, outcome.worker, leg)
        for worker in (outcome.worker, outcome.prefill):
            if worker is not None:
                self._workers[worker].wake(now)

    def _submit(self, active: _Active, worker: int, leg: Leg) -> SimSequence:
        sequence = self._workers[worker].submit(active.number, active.request, active.hashes, leg)
        self._active[sequence] = active
        return sequence

    def _serve_queue(self, peer: ReplayPeer) -> None:
        """Places queued requests for which there is capacity; drops those that waited too long."""
        queue, now = peer.router.queue, self._now
        if not queue:
            return
        for queued in queue.pop_overdue(now):
            del self._queued[queued.key]
        if queue.has_dirty:
            for queued, result in peer.router.rescan(now, peer.rng):
                if isinstance(result, DecisionRecord):
                    self._start(self._queued.pop(queued.key), result.decision)
                elif result is not None:
                    self._queued.pop(queued.key).outcome.refusal = result.reason

    def _on_tokens(self, sequences: Sequence[SimSequence], now: float) -> None:
        peers: set[int] = set()
        for sequence in sequences:
            if len(sequence.output) > 1 and not sequence.is_ended:
                continue
            active = self._active[sequence]
            outcome, load_tracker = active.outcome, self._peers[active.peer].router.load_tracker
            load_tracker.expire(now)
            peers.add(active.peer)
            if sequence is active.prefill:
                del self._active[sequence]
                outcome.cached_tokens = sequence.cached_tokens or 0
                load_tracker.mark_prefill_done(active.key)
                self._hand_over(active, now)
                continue
            if outcome.ttft_s is None:
                outcome.ttft_s = now - outcome.at_s
                outcome.cached_tokens = sequence.cached_tokens or 0
                load_tracker.mark_prefill_done(active.key)
            if sequence.is_ended:
                outcome.end_s = now
                load_tracker.free(active.key)
                del self._active[sequence]
        for peer in sorted(peers):
            self._sync(peer)
            self._serve_queue(self._peers[peer])

    def _on_allocated(self, sequences: Sequence[SimSequence], now: float) -> None:
        for sequence in sequences:
            self._hand_over(self._active[sequence], now)

    def _hand_over(self, active: _Active, now: float) -> None:
        """Starts the transfer if the prompt is computed and decode has its blocks."""
        prefill, decode, at = active.prefill, active.sequence, active.outcome.prefill
        if prefill is None or decode is None or at is None:
            return
        if prefill.transfer is None or decode.transfer is None:
            return
        sender, receiver = self._workers[at], self._workers[active.outcome.worker]

        def arrive(now: float) -> None:
            sender.finish_sending(prefill, now)
            receiver.receive_kv(decode, prefill.cached_tokens or 0, now)

        self._schedule(sender.reserve_link(len(prefill.transfer.blocks), now), arrive)

    # What routers learn.

    def _report_loads(self) -> None:
        for number, worker in enumerate(self._workers):
            load = worker.load()
            sent = self._last_sent.get(number)
            if sent is None or sent[1] != load or self._now - sent[0] >= LOAD_HEARTBEAT_S:
                self._last_sent[number] = (self._now, load)
                arrival_s = self._now + self._settings.index_lag_s
                self._schedule(arrival_s, partial(self._receive_load, number + 1, load))

    def _receive_load(self, worker_id: int, load: Load, now: float) -> None:
        self._reports[Placement(worker_id, 0)] = load
        for peer in self._peers:
            peer.router.load_tracker.report(worker_id, 0, load, now)
            self._serve_queue(peer)

    def _on_kv_changes(self, number: int, changes: Sequence[KvChange], now: float) -> None:
        arrival_s = now + self._settings.index_lag_s
        self._schedule(arrival_s, partial(self._index.apply, number, changes))

    def _sync(self, sender: int) -> None:
        """Sends the unsent bookings of a router to its peers."""
        for receiver, outbound in self._peers[sender].outbound.items():
            if outbound.seconds_until_due(self._now) == 0:
                frame = outbound.frame(self._now)
                arrival_s = self._now + self._settings.sync_lag_s
                self._schedule(arrival_s, partial(self._apply_frame, sender, receiver, frame))

    def _apply_frame(self, sender: int, receiver: int, frame: Frame, now: float) -> None:
        peer = self._peers[receiver]
        if peer.replica.apply_frame(sender, peer.streams[sender], frame, now):
            self._peers[sender].outbound[receiver].request_full_sync()
        self._serve_queue(peer)

    # Parts.

    def _make_worker(self, number: int) -> ReplayWorker:
        settings, speeds = self._settings.worker, self._settings.speeds
        speed = speeds[number] if number < len(speeds) else 1.0
        timing = replace(settings.timing, speedup=settings.timing.speedup * (speed or 1.0))
        return ReplayWorker(
            replace(settings, timing=timing),
            self._schedule,
            self._on_tokens,
            partial(self._on_kv_changes, number),
            self._on_allocated,
            is_stuck=speed == 0,
        )

    def _make_peer(self, policy: ReplayPolicy, number: int) -> ReplayPeer:
        settings = self._settings
        router = Router(
            policy.make_selector(self._reports),
            index=self._index,
            index_settings=policy.index_settings,
            cost_settings=policy.cost_settings,
            policy=settings.rules,
        )
        roles = (_role(worker, settings.prefill_workers) for worker in range(settings.workers))
        router.update(worker_snapshot(settings.worker, roles), 0.0)
        return open_peer(router, number, settings.seed)


def _role(number: int, prefill_workers: int) -> Role:
    if not prefill_workers:
        return "aggregated"
    return "prefill" if number < prefill_workers else "decode"


def _fit(request: TraceRequest, sizes: WorkerSettings) -> TraceRequest:
    """Returns the request, cut so that prompt and output fit the cache of a worker."""
    tokens_max = sizes.total_blocks * sizes.block_size
    if request.input_tokens + request.output_tokens <= tokens_max:
        return request
    output_tokens = min(request.output_tokens, tokens_max // 2)
    input_tokens = min(request.input_tokens, tokens_max - output_tokens)
    return replace(request, input_tokens=input_tokens, output_tokens=output_tokens)
