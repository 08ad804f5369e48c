"""Scenarios drawn from a seed (pure).

Each seed first gives a plain mesh with clients and faults, from its own generator. Then some of the
features in `features.py` are turned on, from another generator, so that a new feature does not
change the plain meshes.
"""

from __future__ import annotations

from random import Random

from router_svc.core.admission import QueueSettings
from router_svc.core.policy import DEFAULT_POLICY, Policy
from tests.sim.clients import draw_client_specs, draw_conversations
from tests.sim.faults import (
    DISAGGREGATED_PROFILES,
    DISAGGREGATED_STORMS,
    PROFILES,
    STORMS,
    draw_faults,
    with_fast_detection,
)
from tests.sim.features import with_features
from tests.sim.scenario import (
    EOS,
    EOS_ONE_IN,
    RECOVERY_MAX_S,
    SHORT_RECOVERY_MAX_S,
    TOKEN_IDS,
    Mode,
    Scenario,
)
from worker_svc.engines.sim.token_oracle import TokenOracle

# Short, so that some requests find it full and some wait too long.
QUEUE = QueueSettings(threshold=0.3, policy="wspt", requests_max=12, wait_max_s=3.0)
SELECTOR_NAMES = ("least_loaded", "power_of_two", "round_robin", "random")
# Share of meshes with fast detection of broken links.
FAST_DETECTION_SHARE = 0.7
# A mesh at rest remains at rest, whatever timers are set: those of keepalive, orphans and leases.
LINGER_S = 20.0


def is_disaggregated(seed: int) -> bool:
    """Whether the mesh of a seed has a KV plane: two of five have one."""
    return seed % 5 in (1, 3)


def draw_scenario(seed: int, *, storm: bool = False) -> Scenario:
    """The scenario of a seed. storm: many more faults than any mesh should see."""
    plain = (_draw_disaggregated if is_disaggregated(seed) else _draw_aggregated)(seed, storm=storm)
    return with_features(plain, Random(f"features {seed}"))


def _draw_aggregated(seed: int, *, storm: bool) -> Scenario:
    """Aggregated workers without an index."""
    rng = Random(f"flat {seed}")
    token_oracle = TokenOracle(TOKEN_IDS, EOS, eos_one_in=EOS_ONE_IN)
    blocks = rng.choice((160, 4096, 4096))
    until = rng.uniform(6.0, 14.0)
    kinds = PROFILES[rng.randrange(len(PROFILES))]
    if storm:
        kinds = STORMS[rng.randrange(len(STORMS))]
    faults = draw_faults(rng, kinds, 30 if storm else rng.randrange(2, 10), until)
    has_fast_detection = rng.random() < FAST_DETECTION_SHARE
    return Scenario(
        seed=seed,
        is_storm=storm,
        workers=rng.randrange(2, 6),
        routers=rng.randrange(1, 4),
        frontends=rng.randrange(1, 3),
        selector=SELECTOR_NAMES[rng.randrange(len(SELECTOR_NAMES))],
        step_s=rng.uniform(0.02, 0.08),
        blocks=blocks,
        seqs=rng.choice((4, 64)),
        delay_s=rng.choice((0.0, 0.002, 0.05)),
        jitter_s=rng.choice((0.0, 0.002, 0.02)),
        quantum_s=rng.choice((0.0, 0.01, 0.05)),
        protect_first=rng.random() < 0.7,
        requests_max=rng.choice((4096, 4096, 4096, 6)),
        recovery_max_s=SHORT_RECOVERY_MAX_S if has_fast_detection else RECOVERY_MAX_S,
        linger_s=LINGER_S if rng.random() < 0.1 else 0.0,
        client_specs=draw_client_specs(
            rng, rng.randrange(25, 90), until, token_oracle, long_prompts=blocks > 2000
        ),
        faults=with_fast_detection(faults) if has_fast_detection else faults,
    )


def _draw_disaggregated(seed: int, *, storm: bool) -> Scenario:
    """Pairs of prefill and decode workers with an index."""
    rng = Random(f"vertical {seed}")
    token_oracle = TokenOracle(TOKEN_IDS, EOS, eos_one_in=EOS_ONE_IN)
    until = rng.uniform(6.0, 12.0)
    profiles = DISAGGREGATED_STORMS if storm else DISAGGREGATED_PROFILES
    kinds = profiles[rng.randrange(len(profiles))]
    faults = draw_faults(rng, kinds, 20 if storm else rng.randrange(2, 9), until)
    has_fast_detection = rng.random() < FAST_DETECTION_SHARE
    modes: tuple[Mode, ...] = ("bootstrap", "bootstrap", "completed")
    return Scenario(
        seed=seed,
        is_storm=storm,
        workers=rng.choice((0, 0, 0, 1, 2)),
        prefills=tuple(rng.choices(modes, k=rng.randrange(1, 4))),
        decodes=rng.randrange(2, 5),
        indexers=rng.randrange(1, 4),
        routers=rng.randrange(1, 4),
        frontends=rng.randrange(1, 3),
        selector=rng.choice(("kv", "kv", "kv", "round_robin")),
        step_s=rng.uniform(0.02, 0.06),
        prefill_token_s=rng.choice((2e-5, 1e-3)),
        batched_tokens=600,
        policy=Policy(queue=QUEUE) if rng.random() < 0.3 else DEFAULT_POLICY,
        gb_per_s=rng.choice((25.0, 0.5, 0.1)),
        chunk_pages=rng.choice((1, 4, 64)),
        local_prefill=rng.random() < 0.5,
        blocks=rng.choice((200, 2048, 2048)),
        delay_s=rng.choice((0.0, 0.002, 0.05)),
        jitter_s=rng.choice((0.0, 0.002, 0.02)),
        quantum_s=rng.choice((0.0, 0.01, 0.05)),
        protect_first=rng.random() < 0.7,
        budget_bytes=rng.choice((0, 0, 0, 0, 20_000)),
        subscriber_bytes=rng.choice((1 << 20, 1 << 20, 4096)),
        recovery_max_s=SHORT_RECOVERY_MAX_S if has_fast_detection else RECOVERY_MAX_S,
        linger_s=LINGER_S if rng.random() < 0.1 else 0.0,
        client_specs=draw_conversations(rng, rng.randrange(20, 50), until, token_oracle),
        faults=with_fast_detection(faults) if has_fast_detection else faults,
    )
