"""The placement policy: configured, counted, and applied by a router that is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from prometheus_client import generate_latest

from common.errors import InternalError
from common.kv.load import Load
from common.registry.instances import Snapshot
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.placement import Query
from common.request.preprocessed import RouterConfigOverride, RoutingHints, SessionControl
from common.runtime.config import ConfigError, read_config
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from router_svc.core.booking import BookingKey
from router_svc.core.candidate import Candidate
from router_svc.core.cost import CostSettings
from router_svc.core.pairing import Bypass, TransferDomain
from router_svc.core.policy import DEFAULT_POLICY, Policy
from router_svc.core.router import Router
from router_svc.core.scoring import View
from router_svc.core.selectors import SELECTORS, Selection
from router_svc.metrics import Metrics
from tests.kit.instances import snapshot_of, worker

PLUGIN = '''
class OnlyTwo:
    """Always selects worker 2 and counts its calls."""

    name = "only-two"

    def __init__(self):
        self.calls = 0

    def select(self, query, candidates, view, rng):
        from router_svc.core.selectors import Selection

        self.calls += 1
        return Selection([c for c in candidates if c.placement.worker_id == 2][0], "always two")
'''


def read(*flags: str) -> RouterConfig:
    return read_config(RouterConfig, "ROUTER", {}, flags)[0]


# Configured.


def test_the_default_configuration_is_the_default_policy() -> None:
    assert read().policy == DEFAULT_POLICY == Policy()


def test_every_policy_field_can_be_configured() -> None:
    config = read(
        "--session-affinity-ttl-s=5",
        "--session-affinity-mode=soft",
        "--lora-residency=preferred",
        "--kv-transfer-domain=zone",
        "--kv-transfer-enforcement=preferred",
        "--kv-transfer-weight=0.25",
        "--bypass-policy=isl_or_load",
        "--bypass-eff-isl-threshold=100",
        "--bypass-eff-isl-ratio-threshold=0.5",
        "--bypass-prefill-busy-threshold=2",
        "--bypass-decode-busy-threshold=0.9",
    )
    assert config.policy == Policy(
        session_ttl_s=5.0,
        session_mode="soft",
        lora_residency="preferred",
        domain=TransferDomain("zone", 0.25),
        bypass=Bypass(
            policy="isl_or_load",
            eff_isl_threshold=100,
            eff_isl_ratio_threshold=0.5,
            prefill_busy_threshold=2.0,
            decode_busy_threshold=0.9,
        ),
    )
    assert read("--kv-transfer-domain=zone").policy.domain == TransferDomain("zone")


@pytest.mark.row("S1-102")
@pytest.mark.parametrize(
    "flag",
    [
        "--session-affinity-ttl-s=0.5",
        "--session-affinity-ttl-s=31536001",
        "--session-affinity-ttl-s=nan",
        "--session-affinity-mode=sticky",
        "--lora-residency=maybe",
        "--kv-transfer-enforcement=hoped",
        "--kv-transfer-weight=1.5",
        "--bypass-policy=always",
        "--bypass-eff-isl-threshold=-1",
        "--bypass-eff-isl-ratio-threshold=-0.1",
        "--bypass-prefill-busy-threshold=-1",
        "--bypass-decode-busy-threshold=1.1",
    ],
)
def test_a_policy_value_out_of_range_stops_the_start_and_is_named(flag: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(flag)
    (problem,) = refused.value.problems
    assert problem.startswith(flag.partition("=")[0])


def test_a_preference_needs_a_domain() -> None:
    with pytest.raises(ConfigError) as refused:
        read("--kv-transfer-enforcement=preferred")
    (problem,) = refused.value.problems
    assert "domain" in problem


@pytest.mark.parametrize("policy", ["prefill_load", "isl_or_load"])
def test_a_bypass_by_load_requires_a_busy_threshold(policy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(f"--bypass-policy={policy}")
    (problem,) = refused.value.problems
    assert "bypass_prefill_busy_threshold" in problem.replace("-", "_")
    assert policy in problem
    settings = read(f"--bypass-policy={policy}", "--queue-threshold=3").policy
    assert settings.bypass.prefill_busy_threshold == 3.0
    own = read(
        f"--bypass-policy={policy}", "--queue-threshold=3", "--bypass-prefill-busy-threshold=0"
    )
    assert own.policy.bypass.prefill_busy_threshold == 0.0


@pytest.mark.row("S1-14")
def test_a_router_is_configured_and_each_request_may_override_it() -> None:
    config = read("--overlap-score-credit=0.5", "--router-temperature=0.25")
    assert config.cost_settings == CostSettings(overlap_score_credit=0.5, router_temperature=0.25)
    own = RouterConfigOverride(overlap_score_credit=2.0, assume_kv_reuse=True)
    assert config.cost_settings.with_override(own) == CostSettings(
        overlap_score_credit=2.0, router_temperature=0.25, assume_kv_reuse=True
    )


# Built.


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "kvmesh_test_selector.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    return "kvmesh_test_selector:OnlyTwo"


def built(*flags: str) -> RouterApp:
    config = read("--registry=memory", *flags)
    app = RouterApp(config, registry=MemoryRegistry(MemoryStore()), clock=lambda: 0.0)
    members = {n: worker(n) for n in (1, 2, 3)}
    app.router.update(Snapshot(1, members), 0.0)
    return app


@pytest.mark.row("S1-40")
async def test_a_selector_named_by_the_configuration_decides_every_request(plugin: str) -> None:
    router = built(f"--selector={plugin}").router
    for number in range(20):
        key = BookingKey(7, f"r{number}", 0)
        record = router.decide(Query("m", 1000), key, 0.0, Random(number))
        assert record.decision.worker.worker_id == 2, "at any load"
        assert (record.selector, record.decision.reasons[0]) == (
            "only-two",
            "only-two: always two",
        )
    assert getattr(router.selector, "calls", 0) == 20


@pytest.mark.row("S1-40")
async def test_a_selector_gets_eligible_candidates_only(plugin: str) -> None:
    router = built(f"--selector={plugin}").router
    hints = RoutingHints(allowed_worker_ids=frozenset({2, 3}))
    assert (
        router.decide(Query("m", routing=hints), None, 0.0, Random(0)).decision.worker.worker_id
        == 2
    )
    hints = RoutingHints(allowed_worker_ids=frozenset({3}))
    with pytest.raises(InternalError, match="only-two") as caught:
        router.decide(Query("m", routing=hints), None, 0.0, Random(0))
    assert isinstance(caught.value.__cause__, IndexError), "the selector searches for worker 2"


async def test_a_built_router_applies_its_policy() -> None:
    hints = RoutingHints(session_control=SessionControl("s"))
    query = Query("m", 100, routing=hints)
    router = built("--session-affinity-ttl-s=2").router
    first = router.decide(query, BookingKey(7, "a", 0), 0.0, Random(0))
    assert router.decide(query, None, 0.0, Random(1)).decision.worker == first.decision.worker
    router.load_tracker.free(BookingKey(7, "a", 0))
    for now in (1.5, 2.0, 3.5):
        router.expire(now)
    assert len(router.affinity) == 0


# Counted.


class Favourite:
    """Selects the first candidate."""

    name = "kv"

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Selection:
        return Selection(candidates[0], "first")


def samples(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_bypasses_and_sessions_are_counted() -> None:
    bypass = Bypass(policy="prefill_load", prefill_busy_threshold=0.0)
    router = Router(Favourite(), policy=Policy(bypass=bypass))
    members = (
        worker(1, role="prefill", local_prefill=False, max_num_batched_tokens=10),
        worker(11, role="decode"),
    )
    router.update(snapshot_of(*members), 0.0)
    router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=1000), 0.0)
    metrics = Metrics(router)
    query = Query("m", 100, routing=RoutingHints(session_control=SessionControl("s")))
    for number in range(3):
        record = router.decide(query, BookingKey(7, f"r{number}", 0), 0.0, Random(0))
        metrics.placed(query, record, (0.0, 0.0, 0.0, 0.0))
    seen = samples(metrics)
    assert seen['kvmesh_router_prefill_bypasses_total{reason="prefill_busy"}'] == 3
    assert seen['kvmesh_router_prefill_bypasses_total{reason="short_prompt"}'] == 0
    assert seen['kvmesh_router_affinity_total{outcome="bound"}'] == 1
    assert seen['kvmesh_router_affinity_total{outcome="kept"}'] == 2
    assert seen["kvmesh_router_affinity_bindings"] == 1
    assert seen["kvmesh_router_affinity_evicted"] == 0


def test_the_policy_applies_to_every_built_in_selector() -> None:
    for name, make in SELECTORS.items():
        router = Router(make(), policy=Policy(lora_residency="required"))
        router.update(Snapshot(1, {1: worker(1), 2: worker(2, loras=frozenset({"fr"}))}), 0.0)
        hints = RoutingHints(lora_name="fr", backend_instance_id=2 if name == "direct" else None)
        chosen = router.decide(Query("m", 9, routing=hints), None, 0.0, Random(0))
        assert chosen.decision.worker.worker_id == 2
