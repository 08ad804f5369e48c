"""The preprocessed request as protobuf: lossless both ways, and strict where proto3 is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import common.request.preprocessed
from common.errors import InvalidRequest
from common.request.preprocessed import (
    CompletionUsage,
    FinishReason,
    GuidedDecoding,
    MediaRawUrl,
    PrefillResult,
    PreprocessedEmbeddingRequest,
    PreprocessedRequest,
    PromptTokensDetails,
    RdmaMediaDataDescriptor,
    RequestTracker,
    RoutingHints,
    TokenIds,
    TokenLogprob,
    TopLogprob,
    from_json,
    from_json_value,
    to_json,
    to_json_value,
    usage,
)
from common.request.preprocessed.codecs import (
    AnyJsonCodec,
    BoolCodec,
    EnumCodec,
    FieldCodec,
    FloatCodec,
    IntegerCodec,
    ListCodec,
    MapCodec,
    NullableCodec,
    ObjectCodec,
    SetCodec,
    TextCodec,
    TokenIdsCodec,
    TokenSpanCodec,
    wire_fields,
)
from common.request.preprocessed.media import MediaCodec
from common.wire.preprocessed import (
    dataclass_from_proto,
    dataclass_to_proto,
    finish_reason_from_proto,
    finish_reason_to_proto,
    from_proto,
    to_proto,
)
from kvmesh.types.v1 import request_pb2

U64_MAX = 0xFFFF_FFFF_FFFF_FFFF

EVERYTHING: dict[str, Any] = {
    "model": "m",
    "token_ids": [0, 1, 2**32 - 1],
    "prompt_embeds": "AA==",
    "multi_modal_data": {
        "image_url": [
            {"Url": "https://example.org/a.png"},
            {"RawUrl": "not a url"},
            {
                "Decoded": {
                    "nixl_metadata": "bQ==",
                    "nixl_descriptor": {
                        "addr": U64_MAX,
                        "size": 3,
                        "mem_type": "Dram",
                        "device_id": 0,
                    },
                    "shape": [1, 1, 3],
                    "dtype": "UINT8",
                    "metadata": {"fps": 24.0},
                    "content_hash": "ff",
                }
            },
        ],
        "audio_url": [],
    },
    "mm_routing_info": {
        "routing_token_ids": [9, 9],
        "block_mm_infos": [
            None,
            {"mm_objects": [{"mm_hash": U64_MAX, "offsets": [[0, 2]]}]},
        ],
    },
    "stop_conditions": {
        "max_tokens": 0,
        "stop": ["x"],
        "stop_token_ids_hidden": [2],
        "stop_token_ids_visible": [3],
        "min_tokens": 0,
        "ignore_eos": False,
        "max_thinking_tokens": 4,
    },
    "sampling_options": {
        "n": 2,
        "best_of": 2,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.1,
        "repetition_penalty": 1.1,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "seed": -1,
        "logit_bias": {"7": -100.0},
        "guided_decoding": {
            "json": {"maximum": 2**60 + 1},
            "backend": "b",
            "whitespace_pattern": "",
        },
    },
    "output_options": {
        "logprobs": 0,
        "prompt_logprobs": 0,
        "skip_special_tokens": False,
        "formatted_prompt": False,
        "include_stop_str_in_output": False,
        "return_tokens_as_token_ids": False,
    },
    "eos_token_ids": [2, 3],
    "mdc_sum": "",
    "annotations": ["a", "b:c"],
    "routing": {
        "backend_instance_id": U64_MAX,
        "prefill_worker_id": 0,
        "decode_worker_id": 2**53 + 1,
        "dp_rank": 0,
        "prefill_dp_rank": 1,
        "expected_output_tokens": 0,
        "lora_name": "",
        "priority_jump": 0.0,
        "priority": -1,
        "allowed_worker_ids": [],
        "routing_constraints": {"required_taints": ["t"], "preferred_taints": {"u": 0.5}},
        "session_control": {"session_id": "s", "action": "close"},
    },
    "router_config_override": {
        "overlap_score_credit": 0.0,
        "prefill_load_scale": 1.0,
        "overlap_score_weight": 1.0,
        "router_temperature": 0.0,
        "assume_kv_reuse": False,
        "track_prefill_tokens": False,
        "shared_cache_multiplier": 0.5,
    },
    "prefill_result": {
        "disaggregated_params": {"handle": U64_MAX},
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "audio_tokens": 1,
            "cache_write_tokens": 2,
        },
    },
    "migration_link": {"trace_id": "a" * 32, "span_id": "malformed"},
    "bootstrap_info": {
        "bootstrap_host": "h",
        "bootstrap_port": 65535,
        "bootstrap_room": 2**63 - 1,
    },
    "extra_args": {"id": 2**64 + 1, "list": [None, 1.5, "é"]},
    "router": {"ttft_target": 1.0, "itl_target": 2.0},
    "agent_context": {
        "session_type_id": "k",
        "session_id": "s",
        "trajectory_id": "t",
        "parent_trajectory_id": "p",
    },
    "mm_processor_kwargs": {"use_audio_in_video": True},
    "request_timestamp_ms": 1.5,
    "_HEALTH_CHECK": True,
}


def over_the_wire(request: PreprocessedRequest) -> PreprocessedRequest:
    data = to_proto(request).SerializeToString()
    return from_proto(request_pb2.PreprocessedRequest.FromString(data))


@pytest.mark.row("S2-17", "S2-42", "S2-45", "S2-55")
def test_a_request_with_every_field_set_survives_both_forms() -> None:
    request = from_json_value(PreprocessedRequest, EVERYTHING)
    again = over_the_wire(request)
    assert again == request
    written = json.loads(to_json(again))
    assert written == to_json_value(request)
    # Written and read JSON differ in one place: the tag of the raw URL.
    written["multi_modal_data"]["image_url"][1] = {"RawUrl": "not a url"}
    assert written == EVERYTHING


def test_the_full_example_leaves_no_protobuf_field_of_the_request_unused() -> None:
    message = to_proto(from_json_value(PreprocessedRequest, EVERYTHING))
    unused = {field.name for field in message.DESCRIPTOR.fields} - {
        field.name for field, _ in message.ListFields()
    }
    assert unused == {"token_ids"}


def wire_classes() -> list[type[Any]]:
    """All dataclasses of the package but those that have no message of their own."""
    without_message = {"MediaRawUrl", "MediaUrl", "RequestTracker", "TokenIds"}
    exported = vars(common.request.preprocessed)
    return [
        cls
        for name, cls in exported.items()
        if isinstance(cls, type) and is_dataclass(cls) and name not in without_message
    ]


@pytest.mark.parametrize("cls", wire_classes(), ids=lambda cls: cls.__name__)
def test_every_field_of_a_part_has_its_place_in_the_message_of_its_name(cls: type[Any]) -> None:
    message = getattr(request_pb2, cls.__name__)
    declared = {one.proto for one in wire_fields(cls)}
    if cls is PreprocessedRequest:
        declared.add("token_ids_le")
    assert declared == {field.name for field in message.DESCRIPTOR.fields}


@pytest.mark.row("S2-31")
def test_a_raw_url_stays_raw_over_protobuf() -> None:
    request = PreprocessedRequest(
        token_ids=TokenIds(), multi_modal_data={"image_url": (MediaRawUrl("odd"),)}
    )
    assert over_the_wire(request) == request


@pytest.mark.row("S2-14")
def test_an_empty_set_of_allowed_workers_is_not_absence_over_protobuf() -> None:
    def sent(hints: RoutingHints) -> RoutingHints | None:
        return over_the_wire(PreprocessedRequest(token_ids=TokenIds(), routing=hints)).routing

    assert sent(RoutingHints(allowed_worker_ids=frozenset())) == RoutingHints(
        allowed_worker_ids=frozenset()
    )
    assert sent(RoutingHints()) == RoutingHints()


@pytest.mark.row("S2-54")
def test_the_tracker_is_not_sent_over_protobuf() -> None:
    tracker = RequestTracker(received_ms=0.0, received_s=0.0)
    request = PreprocessedRequest(token_ids=TokenIds(), tracker=tracker)
    assert over_the_wire(request).tracker is None


@pytest.mark.row("S2-26")
def test_null_disaggregated_params_are_a_value_over_protobuf() -> None:
    message = dataclass_to_proto(PrefillResult(None), request_pb2.PrefillResult())
    assert message.disaggregated_params_json == "null"
    assert dataclass_from_proto(PrefillResult, message) == PrefillResult(None)


@pytest.mark.row("S2-34")
def test_token_ids_are_bytes_or_numbers_but_not_both() -> None:
    message = request_pb2.PreprocessedRequest(token_ids=[1, 2**32 - 1])
    assert from_proto(message).token_ids == TokenIds.of([1, 2**32 - 1])
    message.token_ids_le = b"\x01\0\0\0"
    with pytest.raises(InvalidRequest) as error:
        from_proto(message)
    assert error.value.field == "token_ids_le"
    assert "token_ids" in error.value.message


def test_truncated_token_bytes_are_rejected() -> None:
    with pytest.raises(InvalidRequest) as error:
        from_proto(request_pb2.PreprocessedRequest(token_ids_le=b"\x01\0\0\0\x02"))
    assert error.value.field == "token_ids_le"
    assert "5 bytes" in error.value.message


def test_an_empty_message_is_a_request_with_all_defaults() -> None:
    message = request_pb2.PreprocessedRequest()
    assert from_proto(message) == PreprocessedRequest(token_ids=TokenIds())


Breaker = Callable[[request_pb2.PreprocessedRequest], object]
BREAKERS: list[tuple[str, Breaker]] = [
    ("bootstrap_info.bootstrap_host", lambda m: m.bootstrap_info.SetInParent()),
    ("bootstrap_info.bootstrap_room", lambda m: m.bootstrap_info.MergeFrom(
        request_pb2.BootstrapInfo(bootstrap_host="h", bootstrap_port=1))),
    ("bootstrap_info.bootstrap_port", lambda m: m.bootstrap_info.MergeFrom(
        request_pb2.BootstrapInfo(bootstrap_host="h", bootstrap_port=65536, bootstrap_room=1))),
    ("migration_link.span_id", lambda m: m.migration_link.MergeFrom(
        request_pb2.TraceLink(trace_id="a"))),
    ("prefill_result.disaggregated_params_json", lambda m: m.prefill_result.SetInParent()),
    ("extra_args_json", lambda m: setattr(m, "extra_args_json", "{")),
    ("extra_args_json", lambda m: setattr(m, "extra_args_json", "")),
    ("mm_processor_kwargs_json", lambda m: setattr(m, "mm_processor_kwargs_json", "Infinity")),
    ("request_timestamp_ms", lambda m: setattr(m, "request_timestamp_ms", float("nan"))),
    ("sampling_options.temperature",
     lambda m: setattr(m.sampling_options, "temperature", float("inf"))),
    ("sampling_options.logit_bias.7",
     lambda m: m.sampling_options.logit_bias.update({7: float("nan")})),
    ("sampling_options.guided_decoding",
     lambda m: m.sampling_options.guided_decoding.SetInParent()),
    ("sampling_options.guided_decoding.choice",
     lambda m: m.sampling_options.guided_decoding.choice.SetInParent()),
    ("sampling_options.guided_decoding.json_schema_json",
     lambda m: setattr(m.sampling_options.guided_decoding, "json_schema_json", "[")),
    ("routing.session_control.session_id", lambda m: m.routing.session_control.SetInParent()),
    ("routing.session_control.action", lambda m: m.routing.session_control.MergeFrom(
        request_pb2.SessionControl(
            session_id="s", action=request_pb2.SESSION_ACTION_UNSPECIFIED))),
    ("routing.session_control.action", lambda m: m.routing.session_control.MergeFrom(
        request_pb2.SessionControl(session_id="s", action=9))),  # type: ignore[arg-type]
    ("multi_modal_data.image_url[0]", lambda m: m.multi_modal_data["image_url"].items.add()),
    ("multi_modal_data.image_url[0].url",
     lambda m: m.multi_modal_data["image_url"].items.add(url="/relative")),
    ("multi_modal_data.image_url[0].decoded.nixl_metadata",
     lambda m: m.multi_modal_data["image_url"].items.add().decoded.SetInParent()),
    ("mm_routing_info.routing_token_ids.token_ids_le",
     lambda m: setattr(m.mm_routing_info.routing_token_ids, "token_ids_le", b"abc")),
    ("mm_routing_info.block_mm_infos[0].info.mm_objects[0].offsets[0]",
     lambda m: m.mm_routing_info.block_mm_infos.add().info.mm_objects.add().offsets.add(start=1)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "break_it"), BREAKERS, ids=[field for field, _ in BREAKERS])
def test_values_that_proto3_allows_and_the_contract_does_not_are_rejected_with_their_field(
    field: str, break_it: Breaker
) -> None:
    message = request_pb2.PreprocessedRequest()
    break_it(message)
    with pytest.raises(InvalidRequest) as error:
        from_proto(message)
    assert error.value.field == field


def test_finish_reasons_are_sent_by_name() -> None:
    for reason in FinishReason:
        assert finish_reason_from_proto(finish_reason_to_proto(reason)) is reason
    assert finish_reason_to_proto(FinishReason.EOS) == request_pb2.FINISH_REASON_EOS
    with pytest.raises(InvalidRequest) as error:
        finish_reason_from_proto(request_pb2.FINISH_REASON_UNSPECIFIED, "terminal.finish_reason")
    assert error.value.field == "terminal.finish_reason"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (usage(3, 4), request_pb2.CompletionUsage()),
        (
            CompletionUsage(1, 0, 1, PromptTokensDetails(cached_tokens=0)),
            request_pb2.CompletionUsage(),
        ),
        (TokenLogprob(1, -0.5, (TopLogprob(2, -1.5),)), request_pb2.TokenLogprob()),
        (GuidedDecoding(choice=("a", "b")), request_pb2.GuidedDecoding()),
        (GuidedDecoding(structural_tag={"x": 1}), request_pb2.GuidedDecoding()),
    ],
)
def test_a_nested_value_can_be_sent_by_itself(part: Any, message: Message) -> None:
    assert dataclass_from_proto(type(part), dataclass_to_proto(part, message)) == part


# Strategies for the JSON form, derived from the declared kinds; the hand-written example above
# pins the names.

TEXTS = st.text(st.characters(codec="utf-8"), max_size=4)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=3,
)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=4)
SPANS = st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)).map(sorted)


def forms(kind: FieldCodec) -> st.SearchStrategy[Any]:
    match kind:
        case IntegerCodec(low, high):
            return st.integers(low, high)
        case FloatCodec():
            return NUMBERS
        case TextCodec():
            return TEXTS
        case BoolCodec():
            return st.booleans()
        case AnyJsonCodec():
            return ANY_JSON
        case EnumCodec(enum_type):
            return st.sampled_from([word.value for word in enum_type])
        case TokenIdsCodec():
            return TOKEN_IDS
        case TokenSpanCodec():
            return SPANS
        case NullableCodec(item):
            return st.none() | forms(item)
        case ListCodec(item) | SetCodec(item):
            return st.lists(forms(item), max_size=2)
        case MapCodec(item, token_keys):
            keys = st.integers(0, 2**32 - 1).map(str) if token_keys else TEXTS
            return st.dictionaries(keys, forms(item), max_size=2)
        case ObjectCodec(cls):
            return guided_forms() if cls is GuidedDecoding else object_forms(cls)
        case MediaCodec():
            return st.one_of(
                st.just({"Url": "https://example.org/a"}),
                TEXTS.map(lambda text: {"RawUrl": text}),
                object_forms(RdmaMediaDataDescriptor).map(lambda form: {"Decoded": form}),
            )
    raise AssertionError(f"no strategy for {kind}")


def object_forms(cls: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = wire_fields(cls)
    return st.fixed_dictionaries(
        {one.key: forms(one.kind) for one in fields if one.required},
        optional={one.key: forms(one.kind) for one in fields if not one.required},
    )


def guided_forms() -> st.SearchStrategy[dict[str, Any]]:
    constraint = st.one_of(
        st.fixed_dictionaries({"json": ANY_JSON.filter(lambda value: value is not None)}),
        st.fixed_dictionaries({"regex": TEXTS}),
        st.fixed_dictionaries({"choice": st.lists(TEXTS, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"grammar": TEXTS}),
        st.fixed_dictionaries({"structural_tag": st.lists(ANY_JSON, max_size=1)}),
    )
    modifier = st.fixed_dictionaries({}, optional={"backend": TEXTS, "whitespace_pattern": TEXTS})
    return st.tuples(constraint, modifier).map(lambda pair: pair[0] | pair[1])


QUICK = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
@pytest.mark.row("S2-17")
@QUICK
@given(object_forms(PreprocessedRequest))
def test_any_request_survives_json_and_protobuf(form: dict[str, Any]) -> None:
    request = from_json(PreprocessedRequest, json.dumps(form))
    again = over_the_wire(request)
    assert again == request
    assert json.loads(to_json(again)) == json.loads(to_json(request))


@pytest.mark.row("S2-65")
@QUICK
@given(object_forms(PreprocessedEmbeddingRequest))
def test_any_embedding_request_survives_json_and_protobuf(form: dict[str, Any]) -> None:
    request = from_json(PreprocessedEmbeddingRequest, json.dumps(form))
    message = dataclass_to_proto(request, request_pb2.PreprocessedEmbeddingRequest())
    read = request_pb2.PreprocessedEmbeddingRequest.FromString(message.SerializeToString())
    again = dataclass_from_proto(PreprocessedEmbeddingRequest, read)
    assert again == request
    assert to_json_value(again) == to_json_value(request)
