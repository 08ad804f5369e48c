"""Proofs of members' keys, without a network."""

from __future__ import annotations

import json
from random import Random

import pytest

from common.errors import Unauthenticated
from common.instance_ids import MEMBER_IDS
from common.registry.instances import Instance, new_instance_id
from common.registry.signature import EntrySigner
from common.runtime import member_key
from common.runtime.member_key import REPLY_USE, MemberKey, MemberKeys

KEY, OTHER = MemberKey(), MemberKey()
METHOD, ADDRESS = "/t.T/Echo", "10.0.0.1:5000"


def checker() -> MemberKeys:
    return MemberKeys(is_required=True)


def instance(instance_id: int, address: str = ADDRESS) -> Instance:
    return Instance(instance_id, "ns", "worker", "", address)


def test_the_id_of_a_member_is_that_of_its_key_and_no_other_id_is_like_it() -> None:
    assert KEY.id in MEMBER_IDS
    assert KEY.id != OTHER.id
    rng = Random(7)
    assert not any(new_instance_id(rng) in MEMBER_IDS for _ in range(1000))


def test_a_proof_names_its_member_for_one_use_and_text() -> None:
    proof = KEY.sign(REPLY_USE, b"text")
    assert checker().check(REPLY_USE, b"text", proof) == KEY.id
    public, signature = proof.split(" ")
    other_public = OTHER.sign(REPLY_USE, b"text").split(" ")[0]
    for use, text, forged in (
        (b"call", b"text", proof),
        (REPLY_USE, b"other", proof),
        (REPLY_USE, b"text", f"{other_public} {signature}"),
        (REPLY_USE, b"text", f"{public} {signature[::-1]}"),
        (REPLY_USE, b"text", f"{'00' * 32} {signature}"),
        (REPLY_USE, b"text", f"{'ff' * 32} {signature}"),
        (REPLY_USE, b"text", f"{proof} "),
        (REPLY_USE, b"text", ""),
    ):
        with pytest.raises(Unauthenticated):
            checker().check(use, text, forged)


def test_a_call_names_its_member_for_one_method_and_stamp() -> None:
    proof = KEY.sign_call(METHOD, ADDRESS, 12.5)
    caller_id, stamp = checker().check_call(METHOD, proof)
    assert caller_id == KEY.id
    time_ms, nonce, address = stamp.split(" ")
    assert (time_ms, address) == ("12500", ADDRESS)
    for method, forged in (
        ("/t.T/Other", proof),
        (METHOD, proof.replace("12500", "99999", 1)),
        (METHOD, proof.replace(nonce, nonce[::-1], 1)),
        (METHOD, proof.replace(ADDRESS, "10.0.0.2:5000")),
        (METHOD, ""),
    ):
        with pytest.raises(Unauthenticated):
            checker().check_call(method, forged)


def test_a_second_key_with_the_hash_of_a_known_member_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if an attacker had found one."""
    members = checker()
    members.check(REPLY_USE, b"text", KEY.sign(REPLY_USE, b"text"))
    monkeypatch.setattr(member_key, "_member_id", lambda _public: KEY.id)
    with pytest.raises(Unauthenticated, match="has another key"):
        members.check(REPLY_USE, b"text", OTHER.sign(REPLY_USE, b"text"))
    members.check(REPLY_USE, b"text", KEY.sign(REPLY_USE, b"text"))


def test_the_number_of_known_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_key, "KEYS_MAX", 2)
    members = checker()
    for key in (KEY, OTHER, MemberKey(), MemberKey()):
        members.check(REPLY_USE, b"text", key.sign(REPLY_USE, b"text"))
    assert len(members._known) == 2


def test_only_the_member_itself_makes_its_entry() -> None:
    signer = EntrySigner(None, members=MemberKeys(KEY, is_required=True))
    thief = EntrySigner(None, members=MemberKeys(OTHER, is_required=True))
    own = instance(KEY.id)
    sealed = signer.seal(own)
    signer.check_seal(sealed, KEY.id)
    assert Instance.from_json(sealed) == own
    assert json.loads(sealed)["proof"]
    body = sealed.rpartition(b',"proof"')[0]
    elsewhere = sealed.replace(b"10.0.0.1", b"10.0.0.9")
    for forged, reason in (
        (own.to_json(), "no proof"),
        (elsewhere, "is wrong"),
        (OTHER.seal(own.to_json()), f"instance {OTHER.id} made the entry of instance {KEY.id}"),
        (sealed.removesuffix(b"}") + b',"address":"10.0.0.9:1"}', "this is no proof"),
        (body + b"}", "no proof"),
        (b"", "no proof"),
    ):
        with pytest.raises(Unauthenticated, match=reason):
            thief.check_seal(forged, KEY.id)


def test_an_entry_without_a_key_needs_no_proof_and_a_mesh_without_secrets_makes_none() -> None:
    plain = EntrySigner(None)
    other = instance(new_instance_id(Random(3)))
    checking = EntrySigner(None, members=MemberKeys(KEY, is_required=True))
    assert plain.seal(other) == checking.seal(other) == other.to_json()
    checking.check_seal(other.to_json(), other.id)
    plain.check_seal(instance(KEY.id).to_json(), KEY.id)
