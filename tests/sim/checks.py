"""The rules of a simulated run. A violation is recorded and does not end the run.

Rules about requests, by name: `once`, `tokens`, `usage`, `finish` (each request ends once, with the
output of the model); `errors`, `retries` (a fault explains each of them); `placed` (soon, whatever
routers do); `submit`, `admit`, `role` (a worker that left gets no requests; each worker gets only
requests of its role); `pair` (a pair is one transaction: if a leg fails before decode has delivered
tokens, the other leg ends soon); `abort` (a request ends soon after its client disconnected);
`pages` (a KV page holds only data of its owner); `credit` (a stalled frontend stalls its streams);
`backlog` (a subscriber that reads slowly is cut); `slow` (so is a client); `adapter` (a request for
an adapter reaches a worker that has it, and names it); `cache` (cached tokens were sent before,
with the same adapter); `bounded` (all requests end soon after the last fault).

Rules about the mesh at rest: `index`, `rest` (soon after the last request the index matches the
engines, and nothing is left open, then and at the end); `known` (by then each process has the
newest list of the mesh and excludes no worker); `bookings` (all routers have the same bookings);
`predicted`, `recovered` (a new request is served at once, with the cached tokens that the index
predicts); `departed` (a model that left for good is unavailable, with a retry time); `log` (no
service logged an internal error). The rules about single decisions of routers are in `ledger.py`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import (
    DeadlineExceeded,
    InternalError,
    MeshError,
    Overloaded,
    RequestCancelled,
    Unavailable,
    WorkerLost,
)
from common.kv.events import Source
from common.kv.index_feed import IndexFeed
from common.request.placement import Decision
from common.request.preprocessed import FinishReason
from common.request.token_stream import CREDIT_BYTES, FRAME_BYTES, LegRequest
from common.streams.silence import SESSION
from frontend_svc.request.placement_request import PlacementKey
from frontend_svc.request.types import RequestOutcome
from frontend_svc.routers.monitor import UNROUTED_AFTER_S
from indexer_svc.core.subscriber import BatchUpdate
from tests.sim.clients import DEADLINE_S, Client
from tests.sim.fleet import Peer, SimFrontend, SimIndexer, SimRouter, SimWorker
from worker_svc.engines.handoff import NO_BLOCKS

ATTEMPTS_MAX = 4
BLOCK_SIZE = 16
# Of the retry budget of a frontend (64), at least this many retries must have happened before it
# may report the budget as used up.
RETRIES_MANY = 30
# Discovery shows changes within this time, while it is reachable.
REGISTRY_LAG_MAX_S = 0.5
# Consequences of a fault (missed heartbeats, accept_s) may come this long after its end.
AFTERMATH_S = 5.0
# A worker counts as available if it was healthy and known to all processes for this long.
SETTLED_S = 5.0
# A disconnect reaches the worker and takes effect within this time, without faults: 250 ms and
# network delays.
ABORT_S = 0.7

# Whatever routers do, a request has a placement by then: a router may begin to hang at the end of
# the silence timeout of another.
PLACEMENT_MAX_S = UNROUTED_AFTER_S + SESSION.limit_s + SESSION.heartbeat_s + 0.2

# All routers have the current state of a booking this long after it was made or changed.
BOOKINGS_SYNC_MAX_S = 1.5

# Reasons of a router to reject a request that waited in its queue, or did not fit into it.
QUEUE_REJECTIONS = ("QUEUE_FULL", "QUEUE_TIMEOUT")

# Stands for routers, and for the links and the registry through which they are reached.
CONTROL_PLANE = 0

# Each handoff room of an engine ends in one of these ways.
ROOM_OUTCOMES = (
    *("rooms_handed_over", "rooms_aborted", "rooms_failed", "rooms_timed_out"),
    *("leases_expired", "aborts_forced"),
)

# Coroutines that a mesh at rest may run in addition to those of its start, mainly for open streams.
# Any other coroutine is a leak.
EXPECTED_COROUTINES = frozenset(
    {
        "_run",
        "RouterClient._return_to_home_router",
        "RouterService._read_session",
        "EngineClient._run_connection",
        "WorkerConnection._tick",
        "WorkerConnection._probe_stalled_engine",
        "SimEngine._run",
        "AttachStream._tick",
        "FrameWriter.run",
        "_handle",
        "IndexerLink.run",
        "IndexerLink._read_responses",
        "PeerSync._keep_outbound_stream",
        "_InboundStream.read",
        "_OutboundStream.end_when_silent",
        "SilenceWatch.run",
        "IndexerService._read_publisher",
        "Event.wait",  # of an outbox, which waits with a timeout
    }
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule."""

    at: float
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.at:9.4f} s  {self.rule}: {self.what}"


class Checks:
    """Watches one run. attempts_explained: False if workers refuse requests because they are full.

    queued_s: how long a request may wait in a router's queue. may_be_busy: busy workers get no
    further requests.
    """

    def __init__(
        self, *, attempts_explained: bool = True, queued_s: float = 0.0, may_be_busy: bool = False
    ) -> None:
        self.violations: list[Violation] = []
        self._loop = asyncio.get_running_loop()
        self._attempts_explained = attempts_explained
        self._queued_s = queued_s
        self._may_be_busy = may_be_busy
        # Times of the faults of a process, by its id (workers and frontends).
        self.retries = 0
        self._fault_windows: dict[int, list[tuple[float, float]]] = {}
        # The workers of an attempt; the attempts with tokens from the decode leg.
        self._placed_workers: dict[PlacementKey, list[int]] = {}
        self._delivered: set[PlacementKey] = set()
        self._corrupt_pages: Counter[int] = Counter()
        self._stalled: Counter[int] = Counter()
        self._bookings_agreed_at = 0.0
        self._expected_coroutines = EXPECTED_COROUTINES
        self.pairs_failed = 0
        # How often each prefix was sent, by adapter and by its digest in `_prefix_digests`.
        self._prefix_counts: Counter[tuple[str, int]] = Counter()

    def violation(self, rule: str, what: str) -> None:
        """Notes one."""
        self.violations.append(Violation(self._loop.time(), rule, what))

    def record_fault(self, peer: Peer | None, duration_s: float) -> None:
        """A fault affects a process, or a link to it, for that long. None: the control plane."""
        now = self._loop.time()
        id = CONTROL_PLANE if peer is None else peer.id
        self._fault_windows.setdefault(id, []).append((now, now + duration_s + AFTERMATH_S))

    def _had_fault(self, id: int, since: float) -> bool:
        now = self._loop.time()
        return any(begin <= now and end >= since for begin, end in self._fault_windows.get(id, ()))

    # -- during the run --------------------------------------------------------------------------

    def placed(self, key: PlacementKey, took_s: float, placed: Decision | MeshError) -> None:
        """A frontend received a placement, or an error."""
        if isinstance(placed, Decision):
            legs = (placed.worker, placed.prefill)
            self._placed_workers[key] = [leg.worker_id for leg in legs if leg is not None]
        # After each change of its router the request waits in a queue again.
        since = self._loop.time() - took_s
        changes = sum(begin >= since for begin, _ in self._fault_windows.get(CONTROL_PLANE, ()))
        if took_s > PLACEMENT_MAX_S + self._queued_s * (1 + changes):
            self.violation("placed", f"{key[0]} waited {took_s:.2f} s for a placement")

    def submitted(
        self, frontend: SimFrontend, worker: SimWorker | None, leg_request: LegRequest
    ) -> None:
        """A frontend sent a request to a worker."""
        now = self._loop.time()
        self.retries += leg_request.attempt > 0
        if worker is not None and leg_request.phase not in _phases_of(worker):
            self.violation(
                "role",
                f"{leg_request.request_id}: {leg_request.phase or 'all'} went to a "
                f"{worker.role} worker",
            )
        if worker is None or frontend.has_seen_leave(worker.id):
            self.violation(
                "submit", f"{leg_request.request_id} went to a worker its frontend cannot see"
            )
            return
        if worker.gone_at is None or not frontend.discovery.is_reachable:
            return
        known_from = max(worker.gone_at, frontend.discovery.reachable_since) + REGISTRY_LAG_MAX_S
        # A router with an old list may name a worker that its frontend never saw.
        affected_id = frontend.id if worker.id in frontend.discovery.seen else CONTROL_PLANE
        if now > known_from + 0.01 and not self._had_fault(affected_id, worker.gone_at):
            self.violation(
                "submit", f"{leg_request.request_id} went to {worker.stable_name}, which left"
            )

    def check_adapter(self, client: Client, worker: SimWorker, leg_request: LegRequest) -> None:
        """A request of a client is on its way to a worker."""
        spec, requested = client.spec, ""
        if leg_request.request is not None and leg_request.request.routing is not None:
            requested = leg_request.request.routing.lora_name or ""
        name = f"{spec.request_id}, which requires {spec.lora or 'no adapter'!r},"
        if requested != spec.lora:
            self.violation("adapter", f"{name} names {requested!r}")
        if spec.lora and spec.lora not in worker.loras:
            self.violation(
                "adapter", f"{name} went to {worker.stable_name}, which does not have it"
            )
        if spec.model != worker.model:
            self.violation("adapter", f"{name} went to {worker.stable_name}, of another model")

    def admitted(self, worker: SimWorker) -> None:
        """A worker admitted a request."""
        if worker.runner.is_draining:
            self.violation("admit", f"{worker.stable_name} admitted a request while it drained")

    def delivered(self, leg_request: LegRequest) -> None:
        """A leg of a pair delivered tokens."""
        if leg_request.phase == "decode":
            self._delivered.add((leg_request.request_id, leg_request.attempt))

    def leg_failed(
        self, frontend: SimFrontend, leg_request: LegRequest, workers: Sequence[SimWorker]
    ) -> None:
        """A leg of a pair failed: unless decode has delivered tokens, the other leg must end."""
        if (leg_request.request_id, leg_request.attempt) not in self._delivered:
            self.pairs_failed += 1
            since = self._loop.time()
            self._loop.call_later(ABORT_S, self._check_pair, frontend, leg_request, workers, since)

    def _check_pair(
        self, frontend: SimFrontend, failed: LegRequest, workers: Sequence[SimWorker], since: float
    ) -> None:
        if not frontend.process.is_alive or self._had_fault(frontend.id, since):
            return
        for worker in workers:
            if not worker.process.is_alive or self._had_fault(worker.id, since):
                continue
            for running in worker.runner._active_requests.values():
                leg_request = running.leg_request
                if (leg_request.request_id, leg_request.attempt) == (
                    failed.request_id,
                    failed.attempt,
                ):
                    self.violation(
                        "pair",
                        f"{leg_request.request_id}: {leg_request.phase} runs on at "
                        f"{worker.stable_name} "
                        f"{ABORT_S} s after its {failed.phase} failed",
                    )

    def pages(self, workers: Sequence[SimWorker]) -> None:
        """The corrupt pages that engines found, those of dead workers included."""
        for worker in workers:
            counters = worker.engine.counters
            corrupt = counters["corrupt_pages"] + counters["corrupt_tokens"]
            if corrupt > self._corrupt_pages[worker.id]:
                self._corrupt_pages[worker.id] = corrupt
                self.violation(
                    "pages", f"{worker.stable_name} found {corrupt} corrupt pages or tokens"
                )

    def stalled(self, workers: Sequence[SimWorker]) -> None:
        """The requests that workers ended as lost: no engine of a simulation loses one."""
        for worker in workers:
            stalled = worker.runner.counters["stalled"]
            if stalled > self._stalled[worker.id]:
                self._stalled[worker.id] = stalled
                text = f"{worker.stable_name} ended {stalled} requests that its engine has"
                self.violation("stalled", text)

    def credit(self, name: str, unacked_bytes: int) -> None:
        """The bytes that a worker has sent to one frontend without an acknowledgement."""
        if unacked_bytes > CREDIT_BYTES + FRAME_BYTES:
            self.violation("credit", f"{name}: {unacked_bytes} bytes are not acknowledged")

    def backlog(self, indexer: SimIndexer) -> None:
        """The messages that wait for subscribers of an index."""
        for subscriber in indexer.ingest.subscribers:
            waiting = sum(map(size_bytes, subscriber._waiting))
            if waiting > indexer.subscriber_bytes:
                self.violation(
                    "backlog", f"{indexer.process.name}: {waiting} bytes wait for one subscriber"
                )

    def began(self, client: Client) -> None:
        """A client sends a request."""
        all_tokens = (*client.spec.prompt, *client.expected)
        self._prefix_counts.update((client.spec.lora, one) for one in _prefix_digests(all_tokens))

    def _check_cache(self, client: Client, outcome: RequestOutcome) -> None:
        """The cached tokens of a request were sent before, by another request or an earlier
        attempt.
        """
        details = outcome.usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details is not None else 0
        spec = client.spec
        if cached and outcome.attempts == 1:
            last = _prefix_digests(spec.prompt[:cached])[-1:]
            if not last or self._prefix_counts[spec.lora, last[0]] < 2:
                what = f"{cached} cached tokens that were never sent to {spec.lora or 'the model'}"
                self.violation("cache", f"{spec.request_id}: {what}")

    def tokens(self, client: Client, token_ids: Sequence[int]) -> None:
        """A client received tokens."""
        name = client.spec.request_id
        if client.is_slow_reader:
            self.violation("slow", f"{name} gets more tokens although it does not read")
        if client.outcomes:
            self.violation("once", f"{name} got tokens after its end")
        start = len(client.delivered)
        client.delivered += token_ids
        if client.expected[start : start + len(token_ids)] != list(token_ids):
            self.violation("tokens", f"{name}: tokens from {start} on are not the model's")

    def finished(
        self, client: Client, outcome: RequestOutcome, serving: Sequence[SimWorker]
    ) -> None:
        """A client received its outcome. serving: workers that were healthy and known to all
        processes.
        """
        name = client.spec.request_id
        client.outcomes.append(outcome)
        client.ended_at = self._loop.time()
        if len(client.outcomes) > 1:
            self.violation("once", f"{name} ended {len(client.outcomes)} times")
        counted = outcome.usage.prompt_tokens, outcome.usage.completion_tokens
        if counted != (len(client.spec.prompt), len(client.delivered)):
            self.violation("usage", f"{name}: usage is {counted}")
        self._check_cache(client, outcome)
        if client.has_disconnected:
            if not isinstance(outcome.error, RequestCancelled):
                self.violation(
                    "finish", f"{name}: its client left, but it ended with {outcome.error}"
                )
        elif outcome.error is not None:
            self._check_error(client, outcome, outcome.error, serving)
        elif client.has_stopped:
            if outcome.finish_reason is not FinishReason.STOP:
                self.violation("finish", f"{name} was stopped and ended {outcome.finish_reason}")
        else:
            self._check_complete(client, outcome)
        if self._attempts_explained:
            self._check_retries(client, outcome)

    def _check_complete(self, client: Client, outcome: RequestOutcome) -> None:
        name = client.spec.request_id
        if client.delivered != client.expected:
            self.violation(
                "tokens", f"{name} ended after {len(client.delivered)} of {len(client.expected)}"
            )
        elif outcome.finish_reason is not client.expected_finish:
            # If all tokens were delivered and only the end was lost, the frontend knows only the
            # limit.
            is_full = len(client.delivered) == client.spec.stop.max_tokens
            if not (is_full and outcome.finish_reason is FinishReason.LENGTH):
                self.violation(
                    "finish",
                    f"{name} ended {outcome.finish_reason}, not {client.expected_finish}",
                )

    def _check_error(
        self,
        client: Client,
        outcome: RequestOutcome,
        error: MeshError,
        serving: Sequence[SimWorker],
    ) -> None:
        spec, now = client.spec, self._loop.time()
        name = f"{spec.request_id} (tried {outcome.attempts} times)"
        if isinstance(error, DeadlineExceeded):
            if now < client.began_at + spec.deadline_s - 0.002:
                self.violation("errors", f"{name}: {error} before its deadline")
            if spec.deadline_s == DEADLINE_S:
                self.violation("errors", f"{name}: hung until its deadline")
            return
        if isinstance(error, Overloaded) and self._may_refuse(client, error):
            return
        known = WorkerLost | Unavailable | InternalError
        if not isinstance(error, known) and error.reason != NO_BLOCKS:
            self.violation("errors", f"{name}: {error!r} is unexpected")
            return
        if isinstance(error, InternalError) and (
            outcome.attempts > 1 or self.retries > RETRIES_MANY
        ):
            return  # an internal error is retried once
        if isinstance(error, Unavailable) and not error.retry_after_s:
            self.violation("errors", f"{name}: {error!r} has no retry_after_s")
        if outcome.attempts >= ATTEMPTS_MAX or not self._attempts_explained:
            return
        if error.reason == "RETRY_BUDGET" and self.retries > RETRIES_MANY:
            return
        if not spec.migratable and client.delivered:
            return  # `_check_retries` requires the fault
        if error.reason == "NO_ROUTER" and self._had_fault(CONTROL_PLANE, client.began_at):
            return
        untried = [
            worker
            for worker in serving
            if worker.id not in outcome.worker_ids and worker.model == spec.model
            if not spec.lora or spec.lora in worker.loras
        ]
        if can_serve(untried):
            names = [worker.stable_name for worker in untried]
            self.violation("errors", f"{name}: {error} although {names} were available")

    def _may_refuse(self, client: Client, error: Overloaded) -> bool:
        """Whether a request may be rejected because a worker or a queue is full, or slow."""
        if error.reason == "SLOW_READER":
            return client.is_slow_reader
        if error.reason == "ALL_WORKERS_BUSY":
            return self._may_be_busy
        return bool(self._queued_s) and error.reason in QUEUE_REJECTIONS

    def _check_retries(self, client: Client, outcome: RequestOutcome) -> None:
        assert client.frontend is not None
        error = outcome.error
        is_cut = error is not None and error.reason != "SLOW_READER"
        is_cut &= not isinstance(error, RequestCancelled | DeadlineExceeded)
        if self._had_fault(client.frontend.id, client.began_at):
            return
        for attempt in range(outcome.attempts if is_cut else outcome.attempts - 1):
            worker_ids = self._placed_workers.get((client.spec.request_id, attempt), ())
            if worker_ids and not any(
                self._is_explained(client, worker_id) for worker_id in worker_ids
            ):
                left = [f"{id:x}" for id in worker_ids]
                self.violation("retries", f"{client.spec.request_id} left {left} without a fault")

    def _is_explained(self, client: Client, worker_id: int) -> bool:
        """Whether a worker had a fault since a client began."""
        assert client.frontend is not None
        began_at = client.began_at
        if client.frontend.discovery.seen.get(worker_id, began_at + 1) > began_at:
            return True  # the router had the snapshot before the frontend did
        return self._had_fault(worker_id, began_at)

    def serving(self, workers: Sequence[SimWorker], observers: Sequence[Peer]) -> list[SimWorker]:
        """Workers that are healthy, and that every process has known for SETTLED_S."""
        since = self._loop.time() - SETTLED_S
        return [
            worker
            for worker in workers
            if worker.is_serving
            and not self._had_fault(worker.id, since)
            and all(one.discovery.seen.get(worker.id, since + 1) <= since for one in observers)
        ]

    def aborted(self, client: Client, workers: Sequence[SimWorker]) -> None:
        """ABORT_S after a client disconnected, in a mesh without faults."""
        for worker in workers:
            held = worker.runner._active_requests.values()
            if any(one.leg_request.request_id == client.spec.request_id for one in held):
                self.violation("abort", f"{client.spec.request_id} runs on after its client left")

    # -- after the run --------------------------------------------------------------------------

    def begin(self) -> None:
        """All processes have started, and no client has arrived: these tasks always run."""
        self._expected_coroutines = EXPECTED_COROUTINES | {
            coroutine_name(task) for task in asyncio.all_tasks()
        }

    def check_recovered(self, peers: Sequence[Peer], *, idle: bool = False) -> None:
        """The mesh has recovered by now."""
        for peer in peers:
            if isinstance(peer, SimWorker):
                peer.engine.blocks.check()
        for rule, what in self.problems(peers, idle=idle):
            self.violation(rule, what)

    def problems(self, peers: Sequence[Peer], *, idle: bool = False) -> Iterator[tuple[str, str]]:
        """The problems of a mesh, by rule, cheapest first. peers: the processes that are alive.

        idle: unused streams must have been closed by now.
        """
        yield from _view_problems(peers)
        yield from _leftover_problems(peers, idle=idle)
        for peer in peers:
            if isinstance(peer, SimRouter) and peer.router.decision_checker is not None:
                for what in peer.router.decision_checker.problems(peer.router, self._loop.time()):
                    yield "rest", f"{peer.process.name}: {what}"
        running = Counter(coroutine_name(task) for task in asyncio.all_tasks())
        for name in sorted(running.keys() - self._expected_coroutines):
            yield "rest", f"{running[name]} tasks of {name} still run"
        yield from _index_problems(peers)

    def check_quiescent_request(
        self, client: Client, workers: Sequence[SimWorker], *, is_approximate: bool = False
    ) -> int:
        """A request that had the mesh for itself, long after the last fault.

        is_approximate: whether its router has only approximate entries, which promise nothing.
        Returns the cached tokens that were predicted and found; 0 without an index.
        """
        name = client.spec.request_id
        if not client.outcomes:
            self.violation("recovered", f"{name} has not ended, in a healthy mesh")
            return 0
        outcome = client.outcomes[0]
        if outcome.error is not None or outcome.attempts != 1 or outcome.placed is None:
            self.violation("recovered", f"{name}: {outcome.error}, {outcome.attempts} attempts")
            return 0
        placed = outcome.placed
        id = (placed.prefill or placed.worker).worker_id
        computed_by = next((worker for worker in workers if worker.id == id), None)
        if is_approximate or computed_by is None or computed_by.kv_index_mode != "events":
            return 0
        details = outcome.usage.prompt_tokens_details
        actual = details.cached_tokens if details is not None else None
        predicted = placed.predicted_cached_tokens
        if actual is None:  # the report of prefill came too late
            return 0
        is_subset = computed_by.has_dropped_entries
        if not (predicted <= actual if is_subset else predicted == actual):
            self.violation("predicted", f"{name}: {predicted} cached tokens, but it was {actual}")
        return predicted

    def check_departed_model(self, client: Client) -> None:
        """A request for a model whose last worker left long ago."""
        name = client.spec.request_id
        error = client.outcomes[0].error if client.outcomes else None
        if not (isinstance(error, Unavailable) and error.retry_after_s):
            self.violation(
                "departed", f"{name}: no worker serves its model, and the error is {error!r}"
            )

    def check_bookings(self, client: Client, peers: Sequence[Peer]) -> None:
        """While one request has the mesh for itself, all routers soon have the same bookings."""
        now = self._loop.time()
        routers = [peer for peer in peers if isinstance(peer, SimRouter)]
        if len({frozenset(one.router.load_tracker) for one in routers}) < 2:
            self._bookings_agreed_at = now
        elif now > max(self._bookings_agreed_at, client.placed_at or now) + BOOKINGS_SYNC_MAX_S:
            held = {one.process.name: len(one.router.load_tracker) for one in routers}
            self.violation("bookings", f"{client.spec.request_id}: routers hold {held}")

    def report_unfinished(self, clients: Sequence[Client]) -> None:
        """These clients have no outcome, long after the last fault."""
        for client in clients:
            self.violation(
                "bounded",
                f"{client.spec.request_id} has not ended; "
                f"{len(client.delivered)} of {len(client.expected)} tokens",
            )

    def check_no_tasks(self) -> None:
        """Every process has ended: the caller's task is the only one left."""
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            self.violation("rest", f"a task of {coroutine_name(task)} outlived its process")

    def check_logs(self, events: Sequence[Mapping[str, Any]]) -> None:
        """The log events of the services contain no internal error."""
        for event in events:
            if event.get("log_level") in ("error", "critical") or event.get("reason") in (
                "BUG",
                "ATTACH_BREACH",
            ):
                self.violation("log", str(dict(event)))


def _index_problems(peers: Sequence[Peer]) -> Iterator[tuple[str, str]]:
    """Each index equals the caches of the engines."""
    workers = [peer for peer in peers if isinstance(peer, SimWorker) and peer.is_serving]
    for peer in peers:
        if isinstance(peer, SimIndexer):
            yield from _indexer_problems(peer, workers)
        elif isinstance(peer, SimRouter) and peer.index is not None:
            if not peer.choice.follows_events:
                if peer.index.feed.blocks:
                    yield "index", f"{peer.process.name} keeps entries that it does not use"
                continue
            yield from _feed_problems(peer.process.name, peer.index.feed, workers)
            if not peer.index.is_caught_up:
                yield "index", f"{peer.process.name} has not caught up"


def _view_problems(peers: Sequence[Peer]) -> Iterator[tuple[str, str]]:
    """Each process has the newest list of the mesh and a router, and excludes no worker."""
    for peer in peers:
        name = peer.process.name
        if not peer.discovery.is_current:
            yield "known", f"{name}: it has an old list of the mesh"
        if isinstance(peer, SimRouter):
            others = {one.id for one in peers if isinstance(one, SimRouter)} - {peer.id}
            if set(peer.peers.replica.peers) != others:
                yield "known", f"{name}: its peers are not exactly the other routers"
        if isinstance(peer, SimFrontend):
            if not peer.router.is_connected:
                yield "known", f"{name}: it has no router"
            for worker_id, reason in peer.engines.exclusion_reasons().items():
                yield "known", f"{name}: it excludes {worker_id:x}: {reason}"


def _leftover_problems(peers: Sequence[Peer], *, idle: bool) -> Iterator[tuple[str, str]]:
    """No request is active, and all resources are released."""
    for peer in peers if idle else ():
        is_open = bool(
            peer.engines.open_slots
            if isinstance(peer, SimFrontend)
            else isinstance(peer, SimWorker) and peer.attach._streams
        )
        if is_open:
            yield "rest", f"{peer.process.name}: an unused stream is still open"
    for peer in peers:
        for what, is_released in _REST_CHECKS[type(peer)](peer).items():
            if not is_released:
                yield "rest", f"{peer.process.name}: {what}"


def _indexer_problems(
    indexer: SimIndexer, workers: Sequence[SimWorker]
) -> Iterator[tuple[str, str]]:
    feed = indexer.ingest.feed
    yield from _feed_problems(indexer.process.name, feed, workers)
    known = {source.worker_id for source in feed.sources()}
    for worker_id in sorted(known - {worker.id for worker in workers}):
        yield "index", f"{indexer.process.name} remembers {worker_id:x}, which left"


def _feed_problems(
    name: str, feed: IndexFeed, workers: Sequence[SimWorker]
) -> Iterator[tuple[str, str]]:
    """An index equals the caches of the engines; a subset of them where entries were dropped."""
    by_id = {worker.id: worker for worker in workers}
    for source in feed.sources():
        if source.worker_id not in by_id and feed.is_matchable(source):
            yield "index", f"{name} counts {source.worker_id:x}, which left"
    for worker in workers:
        source = Source(worker.id)
        where = f"{name}, {worker.stable_name}"
        state = feed.status(source).state if source in feed else "unknown"
        expected_states = {"exact", "degraded"} if worker.has_dropped_entries else {"exact"}
        if state not in expected_states or not feed.is_matchable(source):
            yield "index", f"{where}: it is {state} in a healthy mesh"
            continue
        index, advertised = feed.advertised(source)
        advertised_hashes = {int(one) for _, part in index.chunks(advertised) for one in part}
        held = set(worker.engine.blocks.names()) if worker.kv_index_mode == "events" else set()
        if advertised_hashes - held:
            yield "index", f"{where}: {len(advertised_hashes - held)} blocks are not held"
        if held - advertised_hashes and not worker.has_dropped_entries:
            yield "index", f"{where}: {len(held - advertised_hashes)} blocks are not advertised"


def size_bytes(message: object) -> int:
    """A lower bound of the bytes that a message to a subscriber takes."""
    events = message.batch.events if isinstance(message, BatchUpdate) else ()
    return sum(8 * len(event.hashes) for event in events)


def _prefix_digests(tokens: Sequence[int]) -> list[int]:
    """One number for each prefix of whole blocks."""
    content, size = np.asarray(tokens, dtype="<u4").tobytes(), 4 * BLOCK_SIZE
    digests, digest = [], 0
    for stop in range(size, len(content) + 1, size):
        digest = zlib.crc32(content[stop - size : stop], digest)
        digests.append(digest)
    return digests


def can_serve(workers: Sequence[SimWorker]) -> bool:
    """Whether these workers suffice to serve a request."""
    roles = {worker.role for worker in workers}
    return (
        "aggregated" in roles
        or {"prefill", "decode"} <= roles
        or any(worker.role == "decode" and worker.local_prefill for worker in workers)
    )


def _phases_of(worker: SimWorker) -> tuple[str, ...]:
    """The phases that a worker may serve; "" is a whole request."""
    match worker.role:
        case "aggregated":
            return ("",)
        case "prefill":
            return ("prefill",)
    return ("decode", "") if worker.local_prefill else ("decode",)


def coroutine_name(task: asyncio.Task[Any]) -> str:
    """The qualified name of the coroutine that a task runs."""
    return str(getattr(task.get_coro(), "__qualname__", "?"))


def _frontend_rest(frontend: SimFrontend) -> dict[str, bool]:
    router = frontend.router
    return {
        "requests are open": frontend.gateway.open_requests == 0,
        "slots are open": not any(frontend.engines.open_slots.values()),
        "placement requests are open": not router._waiting and not router._query_ids,
        "bookings are held": not router._held_bookings,
    }


def _worker_rest(worker: SimWorker) -> dict[str, bool]:
    runner, engine = worker.runner.counters, worker.engine.counters
    load = worker.engine.loads()[0]
    blocks = worker.engine.blocks
    rooms_opened = engine.get("rooms_opened", 0)
    rooms_ended = sum(engine.get(how, 0) for how in ROOM_OUTCOMES)
    ended = sum(runner[how] for how in ("finished", "stopped", "failed", "closed"))
    engine_ended = sum(engine[how] for how in ("finished", "cancelled", "closed", "failed"))
    streams = worker.attach._streams.values()
    return {
        "requests are inside": worker.runner.open_requests == 0,
        "slots are open": worker.attach.open_slots == 0,
        "slots are kept": not any(stream._keys for stream in streams),
        f"the runner's counters disagree: {dict(runner)}": runner["accepted"] == ended,
        f"the engine's counters disagree: {dict(engine)}": engine["accepted"] == engine_ended,
        "sequences are scheduled": load.running == load.waiting == load.waiting_tokens == 0,
        f"{load.kv_used_blocks} KV blocks are held": load.kv_used_blocks == 0,
        f"{load.rooms_open} rooms are open": load.rooms_open == 0,
        f"{blocks.open_transfers} transfers hold pages": blocks.open_transfers == 0,
        f"the counters of rooms disagree: {dict(engine)}": rooms_opened == rooms_ended,
    }


def _router_rest(router: SimRouter) -> dict[str, bool]:
    load_tracker, replica = router.router.load_tracker, router.peers.replica
    return {
        "it still advertises bookings": not len(replica._own_digest),
        "requests are queued": not (len(router.router.queue) or router.router.queue.tokens),
        "bookings of peers are left": not any(c.bookings for c in replica._peer_states.values()),
        f"{len(load_tracker)} bookings are left": len(load_tracker) == 0,
        f"{load_tracker.orphan_count} orphans are left": load_tracker.orphan_count == 0,
        "a rank still carries load": all(
            rank.booked.requests == rank.booked.prefill_tokens == rank.booked.decode_blocks == 0
            for rank in load_tracker.ranks._ranks.values()
        ),
    }


def _indexer_rest(indexer: SimIndexer) -> dict[str, bool]:
    return {"a registration is missing": indexer.lease is not None}


# Any: each takes its own kind of process.
_REST_CHECKS: Mapping[type[Any], Any] = {
    SimFrontend: _frontend_rest,
    SimWorker: _worker_rest,
    SimRouter: _router_rest,
    SimIndexer: _indexer_rest,
}
