"""What the controller of a cluster does next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from meshctl.cluster.reconcile import Plan, Policy, Reconciler
from meshctl.cluster.state import Action, Desired, Forget, Node, Observed, Phase, Start, Stop
from tests.kit.cluster import STOP_S, desired, node, replica

NODES = [node(1), node(2), node(3)]
WORKERS = [desired("worker-0"), desired("worker-1")]


def step(
    of: Sequence[Desired],
    present: Sequence[Observed],
    nodes: Sequence[Node] = NODES,
    now: float = 0.0,
) -> Plan:
    return Reconciler().step(of, present, nodes, now)


def texts(actions: Sequence[Action]) -> list[str]:
    found = []
    for action in actions:
        match action:
            case Start():
                found.append(f"start {action.desired.name}.{action.number} on {action.node.id}")
            case Stop():
                found.append(f"stop {action.replica.id}")
            case Forget():
                found.append(f"forget {action.replica.id}")
    return found


def test_nothing_is_done_while_all_members_are_routable() -> None:
    present = [replica(one, NODES[i]) for i, one in enumerate(WORKERS)]
    assert step(WORKERS, present).actions == []


def test_missing_members_start_at_once_on_different_nodes() -> None:
    plan = step(WORKERS, [])
    assert texts(plan.actions) == ["start worker-0.1 on n1", "start worker-1.1 on n2"]


def test_members_of_a_lost_node_start_elsewhere_with_the_next_number() -> None:
    present = [replica(WORKERS[0], NODES[0], 4), replica(WORKERS[1], NODES[1])]
    plan = step(WORKERS, present, NODES[1:])
    assert texts(plan.actions) == ["forget worker-0.4", "start worker-0.5 on n3"]


class TestSilence:
    SILENT = replace(replica(WORKERS[0], NODES[0]), silent_s=Policy().silent_s)
    OTHER = replica(WORKERS[1], NODES[1])

    def test_it_counts_after_the_limit(self) -> None:
        early = replace(self.SILENT, silent_s=5.9)
        assert step(WORKERS, [early, self.OTHER]).actions == []

    def test_a_successor_starts_elsewhere_and_the_silent_one_ends_when_that_is_routable(
        self,
    ) -> None:
        plan = step(WORKERS, [self.SILENT, self.OTHER], NODES[:2])
        assert texts(plan.actions) == ["start worker-0.2 on n2"]
        successor = replica(WORKERS[0], NODES[1], 2, Phase.READY)
        assert step(WORKERS, [self.SILENT, successor, self.OTHER], NODES[:2]).actions == []
        routable = replace(successor, phase=Phase.ROUTABLE)
        plan = step(WORKERS, [self.SILENT, routable, self.OTHER], NODES[:2])
        assert texts(plan.actions) == ["forget worker-0.1"]

    def test_one_that_responds_again_drains_when_its_successor_is_routable(self) -> None:
        again = replace(self.SILENT, silent_s=0.0)
        successor = replica(WORKERS[0], NODES[2], 2)
        plan = step(WORKERS, [again, successor, self.OTHER])
        assert texts(plan.actions) == ["stop worker-0.1"]

    def test_nothing_happens_while_most_nodes_are_silent(self) -> None:
        present = [self.SILENT, replace(self.OTHER, silent_s=60.0)]
        assert step(WORKERS, present).actions == []


def test_a_surplus_member_drains_and_others_stay() -> None:
    present = [replica(one, NODES[i]) for i, one in enumerate(WORKERS)]
    assert texts(step(WORKERS[:1], present).actions) == ["stop worker-1.1"]


def test_of_two_replicas_of_a_member_the_older_one_stops_when_the_newer_one_is_routable() -> None:
    older = replica(WORKERS[0], NODES[0], 1)
    starting = replica(WORKERS[0], NODES[1], 2, Phase.READY)
    assert step(WORKERS[:1], [older, starting]).actions == []
    routable = replace(starting, phase=Phase.ROUTABLE)
    assert texts(step(WORKERS[:1], [older, routable]).actions) == ["stop worker-0.1"]


class TestDrainedNode:
    DRAINING = replace(NODES[0], is_draining=True, drained_at=60.0)
    PRESENT = replica(WORKERS[0], NODES[0])

    def test_a_successor_starts_elsewhere_before_the_replica_ends(self) -> None:
        nodes = [self.DRAINING, NODES[1]]
        plan = step(WORKERS[:1], [self.PRESENT], nodes)
        assert texts(plan.actions) == ["start worker-0.2 on n2"]
        successor = replica(WORKERS[0], NODES[1], 2)
        plan = step(WORKERS[:1], [self.PRESENT, successor], nodes)
        assert texts(plan.actions) == ["stop worker-0.1"]

    @pytest.mark.parametrize("has_room", [True, False])
    def test_the_replica_ends_in_time_although_no_successor_is_routable(
        self, has_room: bool
    ) -> None:
        nodes = [self.DRAINING, node(2, cpus=8 if has_room else 0)]
        present = [self.PRESENT]
        if has_room:
            present.append(replica(WORKERS[0], NODES[1], 2, Phase.STARTING))
        limit = 60.0 - STOP_S - Policy().drain_margin_s
        assert step(WORKERS[:1], present, nodes, limit - 0.1).actions == []
        assert texts(step(WORKERS[:1], present, nodes, limit).actions) == ["stop worker-0.1"]

    def test_without_another_node_the_member_waits_and_the_reason_is_told(self) -> None:
        nodes = [replace(self.DRAINING, drained_at=None)]
        plan = step(WORKERS[:1], [self.PRESENT], nodes, 1e6)
        assert plan.actions == []
        assert plan.waiting["worker-0"] == "waits for a node with 1 CPU (10.0.0.1: is drained)"
        assert plan.unplaced == [WORKERS[0].needs]


class TestFailures:
    def test_a_failed_member_starts_again_after_growing_pauses(self) -> None:
        reconciler, number, now = Reconciler(), 0, 0.0
        starts: list[float] = []
        present: list[Observed] = []
        # Ends: eight starts.
        while len(starts) < 8:
            plan = reconciler.step(WORKERS[:1], present, NODES, now)
            present = []
            if any(isinstance(action, Start) for action in plan.actions):
                number += 1
                starts.append(now)
                present = [replica(WORKERS[0], NODES[0], number, Phase.FAILED)]
            now += 0.5
        pauses = [b - a for a, b in pairwise(starts)]
        assert pauses == sorted(pauses)
        assert pauses[0] < 3 < 30 < pauses[-1]

    def test_a_member_whose_actor_never_ran_counts_as_failed(self) -> None:
        dead = replace(replica(WORKERS[0], NODES[0], 1, Phase.STARTING), is_dead=True, pid=0)
        plan = step(WORKERS[:1], [dead])
        assert texts(plan.actions) == ["forget worker-0.1"]
        assert "failed; starts again in" in plan.waiting["worker-0"]

    def test_a_member_whose_supervisor_ended_starts_again_at_once(self) -> None:
        dead = replace(replica(WORKERS[0], NODES[0]), is_dead=True)
        plan = step(WORKERS[:1], [dead])
        assert texts(plan.actions) == ["forget worker-0.1", "start worker-0.2 on n2"]

    def test_an_actor_that_is_not_started_within_the_limit_is_placed_elsewhere(self) -> None:
        pending = replace(replica(WORKERS[0], NODES[0], 1, Phase.STARTING), pending_s=120.0, pid=0)
        plan = step(WORKERS[:1], [pending])
        assert texts(plan.actions) == ["forget worker-0.1", "start worker-0.2 on n2"]


class TestReplacement:
    NEW = tuple(replace(one, digest="b") for one in WORKERS)
    PRESENT = tuple(replica(one, NODES[i]) for i, one in enumerate(WORKERS))

    def test_one_member_is_replaced_at_a_time_old_first_if_another_serves(self) -> None:
        plan = step(self.NEW, self.PRESENT)
        assert texts(plan.actions) == ["stop worker-0.1"]
        stopping = replace(self.PRESENT[0], phase=Phase.STOPPING)
        plan = step(self.NEW, [stopping, self.PRESENT[1]])
        assert texts(plan.actions) == ["start worker-0.2 on n3"]
        new = replica(self.NEW[0], NODES[2], 2, Phase.READY)
        assert step(self.NEW, [new, self.PRESENT[1]]).actions == []
        routable = replace(new, phase=Phase.ROUTABLE)
        plan = step(self.NEW, [routable, self.PRESENT[1]])
        assert texts(plan.actions) == ["stop worker-1.1"]

    def test_the_only_member_of_a_role_is_replaced_new_first(self) -> None:
        plan = step(self.NEW[:1], self.PRESENT[:1])
        assert texts(plan.actions) == ["start worker-0.2 on n2"]

    def test_the_only_member_stays_while_no_node_has_room_for_its_successor(self) -> None:
        plan = step(self.NEW[:1], self.PRESENT[:1], [node(1, cpus=1)])
        assert plan.actions == []
        assert "waits for a node" in plan.waiting["worker-0"]

    def test_a_frontend_is_replaced_old_first_if_only_its_own_node_has_room(self) -> None:
        pair = [
            replace(desired(f"frontend-{i}", "frontend", cpus=8), has_fixed_port=True)
            for i in range(2)
        ]
        present = [replica(one, NODES[i]) for i, one in enumerate(pair)]
        newer = [replace(one, digest="b") for one in pair]
        assert texts(step(newer, present, NODES).actions) == ["start frontend-0.2 on n3"]
        assert texts(step(newer, present, NODES[:2]).actions) == ["stop frontend-0.1"]

    def test_receivers_are_replaced_before_senders(self) -> None:
        names = ("router", "worker", "frontend", "indexer")
        old = [desired(f"{name}-{i}", name) for name in names for i in range(2)]
        present = [replica(one, NODES[i % 3]) for i, one in enumerate(old)]
        new = [replace(one, digest="b") for one in old]
        assert texts(step(new, present).actions) == ["stop indexer-0.1"]

    def test_no_further_member_is_replaced_while_one_is_not_routable(self) -> None:
        third = desired("worker-2")
        present = [*self.PRESENT, replica(third, NODES[2], 1, Phase.READY)]
        plan = step([*self.NEW, third], present)
        assert plan.actions == []
        assert plan.waiting["worker-0"] == "is replaced after worker-2"

    def test_a_member_that_serves_nothing_is_replaced_at_once(self) -> None:
        present = [replica(one, NODES[0], 1, Phase.STARTING) for one in WORKERS]
        assert texts(step(self.NEW, present).actions) == ["stop worker-0.1", "stop worker-1.1"]


class TestSpread:
    PACKED = tuple(replica(one, NODES[0]) for one in WORKERS)

    def test_a_role_on_one_node_gets_a_member_on_another_one_new_first(self) -> None:
        plan = step(WORKERS, self.PACKED, NODES[:2])
        assert texts(plan.actions) == ["start worker-1.2 on n2"]
        moved = replica(WORKERS[1], NODES[1], 2)
        plan = step(WORKERS, [*self.PACKED, moved], NODES[:2])
        assert texts(plan.actions) == ["stop worker-1.1"]
        assert step(WORKERS, [self.PACKED[0], moved], NODES[:2]).actions == []

    @pytest.mark.parametrize(
        "others", [[], [node(2, cpus=0)], [replace(node(2), is_draining=True)]]
    )
    def test_it_stays_where_it_is_if_no_other_node_fits(self, others: list[Node]) -> None:
        assert step(WORKERS, self.PACKED, [NODES[0], *others]).actions == []

    def test_a_node_that_has_just_lost_a_replica_is_no_reason_to_move(self) -> None:
        reconciler = Reconciler()
        dead = replace(replica(WORKERS[1], NODES[1]), is_dead=True)
        reconciler.step(WORKERS, [self.PACKED[0], dead], NODES[:2], 0.0)
        assert reconciler.step(WORKERS, self.PACKED, NODES[:2], 30.0).actions == []
        later = reconciler.step(WORKERS, self.PACKED, NODES[:2], 61.0)
        assert [type(action) for action in later.actions] == [Start]

    def test_members_with_a_transfer_group_move_unless_they_have_partners(self) -> None:
        workers = [replace(one, needs=replace(one.needs, pairs_by="m")) for one in WORKERS]
        packed = [replica(one, NODES[0]) for one in workers]
        plan = step(workers, packed, NODES[:2])
        assert texts(plan.actions) == ["start worker-1.2 on n2"]
        partner = replace(workers[0], name="prefill-0", role="prefill")
        assert step([*workers, partner], [*packed, replica(partner, NODES[0])]).actions == []

    def test_the_only_member_of_a_role_is_not_moved(self) -> None:
        assert step(WORKERS[:1], self.PACKED[:1]).actions == []


def test_a_whole_mesh_ends_senders_before_receivers() -> None:
    names = ("indexer", "worker", "router", "frontend")
    present = [replica(desired(f"{name}-0", name), NODES[0]) for name in names]
    order = []
    # Ends: each round ends a replica.
    while present:
        plan = step([], present)
        (stop,) = plan.actions
        assert isinstance(stop, Stop)
        order.append(stop.replica.group)
        waiting = [
            replace(one, phase=Phase.STOPPING) if one is stop.replica else one for one in present
        ]
        assert step([], waiting).actions == []
        present = [one for one in present if one is not stop.replica]
    assert order == ["frontend", "router", "worker", "indexer"]
