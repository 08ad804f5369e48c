"""Quotas of tenants: never more than a limit allows, and no less."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.access.caller import ANONYMOUS, Caller
from common.api_keys import Limits
from common.errors import Overloaded
from common.registry.instances import Instance, Snapshot
from frontend_svc.access.quotas import Quota, TenantQuotas
from frontend_svc.members import Members


def members(frontends: int) -> Members:
    present = {
        number: Instance(number, "n", "frontend", "", "a:1") for number in range(1, frontends + 1)
    }
    return Members(Snapshot(1, present))


def caller(tenant: str = "acme", **limits: float) -> Caller:
    return Caller(tenant, "key", frozenset(), Limits.model_validate(limits))


def begun(quotas: TenantQuotas, client: Caller, now: float) -> Quota:
    quota = quotas.quota(client, now)
    assert quota is not None
    quota.begin()
    return quota


def admitted(quotas: TenantQuotas, client: Caller, now: float, tokens: int = 0) -> Quota | None:
    quota = quotas.quota(client, now)
    assert quota is not None
    try:
        quota.begin()
        quota.reserve(tokens)
    except Overloaded:
        quota.close(0)
        return None
    return quota


def test_clients_without_limits_have_no_quota() -> None:
    quotas = TenantQuotas(members(1))
    assert quotas.quota(ANONYMOUS, 0.0) is None
    assert quotas.quota(caller(), 0.0) is None


@given(
    st.floats(0.5, 50),
    st.integers(1, 4),
    st.lists(st.floats(0, 0.5), min_size=200, max_size=200),
)
def test_requests_are_exact_at_any_arrivals(rate: float, frontends: int, gaps: list[float]) -> None:
    quotas = TenantQuotas(members(frontends))
    client, now, count = caller(requests_per_s=rate), 0.0, 0
    share = rate / frontends
    for gap in gaps:
        now += gap
        if (quota := admitted(quotas, client, now)) is not None:
            quota.close(0)
            count += 1
    assert count <= max(2.0, share) + share * now + 1e-6
    if all(gap * share < 0.5 for gap in gaps):  # more arrive than are allowed
        assert count >= share * now - 1


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(0, 900)), min_size=5, max_size=80))
def test_tokens_are_exact_though_requests_reserve_more(requests: list[tuple[int, int]]) -> None:
    """Each request reserves the first number and uses at most that; one runs at a time."""
    quotas = TenantQuotas(members(1))
    client, now, used = caller(tokens_per_min=6000), 0.0, 0
    for reserved, wanted in requests * 3:
        actual = min(reserved, wanted)
        while (quota := admitted(quotas, client, now, reserved)) is None:
            now += 0.5
        quota.close(actual)
        used += actual
        assert used <= 6000 + 100 * now + 1e-6
    # It waited only for tokens that it lacked, and at most half a second too long.
    assert now == 0 or used + 900 >= 6000 + 100 * (now - 0.5) - 1e-6


def test_a_request_above_a_window_runs_when_the_bucket_is_full_and_leaves_a_debt() -> None:
    quotas = TenantQuotas(members(1))
    client = caller(tokens_per_min=600)
    quota = admitted(quotas, client, 0.0, 10_000)
    assert quota is not None
    quota.close(1200)
    assert admitted(quotas, client, 59.0, 1) is None
    assert admitted(quotas, client, 61.0, 1) is not None


def test_concurrency_counts_requests_that_run() -> None:
    quotas = TenantQuotas(members(2))
    client = caller(concurrency=5)
    first, second = (begun(quotas, client, 0.0) for _ in range(2))
    with pytest.raises(Overloaded, match=r"2 requests run, the limit is 2") as refused:
        begun(quotas, client, 0.0)
    assert refused.value.reason == "TENANT_CONCURRENCY"
    begun(quotas, caller("other", concurrency=2), 0.0)
    first.close(0)
    begun(quotas, client, 0.0)
    second.close(0)


def test_a_changed_limit_takes_effect_and_brings_no_tokens() -> None:
    quotas = TenantQuotas(members(1))
    quota = admitted(quotas, caller(tokens_per_min=600), 0.0, 600)
    assert quota is not None
    assert admitted(quotas, caller(tokens_per_min=6000), 1.0, 20) is None
    assert admitted(quotas, caller(tokens_per_min=6000), 2.0, 100) is not None


def test_headers_have_the_limits_and_what_is_left() -> None:
    quotas = TenantQuotas(members(1))
    quota = admitted(quotas, caller(requests_per_s=4, tokens_per_min=600), 0.0, 60)
    assert quota is not None
    assert dict(quota.headers) == {
        b"x-ratelimit-limit-requests": b"4",
        b"x-ratelimit-remaining-requests": b"3",
        b"x-ratelimit-reset-requests": b"0.250s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"540",
        b"x-ratelimit-reset-tokens": b"6.000s",
    }
