"""Sums of usage by tenant, model, key and adapter."""

from __future__ import annotations

from common.usage import UsageCounts
from console_svc.pages.usage import added, rows_by
from console_svc.state.tenants import Tenants
from tests.kit.console import tenant


def test_each_dimension_has_a_row_a_tenant_and_name() -> None:
    tenants = Tenants(tenants=(tenant("acme"), tenant("idle", usage=None, by_model={}, by_key={})))
    rows = {by: [(r.tenant, r.name) for r in rows_by(tenants, by)] for by in ("tenant", "key")}
    assert rows == {"tenant": [("acme", "")], "key": [("acme", "key_acme")]}
    assert [r.name for r in rows_by(tenants, "adapter")] == ["poet", "poet"]


def test_a_tenant_without_usage_has_no_row() -> None:
    unused = tenant("new", usage=UsageCounts(), by_model={"sim": UsageCounts()})
    assert rows_by(Tenants(tenants=(unused,)), "tenant") == []
    assert rows_by(Tenants(tenants=(unused,)), "model") == []


def test_sums_add_each_field() -> None:
    parts = [UsageCounts(1, 2, 3, 4, 5), UsageCounts(10, 20, 30, 40, 50)]
    assert added(parts) == UsageCounts(11, 22, 33, 44, 55)
    assert added([]) == UsageCounts()
