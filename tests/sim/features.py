"""What some meshes have beside the plain ones of `draws.py`, drawn by chance (pure).

Each feature changes a scenario: its mesh, and what some of its clients ask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from common.registry.instances import KvIndex
from common.request.preprocessed import SessionAction, StopConditions
from router_svc.core.admission import QueueRules
from router_svc.core.approx_index import ApproxLimits
from router_svc.core.busy import BusyLimits
from router_svc.core.overlap import IndexChoice, choose_index
from tests.sim.clients import Wish
from tests.sim.faults import FaultKind, draw_faults, noticed_soon
from tests.sim.fleet import VISITOR
from tests.sim.net import WINDOW_BYTES
from tests.sim.scenario import SHORT_REST_S, Scenario

# A prompt takes long enough to compute for others to wait, and a step not as long as a hang.
SLOW_TOKEN_S = 1e-3
STEP_TOKENS = 600
# Prompts that take many such steps are cut.
PROMPT_MAX = 1500
# A router has forgotten a model by then whose last worker left when all was well, and streams that
# nobody uses are closed.
FORGETS_S = 75.0
ADAPTERS = ("french", "german")


def with_features(scenario: Scenario, rng: Random) -> Scenario:
    """The scenario with some of them; most have one or two."""
    chances: tuple[tuple[float, Callable[[Scenario, Random], Scenario]], ...] = (
        (0.3, _sessions),
        (0.2, _queue),
        (0.1, _busy),
        (0.25, _adapters),
        (0.3, _guesses),
        (0.15, _slow_clients),
        (0.04, _visitor),
        (0.1, _workers_gone),
        (0.2, _slow_subscribers),
    )
    for chance, feature in chances:
        if rng.random() < chance:
            scenario = feature(scenario, rng)
    return scenario


def _sessions(scenario: Scenario, rng: Random) -> Scenario:
    """Requests belong to a few sessions; some begin one anew, or end it."""
    names = [f"s{number}" for number in range(rng.randrange(1, 6))]
    actions = (None,) * 8 + (SessionAction.OPEN, SessionAction.CLOSE)

    def joins(wish: Wish) -> Wish:
        if rng.random() < 0.2:
            return wish
        return replace(wish, session=rng.choice(names), action=rng.choice(actions))

    rules = replace(
        scenario.rules,
        session_mode=rng.choice(("hard", "soft")),
        session_ttl_s=rng.choice((1.5, 6.0, 300.0)),
    )
    return replace(scenario, rules=rules, wishes=tuple(map(joins, scenario.wishes)))


def _queue(scenario: Scenario, rng: Random) -> Scenario:
    """Requests wait at routers for workers with room; some go ahead of others."""
    has_levels, has_jumps = rng.random() < 0.6, rng.random() < 0.6

    def queues(wish: Wish) -> Wish:
        return replace(
            wish,
            prompt=wish.prompt[:PROMPT_MAX],
            strict_priority=rng.randrange(3) if has_levels else 0,
            jump_s=rng.choice((0.0, 0.0, 0.5, 5.0)) if has_jumps else 0.0,
        )

    queue = QueueRules(
        threshold=rng.choice((0.05, 0.3)),
        policy=rng.choice(("fcfs", "wspt", "lcfs")),
        requests_max=rng.choice((12, 4096)),
        tokens_max=rng.choice((2000, 64_000_000)),
        wait_max_s=rng.choice((1.0, 3.0)),
    )
    scenario = replace(
        scenario,
        rules=replace(scenario.rules, queue=queue),
        wishes=tuple(map(queues, scenario.wishes)),
    )
    if rng.random() < 0.5:
        scenario = _with_faults(scenario, rng, FaultKind.ROUTER_KILL, rng.randrange(1, 4))
    return _slow_prompts(scenario)


def _slow_prompts(scenario: Scenario) -> Scenario:
    return replace(scenario, prefill_token_s=SLOW_TOKEN_S, batched_tokens=STEP_TOKENS)


def _busy(scenario: Scenario, rng: Random) -> Scenario:
    """Workers with much to do get nothing more."""
    limits = rng.choice(
        (
            BusyLimits(active_decode_blocks=0.02),
            BusyLimits(active_prefill_tokens=300),
            BusyLimits(active_prefill_tokens_frac=0.4),
        )
    )
    wishes = tuple(replace(wish, prompt=wish.prompt[:PROMPT_MAX]) for wish in scenario.wishes)
    rules = replace(scenario.rules, busy=limits)
    return _slow_prompts(replace(scenario, rules=rules, wishes=wishes))


def _adapters(scenario: Scenario, rng: Random) -> Scenario:
    """Some workers have adapters, and some requests ask for them with prompts like the others'."""
    some = rng.choice(
        (
            (frozenset(ADAPTERS),),
            (frozenset(ADAPTERS), frozenset(ADAPTERS[:1])),
            (frozenset(ADAPTERS), frozenset(ADAPTERS[:1]), frozenset[str]()),
        )
    )

    # Of a session all ask for the same: which worker it is on would say little about the others.
    asked: dict[str, str] = {}

    def asks(wish: Wish) -> Wish:
        lora = rng.choice(("", "", *ADAPTERS))
        return replace(wish, lora=asked.setdefault(wish.session, lora) if wish.session else lora)

    return replace(scenario, adapters=some, wishes=tuple(map(asks, scenario.wishes)))


def _guesses(scenario: Scenario, rng: Random) -> Scenario:
    """Some routers follow no events, or predict beside them; some workers tell of none."""
    limits = ApproxLimits(
        ttl_s=rng.choice((1.0, 4.0, 120.0)), blocks_max=rng.choice((40, 1 << 20, 1 << 20))
    )

    def choice(*, kv_events: bool, predicted_ttl_s: float = 0.0) -> IndexChoice:
        return choose_index(
            overlap_score_credit=1.0,
            kv_events=kv_events,
            limits=limits,
            predicted_ttl_s=predicted_ttl_s,
        )

    guessing, predicting = choice(kv_events=False), choice(kv_events=True, predicted_ttl_s=1.5)
    plain = choice(kv_events=True)
    if not scenario.indexers:
        ways: tuple[KvIndex, ...] = rng.choice((("approx",), ("approx", "none")))
        kinds = rng.choice(((guessing,), (plain,)))
        return replace(scenario, selector="kv", choices=kinds, kv_ways=ways)
    return replace(
        scenario,
        choices=rng.choice(((guessing,), (predicting,), (plain, guessing), (predicting, plain))),
        kv_ways=rng.choice((("events",), ("events", "approx"), ("events", "none"), ("approx",))),
    )


def _slow_clients(scenario: Scenario, rng: Random) -> Scenario:
    """Some clients read so slowly that they are to be cut."""
    much = StopConditions(max_tokens=150, ignore_eos=True)

    def dawdles(wish: Wish) -> Wish:
        if wish.stops_after is not None or rng.random() < 0.8:
            return wish
        return replace(
            wish,
            stop=much,
            pause_s=rng.uniform(0.3, 3.0),
            unread_max=rng.randrange(3, 40),
        )

    return replace(scenario, wishes=tuple(map(dawdles, scenario.wishes)))


def _visitor(scenario: Scenario, rng: Random) -> Scenario:
    """Another model has one worker, which leaves for good; some ask for it before, some after."""
    leaves_s = rng.uniform(1.0, 6.0)

    def visits(wish: Wish) -> Wish:
        if wish.lora or wish.session or rng.random() < 0.8:
            return wish
        return replace(wish, model=VISITOR)

    return replace(
        scenario,
        visitor_s=leaves_s,
        lingers_s=max(scenario.lingers_s, FORGETS_S),
        wishes=tuple(map(visits, scenario.wishes)),
    )


def _workers_gone(scenario: Scenario, rng: Random) -> Scenario:
    return _with_faults(scenario, rng, FaultKind.WORKERS_GONE, 1)


def _slow_subscribers(scenario: Scenario, rng: Random) -> Scenario:
    if not scenario.indexers:
        return scenario
    # Enough for two statuses of each worker, without which a subscriber could never begin.
    most, window = rng.choice(((1536, 512), (1536, 512), (2048, 2048), (1 << 20, WINDOW_BYTES)))
    scenario = replace(scenario, subscriber_bytes=most, window_bytes=window)
    return _with_faults(scenario, rng, FaultKind.SUBSCRIBER_SLOW, rng.randrange(1, 4))


def _with_faults(scenario: Scenario, rng: Random, kind: FaultKind, count: int) -> Scenario:
    until = max(wish.at for wish in scenario.wishes)
    faults = draw_faults(rng, (kind,), count, max(1.0, until))
    if scenario.rest_s == SHORT_REST_S:
        faults = noticed_soon(faults)
    faults = tuple(sorted((*scenario.faults, *faults), key=lambda one: one.at))
    return replace(scenario, faults=faults)
