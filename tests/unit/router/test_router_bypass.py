"""Conditional disaggregation: when a request that could be split is served by one worker."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Unavailable
from common.kv.events import Source
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingConstraints, RoutingHints, SessionControl
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.overlap import IndexStatus
from router_svc.core.pairing import BYPASS_REASONS, NO_BYPASS, Bypass
from router_svc.core.policy import Policy
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit import instances
from tests.kit.instances import snapshot_of

B = 16
SHORT = Bypass(policy="isl_bounding")
worker = partial(
    instances.worker, kv_index="events", total_kv_blocks=1000, max_num_batched_tokens=2048
)


def isl(prompt: int, cached: int, **fields: Any) -> str:
    return Bypass(policy="isl_bounding", **fields).cause(prompt, cached, False)


# The formulas.


@pytest.mark.parametrize(
    ("prompt", "cached", "is_short"),
    [
        (1000, 896, True),  # 104 tokens, 0.104 of the prompt: the documented example
        (200, 0, False),  # all of it is new
        (200, 60, False),  # 140 of 200: exactly the ratio
        (200, 61, True),
        (10_000, 10_000 - 2048, False),  # exactly the threshold
        (10_000, 10_000 - 2047, True),
        (10_000, 0, False),
        (100, 100, True),
        (100, 120, True),  # more cached blocks than the prompt has: no tokens to compute
        (0, 0, True),
    ],
)
def test_a_prompt_is_short_by_tokens_and_by_share_both_strictly(
    prompt: int, cached: int, is_short: bool
) -> None:
    assert isl(prompt, cached) == ("short_prompt" if is_short else "")


@given(prompt=st.integers(0, 10_000), cached=st.integers(0, 10_000), more=st.integers(0, 500))
def test_a_short_prompt_stays_short_with_more_cached_tokens(
    prompt: int, cached: int, more: int
) -> None:
    if SHORT.is_short(prompt, cached):
        assert SHORT.is_short(prompt, cached + more)


@pytest.mark.parametrize(
    ("waiting", "batch", "threshold", "is_busy"),
    [
        (8193, 8192, 1.0, True),
        (8192, 8192, 1.0, False),
        (4097, 8192, 0.5, True),
        (1, 8192, 0.0, True),
        (0, 8192, 0.0, False),
        (10**9, None, 1.0, False),  # an unknown load is calm
        (10**9, 8192, None, False),
    ],
)
def test_prefill_is_busy_above_its_threshold(
    waiting: int, batch: int | None, threshold: float | None, is_busy: bool
) -> None:
    assert Bypass(prefill_busy_threshold=threshold).is_busy(waiting, batch) is is_busy


def test_each_bypass_policy_uses_its_own_condition() -> None:
    table = {
        "off": ("", "", ""),
        "isl_bounding": ("short_prompt", "", "short_prompt"),
        "prefill_load": ("", "prefill_busy", "prefill_busy"),
        "isl_or_load": ("short_prompt", "prefill_busy", "short_prompt"),
    }
    for name, expected in table.items():
        policy = Bypass(policy=name, prefill_busy_threshold=1.0)  # type: ignore[arg-type]
        got = policy.cause(100, 96, False), policy.cause(100, 0, True), policy.cause(100, 96, True)
        assert got == expected, name
    assert {cause for row in table.values() for cause in row} == {"", *BYPASS_REASONS}


@pytest.mark.parametrize(
    ("held", "own", "total", "threshold", "has_capacity"),
    [
        (50, 30, 100, 0.8, True),
        (51, 30, 100, 0.8, False),
        (0, 1, None, 0.8, False),  # an unknown total counts as no capacity
        (10**6, 1, None, None, True),  # no threshold
        (0, 0, 100, 0.0, True),
    ],
)
def test_the_decode_threshold_includes_the_request_itself(
    held: int, own: int, total: int | None, threshold: float | None, has_capacity: bool
) -> None:
    assert Bypass(decode_busy_threshold=threshold).has_capacity(held, own, total) is has_capacity


# The router.


class Depths:
    """An index: blocks held by worker id."""

    def __init__(self, depths: dict[int, int]) -> None:
        self.depths = depths

    def match(self, query: Query) -> list[SourceMatch]:
        return [SourceMatch(Source(w), d, d, d) for w, d in self.depths.items()]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact")


P1, P2 = worker(1, "prefill", local_prefill=False), worker(2, "prefill", local_prefill=False)
D11, D12 = worker(11, "decode"), worker(12, "decode")
REMOTE = worker(13, "decode", local_prefill=False)
QUERY = Query("m", 100 * B, bytes(8 * 100), 1, B)


class Bed:
    """A router and numbered requests."""

    def __init__(
        self,
        *members: Instance,
        cached: dict[int, int] | None = None,
        selector: str = "kv",
        **bypass: Any,
    ):
        policy = Policy(bypass=Bypass(**{"policy": "isl_bounding", **bypass}))
        self.router = Router(SELECTORS[selector](), index=Depths(cached or {}), policy=policy)
        self.router.update(snapshot_of(*members), 0.0)
        self.number = 0

    def place(self, query: Query = QUERY, **hints: Any) -> DecisionRecord:
        self.number += 1
        if hints:
            query = replace(query, routing=RoutingHints(**hints))
        key = BookingKey(7, f"r{self.number}", 0)
        return self.router.decide(query, key, 0.0, Random(self.number))


def test_a_nearly_cached_prompt_is_computed_where_it_is_decoded() -> None:
    bed = Bed(P1, P2, D11, D12, cached={12: 90, 1: 50})
    record = bed.place()
    assert (record.decision.worker, record.decision.prefill, record.decision.bootstrap) == (
        Placement(12, 0),
        None,
        None,
    )
    assert (record.bypass, record.fallback) == ("short_prompt", "")
    assert record.decision.predicted_cached_tokens == 90 * B
    assert "remote prefill bypassed: short prompt, 160 of 1600 tokens to compute" in (
        record.decision.reasons
    )
    (booking,) = bed.router.load_tracker
    assert (booking.prefill, booking.prefill_tokens) == (None, 160)


def test_a_prompt_that_is_cached_at_prefill_only_is_split() -> None:
    record = Bed(P1, P2, D11, D12, cached={1: 100}).place()
    assert record.decision.prefill == Placement(1, 0)
    assert record.bypass == ""


def test_the_bypass_is_off_by_default() -> None:
    assert NO_BYPASS.policy == "off"
    assert Policy().bypass == NO_BYPASS
    record = Bed(P1, D11, cached={11: 100}, policy="off").place()
    assert record.decision.prefill == Placement(1, 0)


def test_only_workers_that_can_prefill_serve_bypassing_requests() -> None:
    cached = {11: 90, 13: 100, 21: 95}
    assert Bed(P1, REMOTE, cached=cached).place().decision.prefill == Placement(1, 0)
    assert Bed(P1, REMOTE, D11, cached=cached).place().decision.worker == Placement(11, 0)
    aggregated = worker(21, "aggregated")
    record = Bed(P1, REMOTE, D11, aggregated, cached=cached).place()
    assert (record.decision.worker, record.bypass) == (Placement(21, 0), "short_prompt")


def test_busy_prefill_is_bypassed_while_it_is_busy() -> None:
    bed = Bed(P1, D11, policy="prefill_load", prefill_busy_threshold=1.0)
    bed.router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=2049), 0.0)
    record = bed.place()
    assert (record.decision.worker, record.decision.prefill, record.bypass) == (
        Placement(11, 0),
        None,
        "prefill_busy",
    )
    bed.router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=2048), 0.0)
    assert bed.place().decision.prefill == Placement(1, 0)


def test_only_the_prefill_worker_of_the_pair_has_to_be_busy() -> None:
    bed = Bed(P1, P2, D11, policy="prefill_load", prefill_busy_threshold=1.0)
    bed.router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=9999), 0.0)
    assert bed.place().decision.prefill == Placement(2, 0)
    bed.router.load_tracker.report(2, 0, Load(waiting=1, waiting_tokens=9999), 0.0)
    assert bed.place().bypass == "prefill_busy"


def test_a_decode_worker_without_capacity_keeps_the_pair() -> None:
    bed = Bed(P1, D11, cached={11: 90}, decode_busy_threshold=0.5)
    bed.router.load_tracker.report(11, 0, Load(running=1, kv_used_blocks=401), 0.0)
    assert bed.place().decision.prefill == Placement(1, 0)
    bed = Bed(P1, D11, cached={11: 90}, decode_busy_threshold=0.5)
    bed.router.load_tracker.report(11, 0, Load(running=1, kv_used_blocks=400), 0.0)
    assert bed.place().bypass == "short_prompt"
    unknown = replace(D11, total_kv_blocks=None)
    assert Bed(P1, unknown, cached={11: 90}, decode_busy_threshold=0.5).place().bypass == ""


def test_concurrent_requests_do_not_all_pass_the_same_threshold() -> None:
    bed = Bed(P1, D11, cached={11: 90}, decode_busy_threshold=0.5)
    placed = [bed.place() for _ in range(10)]
    assert [d.bypass for d in placed] == ["short_prompt"] * 5 + [""] * 5


def test_prompts_that_wait_for_prefill_at_decode_count_like_those_of_the_request() -> None:
    bed = Bed(P1, D11, cached={11: 90})
    placed = [bed.place() for _ in range(14)]
    assert [d.bypass for d in placed] == ["short_prompt"] * 12 + [""] * 2, "12 * 160 < 2048"
    bed.router.load_tracker.free(next(iter(bed.router.load_tracker)).key)
    assert bed.place().bypass == "short_prompt"


def test_a_busy_prefill_worker_is_bypassed_only_if_decode_has_less_to_compute() -> None:
    bed = Bed(P1, D11, policy="prefill_load", prefill_busy_threshold=1.0)
    bed.router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=4000), 0.0)
    placed = [bed.place() for _ in range(5)]
    work = [(d.bypass, d.decision.prefill_tokens) for d in placed]
    assert work[:3] == [("prefill_busy", 1600)] * 3, "up to 4800 of 5600 tokens"
    assert placed[3].decision.prefill == Placement(1, 0), "6400 of 5600"


def test_rotating_selectors_reach_every_worker_that_a_bypass_may_use() -> None:
    """Decode and aggregated workers are passed together, in order of placement."""
    whole = [replace(D11, id=n, role="aggregated") for n in (3, 15)]
    bed = Bed(
        P1, D11, D12, *whole, cached=dict.fromkeys((3, 11, 12, 15), 90), selector="round_robin"
    )
    assert [bed.place().decision.worker.worker_id for _ in range(5)] == [3, 11, 12, 15, 3]


def test_a_pinned_prefill_is_never_bypassed() -> None:
    bed = Bed(P1, P2, D11, cached={11: 100})
    assert bed.place(prefill_worker_id=2).decision.prefill == Placement(2, 0)
    assert bed.place(prefill_dp_rank=0).bypass == ""


def test_a_bypass_respects_pins_taints_and_failed_workers() -> None:
    cached = {11: 90, 12: 95}
    bed = Bed(P1, D11, D12, cached=cached)
    assert bed.place(decode_worker_id=11).decision.worker == Placement(11, 0)
    failed = bed.place(replace(QUERY, excluded_worker_ids=frozenset({12})))
    assert (failed.decision.worker, failed.bypass) == (Placement(11, 0), "short_prompt")
    tainted = [replace(w, taints=frozenset({"t"})) for w in (P1, REMOTE)]
    bed = Bed(*tainted, D11, cached=cached)
    constraints = RoutingConstraints(required_taints=frozenset({"t"}))
    record = bed.place(routing_constraints=constraints)
    assert (record.decision.prefill, record.decision.worker) == (
        Placement(1, 0),
        Placement(13, 0),
    )


def test_a_session_keeps_its_decode_worker_and_returns_to_its_prefill_worker() -> None:
    bed = Bed(P1, P2, D11, D12)
    hints: dict[str, Any] = {"session_control": SessionControl("s")}
    split = bed.place(**hints)
    assert split.decision.prefill is not None
    index = Depths({split.decision.worker.worker_id: 95, 23 - split.decision.worker.worker_id: 100})
    bed.router.overlaps._index = index
    short = bed.place(**hints)
    assert (short.decision.worker, short.bypass) == (split.decision.worker, "short_prompt")
    index.depths = {}
    again = bed.place(**hints)
    assert (again.decision.worker, again.decision.prefill) == (
        split.decision.worker,
        split.decision.prefill,
    )


def test_a_request_without_tokens_is_split() -> None:
    assert Bed(P1, D11).place(Query("m")).decision.prefill == Placement(1, 0)


def test_without_a_pair_there_is_no_bypass() -> None:
    record = Bed(D11, cached={11: 90}).place()
    assert (record.bypass, record.fallback) == ("", "no_prefill_worker")
    with pytest.raises(Unavailable):
        Bed(REMOTE, cached={13: 90}).place()


@pytest.mark.parametrize("selector", sorted(set(SELECTORS) - {"direct"}))
def test_every_selector_bypasses(selector: str) -> None:
    policy = Policy(bypass=Bypass(policy="prefill_load", prefill_busy_threshold=0.0))
    router = Router(SELECTORS[selector](), policy=policy)
    router.update(snapshot_of(P1, D11), 0.0)
    router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=1), 0.0)
    assert router.decide(QUERY, None, 0.0, Random(0)).bypass == "prefill_busy"
