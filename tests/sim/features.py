"""Features that some meshes have in addition to the plain ones of `draws.py`, drawn by chance
(pure).

Each feature changes a scenario: its mesh, and the requests of some clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from common.registry.instances import KvIndex
from common.request.preprocessed import SessionAction, StopConditions
from router_svc.core.admission import QueueSettings
from router_svc.core.approx_index import ApproxLimits
from router_svc.core.eligibility import BusyLimits
from router_svc.core.overlap import IndexSettings, derive_index_settings
from tests.sim.clients import ClientSpec
from tests.sim.faults import FaultKind, draw_faults, with_fast_detection
from tests.sim.fleet import TEMPORARY_MODEL
from tests.sim.net import WINDOW_BYTES
from tests.sim.scenario import SHORT_RECOVERY_MAX_S, Scenario

# A prompt takes so long to compute that other requests wait.
SLOW_TOKEN_S = 1e-3
STEP_TOKENS = 600
# Prompts that take many such steps are truncated.
PROMPT_MAX = 1500
# By then a router has forgotten a model without workers in a healthy mesh, and unused
# streams are closed.
MODEL_EXPIRY_S = 75.0
ADAPTERS = ("french", "german")


def with_features(scenario: Scenario, rng: Random) -> Scenario:
    """The scenario with some features; most have one or two."""
    chances: tuple[tuple[float, Callable[[Scenario, Random], Scenario]], ...] = (
        (0.3, _sessions),
        (0.2, _queue),
        (0.1, _busy_limits),
        (0.25, _adapters),
        (0.3, _approximate_index),
        (0.15, _slow_clients),
        (0.04, _temporary_model),
        (0.1, _all_workers_killed),
        (0.2, _slow_subscribers),
        (0.1, _long_steps),
        (0.15, _failing_worker),
    )
    for chance, feature in chances:
        if rng.random() < chance:
            scenario = feature(scenario, rng)
    return scenario


def _sessions(scenario: Scenario, rng: Random) -> Scenario:
    """Requests belong to a few sessions; some reopen a session, or close it."""
    names = [f"s{number}" for number in range(rng.randrange(1, 6))]
    actions = (None,) * 8 + (SessionAction.OPEN, SessionAction.CLOSE)

    def with_session(spec: ClientSpec) -> ClientSpec:
        if rng.random() < 0.2:
            return spec
        return replace(spec, session=rng.choice(names), action=rng.choice(actions))

    policy = replace(
        scenario.policy,
        session_mode=rng.choice(("hard", "soft")),
        session_ttl_s=rng.choice((1.5, 6.0, 300.0)),
    )
    return replace(
        scenario, policy=policy, client_specs=tuple(map(with_session, scenario.client_specs))
    )


def _queue(scenario: Scenario, rng: Random) -> Scenario:
    """Requests wait in router queues for workers with capacity; some have a higher priority."""
    has_levels, has_jumps = rng.random() < 0.6, rng.random() < 0.6

    def with_priority(spec: ClientSpec) -> ClientSpec:
        return replace(
            spec,
            prompt=spec.prompt[:PROMPT_MAX],
            strict_priority=rng.randrange(3) if has_levels else 0,
            priority_jump_s=rng.choice((0.0, 0.0, 0.5, 5.0)) if has_jumps else 0.0,
        )

    queue = QueueSettings(
        threshold=rng.choice((0.05, 0.3)),
        policy=rng.choice(("fcfs", "wspt", "lcfs")),
        requests_max=rng.choice((12, 4096)),
        tokens_max=rng.choice((2000, 64_000_000)),
        wait_max_s=rng.choice((1.0, 3.0)),
    )
    scenario = replace(
        scenario,
        policy=replace(scenario.policy, queue=queue),
        client_specs=tuple(map(with_priority, scenario.client_specs)),
    )
    if rng.random() < 0.5:
        scenario = _with_faults(scenario, rng, FaultKind.ROUTER_KILL, rng.randrange(1, 4))
    return _slow_prompts(scenario)


def _slow_prompts(scenario: Scenario) -> Scenario:
    return replace(scenario, prefill_token_s=SLOW_TOKEN_S, batched_tokens=STEP_TOKENS)


def _busy_limits(scenario: Scenario, rng: Random) -> Scenario:
    """Busy workers get no further requests."""
    limits = rng.choice(
        (
            BusyLimits(active_decode_blocks=0.02),
            BusyLimits(active_prefill_tokens=300),
            BusyLimits(active_prefill_tokens_frac=0.4),
        )
    )
    client_specs = tuple(
        replace(spec, prompt=spec.prompt[:PROMPT_MAX]) for spec in scenario.client_specs
    )
    policy = replace(scenario.policy, busy=limits)
    return _slow_prompts(replace(scenario, policy=policy, client_specs=client_specs))


def _adapters(scenario: Scenario, rng: Random) -> Scenario:
    """Some workers have adapters, and some requests name them, with common prompts."""
    adapter_sets = rng.choice(
        (
            (frozenset(ADAPTERS),),
            (frozenset(ADAPTERS), frozenset(ADAPTERS[:1])),
            (frozenset(ADAPTERS), frozenset(ADAPTERS[:1]), frozenset[str]()),
        )
    )

    # All requests of a session have the same adapter: a placement for one adapter does not apply to
    # another.
    adapter_by_session: dict[str, str] = {}

    def with_adapter(spec: ClientSpec) -> ClientSpec:
        lora = rng.choice(("", "", *ADAPTERS))
        return replace(
            spec, lora=adapter_by_session.setdefault(spec.session, lora) if spec.session else lora
        )

    return replace(
        scenario,
        adapters=adapter_sets,
        client_specs=tuple(map(with_adapter, scenario.client_specs)),
    )


def _approximate_index(scenario: Scenario, rng: Random) -> Scenario:
    """Some routers follow no events, or have predicted entries beside them; some workers publish
    none.
    """
    limits = ApproxLimits(
        ttl_s=rng.choice((1.0, 4.0, 120.0)), blocks_max=rng.choice((40, 1 << 20, 1 << 20))
    )

    def choice(*, kv_events: bool, predicted_ttl_s: float = 0.0) -> IndexSettings:
        return derive_index_settings(
            overlap_score_credit=1.0,
            kv_events=kv_events,
            limits=limits,
            predicted_ttl_s=predicted_ttl_s,
        )

    approximate, with_predictions = (
        choice(kv_events=False),
        choice(kv_events=True, predicted_ttl_s=1.5),
    )
    plain = choice(kv_events=True)
    if not scenario.indexers:
        index_modes: tuple[KvIndex, ...] = rng.choice((("approx",), ("approx", "none")))
        index_choices = rng.choice(((approximate,), (plain,)))
        return replace(scenario, selector="kv", choices=index_choices, kv_index_modes=index_modes)
    return replace(
        scenario,
        choices=rng.choice(
            ((approximate,), (with_predictions,), (plain, approximate), (with_predictions, plain))
        ),
        kv_index_modes=rng.choice(
            (("events",), ("events", "approx"), ("events", "none"), ("approx",))
        ),
    )


def _slow_clients(scenario: Scenario, rng: Random) -> Scenario:
    """Some clients read so slowly that they must be cut."""
    long_response = StopConditions(max_tokens=150, ignore_eos=True)

    def with_slow_reader(spec: ClientSpec) -> ClientSpec:
        if spec.stop_after_tokens is not None or rng.random() < 0.8:
            return spec
        return replace(
            spec,
            stop=long_response,
            pause_s=rng.uniform(0.3, 3.0),
            unread_max=rng.randrange(3, 40),
        )

    return replace(scenario, client_specs=tuple(map(with_slow_reader, scenario.client_specs)))


def _temporary_model(scenario: Scenario, rng: Random) -> Scenario:
    """Another model has one worker, which leaves for good; some requests for it come before, some
    after.
    """
    leaves_s = rng.uniform(1.0, 6.0)

    def for_temporary_model(spec: ClientSpec) -> ClientSpec:
        if spec.lora or spec.session or rng.random() < 0.8:
            return spec
        return replace(spec, model=TEMPORARY_MODEL)

    return replace(
        scenario,
        temporary_model_s=leaves_s,
        linger_s=max(scenario.linger_s, MODEL_EXPIRY_S),
        client_specs=tuple(map(for_temporary_model, scenario.client_specs)),
    )


def _all_workers_killed(scenario: Scenario, rng: Random) -> Scenario:
    return _with_faults(scenario, rng, FaultKind.WORKERS_GONE, 1)


def _slow_subscribers(scenario: Scenario, rng: Random) -> Scenario:
    if not scenario.indexers:
        return scenario
    # Enough for two statuses of each worker; a subscriber with less could never begin.
    subscriber_limit, window = rng.choice(
        ((1536, 512), (1536, 512), (2048, 2048), (1 << 20, WINDOW_BYTES))
    )
    scenario = replace(scenario, subscriber_bytes=subscriber_limit, window_bytes=window)
    return _with_faults(scenario, rng, FaultKind.SUBSCRIBER_SLOW, rng.randrange(1, 4))


def _long_steps(scenario: Scenario, rng: Random) -> Scenario:
    """Steps of several seconds, which must not count as a hang."""
    client_specs = tuple(
        replace(spec, prompt=spec.prompt[:PROMPT_MAX]) for spec in scenario.client_specs
    )
    return replace(
        scenario,
        prefill_token_s=rng.choice((2e-3, 5e-3)),
        batched_tokens=rng.choice((600, 8192)),
        client_specs=client_specs,
    )


def _failing_worker(scenario: Scenario, rng: Random) -> Scenario:
    """The engine of a worker fails its requests for a while, and does not die."""
    return _with_faults(scenario, rng, FaultKind.WORKER_FAIL, 1)


def _with_faults(scenario: Scenario, rng: Random, kind: FaultKind, count: int) -> Scenario:
    until = max(spec.at for spec in scenario.client_specs)
    faults = draw_faults(rng, (kind,), count, max(1.0, until))
    if scenario.recovery_max_s == SHORT_RECOVERY_MAX_S:
        faults = with_fast_detection(faults)
    faults = tuple(sorted((*scenario.faults, *faults), key=lambda one: one.at))
    return replace(scenario, faults=faults)
