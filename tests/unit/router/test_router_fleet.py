"""The fleet in discovery: candidates by model and role."""

from __future__ import annotations

from typing import Any

import pytest

from common.registry.instances import Instance
from common.request.placement import Placement
from router_svc.core.fleet import GONE_MODEL_TTL_S, Fleet
from tests.kit.instances import snapshot_of


def worker(worker_id: int, **facts: Any) -> Instance:
    given: dict[str, Any] = {"model": "m", **facts}
    return Instance(worker_id, "mesh", "worker", f"w{worker_id}", "127.0.0.1:1", **given)


def placements(fleet: Fleet, model: str = "m", role: Any = "aggregated") -> list[Placement]:
    return [c.placement for c in fleet.candidates(model, role)]


def test_every_rank_of_a_worker_is_a_candidate_in_order_of_placement() -> None:
    fleet = Fleet()
    fleet.update(snapshot_of(worker(9), worker(4, dp_rank_start=2, dp_size=2)), 0.0)
    assert placements(fleet) == [Placement(4, 2), Placement(4, 3), Placement(9, 0)]


def test_candidates_belong_to_one_model_and_role() -> None:
    fleet = Fleet()
    fleet.update(
        snapshot_of(
            worker(1), worker(2, role="decode"), worker(3, model="other"), worker(4, model="")
        ),
        0.0,
    )
    assert placements(fleet) == [Placement(1, 0)]
    assert placements(fleet, role="decode") == [Placement(2, 0)]
    assert {c.placement.worker_id for c in fleet.all_candidates()} == {1, 2, 3}
    assert fleet.models == {"m", "other"}
    assert fleet.worker_count == 3, "a worker without a model is no candidate"


def test_only_workers_serve_models() -> None:
    fleet = Fleet()
    fleet.update(snapshot_of(Instance(1, "mesh", "frontend", "", "127.0.0.1:1", model="m")), 0.0)
    assert placements(fleet) == []
    assert not fleet.has(Placement(1, 0))
    assert fleet.is_present(1)


@pytest.mark.row("S1-107")
def test_a_worker_that_left_is_no_candidate_after_one_snapshot() -> None:
    fleet = Fleet()
    fleet.update(snapshot_of(worker(1), worker(2)), 0.0)
    changes = fleet.update(snapshot_of(worker(2)), 1.0)
    assert [i.id for i in changes.left] == [1]
    assert placements(fleet) == [Placement(2, 0)]
    assert not fleet.has(Placement(1, 0))


def test_a_model_is_remembered_for_a_while_after_its_last_worker_left() -> None:
    fleet = Fleet()
    assert not fleet.is_known_model("m", 0.0)
    fleet.update(snapshot_of(worker(1)), 0.0)
    fleet.update(snapshot_of(), 10.0)
    assert fleet.models == frozenset()
    assert fleet.is_known_model("m", 10.0 + GONE_MODEL_TTL_S - 1)
    assert not fleet.is_known_model("m", 10.0 + GONE_MODEL_TTL_S)


def test_models_that_left_are_not_remembered_without_bound() -> None:
    fleet = Fleet()
    for number in range(1500):
        fleet.update(snapshot_of(worker(1, model=f"m{number}")), 0.0)
    assert not fleet.is_known_model("m0", 0.0)
    assert fleet.is_known_model("m1498", 0.0)


def test_a_rank_that_the_worker_does_not_have_is_absent() -> None:
    fleet = Fleet()
    fleet.update(snapshot_of(worker(1, dp_size=2)), 0.0)
    assert fleet.has(Placement(1, 1))
    assert not fleet.has(Placement(1, 2))
