"""Settings without effect are reported at start; settings with effect are not."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from random import Random
from typing import Any

import pytest
import structlog

from common.errors import Unsupported
from common.kv.events import Source
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.placement import Placement, Query
from common.request.preprocessed import RouterConfigOverride
from common.runtime.config import ConfigError, read_config
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from router_svc.core.admission import QueuedRequest
from router_svc.core.booking import BookingKey
from router_svc.core.cost import CostSettings
from router_svc.core.overlap import IndexStatus
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from router_svc.unused_settings import settings_without_effect
from tests.kit import instances
from tests.kit.apps import living
from tests.kit.instances import snapshot_of

B = 16
COST_SETTINGS: dict[str, Any] = {
    "overlap_score_credit": 0.5,
    "overlap_score_credit_decay": 1.0,
    "prefill_load_scale": 2.0,
    "decode_active_request_weight": 0.0,
    "host_cache_hit_weight": 0.5,
    "disk_cache_hit_weight": 0.5,
    "router_temperature": 1.0,
    "affinity_weight": 0.5,
    "assume_kv_reuse": True,
    "recent_miss_weight": 0.5,
    "recent_miss_half_life_s": 5.0,
    "uncached_block_weight": 3.0,
    "held_block_weight": 0.5,
}
NOT_DYNAMO = [*COST_SETTINGS][-4:]
WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"kv_transfer_domain": "zone", "kv_transfer_weight": 0.5}, "kv_transfer_weight"),
    ({"active_prefill_tokens_threshold": 9, "track_prefill_tokens": False},
     "active_prefill_tokens_threshold"),
    ({"active_prefill_tokens_threshold_frac": 2.0, "track_prefill_tokens": False},
     "active_prefill_tokens_threshold_frac"),
    ({"bypass_policy": "prefill_load", "bypass_prefill_busy_threshold": 1.0,
      "track_prefill_tokens": False}, "bypass_prefill_busy_threshold"),
    ({"bypass_policy": "isl_bounding", "bypass_prefill_busy_threshold": 1.0},
     "bypass_prefill_busy_threshold"),
    ({"bypass_policy": "prefill_load", "bypass_prefill_busy_threshold": 1.0,
      "bypass_eff_isl_threshold": 9}, "bypass_eff_isl_threshold"),
    ({"bypass_eff_isl_ratio_threshold": 0.5}, "bypass_eff_isl_ratio_threshold"),
    ({"bypass_decode_busy_threshold": 0.5}, "bypass_decode_busy_threshold"),
    ({"queue_policy": "wspt"}, "queue_policy"),
    ({"queue_requests_max": 9}, "queue_requests_max"),
    ({"queue_tokens_max": 9}, "queue_tokens_max"),
    ({"queue_wait_max_s": 9.0}, "queue_wait_max_s"),
    ({"session_affinity_ttl_s": 0.0, "session_affinity_mode": "soft"}, "session_affinity_mode"),
    ({"overlap_score_credit": 0.0, "router_predicted_ttl_secs": 9.0}, "router_predicted_ttl_secs"),
    ({"kv_events": False, "router_predicted_ttl_secs": 9.0}, "router_predicted_ttl_secs"),
    ({"overlap_score_credit": 0.0, "router_ttl_secs": 5.0}, "router_ttl_secs"),
    ({"overlap_score_credit": 0.0, "router_max_tree_size": 5}, "router_max_tree_size"),
    ({"overlap_score_credit": 0.0, "router_prune_target_ratio": 0.5}, "router_prune_target_ratio"),
    ({"overlap_score_credit": 0.0, "overlap_score_credit_decay": 1.0},
     "overlap_score_credit_decay"),
]  # fmt: skip
worker = partial(instances.worker, kv_index="events", max_num_batched_tokens=1000)


@pytest.mark.parametrize(("settings", "name"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_reported_with_the_reason(
    settings: dict[str, Any], name: str
) -> None:
    config = RouterConfig(**settings)
    assert config.problems() == []
    assert list(settings_without_effect(config)) == [name]
    assert settings_without_effect(config)[name]


async def test_a_router_logs_one_warning_with_all_settings_without_effect() -> None:
    config = RouterConfig(registry="memory", queue_policy="wspt", kv_transfer_weight=0.5)
    with structlog.testing.capture_logs() as lines:
        async with living(RouterApp(config, registry=MemoryRegistry(MemoryStore()))):
            pass
    (warning,) = [line for line in lines if line["event"] == "settings_without_effect"]
    assert warning["reasons"] == {
        "queue_policy": "queue_threshold is unset",
        "kv_transfer_weight": "kv_transfer_enforcement is required",
    }


def test_a_domain_with_a_value_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        read_config(RouterConfig, "ROUTER", {}, ["--kv-transfer-domain", "zone=a"])
    assert "give the name of the domain only: 'zone'" in str(refused.value)


def test_the_table_of_this_file_has_every_cost_setting() -> None:
    tracked = {"track_prefill_tokens", "track_active_blocks"}
    assert COST_SETTINGS.keys() | tracked == {spec.name for spec in fields(CostSettings)}


@pytest.mark.parametrize("name", COST_SETTINGS)
@pytest.mark.parametrize("selector", sorted(set(SELECTORS) - {"kv", "dynamo"}))
def test_cost_settings_have_no_effect_with_another_built_in_selector(
    selector: str, name: str
) -> None:
    value = {name: COST_SETTINGS[name]}
    unused = settings_without_effect(RouterConfig(selector=selector, **value))
    assert unused == {name: f"selector is {selector}"}
    assert settings_without_effect(RouterConfig(**value)) == {}
    custom = RouterConfig.model_construct(selector="my.own:make", **value)
    assert settings_without_effect(custom) == {}


@pytest.mark.parametrize("name", COST_SETTINGS)
def test_the_settings_of_our_cost_have_no_effect_on_that_of_dynamo(name: str) -> None:
    config = RouterConfig(selector="dynamo", **{name: COST_SETTINGS[name]})
    expected = {name: "selector is dynamo"} if name in NOT_DYNAMO else {}
    assert settings_without_effect(config) == expected


@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_defaults_and_a_disabled_index_are_fine_with_every_selector(selector: str) -> None:
    assert settings_without_effect(RouterConfig(selector=selector)) == {}
    no_index = RouterConfig(selector=selector, overlap_score_credit=0.0)
    assert settings_without_effect(no_index) == {}
    tracked = RouterConfig(selector=selector, track_prefill_tokens=False, track_active_blocks=False)
    assert settings_without_effect(tracked) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"bypass_policy": "isl_or_load", "bypass_eff_isl_threshold": 1,
         "bypass_prefill_busy_threshold": 1.0, "bypass_decode_busy_threshold": 0.5},
        {"queue_threshold": 1.0, "queue_policy": "wspt", "queue_wait_max_s": 9.0},
        {"kv_transfer_domain": "zone", "kv_transfer_enforcement": "preferred",
         "kv_transfer_weight": 0.5},
        {"kv_events": False, "router_ttl_secs": 20.0},
        {"selector": "round_robin", "bypass_policy": "isl_bounding"},
        {"overlap_score_credit": 0.0, "kv_events": False},
        {"overlap_score_credit": 0.0, "bypass_policy": "isl_bounding",
         "router_predicted_ttl_secs": 5.0, "router_ttl_secs": 9.0},
        {"session_affinity_mode": "soft"},
    ],
)  # fmt: skip
def test_a_setting_with_an_effect_is_not_reported(settings: dict[str, Any]) -> None:
    config = RouterConfig(**settings)
    assert config.problems() == []
    assert settings_without_effect(config) == {}


# A credit of 0 disables the index, unless another setting needs it.

OTHER_USES: list[dict[str, Any]] = [
    {"host_cache_hit_weight": 0.5},
    {"disk_cache_hit_weight": 1.0},
    {"assume_kv_reuse": True},
    {"queue_threshold": 1.0, "queue_policy": "wspt"},
    {"bypass_policy": "isl_bounding"},
    {"bypass_policy": "isl_or_load", "bypass_prefill_busy_threshold": 1.0},
]


class FixedIndex:
    """An index with the same (device, host, disk) blocks per worker for every prompt."""

    def __init__(self, **held: tuple[int, int, int]) -> None:
        self.held = {int(name[1:]): tiers for name, tiers in held.items()}

    def match(self, query: Query) -> list[SourceMatch]:
        return [SourceMatch(Source(at), *tiers) for at, tiers in self.held.items()]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact", "", 0.0)


def built(held: FixedIndex, *workers: Instance, **cost_settings: Any) -> Router:
    config = RouterConfig(**cost_settings)
    assert config.problems() == []
    router = Router(
        SELECTORS["kv"](),
        index=held,
        index_settings=config.index_settings,
        cost_settings=config.cost_settings,
        policy=config.policy,
    )
    router.update(snapshot_of(*(workers or (worker(1), worker(2)))), 0.0)
    return router


def hashed(blocks: int) -> Query:
    return Query("m", blocks * B, bytes(8 * blocks), 1, B)


def chosen(router: Router, query: Query) -> set[int]:
    return {router.preview(query, 0.0, Random(n)).decision.worker.worker_id for n in range(12)}


@pytest.mark.parametrize("cost_settings", OTHER_USES)
def test_a_credit_of_zero_keeps_the_index_if_another_setting_needs_it(
    cost_settings: dict[str, Any],
) -> None:
    index_settings = RouterConfig(overlap_score_credit=0.0, **cost_settings).index_settings
    assert (index_settings.kind, index_settings.follows_events) == ("events", True)
    approximate = RouterConfig(
        overlap_score_credit=0.0, kv_events=False, **cost_settings
    ).index_settings
    assert approximate.kind == "approx"


@pytest.mark.parametrize(
    "cost_settings",
    [{}, {"host_cache_hit_weight": 0.0}, {"bypass_policy": "off"}, {"queue_threshold": 1.0}],
)
def test_a_credit_of_zero_disables_the_index_if_nothing_else_needs_it(
    cost_settings: dict[str, Any],
) -> None:
    assert RouterConfig(overlap_score_credit=0.0, **cost_settings).index_settings.kind == "none"


def test_predicted_entries_remain_if_a_credit_of_zero_keeps_the_index() -> None:
    config = RouterConfig(
        overlap_score_credit=0.0, bypass_policy="isl_bounding", router_predicted_ttl_secs=5.0
    )
    assert config.index_settings.predicted is not None


def test_blocks_in_host_memory_count_with_a_device_credit_of_zero() -> None:
    held = FixedIndex(w1=(0, 8, 8), w2=(8, 8, 8))
    router = built(held, overlap_score_credit=0.0, host_cache_hit_weight=0.5)
    assert chosen(router, hashed(10)) == {1}


def test_a_nearly_cached_prompt_is_bypassed_with_a_credit_of_zero() -> None:
    pair = {"transfer_group": "g"}
    workers = (
        worker(1, role="prefill", **pair),
        worker(2, role="decode", local_prefill=True, **pair),
    )
    for credit in (0.0, 1.0):
        router = built(FixedIndex(w2=(62, 62, 62)), *workers, overlap_score_credit=credit,
                       bypass_policy="isl_bounding")  # fmt: skip
        record = router.preview(hashed(63), 0.0, Random(1))
        assert (record.bypass, record.decision.prefill_tokens) == ("short_prompt", B)


def test_wspt_subtracts_cached_tokens_with_a_credit_of_zero() -> None:
    router = built(FixedIndex(w1=(90, 90, 90)), worker(1), overlap_score_credit=0.0,
                   queue_threshold=1.0, queue_policy="wspt")  # fmt: skip
    rng = Random(0)
    router.admit(Query("m", 2000), BookingKey(7, "fills", 0), 0.0, rng)
    for name, query in (("short", Query("m", 50 * B)), ("cached", hashed(100))):
        assert isinstance(router.admit(query, BookingKey(7, name, 0), 0.0, rng), QueuedRequest)
    router.load_tracker.free(BookingKey(7, "fills", 0))
    first, _ = next(router.rescan(0.0, rng))
    assert first.key.request_id == "cached"


@pytest.mark.parametrize(
    ("override", "field"),
    [
        (RouterConfigOverride(overlap_score_credit=1.0), "overlap_score_credit"),
        (RouterConfigOverride(assume_kv_reuse=True), "assume_kv_reuse"),
    ],
)
def test_a_request_override_that_needs_the_index_is_refused_without_one(
    override: RouterConfigOverride, field: str
) -> None:
    query = Query("m", 160, bytes(80), 1, B, config_override=override)
    held = FixedIndex(w1=(10, 10, 10))
    with pytest.raises(Unsupported) as refused:
        built(held, overlap_score_credit=0.0).preview(query, 0.0, Random(0))
    assert refused.value.field == f"query.config_override.{field}"
    assert "overlap_score_credit is 0" in refused.value.message
    kept = built(held, overlap_score_credit=0.0, bypass_policy="isl_bounding")
    assert kept.preview(query, 0.0, Random(0)).decision.overlap_blocks in (0, 10)


def test_a_request_may_override_a_credit_of_zero_if_the_index_is_kept() -> None:
    held = FixedIndex(w1=(10, 10, 10))
    router = built(held, overlap_score_credit=0.0, bypass_policy="isl_bounding")
    query = hashed(10)
    assert chosen(router, query) == {1, 2}
    override = RouterConfigOverride(overlap_score_credit=1.0)
    assert chosen(router, replace(query, config_override=override)) == {1}


def test_a_request_override_equal_to_the_setting_is_accepted() -> None:
    override = RouterConfigOverride(overlap_score_credit=0.0, assume_kv_reuse=False)
    query = Query("m", 160, bytes(80), 1, B, config_override=override)
    router = built(FixedIndex(w1=(10, 10, 10)), overlap_score_credit=0.0)
    assert chosen(router, query) == {1, 2}
