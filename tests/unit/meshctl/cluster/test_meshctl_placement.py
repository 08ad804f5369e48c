"""On which node a replica runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshctl.cluster.placement import choose_node
from meshctl.cluster.state import CPU, GPU, Desired, Needs, Node, Observed, Phase
from tests.kit.cluster import desired, node, replica

NODES = [node(1), node(2), node(3)]


def place(of: Desired, nodes: list[Node], *present: Observed) -> str:
    """Returns the id of the node, or the reason why there is none."""
    found = choose_node(of, nodes, present)
    return found if isinstance(found, str) else found.id


def fill(count: int, nodes: list[Node], **needs: object) -> list[str]:
    """Places workers one after the other; returns their nodes."""
    present: list[Observed] = []
    for number in range(count):
        one = desired(f"worker-{number}")
        if needs:
            one = replace(one, needs=Needs(**needs))  # type: ignore[arg-type]
        found = choose_node(one, nodes, present)
        if isinstance(found, str):
            break
        present.append(replica(one, found))
    return [one.node_id for one in present]


def test_members_of_a_role_are_spread_also_where_other_roles_fill_the_nodes_unevenly() -> None:
    present = [replica(desired(f"worker-{i}"), NODES[0]) for i in range(2)]
    routers = [desired("router-0", "router"), desired("router-1", "router")]
    first = place(routers[0], NODES, *present)
    assert first == "n2"
    second = place(routers[1], NODES, *present, replica(routers[0], NODES[1]))
    assert second == "n3"


def test_a_node_is_filled_up_to_its_resources_and_the_reason_names_what_is_missing() -> None:
    nodes = [node(1, cpus=2), node(2, cpus=1)]
    assert sorted(fill(9, nodes)) == ["n1", "n1", "n2"]
    full = [replica(desired("worker-0", cpus=2), nodes[0]), replica(desired("worker-1"), nodes[1])]
    reason = place(desired("worker-2"), nodes, *full)
    assert reason == (
        "waits for a node with 1 CPU (10.0.0.1: 0 CPU free of 2; 10.0.0.2: 0 CPU free of 1)"
    )


def test_a_replica_that_drains_occupies_its_node_until_it_has_ended() -> None:
    leaving = replica(desired("worker-0", cpus=8), NODES[0], phase=Phase.STOPPING)
    assert place(desired("worker-0", cpus=8), NODES[:1], leaving).startswith("waits for a node")


@pytest.mark.parametrize("count", [2, 6])
def test_at_most_the_permitted_number_of_a_group_is_on_one_node(count: int) -> None:
    found = fill(count, NODES, amounts={CPU: 0.5}, per_node=1)
    assert sorted(found) == ["n1", "n2", "n3"][:count]


def test_labels_and_gpus_select_the_nodes() -> None:
    nodes = [node(1, zone="a"), replace(node(2, zone="b"), amounts={CPU: 8, GPU: 1})]
    of_zone = replace(desired("worker-0"), needs=Needs(labels={"zone": "b"}))
    assert place(of_zone, nodes) == "n2"
    with_gpu = replace(desired("worker-0"), needs=Needs({GPU: 1}))
    assert place(with_gpu, nodes) == "n2"
    other = replace(desired("worker-0"), needs=Needs({GPU: 1}, {"zone": "a"}))
    reason = place(other, nodes)
    assert "waits for a node with 1 GPU, zone=a" in reason
    assert "zone is 'b'" in reason


def test_prefill_and_decode_workers_that_transfer_inside_of_a_node_are_placed_in_pairs() -> None:
    present: list[Observed] = []
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "prefill-2", "decode-2"):
        role = name.rpartition("-")[0]
        one = Desired(name, role, role, 2, 1.0, "a", Needs({CPU: 1}, pairs_by="m"))
        found = choose_node(one, NODES, present)
        assert isinstance(found, Node)
        present.append(replica(one, found))
    by_node = {n.id: sorted(r.group for r in present if r.node_id == n.id) for n in NODES}
    assert by_node == {n.id: ["decode", "prefill"] for n in NODES}


def test_a_node_that_is_drained_takes_none_and_one_that_lost_a_replica_only_without_another() -> (
    None
):
    draining = [replace(NODES[0], is_draining=True), NODES[1]]
    assert place(desired("worker-0"), draining) == "n2"
    found = choose_node(desired("worker-0"), NODES, (), ["n1", "n2"])
    assert isinstance(found, Node)
    assert found.id == "n3"
    only = choose_node(desired("worker-0"), NODES[:1], (), ["n1"])
    assert isinstance(only, Node)


def test_two_replicas_of_a_member_with_a_fixed_port_are_on_different_nodes() -> None:
    fixed = replace(desired("frontend-0", "frontend"), has_fixed_port=True)
    old = replica(fixed, NODES[1])
    assert place(fixed, NODES[:2], old) == "n1"
    assert "fixed port" in place(fixed, NODES[1:2], old)
