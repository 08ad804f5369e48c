"""Which workers hold an adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.errors import Conflict, InvalidRequest
from common.registry.adapters import (
    ADAPTERS_MAX,
    ADAPTERS_META_KEY,
    AdapterState,
    DesiredAdapter,
    check_addition,
)
from common.registry.instances import Instance
from tests.kit.instances import worker
from worker_svc.adapters.placement import Candidate, Plan, candidates, holders, not_taken_over, plan
from worker_svc.adapters.use import BUSY_REQUESTS, BUSY_S, QUIET_REQUESTS, QUIET_S, AdapterUse

ADAPTERS = [DesiredAdapter(f"adapter-{i}", "m", copies=2) for i in range(40)]


def placing(worker_id: int, role: str = "aggregated", **state: Any) -> Instance:
    """Returns a worker that places adapters. state: what it advertises of them."""
    text = AdapterState(**state).to_text()
    name = f"worker-{worker_id}"
    return worker(worker_id, role, stable_name=name, meta={ADAPTERS_META_KEY: text})


def placed_on(*workers: Instance) -> dict[str, set[int]]:
    """Returns the holders of each adapter."""
    members = candidates(workers, "aggregated")
    return {one.name: {holder.id for holder in holders(one, members)} for one in ADAPTERS}


def candidate(worker_id: int, *loras: str, **state: Any) -> Candidate:
    (found,) = candidates([placing(worker_id, **state)], "aggregated")
    return replace(found, loras=frozenset(loras))


def test_each_adapter_has_its_copies_on_workers_of_the_role_that_place_adapters() -> None:
    members = [placing(i) for i in range(1, 6)]
    others = [placing(7, "prefill"), placing(8, is_leaving=True), worker(9)]
    found = placed_on(*members, *others)
    assert {len(ids) for ids in found.values()} == {2}
    assert set.union(*found.values()) == {1, 2, 3, 4, 5}
    assert placed_on(*reversed(members)) == found, "the order of registration does not matter"


def test_the_loss_of_a_worker_moves_only_what_it_held() -> None:
    before = placed_on(*(placing(i) for i in range(1, 6)))
    after = placed_on(*(placing(i) for i in range(1, 6) if i != 3))
    for name, ids in before.items():
        assert after[name] >= ids - {3}
        if 3 not in ids:
            assert after[name] == ids, name


def test_a_restarted_worker_gets_its_adapters_again() -> None:
    before = placed_on(placing(1), placing(2), placing(3))
    restarted = replace(placing(3), id=33)
    after = placed_on(placing(1), placing(2), restarted)
    assert after == {name: {33 if i == 3 else i for i in ids} for name, ids in before.items()}


def test_copies_above_the_workers_and_no_number_mean_all() -> None:
    members = candidates([placing(1), placing(2)], "aggregated")
    for copies in (2, 3, None):
        found = holders(DesiredAdapter("a", "m", copies=copies), members)
        assert {one.id for one in found} == {1, 2}


def test_a_worker_that_cannot_load_an_adapter_is_replaced_by_the_next() -> None:
    before = placed_on(placing(1), placing(2), placing(3))
    failed = next(name for name, ids in before.items() if ids == {1, 2})
    after = placed_on(placing(1, failed={failed: "no such folder"}), placing(2), placing(3))
    assert after == before | {failed: {2, 3}}


def test_copies_grow_while_all_holders_are_busy_up_to_the_most() -> None:
    adapter = DesiredAdapter("a", "m", copies=1, copies_max=3)
    idle = [candidate(i) for i in range(1, 6)]
    ranked = [one.id for one in holders(replace(adapter, copies=5, copies_max=5), idle)]

    def held(busy: int) -> list[int]:
        members = [candidate(i, busy=("a",) if i in ranked[:busy] else ()) for i in range(1, 6)]
        return [one.id for one in holders(adapter, members)]

    assert [len(held(busy)) for busy in range(5)] == [1, 2, 3, 3, 3]
    assert held(2) == ranked[:3]


def test_a_plan_loads_what_is_missing_and_unloads_once_others_hold_it() -> None:
    adapter = DesiredAdapter("a", "m", copies=1)
    both = [candidate(1), candidate(2)]
    first, second = sorted(both, key=lambda one: one.id != holders(adapter, both)[0].id)
    assert plan([adapter], both, first, {}) == Plan(load=(adapter,))
    assert plan([adapter], both, second, {}) == Plan()
    holding = replace(second, loras=frozenset({"a"}))
    assert plan([adapter], [first, holding], holding, {"a": ""}) == Plan()
    loaded = replace(first, loras=frozenset({"a"}))
    assert plan([adapter], [loaded, holding], holding, {"a": ""}) == Plan(unload=("a",))
    assert plan([adapter], [loaded, holding], holding, {}) == Plan(), "loaded by an operator"
    assert plan([], [loaded], loaded, {"a": ""}) == Plan(unload=("a",))
    assert plan([replace(adapter, uri="x")], [loaded], loaded, {"a": ""}) == Plan(unload=("a",))


def test_a_worker_tries_again_what_it_failed_to_load() -> None:
    adapter = DesiredAdapter("a", "m")
    failed = candidate(1, failed={"a": "no such folder"})
    assert holders(adapter, [failed]) == ()
    assert plan([adapter], [failed], failed, {}) == Plan(load=(adapter,))


def test_a_worker_that_leaves_waits_for_those_that_take_over() -> None:
    adapter = DesiredAdapter("a", "m", copies=1)
    assert not_taken_over([adapter], [candidate(2)], ["a"]) == ["a"]
    assert not_taken_over([adapter], [candidate(2, "a")], ["a"]) == []
    assert not_taken_over([adapter], [], ["a"]) == [], "there is none"
    assert not_taken_over([], [candidate(2)], ["a"]) == [], "it is not desired any more"


def test_a_state_of_another_form_is_none() -> None:
    assert AdapterState.of(worker(1, meta={ADAPTERS_META_KEY: "on"})) is None
    state = AdapterState(True, {"a": "x" * 1000}, ("b",))
    found = AdapterState.of(worker(1, meta={ADAPTERS_META_KEY: state.to_text()}))
    assert found == AdapterState(True, {"a": "x" * 200}, ("b",))


def test_an_adapter_is_busy_and_quiet_only_after_a_while() -> None:
    use = AdapterUse()
    assert not use.update({"a": BUSY_REQUESTS}, 0.0)
    assert not use.update({"a": BUSY_REQUESTS - 1}, BUSY_S), "the time begins again"
    assert not use.update({"a": BUSY_REQUESTS}, BUSY_S + 1)
    assert use.update({"a": BUSY_REQUESTS}, 2 * BUSY_S + 1) == {"a"}
    assert use.update({"a": QUIET_REQUESTS}, 1000.0) == {"a"}
    assert use.update({}, 2000.0) == {"a"}
    assert use.update({}, 2000.0 + QUIET_S) == frozenset()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a" * 129}, "name"),
        ({"name": "m"}, "name"),
        ({"model": ""}, "model"),
        ({"uri": "x" * 2049}, "uri"),
        ({"copies": 0}, "copies"),
        ({"copies_max": 2}, "copies_max"),
        ({"copies": 3, "copies_max": 2}, "copies_max"),
    ],
)
def test_an_invalid_adapter_is_refused_by_its_field(values: dict[str, object], field: str) -> None:
    given: dict[str, object] = {"name": "a", "model": "m", **values}
    with pytest.raises(InvalidRequest) as refused:
        DesiredAdapter(**given)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_an_adapter_is_added_beside_others_up_to_the_limit() -> None:
    adapter = DesiredAdapter("a", "m")
    check_addition(adapter, [adapter])
    with pytest.raises(Conflict, match="an adapter of 'n'"):
        check_addition(adapter, [DesiredAdapter("a", "n")])
    with pytest.raises(Conflict, match="a model has the name"):
        check_addition(adapter, [], ["a"])
    full = [DesiredAdapter(f"a{i}", "m") for i in range(ADAPTERS_MAX)]
    check_addition(full[0], full)
    with pytest.raises(Conflict, match="1024/1024"):
        check_addition(adapter, full)
