from __future__ import annotations

import dataclasses
import json
import pickle
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.registry.instances import (
    EndpointId,
    Instance,
    Snapshot,
    SnapshotDiff,
    diff_snapshots,
    find_card_conflict,
    new_instance_id,
    newest_incarnations,
    slugify,
)

INSTANCE_ID = 0x694D967CA5EFD804


def instance(id: int = 1, **facts: Any) -> Instance:
    known: dict[str, Any] = {
        "namespace": "ns",
        "service": "worker",
        "stable_name": f"w{id}",
        "address": "127.0.0.1:5000",
    }
    return Instance(id, **(known | facts))


def snapshot(*members: Instance) -> Snapshot:
    return Snapshot().next_snapshot(members)


FULL = instance(
    2**63 - 1,
    model="Qwen/Q",
    card_checksum="c" * 64,
    role="decode",
    block_size=16,
    transfer_group="g",
    bootstrap_host="10.0.0.1",
    bootstrap_port=8998,
    local_prefill=False,
    dp_rank_start=2,
    dp_size=4,
    total_kv_blocks=100,
    max_num_seqs=8,
    max_num_batched_tokens=8192,
    context_length=40960,
    taints=frozenset({"b", "a"}),
    kv_index="events",
    meta={"zone": "ä"},
    pid=77,
)


@pytest.mark.parametrize("one", [instance(), FULL], ids=["bare", "full"])
def test_an_instance_survives_json(one: Instance) -> None:
    assert Instance.from_json(one.to_json()) == one


def test_unknown_keys_are_ignored_so_that_newer_peers_can_join() -> None:
    raw = json.loads(FULL.to_json()) | {"invented_later": [1]}
    assert Instance.from_json(json.dumps(raw)) == FULL


@pytest.mark.parametrize("name", ["id", "namespace", "service", "stable_name", "address"])
def test_the_error_for_a_missing_field_names_it(name: str) -> None:
    raw = json.loads(FULL.to_json())
    del raw[name]
    with pytest.raises(InvalidRequest) as rejected:
        Instance.from_json(json.dumps(raw))
    assert rejected.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "5"),
        ("id", 0),
        ("id", 2**63),
        ("id", True),
        ("namespace", "../up"),
        ("namespace", ".hidden"),
        ("service", "database"),
        ("role", "encode"),
        ("kv_index", None),
        ("address", "localhost"),
        ("address", "localhost:0"),
        ("http_address", "localhost:65536"),
        ("local_prefill", 1),
        ("block_size", 16.0),
        ("block_size", 0),
        ("total_kv_blocks", 0),
        ("dp_size", 0),
        ("dp_rank_start", -1),
        ("bootstrap_port", 0),
        ("bootstrap_port", None),
        ("model", ""),
    ],
)
def test_a_wrong_value_is_rejected_by_name(name: str, value: object) -> None:
    raw = json.loads(FULL.to_json()) | {name: value}
    with pytest.raises(InvalidRequest) as rejected:
        Instance.from_json(json.dumps(raw))
    assert rejected.value.field == name


@pytest.mark.parametrize(
    ("name", "value", "path"), [("taints", ["a", 1], "taints.1"), ("meta", {"a": 1}, "meta.a")]
)
def test_a_wrong_element_is_rejected_by_path(name: str, value: object, path: str) -> None:
    raw = json.loads(FULL.to_json()) | {name: value}
    with pytest.raises(InvalidRequest) as rejected:
        Instance.from_json(json.dumps(raw))
    assert rejected.value.field == path


def test_invalid_json_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="instance: Invalid JSON"):
        Instance.from_json(b'{"id": 1, "na')


def test_an_instance_copies_its_meta_mapping() -> None:
    meta = {"zone": "a"}
    one = instance(meta=meta)
    meta["zone"] = "b"
    assert one.meta == {"zone": "a"}
    assert hash(one) == hash(instance(meta={"zone": "a"}))
    with pytest.raises(TypeError):
        one.meta["zone"] = "c"  # type: ignore[index]


def test_new_ids_have_63_bits_and_none_fits_a_json_number() -> None:
    rng = Random(7)
    ids = [new_instance_id(rng) for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(2**53 <= i < 2**63 for i in ids)
    assert max(ids) > 2**62


def test_a_snapshot_selects_members_by_service_and_model() -> None:
    router = instance(1, service="router")
    bare, carded, other = (
        instance(2, model="m"),
        instance(3, model="m", card_checksum="c"),
        instance(4, model="n"),
    )
    members = snapshot(router, bare, carded, other)
    assert members.of("router") == (router,)
    assert members.serving("m") == (bare, carded)
    assert members.serving("unknown") == ()


def test_the_next_snapshot_is_the_same_object_if_nothing_changed() -> None:
    first = snapshot(instance(1))
    assert first.revision == 1
    assert first.next_snapshot([instance(1)]) is first
    assert first.next_snapshot([]).revision == 2
    refused = first.next_snapshot([instance(1)], has_unauthenticated=True)
    assert refused.revision == 2
    assert refused.next_snapshot([instance(1)], has_unauthenticated=True) is refused


def test_the_first_snapshot_without_members_has_revision_one() -> None:
    empty = Snapshot().next_snapshot([])
    assert (empty.revision, empty.instances) == (1, {})
    assert empty.next_snapshot([]) is empty


def test_a_diff_has_joined_left_and_changed_instances() -> None:
    old = snapshot(instance(1), instance(2), instance(3))
    new = snapshot(instance(2), instance(3, taints=frozenset({"slow"})), instance(4))
    changes = diff_snapshots(old, new)
    assert [i.id for i in changes.joined] == [4]
    assert [i.id for i in changes.left] == [1]
    assert changes.changed == (new.instances[3],)
    assert not diff_snapshots(new, new)
    assert changes


IDS = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from(["", "a", "b"]), st.booleans()),
    max_size=12,
    unique_by=lambda row: row[0],
)


@settings(max_examples=100)
@given(IDS, IDS)
def test_a_diff_applied_to_the_old_gives_the_new(
    before: list[tuple[int, str, bool]], after: list[tuple[int, str, bool]]
) -> None:
    old, new = (
        snapshot(*(instance(i, stable_name=name, local_prefill=flag) for i, name, flag in rows))
        for rows in (before, after)
    )
    changes: SnapshotDiff = diff_snapshots(old, new)
    rebuilt = dict(old.instances)
    for gone in changes.left:
        assert rebuilt.pop(gone.id) == gone
    for one in changes.joined:
        assert one.id not in rebuilt
    rebuilt |= {one.id: one for one in (*changes.joined, *changes.changed)}
    assert rebuilt == new.instances


@settings(max_examples=100)
@given(IDS)
def test_only_the_newest_incarnation_of_each_stable_name_is_kept(
    rows: list[tuple[int, str, bool]],
) -> None:
    members = [instance(i, stable_name=name) for i, name, _ in rows]
    kept = newest_incarnations(members)
    named = [i.stable_name for i in kept if i.stable_name]
    assert len(named) == len(set(named))
    last = {i.stable_name: i for i in members if i.stable_name}
    assert {i.stable_name: i for i in kept if i.stable_name} == last
    assert [i for i in kept if not i.stable_name] == [i for i in members if not i.stable_name]
    assert newest_incarnations(kept) == kept


def test_a_stable_name_in_another_service_or_namespace_is_another_process() -> None:
    members = (
        instance(1, stable_name="a"),
        instance(2, stable_name="a", service="router"),
        instance(3, stable_name="a", namespace="other"),
    )
    assert newest_incarnations(members) == members


def test_another_card_for_a_served_model_conflicts() -> None:
    old = instance(1, model="m", card_checksum="c1")
    assert find_card_conflict([old], instance(2, model="m", card_checksum="c2")) == old
    assert find_card_conflict([old], instance(2, model="m", card_checksum="c1")) is None
    assert find_card_conflict([old], instance(2, model="n", card_checksum="c2")) is None
    assert find_card_conflict([old], instance(2, model="m")) is None
    assert find_card_conflict([], instance(2, model="m", card_checksum="c2")) is None


def test_a_restart_with_a_new_card_does_not_conflict_with_its_predecessor() -> None:
    old = instance(1, stable_name="w", model="m", card_checksum="c1")
    new = instance(2, stable_name="w", model="m", card_checksum="c2")
    peer = instance(3, model="m", card_checksum="c1")
    assert find_card_conflict([old], new) is None
    assert find_card_conflict([old, peer], new) == peer
    assert find_card_conflict([old], dataclasses.replace(old, card_checksum="c2")) is None


@pytest.mark.row("S0-10", "S0-16")
def test_the_key_of_an_instance_is_a_cloneable_value_that_prints_as_itself() -> None:
    key = EndpointId("ns", "cp", "ep").instance_key(INSTANCE_ID)
    assert str(key) == f"{key}" == "ns.cp.ep-694d967ca5efd804"
    clone = pickle.loads(pickle.dumps(key))
    assert (clone, type(clone)) == (key, type(key))
    assert {key: 1}[clone] == 1


@pytest.mark.row("S0-11")
def test_the_key_of_an_instance_is_pinned() -> None:
    assert EndpointId("ns", "cp", "ep").instance_key(INSTANCE_ID) == "ns.cp.ep-694d967ca5efd804"


@pytest.mark.row("S0-12")
def test_the_whole_key_of_an_instance_is_slugified() -> None:
    assert EndpointId("My Ns", "c/p", "é").instance_key(0xAB) == "my_ns.c_p._-ab"
    legal = "a-b.c_d.0-1"
    assert slugify(legal) == legal
    assert EndpointId("a-b", "c_d", "0").instance_key(1) == legal


@pytest.mark.row("S0-13")
@pytest.mark.parametrize(
    ("instance_id", "text"),
    [(0, "0"), (1, "1"), (-1, "f" * 16), (-(2**63), "8" + "0" * 15), (2**63 - 1, "7" + "f" * 15)],
)
def test_an_id_is_lower_case_hex_without_prefix_or_padding(instance_id: int, text: str) -> None:
    assert EndpointId("n", "c", "e").instance_key(instance_id) == f"n.c.e-{text}"


@pytest.mark.parametrize("instance_id", [2**64, -(2**63) - 1])
def test_an_id_above_64_bits_is_rejected(instance_id: int) -> None:
    with pytest.raises(InvalidRequest) as rejected:
        EndpointId("n", "c", "e").instance_key(instance_id)
    assert rejected.value.field == "instance_id"


@pytest.mark.row("S0-14", "S0-15")
def test_an_endpoint_and_an_instance_give_the_key_of_their_parts() -> None:
    key = EndpointId("ns", "worker", "serve").instance_key(INSTANCE_ID)
    assert instance(INSTANCE_ID).endpoint.instance_key(INSTANCE_ID) == key
    assert instance(INSTANCE_ID).key == key


@pytest.mark.row("S0-21")
def test_keys_differ_between_instances_but_not_between_registrations() -> None:
    assert instance(1).key != instance(2).key
    again = instance(1, address="127.0.0.1:6000", taints=frozenset({"t"}))
    assert again.key == instance(1).key
    assert instance(255).key == "ns.worker.serve-ff"
