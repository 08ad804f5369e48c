"""Which peers a member waits for, and when it is routable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.instance_ids import MEMBER_IDS
from common.registry.instances import Instance, Service
from common.service.routable.peers import SENDERS, Peers
from tests.kit.instances import snapshot_of
from tests.kit.instances import worker as worker_of

LIMIT_S = 10.0


def member(number: int, service: Service, name: str = "") -> Instance:
    return replace(worker_of(number, model=""), service=service, stable_name=name)


WORKER, FRONTEND, ROUTER, INDEXER = (
    member(1, "worker"),
    member(2, "frontend", "front"),
    member(3, "router"),
    member(4, "indexer"),
)
ALL = snapshot_of(WORKER, FRONTEND, ROUTER, INDEXER)


def needs_nothing(_: Instance) -> bool:
    return False


def joining(instance: Instance = WORKER) -> Peers:
    return Peers(instance, LIMIT_S, is_leaving=False)


def missing(peers: Peers) -> dict[int, str]:
    return {peer.instance_id: peer.reason for peer in peers.state.missing}


def is_routable(peers: Peers) -> bool:
    return peers.state.is_routable


def given_up(peers: Peers) -> dict[int, str]:
    return {peer.instance_id: peer.reason for peer in peers.state.given_up}


def test_no_service_waits_for_a_service_that_waits_for_it() -> None:
    for service, senders in SENDERS.items():
        assert all(service not in SENDERS[sender] for sender in senders)


@pytest.mark.parametrize(
    ("instance", "senders"),
    [(WORKER, {2, 3}), (ROUTER, {2}), (INDEXER, {3}), (FRONTEND, set())],
)
def test_a_member_waits_for_the_peers_that_send_it_work(
    instance: Instance, senders: set[int]
) -> None:
    peers = joining(instance)
    assert {peer.id for peer in peers.follow(ALL, needs_nothing, 0.0)} == senders
    assert missing(peers).keys() == senders
    assert is_routable(peers) == (not senders)


def test_a_member_is_routable_when_all_its_peers_have_acknowledged_it() -> None:
    peers = joining()
    peers.follow(ALL, needs_nothing, 0.0)
    peers.responded(2, "its card is loading", 1.0)
    assert missing(peers) == {2: "its card is loading", 3: "it has not responded yet"}
    peers.responded(3, "", 1.0)
    assert not is_routable(peers)
    peers.responded(2, "", 2.0)
    assert is_routable(peers)
    assert peers.is_complete


def test_a_service_without_a_live_member_counts_as_acknowledged() -> None:
    peers = joining()
    assert peers.follow(snapshot_of(WORKER), needs_nothing, 0.0) == ()
    assert is_routable(peers)


@pytest.mark.parametrize(
    ("instance", "suffices"),
    [(WORKER, FRONTEND), (ROUTER, FRONTEND), (INDEXER, ROUTER), (FRONTEND, WORKER)],
)
def test_a_member_that_proves_only_its_own_service_is_not_routable_beside_unproved_entries(
    instance: Instance, suffices: Instance
) -> None:
    peers = joining(instance)
    twin = replace(instance, id=9)
    alone = replace(snapshot_of(instance, twin), has_unauthenticated=True)
    assert peers.follow(alone, needs_nothing, 0.0) == ()
    assert "without a proof" in missing(peers)[instance.id]
    assert not is_routable(peers)
    beside = replace(snapshot_of(instance, twin, suffices), has_unauthenticated=True)
    for peer in peers.follow(beside, needs_nothing, 100.0):
        peers.responded(peer.id, "", 100.0)
    assert is_routable(peers)


@pytest.mark.parametrize(
    ("instance", "suffices"),
    [(WORKER, FRONTEND), (ROUTER, FRONTEND), (INDEXER, ROUTER), (FRONTEND, WORKER)],
)
def test_a_member_without_a_key_is_not_routable_beside_members_that_have_one(
    instance: Instance, suffices: Instance
) -> None:
    peers = joining(instance)
    with_keys = [replace(one, id=MEMBER_IDS.start + one.id) for one in ALL.instances.values()]
    for peer in peers.follow(snapshot_of(instance, *with_keys), needs_nothing, 0.0):
        peers.failed(peer.id, "it refuses", LIMIT_S)
    assert "--mesh-token" in missing(peers)[instance.id]
    assert not is_routable(peers)
    # Another one without a key: both are of one mesh.
    peers.follow(snapshot_of(instance, suffices, *with_keys), needs_nothing, LIMIT_S)
    peers.responded(suffices.id, "", LIMIT_S)
    assert is_routable(peers)


def test_a_member_with_a_key_is_routable_beside_members_without_one() -> None:
    peers = joining(replace(WORKER, id=MEMBER_IDS.start))
    members = snapshot_of(replace(WORKER, id=MEMBER_IDS.start), FRONTEND)
    for peer in peers.follow(members, needs_nothing, 0.0):
        peers.responded(peer.id, "", 0.0)
    assert is_routable(peers)


def test_a_required_role_without_a_live_member_is_waited_for_and_named() -> None:
    peers = Peers(WORKER, LIMIT_S, is_leaving=False, required=("frontend", "aggregated", "decode"))
    peers.follow(snapshot_of(WORKER), needs_nothing, 0.0)
    assert not is_routable(peers)
    assert [str(peer) for peer in peers.state.missing] == [
        f"{role}: no live member has this role, which --required-roles names"
        for role in ("frontend", "decode")
    ]
    decode = replace(member(5, "worker"), role="decode")
    assert peers.follow(snapshot_of(WORKER, decode, FRONTEND), needs_nothing, 100.0) == (FRONTEND,)
    assert missing(peers).keys() == {FRONTEND.id}
    peers.responded(FRONTEND.id, "", 101.0)
    assert is_routable(peers)
    # Once routable, it stays so.
    peers.follow(snapshot_of(WORKER), needs_nothing, 102.0)
    assert is_routable(peers)


def test_a_member_that_the_registry_does_not_show_yet_waits_and_names_itself() -> None:
    peers = joining()
    peers.follow(snapshot_of(ROUTER), needs_nothing, 0.0)
    peers.responded(ROUTER.id, "", 0.0)
    assert not is_routable(peers)
    assert missing(peers) == {WORKER.id: "the registry does not show it yet"}
    # A frontend that became visible before it is waited for.
    assert peers.follow(ALL, needs_nothing, 30.0) == (FRONTEND,)
    peers.responded(FRONTEND.id, "", 30.0)
    assert is_routable(peers)


def test_a_peer_that_leaves_is_not_waited_for() -> None:
    peers = joining()
    peers.follow(ALL, needs_nothing, 0.0)
    peers.responded(2, "", 0.0)
    peers.follow(snapshot_of(WORKER, FRONTEND), needs_nothing, 1.0)
    assert is_routable(peers)


def test_a_peer_that_joins_meanwhile_is_waited_for_and_a_later_one_is_not() -> None:
    peers = joining()
    peers.follow(snapshot_of(WORKER, FRONTEND), needs_nothing, 0.0)
    assert peers.follow(ALL, needs_nothing, 1.0) == (ROUTER,)
    peers.responded(2, "", 1.0)
    peers.responded(3, "", 1.0)
    late = member(9, "frontend")
    assert peers.follow(snapshot_of(*ALL.instances.values(), late), needs_nothing, 2.0) == ()
    assert is_routable(peers)


def test_a_silent_peer_is_given_up_after_the_limit_and_still_named() -> None:
    peers = joining()
    peers.follow(ALL, needs_nothing, 0.0)
    peers.responded(3, "", 0.0)
    assert not peers.failed(2, "no response", 9.9)
    assert not is_routable(peers)
    assert peers.failed(2, "no response", 10.0), "it is reported once"
    assert not peers.failed(2, "no response", 11.0)
    assert is_routable(peers)
    assert missing(peers) == {}
    assert given_up(peers) == {2: "no response"}
    assert str(peers.state.given_up[0]) == "frontend front: no response"
    assert not peers.is_complete


def test_the_limit_counts_from_the_last_response() -> None:
    peers = joining()
    peers.follow(ALL, needs_nothing, 0.0)
    peers.responded(3, "", 0.0)
    peers.responded(2, "its card is loading", 8.0)
    assert peers.remaining_s(2, 12.0) == 6.0
    peers.failed(2, "no response", 17.9)
    assert not is_routable(peers)
    peers.failed(2, "no response", 18.0)
    assert is_routable(peers)


def test_a_live_peer_that_does_not_acknowledge_is_never_given_up() -> None:
    peers = joining()
    peers.follow(ALL, needs_nothing, 0.0)
    peers.responded(3, "", 0.0)
    for second in range(100):
        peers.responded(2, "its card is loading", float(second))
    assert not is_routable(peers)


def test_a_given_up_peer_that_responds_is_waited_for_again_while_others_are_missing() -> None:
    peers = joining()
    peers.follow(ALL, needs_nothing, 0.0)
    peers.failed(2, "no response", 10.0)
    peers.responded(2, "its card is loading", 11.0)
    assert missing(peers).keys() == {2, 3}


def test_a_routable_member_stays_routable_and_forgets_a_peer_that_acknowledges_late() -> None:
    peers = joining()
    peers.follow(ALL, needs_nothing, 0.0)
    peers.responded(3, "", 0.0)
    peers.failed(2, "no response", 10.0)
    peers.responded(2, "its card is loading", 11.0)
    assert is_routable(peers)
    assert given_up(peers) == {2: "its card is loading"}
    peers.responded(2, "", 12.0)
    assert peers.is_complete
    assert given_up(peers) == {}


def test_a_given_up_peer_of_a_routable_member_stays_given_up_when_it_fails_again() -> None:
    peers = joining()
    peers.follow(ALL, needs_nothing, 0.0)
    peers.responded(3, "", 0.0)
    peers.failed(2, "no response", 10.0)
    peers.responded(2, "its card is loading", 11.0)
    assert not peers.failed(2, "no response", 12.0)
    assert is_routable(peers)
    assert missing(peers) == {}
    assert given_up(peers) == {2: "no response"}


def test_a_member_waits_for_what_it_needs_itself_up_to_the_limit() -> None:
    peers = joining(FRONTEND)
    assert peers.follow(ALL, lambda peer: peer.service == "worker", 0.0) == ()
    assert [peer.id for peer in peers.own_needs] == [WORKER.id]
    assert not is_routable(peers)
    assert not peers.failed(WORKER.id, "its card is loading", 5.0)
    assert peers.failed(WORKER.id, "its card is loading", 10.0)
    assert is_routable(peers)


def test_a_member_that_leaves_waits_for_its_senders_only() -> None:
    peers = Peers(ROUTER, LIMIT_S, is_leaving=True)
    assert peers.follow(ALL, lambda _: True, 0.0) == (FRONTEND,)
    peers.responded(2, "discovery still shows it", 1.0)
    assert missing(peers) == {2: "discovery still shows it"}
    peers.responded(2, "", 2.0)
    assert peers.is_done
    state = peers.state
    assert (state.is_routable, state.is_leaving, state.missing) == (False, True, ())
