"""The rules about sessions, queues, adapters and approximate entries can fail."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import MeshError
from common.kv.events import EventBatch, EventKind, KvEvent, Source
from common.request.placement import Query
from common.request.preprocessed import StopConditions
from common.request.token_stream import LegRequest, LegSink
from common.streams.stall_clock import never_stalled
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.ports import ResponseSink
from frontend_svc.request.types import RequestPlan
from frontend_svc.workers.client import Submission
from indexer_svc.core.subscriber import BatchUpdate
from kvmesh.router.v1 import router_pb2
from router_svc.core.admission import QueueSettings
from router_svc.core.approx_index import ApproxLimits
from router_svc.core.eligibility import NO_LIMITS, BusyLimits
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.overlap import derive_index_settings
from router_svc.core.policy import Policy
from router_svc.replication_sync import PeerSync
from tests.sim.checks import Checks
from tests.sim.clients import ClientSpec
from tests.sim.faults import Fault, FaultKind
from tests.sim.fleet import (
    TEMPORARY_MODEL,
    ObservedEngineClient,
    ObservedRouter,
    ObservedRouterClient,
    Parts,
)
from tests.sim.loop import run_virtually
from tests.sim.scenario import SHORT_RECOVERY_MAX_S, TOKEN_IDS, Scenario
from tests.sim.world import run_scenario
from worker_svc.engines.contract import EngineConfig
from worker_svc.engines.sim.engine import SimEngine

pytestmark = pytest.mark.slow


def fault(kind: FaultKind, at: float, *, duration_s: float = 1.0) -> Fault:
    return Fault(at, kind, 0.0, 0.0, duration_s, near_s=0.1, far_s=0.1, notice_s=0.5)


SHORT = StopConditions(max_tokens=6, ignore_eos=True)
LONG = StopConditions(max_tokens=100, ignore_eos=True)


def client_specs(
    count: int, every_s: float, tokens: int, stop: StopConditions = SHORT
) -> list[ClientSpec]:
    """Clients with a common prefix in their prompts."""
    rng = Random(5)
    begin = tuple(rng.choices(TOKEN_IDS, k=tokens // 2))
    return [
        ClientSpec(n, every_s * n, begin + tuple(rng.choices(TOKEN_IDS, k=tokens // 2)), stop)
        for n in range(count)
    ]


PLAIN = Scenario(seed=7, selector="random", recovery_max_s=SHORT_RECOVERY_MAX_S)
SLOW = replace(PLAIN, prefill_token_s=1e-3, batched_tokens=600)
SESSIONS = replace(
    PLAIN,
    policy=Policy(session_mode="hard", session_ttl_s=2.0),
    client_specs=tuple(
        replace(one, session=f"s{one.number % 3}") for one in client_specs(30, 0.2, 40)
    ),
)
SOFT = replace(SESSIONS, policy=Policy(session_mode="soft"))
# One session with requests through different frontends, and so through different routers.
ACROSS = replace(
    SESSIONS,
    workers=8,
    routers=2,
    frontends=4,
    policy=Policy(session_mode="hard"),
    client_specs=tuple(
        replace(one, session="s", target_draw=one.number % 4 / 4)
        for one in client_specs(12, 2.0, 40)
    ),
)
# Six arrive at once, and each prompt takes half a second; two workers compute them.
QUEUE = replace(
    SLOW,
    workers=2,
    policy=Policy(queue=QueueSettings(threshold=0.05, wait_max_s=1.0)),
    client_specs=tuple(
        replace(one, at=0.01 * one.number, strict_priority=one.number % 3)
        for one in client_specs(12, 0.0, 500)
    ),
)
DEATH = replace(QUEUE, routers=2, faults=(fault(FaultKind.ROUTERS_KILL, 0.5, duration_s=0.2),))
BUSY = replace(
    SLOW,
    workers=2,
    policy=Policy(busy=BusyLimits(active_prefill_tokens=300)),
    client_specs=tuple(client_specs(12, 0.1, 500)),
)
ADAPTERS = replace(
    PLAIN,
    selector="round_robin",
    adapters=(frozenset({"french", "german"}), frozenset({"french"})),
    client_specs=tuple(
        replace(one, lora=("", "french", "german")[one.number % 3])
        for one in client_specs(30, 0.2, 80)
    ),
)
MOVES = replace(
    ADAPTERS,
    client_specs=tuple(replace(one, stop=LONG) for one in ADAPTERS.client_specs),
    faults=(fault(FaultKind.WORKER_KILL, 3.0),),
)
APPROXIMATE = replace(
    PLAIN,
    selector="kv",
    kv_index_modes=("approx", "none"),
    choices=(
        derive_index_settings(
            overlap_score_credit=1.0,
            kv_events=False,
            limits=ApproxLimits(ttl_s=2.5),
            predicted_ttl_s=0.0,
        ),
    ),
    # With a pause in which approximate entries expire.
    client_specs=tuple(
        replace(one, at=one.at + 6.0 * (one.number >= 15)) for one in client_specs(30, 0.7, 80)
    ),
)
# Eight prompts, each twice within a moment, then again when the caches have evicted it.
PREDICTIONS = replace(
    PLAIN,
    selector="kv",
    indexers=1,
    blocks=12,
    choices=(
        derive_index_settings(
            overlap_score_credit=1.0, kv_events=True, limits=ApproxLimits(), predicted_ttl_s=1.0
        ),
    ),
    client_specs=tuple(
        ClientSpec(n, 0.4 * (n // 2) + 0.01 * (n % 2), (11 + n // 2 % 8,) * 80, SHORT)
        for n in range(60)
    ),
)
SLOW_READERS = replace(
    PLAIN,
    client_specs=tuple(
        replace(one, pause_s=3.0, unread_max=8) for one in client_specs(6, 0.1, 40, LONG)
    ),
)
MODEL_LEAVES = replace(
    PLAIN,
    temporary_model_s=2.0,
    linger_s=75.0,
    client_specs=tuple(replace(one, model=TEMPORARY_MODEL) for one in client_specs(12, 0.5, 40)),
)
STALL = replace(
    PLAIN,
    client_specs=tuple(client_specs(12, 0.1, 40, LONG)),
    faults=(fault(FaultKind.FRONTEND_STALL, 1.0, duration_s=6.0),),
)
SCENARIOS = {
    "hard sessions": SESSIONS,
    "soft sessions": SOFT,
    "sessions at several routers": ACROSS,
    "a queue": QUEUE,
    "a queue of a router that dies": DEATH,
    "busy workers": BUSY,
    "adapters": ADAPTERS,
    "adapters of a worker that dies": MOVES,
    "guesses": APPROXIMATE,
    "predictions": PREDICTIONS,
    "slow clients": SLOW_READERS,
    "a model that leaves": MODEL_LEAVES,
    "a frontend that stalls": STALL,
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_the_real_parts_break_no_rule_with_a_feature(scenario: Scenario) -> None:
    report = run_scenario(scenario)
    assert not report.violations, str(report)


@pytest.mark.parametrize(
    ("scenario", "what"),
    [
        (SESSIONS, "session kept"),
        (SOFT, "session kept"),
        (ACROSS, "sessions kept across"),
        (QUEUE, "levels passed"),
        (QUEUE, "queue timeouts"),
        (DEATH, "queued at a router death"),
        (BUSY, "refused: ALL_WORKERS_BUSY"),
        (ADAPTERS, "adapters requested"),
        (MOVES, "responses migrated"),
        (APPROXIMATE, "blocks assumed: approx"),
        (PREDICTIONS, "blocks assumed: events"),
        (SLOW_READERS, "clients cut"),
        (MODEL_LEAVES, "models missed"),
        (MODEL_LEAVES, "models forgotten"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_the_scenarios_with_a_feature_use_it(scenario: Scenario, what: str) -> None:
    assert run_scenario(scenario).counts[what] > 0


class ForgetsSessions(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.affinity.record_booking = lambda *args: None  # type: ignore[method-assign]


class KeepsSessionsForEver(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.affinity._ttl_s = 1e9


class NeverSyncsSessions(PeerSync):
    """Sends only bookings to other routers."""

    def __init__(self, id: int, book: LoadTracker, affinity: Any, **others: Any) -> None:
        super().__init__(id, book, **others)


class InvertsPriorities(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        enqueue = self.queue.enqueue

        def inverted(query: Query, *args: Any, **others: Any) -> Any:
            low = replace(query, strict_priority=9 - query.strict_priority)
            return enqueue(low, *args, **others)

        self.queue.enqueue = inverted  # type: ignore[method-assign]


class ServesTheLatestFirst(ObservedRouter):
    """Overrides the configured order of the queue."""

    def __init__(self, *args: Any, policy: Policy, **others: Any) -> None:
        late = replace(policy, queue=replace(policy.queue, policy="lcfs"))
        super().__init__(*args, policy=late, **others)


class BypassesTheQueue(ObservedRouter):
    """Every second request skips the queue, even if others wait."""

    admit_count = 0

    def admit(self, query: Query, *args: Any) -> Any:
        self.admit_count += 1
        return (super().admit if self.admit_count % 2 else self.decide)(query, *args)


class NeverTimesOutRequests(ObservedRouter):
    """Never serves a queued request."""

    def __init__(self, *args: Any, policy: Policy, **others: Any) -> None:
        unlimited = replace(policy, queue=replace(policy.queue, wait_max_s=1e6))
        super().__init__(*args, policy=unlimited, **others)
        self._try_admit = lambda *args: None  # type: ignore[method-assign]


class NeverResendsRequests(ObservedRouterClient):
    """Does not repeat the requests of one router session in the next."""

    def _first_frame(self) -> router_pb2.SessionRequest:
        if self.unrouted >= 0 and hasattr(self, "has_requests"):
            self._waiting.clear()
            self._query_ids.clear()
        self.has_requests = True
        return super()._first_frame()


class IgnoresLimits(ObservedRouter):
    def __init__(self, *args: Any, policy: Policy, **others: Any) -> None:
        super().__init__(*args, policy=replace(policy, busy=NO_LIMITS), **others)


class IgnoresAdapters(ObservedRouter):
    def admit(self, query: Query, *args: Any) -> Any:
        return super().admit(replace(query, routing=None), *args)


class IgnoresAdaptersInCacheKeys(SimEngine):
    """Hashes the blocks of all adapters alike."""

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        assert self._core is not None
        hashers: Any = self._core.jobs.hashers
        hashers.update(dict.fromkeys(hashers, hashers[""]))
        return config


class ForgetsTheAdapterInMigration(ObservedEngineClient):
    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        request = leg_request.changed_request()
        if leg_request.attempt and request is not None:
            without = replace(request, routing=None)
            leg_request = replace(leg_request, request=without, changes={})
        return super().submit(worker_id, address, leg_request, sink)


class NeverExpiresApproximateEntries(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        assert self.overlaps.approximate is not None
        self.overlaps.approximate.limits = ApproxLimits(ttl_s=1e9)


class ApproximatesAllWorkers(ObservedRouter):
    """Includes workers with caches that cannot be tracked."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.overlaps._index_kind = lambda worker: "approx"  # type: ignore[method-assign]


class NeverRecordsRouting(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.overlaps.record_placement = lambda *args: False  # type: ignore[method-assign]


class NeverExpiresPredictions(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        assert self.overlaps.predicted is not None
        self.overlaps.predicted.limits = ApproxLimits(ttl_s=1e9)


class NeverCutsSlowReaders(Gateway):
    """Never fails a request."""

    def open(self, plan: RequestPlan, query: PlacementRequest, sink: ResponseSink) -> RequestHandle:
        handle = super().open(plan, query, sink)
        handle.fail = self.ignore  # type: ignore[method-assign]
        return handle

    def ignore(self, error: MeshError, reason: str) -> None:
        pass


class ForgetsModelsImmediately(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.fleet.is_known_model = lambda model, now: False  # type: ignore[method-assign]


class NeverForgetsModels(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.fleet.is_known_model = lambda model, now: True  # type: ignore[method-assign]


class IgnoresOwnStalls(ObservedEngineClient):
    """Treats workers as lost that were silent only because of its own stall."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **{**others, "stalled_s": never_stalled})


@pytest.mark.parametrize(
    ("rule", "scenario", "parts"),
    [
        ("session", SESSIONS, Parts(router=ForgetsSessions)),
        ("session", SOFT, Parts(router=ForgetsSessions)),
        ("session", ACROSS, Parts(peers=NeverSyncsSessions)),
        ("rest", replace(SESSIONS, linger_s=10.0), Parts(router=KeepsSessionsForEver)),
        ("queue", QUEUE, Parts(router=InvertsPriorities)),
        ("queue", QUEUE, Parts(router=ServesTheLatestFirst)),
        ("queue", QUEUE, Parts(router=BypassesTheQueue)),
        ("queue", QUEUE, Parts(router=NeverTimesOutRequests)),
        ("bounded", DEATH, Parts(router_port=NeverResendsRequests)),
        ("busy", BUSY, Parts(router=IgnoresLimits)),
        ("adapter", ADAPTERS, Parts(router=IgnoresAdapters)),
        ("cache", ADAPTERS, Parts(engine=IgnoresAdaptersInCacheKeys)),
        ("adapter", MOVES, Parts(engines=ForgetsTheAdapterInMigration)),
        ("tokens", MOVES, Parts(engines=ForgetsTheAdapterInMigration)),
        ("overlap", APPROXIMATE, Parts(router=NeverExpiresApproximateEntries)),
        ("overlap", APPROXIMATE, Parts(router=ApproximatesAllWorkers)),
        ("overlap", APPROXIMATE, Parts(router=NeverRecordsRouting)),
        ("rest", replace(APPROXIMATE, linger_s=10.0), Parts(router=NeverExpiresApproximateEntries)),
        ("overlap", PREDICTIONS, Parts(router=NeverExpiresPredictions)),
        ("slow", SLOW_READERS, Parts(gateway=NeverCutsSlowReaders)),
        ("departed", MODEL_LEAVES, Parts(router=ForgetsModelsImmediately)),
        ("departed", MODEL_LEAVES, Parts(router=NeverForgetsModels)),
        ("retries", STALL, Parts(engines=IgnoresOwnStalls)),
    ],
    ids=lambda value: _mistake(value) if isinstance(value, Parts) else None,
)
def test_a_mistake_with_a_feature_is_caught_by_its_rule(
    rule: str, scenario: Scenario, parts: Parts
) -> None:
    assert rule in {violation.rule for violation in run_scenario(scenario, parts).violations}


def test_the_rule_about_the_backlog_of_a_subscriber_can_fail() -> None:
    """A subscriber that is not cut has a larger backlog than allowed."""
    stored = KvEvent(EventKind.STORED, np.arange(100, dtype=np.uint64))
    update = BatchUpdate(EventBatch(Source(1), 1, 1, [stored]))

    async def policy(subscriber_bytes: int) -> set[str]:
        checks = Checks()
        subscriber = SimpleNamespace(_waiting=[update, update])
        ingest = SimpleNamespace(subscribers=[subscriber])
        indexer: Any = SimpleNamespace(
            ingest=ingest, subscriber_bytes=subscriber_bytes, process=SimpleNamespace(name="i")
        )
        checks.backlog(indexer)
        return {violation.rule for violation in checks.violations}

    assert run_virtually(policy(1500)) == {"backlog"}
    assert run_virtually(policy(1600)) == set()


def _mistake(parts: Parts) -> str | None:
    real = Parts()
    names = ("router", "peers", "router_port", "engines", "engine", "gateway")
    changed = (getattr(parts, name) for name in names)
    return next((one.__name__ for one in changed if one not in _all(real)), None)


def _all(parts: Parts) -> list[type[Any]]:
    return [
        parts.router,
        parts.peers,
        parts.router_port,
        parts.engines,
        parts.engine,
        parts.gateway,
    ]
