"""The rules about sessions, queues, adapters and guesses can fail: a mistake is caught by them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import MeshError
from common.kv.events import Event, EventBatch, EventKind, Source
from common.request.preprocessed import StopConditions
from common.request.token_stream import LegSink, Order
from frontend_svc.core.peers.stall_clock import never_late
from frontend_svc.core.request.machine import Plan
from frontend_svc.peers.engine_client import Submission
from frontend_svc.peers.router_client import Query
from frontend_svc.request.gateway import Gateway, Listener, Ticket
from router_svc.core.admission import QueueRules
from router_svc.core.approx_index import ApproxLimits
from router_svc.core.busy import NO_LIMITS, BusyLimits
from router_svc.core.load_tracker import LoadBook
from router_svc.core.overlap import choose_index
from router_svc.core.policy import Rules
from router_svc.core.query import Query as RouterQuery
from router_svc.replication_sync import PeerSync
from tests.sim.checks import Checks
from tests.sim.clients import Wish
from tests.sim.faults import Fault, FaultKind
from tests.sim.fleet import VISITOR, Parts, WatchedEngines, WatchedRouter, WatchedRouterClient
from tests.sim.loop import run_virtually
from tests.sim.scenario import SHORT_REST_S, WORDS, Scenario
from tests.sim.world import run_scenario
from worker_svc.engines.contract import EngineConfig
from worker_svc.engines.sim.engine import SimEngine

pytestmark = pytest.mark.slow


def fault(kind: FaultKind, at: float, *, lasts_s: float = 1.0) -> Fault:
    return Fault(at, kind, 0.0, 0.0, lasts_s, near_s=0.1, far_s=0.1, notice_s=0.5)


SHORT = StopConditions(max_tokens=6, ignore_eos=True)
LONG = StopConditions(max_tokens=100, ignore_eos=True)


def wishes(count: int, every_s: float, tokens: int, stop: StopConditions = SHORT) -> list[Wish]:
    """Clients whose prompts begin alike."""
    rng = Random(5)
    begin = tuple(rng.choices(WORDS, k=tokens // 2))
    return [
        Wish(n, every_s * n, begin + tuple(rng.choices(WORDS, k=tokens // 2)), stop)
        for n in range(count)
    ]


PLAIN = Scenario(seed=7, selector="random", rest_s=SHORT_REST_S)
SLOW = replace(PLAIN, prefill_token_s=1e-3, batched_tokens=600)
SESSIONS = replace(
    PLAIN,
    rules=Rules(session_mode="hard", session_ttl_s=2.0),
    wishes=tuple(replace(one, session=f"s{one.number % 3}") for one in wishes(30, 0.2, 40)),
)
SOFT = replace(SESSIONS, rules=Rules(session_mode="soft"))
# One session, whose requests come by different frontends, and so by different routers.
ACROSS = replace(
    SESSIONS,
    workers=8,
    routers=2,
    frontends=4,
    rules=Rules(session_mode="hard"),
    wishes=tuple(replace(one, session="s", pick=one.number % 4 / 4) for one in wishes(12, 2.0, 40)),
)
# Six come at once, and each prompt takes half a second; two workers compute them.
QUEUE = replace(
    SLOW,
    workers=2,
    rules=Rules(queue=QueueRules(threshold=0.05, wait_max_s=1.0)),
    wishes=tuple(
        replace(one, at=0.01 * one.number, strict_priority=one.number % 3)
        for one in wishes(12, 0.0, 500)
    ),
)
DEATH = replace(QUEUE, routers=2, faults=(fault(FaultKind.ROUTERS_KILL, 0.5, lasts_s=0.2),))
BUSY = replace(
    SLOW,
    workers=2,
    rules=Rules(busy=BusyLimits(active_prefill_tokens=300)),
    wishes=tuple(wishes(12, 0.1, 500)),
)
ADAPTERS = replace(
    PLAIN,
    selector="round_robin",
    adapters=(frozenset({"french", "german"}), frozenset({"french"})),
    wishes=tuple(
        replace(one, lora=("", "french", "german")[one.number % 3]) for one in wishes(30, 0.2, 80)
    ),
)
MOVES = replace(
    ADAPTERS,
    wishes=tuple(replace(one, stop=LONG) for one in ADAPTERS.wishes),
    faults=(fault(FaultKind.WORKER_KILL, 3.0),),
)
GUESSES = replace(
    PLAIN,
    selector="kv",
    kv_ways=("approx", "none"),
    choices=(
        choose_index(
            overlap_score_credit=1.0,
            kv_events=False,
            limits=ApproxLimits(ttl_s=2.5),
            predicted_ttl_s=0.0,
        ),
    ),
    # With a pause in which guesses expire.
    wishes=tuple(replace(one, at=one.at + 6.0 * (one.number >= 15)) for one in wishes(30, 0.7, 80)),
)
# Eight prompts, each twice in a moment, then again when the caches have forgotten it.
PREDICTIONS = replace(
    PLAIN,
    selector="kv",
    indexers=1,
    blocks=12,
    choices=(
        choose_index(
            overlap_score_credit=1.0, kv_events=True, limits=ApproxLimits(), predicted_ttl_s=1.0
        ),
    ),
    wishes=tuple(
        Wish(n, 0.4 * (n // 2) + 0.01 * (n % 2), (11 + n // 2 % 8,) * 80, SHORT) for n in range(60)
    ),
)
DAWDLES = replace(
    PLAIN,
    wishes=tuple(replace(one, pause_s=3.0, unread_max=8) for one in wishes(6, 0.1, 40, LONG)),
)
VISITOR_LEAVES = replace(
    PLAIN,
    visitor_s=2.0,
    lingers_s=75.0,
    wishes=tuple(replace(one, model=VISITOR) for one in wishes(12, 0.5, 40)),
)
STALL = replace(
    PLAIN,
    wishes=tuple(wishes(12, 0.1, 40, LONG)),
    faults=(fault(FaultKind.FRONTEND_STALL, 1.0, lasts_s=6.0),),
)
SCENARIOS = {
    "hard sessions": SESSIONS,
    "soft sessions": SOFT,
    "sessions at several routers": ACROSS,
    "a queue": QUEUE,
    "a queue whose router dies": DEATH,
    "busy workers": BUSY,
    "adapters": ADAPTERS,
    "adapters whose worker dies": MOVES,
    "guesses": GUESSES,
    "predictions": PREDICTIONS,
    "slow clients": DAWDLES,
    "a model that leaves": VISITOR_LEAVES,
    "a frontend that stalls": STALL,
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_the_real_parts_break_no_rule_with_a_feature(scenario: Scenario) -> None:
    report = run_scenario(scenario)
    assert not report.breaches, str(report)


@pytest.mark.parametrize(
    ("scenario", "what"),
    [
        (SESSIONS, "session kept"),
        (SOFT, "session kept"),
        (ACROSS, "sessions kept across"),
        (QUEUE, "levels passed"),
        (QUEUE, "queue timeouts"),
        (DEATH, "parked at a death"),
        (BUSY, "refused: ALL_WORKERS_BUSY"),
        (ADAPTERS, "adapters asked for"),
        (MOVES, "answers migrated"),
        (GUESSES, "blocks believed: approx"),
        (PREDICTIONS, "blocks believed: events"),
        (DAWDLES, "clients cut"),
        (VISITOR_LEAVES, "models missed"),
        (VISITOR_LEAVES, "models forgotten"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_the_scenarios_with_a_feature_have_what_it_is_for(scenario: Scenario, what: str) -> None:
    assert run_scenario(scenario).counts[what] > 0


class ForgetsSessions(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.affinity.booked = lambda *args: None  # type: ignore[method-assign]


class KeepsSessionsForEver(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.affinity._ttl_s = 1e9


class KeepsSessionsToItself(PeerSync):
    """Tells other routers of bookings only."""

    def __init__(self, id: int, routers: Any, book: LoadBook, affinity: Any, **others: Any) -> None:
        super().__init__(id, routers, book, **others)


class TurnsLevelsRound(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        park = self.queue.park

        def turned(query: RouterQuery, *args: Any, **others: Any) -> Any:
            low = replace(query, strict_priority=9 - query.strict_priority)
            return park(low, *args, **others)

        self.queue.park = turned  # type: ignore[method-assign]


class ServesTheLatestFirst(WatchedRouter):
    """Though it was told to serve in order."""

    def __init__(self, *args: Any, rules: Rules, **others: Any) -> None:
        late = replace(rules, queue=replace(rules.queue, policy="lcfs"))
        super().__init__(*args, rules=late, **others)


class LetsSomeIn(WatchedRouter):
    """Every other one need not wait, whoever does."""

    asked_for = 0

    def admit(self, query: RouterQuery, *args: Any) -> Any:
        self.asked_for += 1
        return (super().admit if self.asked_for % 2 else self.decide)(query, *args)


class NeverTurnsAway(WatchedRouter):
    """And never lets anybody in who waits."""

    def __init__(self, *args: Any, rules: Rules, **others: Any) -> None:
        for_ever = replace(rules, queue=replace(rules.queue, wait_max_s=1e6))
        super().__init__(*args, rules=for_ever, **others)
        self._admitted = lambda *args: None  # type: ignore[method-assign]


class AsksOnce(WatchedRouterClient):
    """What it asked one router it does not ask the next."""

    async def _write(self, session: Any) -> None:
        if self.unrouted >= 0 and hasattr(self, "has_asked"):
            self._waiting.clear()
            self._numbers.clear()
        self.has_asked = True
        await super()._write(session)


class IgnoresLimits(WatchedRouter):
    def __init__(self, *args: Any, rules: Rules, **others: Any) -> None:
        super().__init__(*args, rules=replace(rules, busy=NO_LIMITS), **others)


class IgnoresAdapters(WatchedRouter):
    def admit(self, query: RouterQuery, *args: Any) -> Any:
        return super().admit(replace(query, routing=None), *args)


class SharesCaches(SimEngine):
    """Names the blocks of all adapters alike."""

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        assert self._core is not None
        hashers: Any = self._core.hashers
        hashers.update(dict.fromkeys(hashers, hashers[""]))
        return config


class ForgetsTheAdapterInMigration(WatchedEngines):
    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        if order.attempt and order.request is not None:
            order = replace(order, request=replace(order.request, routing=None))
        return super().submit(worker_id, address, order, sink)


class BelievesForEver(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        assert self.overlaps.guesses is not None
        self.overlaps.guesses.limits = ApproxLimits(ttl_s=1e9)


class GuessesAboutAll(WatchedRouter):
    """Also about those whose caches cannot be known."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.overlaps._way = lambda worker: "approx"  # type: ignore[method-assign]


class GuessesNothing(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.overlaps.routed = lambda *args: None  # type: ignore[method-assign]


class PredictsForEver(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        assert self.overlaps.predictions is not None
        self.overlaps.predictions.limits = ApproxLimits(ttl_s=1e9)


class Patient(Gateway):
    """Never gives a request up."""

    def open(self, plan: Plan, query: Query, listener: Listener) -> Ticket:
        ticket = super().open(plan, query, listener)
        ticket.fail = self.ignore  # type: ignore[method-assign]
        return ticket

    def ignore(self, error: MeshError, reason: str) -> None:
        pass


class ForgetsModelsAtOnce(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.fleet.knows = lambda model, now: False  # type: ignore[method-assign]


class RemembersModels(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.fleet.knows = lambda model, now: True  # type: ignore[method-assign]


class BlamesOthers(WatchedEngines):
    """Whoever it could not hear while it stood still is lost to it."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **{**others, "lost_s": never_late})


@pytest.mark.parametrize(
    ("rule", "scenario", "parts"),
    [
        ("session", SESSIONS, Parts(router=ForgetsSessions)),
        ("session", SOFT, Parts(router=ForgetsSessions)),
        ("session", ACROSS, Parts(peers=KeepsSessionsToItself)),
        ("rest", replace(SESSIONS, lingers_s=10.0), Parts(router=KeepsSessionsForEver)),
        ("queue", QUEUE, Parts(router=TurnsLevelsRound)),
        ("queue", QUEUE, Parts(router=ServesTheLatestFirst)),
        ("queue", QUEUE, Parts(router=LetsSomeIn)),
        ("queue", QUEUE, Parts(router=NeverTurnsAway)),
        ("bounded", DEATH, Parts(placer=AsksOnce)),
        ("busy", BUSY, Parts(router=IgnoresLimits)),
        ("adapter", ADAPTERS, Parts(router=IgnoresAdapters)),
        ("cache", ADAPTERS, Parts(engine=SharesCaches)),
        ("adapter", MOVES, Parts(engines=ForgetsTheAdapterInMigration)),
        ("truth", MOVES, Parts(engines=ForgetsTheAdapterInMigration)),
        ("guess", GUESSES, Parts(router=BelievesForEver)),
        ("guess", GUESSES, Parts(router=GuessesAboutAll)),
        ("guess", GUESSES, Parts(router=GuessesNothing)),
        ("rest", replace(GUESSES, lingers_s=10.0), Parts(router=BelievesForEver)),
        ("guess", PREDICTIONS, Parts(router=PredictsForEver)),
        ("slow", DAWDLES, Parts(gateway=Patient)),
        ("departed", VISITOR_LEAVES, Parts(router=ForgetsModelsAtOnce)),
        ("departed", VISITOR_LEAVES, Parts(router=RemembersModels)),
        ("retries", STALL, Parts(engines=BlamesOthers)),
    ],
    ids=lambda value: _mistake(value) if isinstance(value, Parts) else None,
)
def test_a_mistake_with_a_feature_is_caught_by_its_rule(
    rule: str, scenario: Scenario, parts: Parts
) -> None:
    assert rule in {breach.rule for breach in run_scenario(scenario, parts).breaches}


def test_the_rule_about_the_backlog_of_a_subscriber_can_fail() -> None:
    """A subscriber that is not cut holds more than it may."""
    stored = Event(EventKind.STORED, np.arange(100, dtype=np.uint64))
    batch = EventBatch(Source(1), 1, 1, [stored])

    async def rules(subscriber_bytes: int) -> set[str]:
        checks = Checks()
        subscriber = SimpleNamespace(_waiting=[batch, batch])
        ingest = SimpleNamespace(subscribers=[subscriber])
        indexer: Any = SimpleNamespace(
            ingest=ingest, subscriber_bytes=subscriber_bytes, process=SimpleNamespace(name="i")
        )
        checks.backlog(indexer)
        return {breach.rule for breach in checks.breaches}

    assert run_virtually(rules(1500)) == {"backlog"}
    assert run_virtually(rules(1600)) == set()


def _mistake(parts: Parts) -> str | None:
    real = Parts()
    names = ("router", "peers", "placer", "engines", "engine", "gateway")
    changed = (getattr(parts, name) for name in names)
    return next((one.__name__ for one in changed if one not in _all(real)), None)


def _all(parts: Parts) -> list[type[Any]]:
    return [parts.router, parts.peers, parts.placer, parts.engines, parts.engine, parts.gateway]
