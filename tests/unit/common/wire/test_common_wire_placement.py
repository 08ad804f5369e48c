"""Queries and decisions as protobuf: the bytes of earlier versions, and each field of the proto."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from common.errors import InvalidRequest
from common.request.placement import Decision, Placement, Query
from common.request.preprocessed import (
    BootstrapInfo,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
    SessionAction,
    SessionControl,
)
from common.request.preprocessed.codecs import from_json, to_json, wire_fields
from common.wire.preprocessed import dataclass_from_proto, dataclass_to_proto
from kvmesh.router.v1 import router_pb2 as pb

HASHES = bytes(range(256)) * 2
QUERY = Query("m", 1025, HASHES, 1, 16, waited_ms=12, tenant="t")
FULL_QUERY = Query(
    "m",
    1025,
    HASHES,
    1,
    16,
    routing=RoutingHints(
        decode_worker_id=7,
        dp_rank=1,
        lora_name="a",
        priority=-3,
        priority_jump=1.5,
        allowed_worker_ids=frozenset({3, 1, 2}),
        routing_constraints=RoutingConstraints(
            required_taints=frozenset({"x"}), preferred_taints={"y": 0.5}
        ),
        session_control=SessionControl("s", SessionAction.OPEN),
        cache_salt="z",
    ),
    config_override=RouterConfigOverride(router_temperature=0.5, assume_kv_reuse=True),
    excluded_worker_ids=frozenset({5}),
    exclusion_reasons=("it failed this request",),
    waited_ms=12,
    expected_output_tokens=200,
    strict_priority=2,
    tenant="t",
    tenant_weight=2.5,
    affinity_key=9,
    ttft_target_ms=250.5,
    itl_target_ms=20.0,
)
DECISION = Decision(
    Placement(7, 0),
    overlap_blocks=12,
    reasons=("prefix hit: 12 of 64 blocks", "kv: lowest cost 53.0", "8 of 8 eligible"),
    predicted_cached_tokens=192,
    worker_address="127.0.0.1:7",
    prefill_tokens=833,
    decode_blocks=65,
)
FULL_DECISION = Decision(
    Placement(7, 1),
    Placement(8, 2),
    overlap_blocks=12,
    bootstrap=BootstrapInfo("h", 80, 5),
    reasons=("a", "b"),
    predicted_cached_tokens=192,
    queued_ms=250,
    worker_address="127.0.0.1:7",
    prefill_address="127.0.0.1:8",
    prefill_tokens=833,
    decode_blocks=65,
    session_revision=9,
)
# The bytes of the converters that earlier versions wrote by hand.
BYTES = (
    (QUERY, "0a016d1081081a8004" + HASHES.hex() + "20012810500c6a017471000000000000f03f"),
    (
        replace(
            FULL_QUERY,
            exclusion_reasons=(),
            affinity_key=0,
            ttft_target_ms=None,
            itl_target_ms=None,
        ),
        "0a016d1081081a8004" + HASHES.hex() + "200128103a3f180720013a016141000000000000f83f48fdff"
        "ffffffffffffff0152050a030102035a110a0178120c0a017911000000000000e03f62050a017310016a017a"
        "420b21000000000000e03f28014a0105500c58c80160026a0174710000000000000440",
    ),
    (
        DECISION,
        "0a020807180c2a1b707265666978206869743a203132206f6620363420626c6f636b732a146b763a206c6f77"
        "65737420636f73742035332e302a0f38206f66203820656c696769626c6530c001420b3132372e302e302e31"
        "3a3750c1065841",
    ),
    (
        FULL_DECISION,
        "0a0408071001120408081002180c22070a0168105018052a01612a016230c00138fa01420b3132372e302e30"
        "2e313a374a0b3132372e302e302e313a3850c10658416009",
    ),
)
MESSAGES: dict[type[Any], type[Message]] = {
    Query: pb.Query,
    Decision: pb.Decision,
    Placement: pb.Placement,
}


def encoded(value: object) -> Message:
    return dataclass_to_proto(value, MESSAGES[type(value)]())


@pytest.mark.parametrize(("value", "expected"), BYTES)
def test_the_bytes_are_those_of_earlier_versions(value: object, expected: str) -> None:
    message = encoded(value)
    assert message.SerializeToString(deterministic=True).hex() == expected
    received = MESSAGES[type(value)].FromString(bytes.fromhex(expected))
    assert dataclass_from_proto(type(value), received) == value


def test_each_field_of_a_query_is_the_field_of_the_proto() -> None:
    query, message = FULL_QUERY, encoded(FULL_QUERY)
    assert isinstance(message, pb.Query)
    assert message.model == query.model
    assert message.total_tokens == query.total_tokens
    assert message.prefix_hashes == query.prefix_hashes
    assert message.hash_scheme == query.hash_scheme
    assert message.block_size == query.block_size
    assert message.routing.decode_worker_id == 7
    assert message.config_override.router_temperature == 0.5
    assert list(message.excluded_worker_ids) == [5]
    assert list(message.exclusion_reasons) == ["it failed this request"]
    assert message.waited_ms == query.waited_ms
    assert message.expected_output_tokens == query.expected_output_tokens
    assert message.strict_priority == query.strict_priority
    assert message.tenant == query.tenant
    assert message.tenant_weight == query.tenant_weight


def test_each_field_of_a_decision_is_the_field_of_the_proto() -> None:
    decision, message = FULL_DECISION, encoded(FULL_DECISION)
    assert isinstance(message, pb.Decision)
    assert (message.worker.worker_id, message.worker.dp_rank) == decision.worker
    assert (message.prefill.worker_id, message.prefill.dp_rank) == decision.prefill
    assert message.overlap_blocks == decision.overlap_blocks
    assert message.bootstrap.bootstrap_port == 80
    assert tuple(message.reasons) == decision.reasons
    assert message.predicted_cached_tokens == decision.predicted_cached_tokens
    assert message.queued_ms == decision.queued_ms
    assert message.worker_address == decision.worker_address
    assert message.prefill_address == decision.prefill_address
    assert message.charged_prefill_tokens == decision.prefill_tokens
    assert message.charged_decode_blocks == decision.decode_blocks
    assert message.session_revision == decision.session_revision


def test_each_field_of_the_protos_is_declared() -> None:
    # Token ids are counted and hashed by the router; no frontend sends them.
    undeclared = {
        message.DESCRIPTOR.name: set(message.DESCRIPTOR.fields_by_name)
        - {field.proto for field in wire_fields(cls)}
        for cls, message in MESSAGES.items()
    }
    assert undeclared == {"Query": {"token_ids"}, "Decision": set(), "Placement": set()}


def test_fields_that_are_not_set_have_their_defaults() -> None:
    assert dataclass_from_proto(Query, pb.Query(model="m")) == Query("m")
    assert dataclass_from_proto(Query, pb.Query(model="m")).tenant_weight == 1.0
    decision = pb.Decision(worker=pb.Placement(worker_id=3))
    assert dataclass_from_proto(Decision, decision) == Decision(Placement(3, 0))
    assert dataclass_from_proto(Query, pb.Query()).model == "", "the router refuses it"


def test_an_empty_placement_differs_from_an_absent_one() -> None:
    message = encoded(Decision(Placement(3, 1), Placement(0, 0)))
    assert message.HasField("prefill")
    assert dataclass_from_proto(Decision, message).prefill == Placement(0, 0)
    assert not encoded(Decision(Placement(3, 1))).HasField("prefill")


@pytest.mark.parametrize(
    ("cls", "message", "field"),
    [
        (Decision, pb.Decision(), "worker"),
        (Query, pb.Query(model="m", tenant_weight=math.inf), "tenant_weight"),
    ],
)
def test_malformed_messages_are_refused_by_field(
    cls: type[Any], message: Message, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        dataclass_from_proto(cls, message)
    assert refused.value.field == field


@pytest.mark.parametrize("value", [QUERY, FULL_QUERY, DECISION, FULL_DECISION, Placement(5, 1)])
def test_the_same_declarations_give_json(value: object) -> None:
    assert from_json(type(value), to_json(value)) == value


@pytest.mark.parametrize("value", [QUERY, DECISION, Placement(5, 1)])
def test_the_largest_values_of_the_wire_are_values_of_the_fields(value: object) -> None:
    limits = {
        FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
        FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    }
    message, expected = encoded(value), {}
    for field in wire_fields(type(value)):
        descriptor = message.DESCRIPTOR.fields_by_name[field.proto]
        if descriptor.cpp_type in limits and not descriptor.is_repeated:
            expected[field.name] = limits[descriptor.cpp_type]
            setattr(message, field.proto, expected[field.name])
    received = dataclass_from_proto(type(value), message)
    assert {name: getattr(received, name) for name in expected} == expected
    assert encoded(received) == message
